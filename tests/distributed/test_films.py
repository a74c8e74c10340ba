"""Files of films through a whole world: chosen frames, rows and details, in every form of request; and broken ones."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import pytest
import torch
import transformers

from spmd_encoder.media.base import Film, FilmInfo
from spmd_encoder.models.loading import load_preprocessor
from tests.harness import media
from tests.harness.film_families import FILM_REFERENCES
from tests.harness.reference import QwenReference
from tests.harness.web import Exchange, web
from tests.harness.world import World, data_uri, noise_png, off_by

FRAMES, RATE, WIDTH, HEIGHT = 40, 25, 112, 84
FILES = {
    "mp4": ("mp4", "libx264", False),
    "webm": ("webm", "libvpx-vp9", False),
    "with_sound": ("mp4", "libx264", True),
}


def moving(width: int = WIDTH, height: int = HEIGHT, count: int = FRAMES) -> list[Any]:
    """Bars that run to the right, so that each frame differs from all others."""
    across = np.arange(width)[None, :, None] + np.zeros((height, 1, 3), int)
    return [((across * [3, 5, 7] + 6 * index) % 256).astype(np.uint8) for index in range(count)]


@pytest.fixture(scope="module")
def world(qwen_tiny: Path) -> Iterator[World]:
    flags = ("--model-path", str(qwen_tiny), "--cache-bytes", "0", "--allow-private-media-hosts")
    with World(*flags, nproc=1) as started:
        yield started.start().wait_ready()


@pytest.fixture(scope="module")
def films() -> dict[str, bytes]:
    return {
        name: media.film(container, codec, moving(), with_sound=has_sound)
        for name, (container, codec, has_sound) in FILES.items()
    }


class WholeModel:
    """transformers' model over frames that PyAV decodes one by one."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        models: Any = transformers
        self._model = models.Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        # Its tensors are those of transformers' video processor: `tests/compat/test_video_processors.py`.
        self._made = load_preprocessor(folder)

    def rows(self, file: bytes, count: int) -> np.ndarray[Any, Any]:
        """Of `count` frames in equal steps from the first one, as `Qwen2VLVideoProcessor.sample_frames` takes them."""
        container: Any
        with av.open(io.BytesIO(file)) as container:
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        indices = torch.arange(0, len(frames), len(frames) / count).int().tolist()
        height, width, _ = frames[0].shape
        film = Film(
            frames=tuple(frames[index] for index in indices),
            times=tuple(index / RATE for index in indices),
            indices=tuple(indices),
            info=FilmInfo(num_frames=len(frames), fps=RATE, seconds=len(frames) / RATE, width=width, height=height),
        )
        with torch.inference_mode():
            return FILM_REFERENCES["qwen2_5_vl"](self._model, self._made.preprocess_video(film).tensors).numpy()


@pytest.fixture(scope="module")
def whole(qwen_tiny: Path) -> WholeModel:
    return WholeModel(qwen_tiny)


def rows_of(one: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    assert one["status"] == "ok", one
    rows: np.ndarray[Any, Any] = np.frombuffer(base64.b64decode(one["embedding"]), "<f4").reshape(one["shape"])
    return rows


def check(reply: httpx.Response, want: np.ndarray[Any, Any], count: int) -> None:
    assert reply.status_code == 200, reply.text[:500]
    (one,) = reply.json()["data"]
    assert off_by(rows_of(one), want) <= 1e-6
    t, h, w = one["grid"]
    assert t * h * w // 4 == len(want) == one["num_tokens"]
    fps = count / FRAMES * RATE
    assert one["details"] == {
        "num_frames": count,
        "sampled_fps": pytest.approx(fps),
        "second_per_grid_ts": pytest.approx(2 / fps),
    }


def test_info_and_models_say_that_films_are_taken(world: World) -> None:
    told = world.info()["decoders"]
    assert "MP4" in told["video_formats"] and {"h264", "vp9"} <= set(told["video_codecs"])
    assert world.http.get("/v1/models").json()["data"][0]["modalities"] == ["image", "video"]


SAMPLINGS = [({"fps": 5}, 8), ({"fps": 5, "max_frames": 4}, 4), ({"fps": 25, "max_frames": 1000}, FRAMES), ({}, 4)]


@pytest.mark.parametrize(("sampling", "count"), SAMPLINGS, ids=str)
@pytest.mark.parametrize("name", FILES)
def test_a_file_as_json(
    world: World, films: dict[str, bytes], whole: WholeModel, name: str, sampling: dict[str, Any], count: int
) -> None:
    item = {"video": data_uri(films[name], "video/mp4"), **sampling}
    check(world.http.post("/v1/encode", json={"items": [item]}), whole.rows(films[name], count), count)


@pytest.mark.parametrize("name", FILES)
def test_a_raw_body_and_a_form(world: World, films: dict[str, bytes], whole: WholeModel, name: str) -> None:
    file, want = films[name], whole.rows(films[name], 8)
    kind = "video/webm" if name == "webm" else "video/mp4"
    raw = world.http.post("/v1/encode", params={"fps": 5}, headers={"Content-Type": kind}, content=file)
    check(raw, want, 8)
    form = world.http.post("/v1/encode", files={"video": ("a", file, kind)}, data={"fps": "5", "max_frames": "10"})
    check(form, want, 8)


async def test_a_url(world: World, films: dict[str, bytes], whole: WholeModel) -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.reply(films[exchange.path.strip("/")])

    async with web(answer) as site, httpx.AsyncClient(base_url=world.url, timeout=60) as http:
        for name, file in films.items():
            item = {"video": f"http://127.0.0.1:{site.port}/{name}", "fps": 5}
            check(await http.post("/v1/encode", json={"items": [item]}), whole.rows(file, 8), 8)


def test_pictures_films_and_a_broken_film_in_one_request(
    world: World, films: dict[str, bytes], whole: WholeModel, qwen_tiny: Path
) -> None:
    picture = noise_png(5, 84, 56)
    items = [
        {"video": data_uri(films["webm"]), "fps": 5},
        {"image": data_uri(picture)},
        {"video": data_uri(films["mp4"][:200])},
        {"video": data_uri(films["with_sound"]), "max_frames": 4},
    ]
    found = world.http.post("/v1/encode", json={"items": items}).json()["data"]
    assert [one["status"] for one in found] == ["ok", "ok", "error", "ok"]
    assert found[2]["error"]["param"] == "items[2]"
    assert off_by(rows_of(found[0]), whole.rows(films["webm"], 8)) <= 1e-6
    assert off_by(rows_of(found[1]), QwenReference(qwen_tiny).tokens(picture)) <= 1e-6
    assert off_by(rows_of(found[3]), whole.rows(films["with_sound"], 4)) <= 1e-6
    assert [one.get("details", {}).get("num_frames") for one in found] == [8, None, None, 4]


def broken() -> dict[str, bytes]:
    """Films that cannot be encoded, each in its own way."""
    mp4 = media.film("mp4", "libx264", moving())
    mkv = media.film("matroska", "libx264", moving())
    first = mkv.index(b"\x1f\x43\xb6\x75")  # a Cluster, where the frames begin
    no_frames = mp4.replace(b"stsz", b"free", 1)
    return {
        "cut before its table": mp4[: len(mp4) * 6 // 10],
        "cut before its first frame": mkv[:first],
        "no table of samples": no_frames,
        "no table at all": mp4.replace(b"moov", b"free", 1),
        "sound alone": media.sound("mp4", "aac", 16_000, media.tone(16_000, 16_000)),
        "a WAV file": media.wav(np.zeros(1600, np.int16), 16_000),
        "10,000 pixels wide": media.film("mp4", "libx264", moving(10_000, 16, 2)),
        "a picture": noise_png(1, 30, 30),
        "text": b"<html>not found</html>",
        "a brand and nothing else": mp4[:32],
        "a code that is not decoded": media.film("matroska", "mpeg4", moving(count=3)),
    }


@pytest.mark.parametrize("name", broken())
def test_a_broken_film_fails_alone(world: World, films: dict[str, bytes], whole: WholeModel, name: str) -> None:
    bad = {"video": data_uri(broken()[name])}
    alone = world.http.post("/v1/encode", json={"items": [bad]})
    (one,) = alone.json()["data"]
    assert one["status"] == "error", name
    assert one["error"]["code"] in {"MEDIA_CORRUPT", "MEDIA_UNSUPPORTED", "TOO_LARGE"}
    assert 400 <= one["error"].get("status", alone.status_code) < 500
    good = {"video": data_uri(films["mp4"]), "fps": 5}
    found = world.http.post("/v1/encode", json={"items": [bad, good]}).json()["data"]
    assert [each["status"] for each in found] == ["error", "ok"]
    assert off_by(rows_of(found[1]), whole.rows(films["mp4"], 8)) <= 1e-6


def test_the_smallest_film_is_encoded(world: World, whole: WholeModel) -> None:
    file = media.film("webm", "libvpx-vp9", moving(1, 1, 4))
    (one,) = world.http.post("/v1/encode", json={"items": [{"video": data_uri(file)}]}).json()["data"]
    assert off_by(rows_of(one), whole.rows(file, 4)) <= 1e-6
