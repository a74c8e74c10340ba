"""Settings and items that a model's own code fails for, in worlds: one line at the start, one item while serving."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import MiniCPMV4_6Config, MiniCPMV4_6ForConditionalGeneration
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil

from spmd_encoder.models import registry
from spmd_encoder.models.loading import adapter_class
from spmd_encoder.models.tiny import write_random
from tests.harness.world import World, noise_png, off_by, vector

GOOD, BAD = noise_png(1, 112, 112), noise_png(2, 300, 200)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_setting_that_the_model_fails_for_ends_the_start_at_once(qwen_tiny: Path, tmp_path: Path, tp: int) -> None:
    folder = shutil.copytree(qwen_tiny, tmp_path / "odd")
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["window_size"] = 0
    (folder / "config.json").write_text(json.dumps(config))
    with World("--model-path", str(folder), "--tp-size", str(tp), nproc=tp) as world:
        world.start()
        world.wait_end(120)
        log = world.log()
        assert "fails (ZeroDivisionError: integer modulo by zero) for an ordinary item of the warm-up" in log
        assert log.count("formed anew") == 0 and "tried" not in log, log[-3000:]
        assert set(world.exit_codes().values()) <= {1}
        world.assert_nothing_left()


def test_an_item_that_the_model_fails_for_costs_no_worker(tmp_path: Path) -> None:
    adapter_class(registry.find("minicpmv4_6")).tiny_checkpoint(tmp_path, seed=3)
    config: Any = MiniCPMV4_6Config.from_pretrained(tmp_path)
    config.merger_times = 2  # which takes only grids that are divided by four
    processor = MiniCPMV4_6ImageProcessorPil.from_pretrained(tmp_path)
    write_random(MiniCPMV4_6ForConditionalGeneration, config, processor, tmp_path, 3)
    with World("--model-path", str(tmp_path), torchrun=False).start() as world:
        world.wait_ready()
        worker = world.pid("worker")
        alone = vector(world.post([GOOD]).json()["data"][0])
        for _ in range(3):
            first, bad, last = world.post([GOOD, BAD, noise_png(3, 112, 112)]).json()["data"]
            assert off_by(vector(first), alone) <= 1e-5
            assert (last["status"], bad["error"]["code"]) == ("ok", "MEDIA_CORRUPT")
            assert bad["error"]["message"] == "cannot be encoded: the model's own code fails for it (RuntimeError)"
        assert world.post([BAD]).status_code == 422
        assert (world.pid("worker"), world.epoch(0)) == (worker, 0)
        assert "some image items of the warm-up cannot be encoded: the code of MiniCPMV4_6" in world.log()
