"""Pictures of every size: the right answer, or a refusal that says why; and the next request works."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from spmd_encoder.models.loading import adapter_class
from spmd_encoder.models.registry import FAMILIES
from tests.harness.families import WholeModel
from tests.harness.world import World, noise_png, off_by, png, vector

TOLERANCE = 1e-6
MAX_ASPECT = 200


@pytest.fixture(scope="module", params=["qwen2_5_vl", "siglip2"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[World, WholeModel]]:
    """One family that keeps sizes in bounds, and one that scales all pictures up to a number of patches."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    (entry,) = (entry for entry in FAMILIES if entry.family == request.param)
    adapter_class(entry).tiny_checkpoint(folder, seed=11)
    with World("--model-path", str(folder), torchrun=False) as world:
        world.start()
        whole = WholeModel(request.param, folder)
        yield world.wait_ready(), whole


def answers(world: World, pictures: list[bytes]) -> list[dict[str, Any]]:
    reply = world.post(pictures, output="tokens")
    entries = reply.json()["data"]
    assert [entry["index"] for entry in entries] == list(range(len(pictures)))
    assert reply.status_code == (200 if any(e["status"] == "ok" for e in entries) else 422), reply.text[:300]
    return list(entries)


def right(whole: WholeModel, picture: bytes) -> np.ndarray[Any, Any]:
    tokens, _ = whole.encode(Image.open(io.BytesIO(picture)).convert("RGB"))
    return tokens.numpy()


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.sweep)])
def test_small_sizes(served: tuple[World, WholeModel], every: int) -> None:
    """Each side from 1 to 64 with some others, or with all."""
    world, whole = served
    # A ramp, cut to size, costs less to make than noise, and no two sizes have the same pixels.
    rows = np.arange(64 * 64 * 3, dtype=np.uint32).reshape(64, 64, 3) * 37 % 251
    sizes = [(width, height) for width in range(1, 65) for height in range(1, 65) if (width + 2 * height) % every == 0]
    for start in range(0, len(sizes), 128):
        chunk = sizes[start : start + 128]
        pictures = [png(Image.fromarray(rows[:h, :w].astype(np.uint8))) for w, h in chunk]
        for place, (entry, size) in enumerate(zip(answers(world, pictures), chunk, strict=True)):
            assert entry["status"] == "ok", (size, entry)
            got = vector(entry)
            assert np.isfinite(got).all()
            assert got.shape == (entry["num_tokens"], got.shape[1])
            if place % 8 == start // 128 % 8:
                assert off_by(got, right(whole, pictures[place])) <= TOLERANCE, size


def test_large_and_long_pictures(served: tuple[World, WholeModel]) -> None:
    world, whole = served
    chance = random.Random(5)
    sizes = [(chance.randint(65, 2000), chance.randint(65, 2000)) for _ in range(6)]
    sizes += [(1, 200), (200, 1), (1, 201), (2000, 9), (2000, 10), (9, 2000), (2, 401), (2, 400), (1999, 65)]
    for index, (width, height) in enumerate(sizes):
        picture = noise_png(index, width, height)
        entry, after = answers(world, [picture, noise_png(99, 60, 50)])
        assert after["status"] == "ok", "the next one works"
        if max(width, height) > MAX_ASPECT * min(width, height):
            assert entry["error"]["code"] == "MEDIA_CORRUPT"
            assert f"{width} x {height} pixels" in entry["error"]["message"]
        else:
            assert entry["status"] == "ok", (width, height, entry)
            assert off_by(vector(entry), right(whole, picture)) <= TOLERANCE, (width, height)
