"""Every family, served by a (2, 2) world over HTTP, gives transformers' numbers for each of its outputs.

`test_worlds.py` has all shapes of worlds for one family, `test_tp_equality.py` all sizes of TP for each family.
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

TOLERANCE = 1e-5
SIZES = [(56, 56), (112, 84), (200, 60), (1, 1), (28, 300), (3, 2), (140, 140), (640, 480)]


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda entry: entry.family)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[World, WholeModel]]:
    entry: FamilyEntry = request.param
    folder: Path = tmp_path_factory.mktemp(entry.family)
    adapter_class(entry).tiny_checkpoint(folder, seed=11)
    with World("--model-path", str(folder), "--tp-size", "2", nproc=4) as world:
        world.start()
        whole = WholeModel(entry.family, folder)
        yield world.wait_ready(replicas=2), whole


def test_all_outputs_in_any_company(served: tuple[World, WholeModel]) -> None:
    world, whole = served
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
            assert off_by(got, right[index]) <= TOLERANCE, (output, SIZES[index])
        together = world.encode([pictures[index] for index in order] * 2, output=output)
        for got, index in zip(together, order * 2, strict=True):
            assert off_by(got, right[index]) <= TOLERANCE, (output, SIZES[index])
    assert [got.shape for got in world.encode(pictures)] == [want.shape for want in expected[model["default_output"]]]


def test_an_output_that_the_model_lacks_is_refused(served: tuple[World, WholeModel]) -> None:
    world, _ = served
    (model,) = world.http.get("/v1/models").json()["data"]
    for output in {"tokens", "pooled"} - set(model["outputs"]):
        reply = world.post([noise_png(1, 30, 30)], output=output)
        assert reply.status_code == 400
        assert "it has tokens" in reply.json()["error"]["message"]
