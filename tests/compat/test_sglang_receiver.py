"""SGLang 0.5.23's own receiver against this server. Run by hand with `make compat`, which makes its environment."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from spmd_encoder.client import Audio, Client, Video
from spmd_encoder.models.qwen2_audio import Qwen2AudioAdapter
from tests.harness.media import film, tone, wav
from tests.harness.reference import QwenReference
from tests.harness.sglang_server import config, serving
from tests.harness.world import World, noise_png, off_by

INTERPRETER = os.environ.get("SGLANG_PYTHON")
BACKENDS = {"zmq_to_tokenizer": 1, "zmq_to_scheduler": 2, "mooncake": 2}
MOONCAKE_SITE = os.environ.get("MOONCAKE_SITE", "")
SIZES = [(112, 84), (56, 56), (200, 60), (28, 300), (140, 140)]

pytestmark = [
    pytest.mark.skipif(INTERPRETER is None, reason="`make compat` runs this"),
    pytest.mark.timeout(400),
]


@dataclass(frozen=True)
class Outcome:
    rows: np.ndarray[Any, Any] | None
    grid: dict[str, Any] | None
    error: dict[str, Any] | None


@pytest.fixture(scope="module", params=BACKENDS)
def served(request: pytest.FixtureRequest, qwen_tiny: Path) -> Iterator[tuple[str, World]]:
    flags = ("--model-path", str(qwen_tiny), "--encoder-transfer-backend", request.param, "--cache-bytes", "0")
    with World(*flags, nproc=2, env={"PYTHONPATH": MOONCAKE_SITE}) as world:
        yield request.param, world.start().wait_ready(replicas=2)


def receive(backend: str, url: str, items: list[bytes], folder: Path, modality: str = "image") -> list[Outcome]:
    """What each rank of the language server ends with."""
    assert INTERPRETER is not None
    files = []
    for index, item in enumerate(items):
        files.append(folder / f"{index}.bin")
        files[-1].write_bytes(item)
    script = Path(__file__).with_name("receiver.py")
    done = subprocess.run(
        [INTERPRETER, script, backend, url, folder, modality, *files],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": MOONCAKE_SITE},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    outcomes = []
    for rank in range(BACKENDS[backend]):
        rows, grid, error = (folder / f"{name}-{rank}" for name in ("rows", "grid", "error"))
        outcomes.append(
            Outcome(
                np.load(rows.with_suffix(".npy")) if rows.with_suffix(".npy").exists() else None,
                json.loads(grid.with_suffix(".json").read_text()) if grid.with_suffix(".json").exists() else None,
                json.loads(error.with_suffix(".json").read_text()) if error.with_suffix(".json").exists() else None,
            )
        )
    return outcomes


def test_the_receiver_puts_together_transformers_rows(
    served: tuple[str, World], qwen_tiny: Path, tmp_path: Path
) -> None:
    backend, world = served
    reference = QwenReference(qwen_tiny)
    pictures = [noise_png(80 + index, width, height) for index, (width, height) in enumerate(SIZES)]
    expected = np.concatenate([reference.tokens(picture) for picture in pictures])
    for outcome in receive(backend, world.url, pictures, tmp_path):
        assert outcome.error is None
        assert outcome.rows is not None and outcome.grid is not None
        assert off_by(outcome.rows, expected) <= 1e-5
        assert outcome.grid["dtype"] == "torch.float32"
        assert [t * h * w // 4 for t, h, w in outcome.grid["grid"]] == [len(reference.tokens(p)) for p in pictures]


def test_films_with_their_grids_and_times(served: tuple[str, World], tmp_path: Path) -> None:
    backend, world = served
    frames = [np.asarray(Image.open(io.BytesIO(noise_png(seed, 84, 56)))) for seed in range(12)]
    films = [film("mp4", "libx264", frames[:count]) for count in (12, 6, 8)]
    with Client(world.url) as client:
        expected = client.encode([Video(data) for data in films], output="tokens")
    for outcome in receive(backend, world.url, films, tmp_path, "video"):
        assert outcome.error is None
        assert outcome.rows is not None and outcome.grid is not None
        assert off_by(outcome.rows, np.concatenate([result.numpy() for result in expected])) <= 1e-5
        assert outcome.grid["modality"] == "VIDEO"
        assert outcome.grid["grid"] == [list(result.grid or ()) for result in expected]
        assert outcome.grid["second_per_grid_ts"] == [result.details["second_per_grid_ts"] for result in expected]


def test_sounds_with_their_lengths(tmp_path: Path) -> None:
    checkpoint, backend = tmp_path / "checkpoint", "zmq_to_tokenizer"
    Qwen2AudioAdapter.tiny_checkpoint(checkpoint, 0)
    sounds = [wav(tone(count, 16_000), 16_000) for count in (8000, 16_000, 5000)]
    flags = ("--model-path", str(checkpoint), "--encoder-transfer-backend", backend)
    with World(*flags, nproc=1) as world:
        world.start().wait_ready(replicas=1)
        with Client(world.url) as client:
            expected = client.encode([Audio(data) for data in sounds], output="tokens")
        (outcome,) = receive(backend, world.url, sounds, tmp_path, "audio")
    assert outcome.error is None
    assert outcome.rows is not None and outcome.grid is not None
    assert off_by(outcome.rows, np.concatenate([result.numpy() for result in expected])) <= 1e-5
    assert outcome.grid["modality"] == "AUDIO"
    assert outcome.grid["grid"] == [result.details["audio_feature_length"] for result in expected]


def test_an_error_reaches_every_rank(served: tuple[str, World], tmp_path: Path) -> None:
    backend, world = served
    pictures = [noise_png(1, 56, 56), noise_png(2, 56, 56)[:150], noise_png(3, 56, 56)]
    for outcome in receive(backend, world.url, pictures, tmp_path):
        assert outcome.rows is None
        assert outcome.error is not None
        if backend != "zmq_to_tokenizer":
            assert outcome.error["code"] == 400
            assert "mm_items[" in outcome.error["message"]


@pytest.mark.parametrize("backend", ["zmq_to_tokenizer", "zmq_to_scheduler"])
async def test_ranks_that_wait_hear_of_a_request_that_got_no_turn(backend: str, tmp_path: Path) -> None:
    """Nobody has read its body, so it is SGLang's own side that tells them, and they hang up."""
    async with serving(config(encoder_transfer_backend=backend)) as full:
        full.give_no_turns()
        outcomes = await asyncio.to_thread(receive, backend, str(full.http.base_url), [noise_png(1, 56, 56)], tmp_path)
        while full.front_end.shared.dialect.num_parts:
            await asyncio.sleep(0.01)
    for outcome in outcomes:
        assert outcome.rows is None
        assert outcome.error is not None
        if backend != "zmq_to_tokenizer":
            assert outcome.error["code"] == 503
            assert "--max-queued-items" in outcome.error["message"]
