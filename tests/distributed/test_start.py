"""What a start tells: how long each phase took, what the warm-up reached, and what it found."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.harness.world import World, noise_png

PHASES = ["imports", "rendezvous", "load", "warm_up", "preparers", "probe"]


def flags(folder: Path, *more: str) -> tuple[str, ...]:
    return ("--model-path", str(folder), "--device", "cpu", "--tp-size", "2", *more)


def test_a_group_is_warm_before_it_is_ready_and_tells_its_phases(qwen_tiny: Path) -> None:
    with World(*flags(qwen_tiny), nproc=2).start() as world:
        world.wait_ready()
        (replica,) = world.info()["replicas"]
        assert list(replica["start_s"]) == PHASES
        assert all(seconds >= 0 for seconds in replica["start_s"].values())
        assert replica["load_s"] == replica["start_s"]["load"]
        found = re.search(r"warm-up: (\d+) batches of up to (\d+) tokens", world.log())
        assert found is not None
        assert int(found[1]) >= 3, "a tiny picture twice and a long one"
        world.encode([noise_png(1, 56, 56)])
        assert f"warm_up {replica['start_s']['warm_up']:.2f} s" in world.log()


def test_without_a_warm_up(qwen_tiny: Path) -> None:
    with World(*flags(qwen_tiny, "--warm-up=off"), nproc=2).start() as world:
        world.wait_ready()
        assert list(world.info()["replicas"][0]["start_s"]) == [name for name in PHASES if name != "warm_up"]
        assert "warm-up:" not in world.log()


def test_broken_weights_in_any_layer_end_the_start(qwen_tiny: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(qwen_tiny, tmp_path / "broken")
    for shard in folder.glob("*.safetensors"):
        weights: dict[str, Any] = load_file(shard)
        for name in weights:
            if "visual.blocks.3." in name:  # the start's comparison looks at the first block only
                weights[name] = torch.full_like(weights[name], torch.nan)
        save_file(weights, shard, {"format": "pt"})
    with World(*flags(folder), nproc=2).start() as world:
        world.wait_end(90)
        assert "in the warm-up the model gave values that are not finite" in world.log()
        assert set(world.exit_codes().values()) <= {1}


def test_a_limit_below_the_least_picture_is_no_obstacle(qwen_tiny: Path) -> None:
    with World(*flags(qwen_tiny, "--max-batch-tokens", "10"), nproc=2).start() as world:
        world.wait_ready()
        assert len(world.encode([noise_png(1, 200, 200)])) == 1
