"""Families, served over HTTP by worlds of several shapes, give transformers' numbers for each of their outputs.

`test_worlds.py` has more of each shape for one family, `test_tp_equality.py` more sizes of TP for each family.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet
from PIL import Image

from spmd_encoder.api.types import Modality
from spmd_encoder.media.base import Film, FilmInfo
from spmd_encoder.models.base import LoadContext
from spmd_encoder.models.loading import adapter_class, load_adapter
from spmd_encoder.models.registry import FAMILIES, FamilyEntry
from tests.harness import media
from tests.harness.clips import sound
from tests.harness.families import SAME_TOWER, WholeModel
from tests.harness.film_families import FILM_REFERENCES
from tests.harness.sound_families import WholeSoundModel
from tests.harness.world import World, noise_png, off_by

Item = dict[str, Any]
Values = np.ndarray[Any, Any]

SIZES = [(56, 56), (112, 84), (200, 60), (1, 1), (28, 300), (3, 2), (140, 140), (640, 480)]


@dataclass(frozen=True)
class Wanted:
    item: Item
    outputs: dict[str, Values]


# To a world these are as others of their kind: `test_family.py` and its like, and `test_tp_equality.py`, compare their
# numbers, and `make sweep` serves them too.
AS_OTHERS = {
    *(*SAME_TOWER, "qwen2_vl", "qwen3_5", "glm4v"),
    *("llava", "llava_next", "llava_onevision", "internvl", "gemma3", "paligemma", "idefics3"),
    *("siglip", "dinov2_with_registers", "dinov3_vit", "dinov3_convnext", "colpali", "colmodernvbert"),
    *("voxtral", "musicflamingo", "glmasr", "qwen3_asr"),
}
IN_SEVERAL_SHAPES = {"qwen2_5_vl", "siglip2", "qwen2_audio"}
SHAPES = [(1, 1, "weights"), (1, 2, "weights"), (2, 2, "weights"), (1, 3, "weights"), (1, 3, "data")]
"""Sizes of DP and TP, and what the ranks of a copy share out."""


def cases() -> Iterator[ParameterSet]:
    for entry in FAMILIES:
        family = entry.family
        shapes, always = (SHAPES, SHAPES[2::2]) if family in IN_SEVERAL_SHAPES else (SHAPES[1:2], SHAPES[1:2])
        for dp, tp, mode in shapes:
            is_first_of_kind = (dp, tp, mode) in always and family not in AS_OTHERS
            marks = [] if is_first_of_kind else [pytest.mark.sweep]
            yield pytest.param((entry, (dp, tp), mode), id=f"{family}-dp{dp}tp{tp}-{mode}", marks=marks)


@pytest.fixture(scope="module", params=cases())
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, context: LoadContext
) -> Iterator[tuple[World, list[Wanted], float]]:
    """With what its items give, and what the numbers may differ by."""
    entry, (dp, tp), mode = request.param
    folder: Path = tmp_path_factory.mktemp(entry.family)
    adapter_class(entry).tiny_checkpoint(folder, seed=11)
    sizes = ("--tp-size", str(tp), "--mm-encoder-tp-mode", mode)
    flags = ("--model-path", str(folder), *sizes, "--cache-bytes", "0")
    with World(*flags, nproc=dp * tp) as world:
        world.start()
        wanted = [one for modality in adapter_class(entry).modalities for one in want(modality, entry, folder, context)]
        yield world.wait_ready(replicas=dp), wanted, 1e-6 if tp == 1 or mode == "data" else 1e-5


def want(modality: Modality, entry: FamilyEntry, folder: Path, context: LoadContext) -> list[Wanted]:
    """What transformers' whole model makes of some items of this modality."""
    match modality:
        case Modality.IMAGE:
            whole = WholeModel(entry.family, folder)
            files = [noise_png(40 + i, width, height) for i, (width, height) in enumerate(SIZES)]
            answers = [whole.encode(Image.open(io.BytesIO(file)).convert("RGB")) for file in files]
        case Modality.AUDIO:
            rate = load_adapter(folder, context).preprocessor.sampling_rate
            sounds = [sound(seconds, rate) for seconds in (0.5, 1.9, 0.1, 1.0)]
            files = [media.wav(one.samples, rate) for one in sounds]
            answers = [WholeSoundModel(entry.family, folder).encode(one) for one in sounds]
        case Modality.VIDEO:
            return want_films(entry, folder, context)
    return [
        Wanted(
            {modality.value: data_uri(file)},
            {"tokens": tokens.numpy(), **({} if pooled is None else {"pooled": pooled.numpy()})},
        )
        for file, (tokens, pooled) in zip(files, answers, strict=True)
    ]


def want_films(entry: FamilyEntry, folder: Path, context: LoadContext) -> list[Wanted]:
    """Lossless lists of frames: a codec's losses are told by the tests of `media.video`."""
    made = load_adapter(folder, context).preprocessor
    model = WholeModel(entry.family, folder).model
    found = []
    for count, width, height in ((4, 84, 60), (1, 56, 90), (7, 120, 56)):
        pictures = [noise_png(70 + i, width, height) for i in range(count)]
        frames = tuple(np.asarray(Image.open(io.BytesIO(p)).convert("RGB")) for p in pictures)
        info = media_info(count, width, height)
        film = Film(frames=frames, times=(0.0,) * count, indices=tuple(range(count)), info=info)
        with torch.inference_mode():
            rows = FILM_REFERENCES[entry.family](model, made.preprocess_video(film).tensors)
        found.append(Wanted({"video": [data_uri(p) for p in pictures], "fps": 2}, {"tokens": rows.numpy()}))
    return found


def media_info(count: int, width: int, height: int) -> FilmInfo:
    return FilmInfo(num_frames=count, fps=2.0, seconds=count / 2, width=width, height=height)


def data_uri(file: bytes) -> str:
    return "data:;base64," + base64.b64encode(file).decode()


def encode(world: World, items: list[Item], **fields: Any) -> list[Values]:
    reply = world.http.post("/v1/encode", json={"items": items, **fields})
    assert reply.status_code == 200, reply.text[:500]
    found = reply.json()["data"]
    return [np.frombuffer(base64.b64decode(one["embedding"]), "<f4").reshape(one["shape"]) for one in found]


def test_all_outputs_in_any_company(served: tuple[World, list[Wanted], float]) -> None:
    world, wanted, tolerance = served
    (model,) = world.http.get("/v1/models").json()["data"]
    assert set(model["outputs"]) == set(wanted[0].outputs)
    assert model["default_output"] == ("pooled" if "pooled" in wanted[0].outputs else "tokens")
    order = [*range(1, len(wanted), 2), *range(0, len(wanted), 2)]
    for output in wanted[0].outputs:
        for one in wanted[::3]:
            (got,) = encode(world, [one.item], output=output)
            assert off_by(got, one.outputs[output]) <= tolerance, output
        together = encode(world, [wanted[index].item for index in order] * 2, output=output)
        for got, index in zip(together, order * 2, strict=True):
            assert off_by(got, wanted[index].outputs[output]) <= tolerance, (output, index)
    default = [one.outputs[model["default_output"]] for one in wanted]
    assert [got.shape for got in encode(world, [one.item for one in wanted])] == [one.shape for one in default]


def test_what_the_model_lacks_is_refused(served: tuple[World, list[Wanted], float]) -> None:
    world, wanted, _ = served
    (model,) = world.http.get("/v1/models").json()["data"]
    for output in {"tokens", "pooled"} - set(model["outputs"]):
        reply = world.http.post("/v1/encode", json={"items": [wanted[0].item], "output": output})
        assert reply.status_code == 400
        assert "it has tokens" in reply.json()["error"]["message"]
    files = {"image": noise_png(1, 30, 30), "audio": media.wav(np.zeros(9000, np.float32), 16_000)}
    for modality in files.keys() - set(model["modalities"]):
        items = [{modality: data_uri(files[modality])}, wanted[0].item]
        reply = world.http.post("/v1/encode", json={"items": items})
        assert [one["status"] for one in reply.json()["data"]] == ["error", "ok"]
        error = reply.json()["data"][0]["error"]
        assert (error["code"], error["param"]) == ("MEDIA_UNSUPPORTED", "items[0]")
        assert f"this model takes no {modality} items" in error["message"]
