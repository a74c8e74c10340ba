"""Models without a family, served over HTTP by worlds: alone, by several ranks with whole weights, and not cut."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from spmd_encoder.api.types import Modality
from spmd_encoder.media.base import Film
from spmd_encoder.models.fallback import FallbackAdapter
from tests.harness import media
from tests.harness.clips import film, sound
from tests.harness.fallback_families import STRANGERS, WholeStranger
from tests.harness.world import World, data_uri, noise_png, off_by, vector

BY_NAME = {stranger.name: stranger for stranger in STRANGERS}
RATE = 16_000
SIZES = [(112, 84), (200, 60), (1, 1), (640, 480), (28, 300)]
Sent = dict[str, str] | dict[str, list[str]]
Wanted = list[tuple[Sent, "np.ndarray[Any, Any]"]]


@pytest.fixture(
    scope="module", params=[("gemma4", 2), ("video_llama_3", 1), ("metaclip_2", 1), ("xclip", 2)], ids=lambda p: p[0]
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[World, str, Wanted]]:
    """With its name, and items with what transformers' whole model gives for them."""
    name, ranks = request.param
    stranger = BY_NAME[name]
    folder: Path = tmp_path_factory.mktemp(name)
    stranger.write(folder)
    sizes = ("--tp-size", str(ranks), "--mm-encoder-tp-mode", "data")
    with World("--model-path", str(folder), *sizes, "--cache-bytes", "0", nproc=ranks) as world:
        world.start()
        whole = WholeStranger(stranger, folder)
        pictures = [noise_png(7 + n, *size) for n, size in enumerate(SIZES)]
        wanted: Wanted = []
        if Modality.IMAGE in stranger.rows:
            wanted += [({"image": data_uri(file)}, whole.rows(_decoded(file)).numpy()) for file in pictures]
        if Modality.AUDIO in stranger.rows:
            wanted += [(_sound_item(seconds), whole.rows(_as_sent(seconds)).numpy()) for seconds in (0.5, 1.9, 0.3)]
        if Modality.VIDEO in stranger.rows:
            films = [[noise_png(50 * count + n, 90, 64) for n in range(count)] for count in (8, 3, 1, 5)]
            wanted += [
                ({"video": [data_uri(file) for file in files]}, whole.rows(_film(files)).numpy()) for files in films
            ]
        yield world.wait_ready(replicas=1), name, wanted


def _decoded(file: bytes) -> Image.Image:
    return Image.open(io.BytesIO(file)).convert("RGB")


def _sound_item(seconds: float) -> dict[str, str]:
    file = media.wav(sound(seconds, RATE).samples, RATE)
    return {"audio": "data:;base64," + base64.b64encode(file).decode()}


def _film(files: list[bytes]) -> Film:
    """What a list of pictures is decoded to."""
    frames = tuple(np.asarray(_decoded(file)) for file in files)
    return replace(film(len(files), 90, 64), frames=frames)


def _as_sent(seconds: float) -> Any:
    return sound(seconds, RATE)


def encode(world: World, items: list[Sent]) -> list[np.ndarray[Any, Any]]:
    reply = world.http.post("/v1/encode", json={"items": items})
    assert reply.status_code == 200, reply.text[:500]
    return [vector(one) for one in reply.json()["data"]]


def test_items_alone_and_together_are_transformers_own(served: tuple[World, str, Wanted]) -> None:
    world, name, wanted = served
    items = [(item, rows[0] if BY_NAME[name].pooled else rows) for item, rows in wanted]
    for item, rows in items[::2]:
        (got,) = encode(world, [item])
        assert off_by(got, rows) <= 1e-5
    together = [*items[1::2], *items[::2]]
    for got, (_, rows) in zip(encode(world, [item for item, _ in together]), together, strict=True):
        assert off_by(got, rows) <= 1e-5


def test_everybody_is_told_that_it_is_the_fallback(served: tuple[World, str, Wanted]) -> None:
    world, name, _ = served
    (model,) = world.http.get("/v1/models").json()["data"]
    assert (model["family"], model["model_type"]) == ("fallback", name)
    assert model["outputs"] == (["pooled"] if BY_NAME[name].pooled else ["tokens"])
    assert set(model["modalities"]) == set(BY_NAME[name].rows)
    assert world.http.get("/info").json()["model"]["family"] == "fallback"
    assert f"model type '{name}' is served by the fallback" in world.log()


def test_what_cannot_be_encoded_is_the_caller_s_to_mend(served: tuple[World, str, Wanted]) -> None:
    world, name, wanted = served
    thin = data_uri(noise_png(1, 1, 900))
    bad: Sent = {"image": thin} if Modality.IMAGE in BY_NAME[name].rows else {"video": [thin, thin]}
    items = [bad, wanted[0][0]]
    if Modality.AUDIO not in BY_NAME[name].rows:
        items.append(_sound_item(0.5))
    found = world.http.post("/v1/encode", json={"items": items}).json()["data"]
    if len(found) == 3:
        assert "has no get_audio_features" in found[2]["error"]["message"]
    codes = [one["error"]["code"] if one["status"] == "error" else "ok" for one in found]
    assert codes == ["MEDIA_CORRUPT", "ok", "MEDIA_UNSUPPORTED"][: len(items)]


def test_to_cut_it_is_refused_with_what_to_do(tmp_path: Path) -> None:
    FallbackAdapter.tiny_checkpoint(tmp_path, seed=2)
    with World("--model-path", str(tmp_path), "--tp-size", "2", nproc=2) as world:
        world.start()
        world.wait_end()
        assert "model type 'vipllava', which only the fallback serves, cannot be split over ranks" in world.log()
        assert "--tp-size 1, or --mm-encoder-tp-mode data" in world.log()
