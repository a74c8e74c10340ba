"""The README's curl commands for sounds and films, run to the letter against a model that takes them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spmd_encoder.models.qwen2_5_omni import Qwen25OmniAdapter
from tests.contracts.test_readme_http import BLOCKS, fill, run
from tests.harness.world import World, vector

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")

(BLOCK,) = [block for block in BLOCKS if "@talk.wav" in block]
Wanted = tuple[str, set[str]]
SOUND: Wanted = ("audio", {"audio_feature_length"})
FILM: Wanted = ("video", {"num_frames", "sampled_fps"})
PICTURE: Wanted = ("image", set())
WANTED = [[SOUND], [FILM], [SOUND, FILM, PICTURE], [SOUND]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("qwen2_5_omni")
    Qwen25OmniAdapter.tiny_checkpoint(folder, seed=3)
    with World("--model-path", str(folder), nproc=1) as world:
        yield world.start().wait_ready()


def test_sounds_and_films_are_encoded_as_the_readme_sends_them(world: World, tmp_path: Path) -> None:
    folder = fill(tmp_path, world.port)
    printed = [run(command, folder) for command in BLOCK.splitlines()]
    replies: list[list[dict[str, Any]]] = [json.loads(text)["data"] for text in printed if text]
    for reply, wanted in zip(replies, WANTED, strict=True):
        assert [item["modality"] for item in reply] == [modality for modality, _ in wanted]
        for item, (_, names) in zip(reply, wanted, strict=True):
            assert item["status"] == "ok" and names <= item.get("details", {}).keys()
            rows = vector(item)
            assert len(rows) == item["num_tokens"] > 0 and np.isfinite(rows).all()
    (sound,), (film,), mixed, (as_json,) = replies
    assert sound["embedding"] == mixed[0]["embedding"] == as_json["embedding"]
    assert film["embedding"] == mixed[1]["embedding"]
    assert film["details"]["num_frames"] == 4, "one of each of its four seconds"
