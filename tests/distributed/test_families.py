"""Every family, served over HTTP by worlds of several shapes, gives transformers' numbers for each of its outputs.

`test_worlds.py` has more of each shape for one family, `test_tp_equality.py` more sizes of TP for each family.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from spmd_encoder.models.loading import adapter_class
from spmd_encoder.models.registry import FAMILIES, FamilyEntry
from tests.harness.families import WholeModel
from tests.harness.world import World, noise_png, off_by

SHAPES = [(1, 1), (1, 2), (2, 2), (1, 3)]
SIZES = [(56, 56), (112, 84), (200, 60), (1, 1), (28, 300), (3, 2), (140, 140), (640, 480)]


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda entry: entry.family)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WholeModel]:
    entry: FamilyEntry = request.param
    folder: Path = tmp_path_factory.mktemp(entry.family)
    adapter_class(entry).tiny_checkpoint(folder, seed=11)
    return folder, WholeModel(entry.family, folder)


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: f"dp{shape[0]}tp{shape[1]}")
def served(
    request: pytest.FixtureRequest, checkpoint: tuple[Path, WholeModel]
) -> Iterator[tuple[World, WholeModel, float]]:
    """With what the numbers may differ by."""
    (dp, tp), (folder, whole) = request.param, checkpoint
    flags = ("--model-path", str(folder), "--tp-size", str(tp), "--cache-bytes", "0")
    with World(*flags, nproc=dp * tp) as world:
        yield world.start().wait_ready(replicas=dp), whole, 1e-6 if tp == 1 else 1e-5


def test_all_outputs_in_any_company(served: tuple[World, WholeModel, float]) -> None:
    world, whole, tolerance = served
    pictures = [noise_png(40 + i, width, height) for i, (width, height) in enumerate(SIZES)]
    wanted = [whole.encode(Image.open(io.BytesIO(picture)).convert("RGB")) for picture in pictures]
    (model,) = world.http.get("/v1/models").json()["data"]
    expected: dict[str, list[np.ndarray[Any, Any]]] = {"tokens": [tokens.numpy() for tokens, _ in wanted]}
    if wanted[0][1] is not None:
        expected["pooled"] = [pooled.numpy() for _, pooled in wanted if pooled is not None]
    assert set(model["outputs"]) == set(expected)
    assert model["default_output"] == ("pooled" if "pooled" in expected else "tokens")
    order = [5, 0, 3, 1, 7, 4, 2, 6]
    for output, right in expected.items():
        for index in range(0, len(pictures), 3):
            (got,) = world.encode([pictures[index]], output=output)
            assert off_by(got, right[index]) <= tolerance, (output, SIZES[index])
        together = world.encode([pictures[index] for index in order] * 2, output=output)
        for got, index in zip(together, order * 2, strict=True):
            assert off_by(got, right[index]) <= tolerance, (output, SIZES[index])
    assert [got.shape for got in world.encode(pictures)] == [want.shape for want in expected[model["default_output"]]]


def test_an_output_that_the_model_lacks_is_refused(served: tuple[World, WholeModel, float]) -> None:
    world, _, _ = served
    (model,) = world.http.get("/v1/models").json()["data"]
    for output in {"tokens", "pooled"} - set(model["outputs"]):
        reply = world.post([noise_png(1, 30, 30)], output=output)
        assert reply.status_code == 400
        assert "it has tokens" in reply.json()["error"]["message"]
