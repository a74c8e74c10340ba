"""What has broken servers like this one, sent to one that takes pictures, sounds and films: each has its own answer or
a reason of its own, whatever it comes with, and a good item is the same after it as before."""

from __future__ import annotations

import asyncio
import io
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from spmd_encoder.models.qwen2_5_omni import Qwen25OmniAdapter
from tests.harness import media
from tests.harness.web import Exchange, web
from tests.harness.world import World, data_uri, noise_png, off_by, png, vector

TOLERANCE = 1e-6
OK = "ok"
RATE = 16_000
Item = dict[str, Any]


class Input(NamedTuple):
    """`expected` is `OK` or the code of the error."""

    name: str
    item: Item
    expected: str


def image(name: str, file: bytes, expected: str = OK, kind: str = "image/png") -> Input:
    return Input(name, {"image": data_uri(file, kind)}, expected)


def sized(width: int, height: int, expected: str = OK) -> Input:
    return image(f"{width} x {height}", noise_png(width + height, width, height), expected)


def saved(mode: str, format: str, size: tuple[int, int] = (224, 224), **options: Any) -> bytes:
    out = io.BytesIO()
    gradient = Image.linear_gradient("L").resize(size)
    picture = gradient if mode == "L" else gradient.convert("RGB").convert(mode) if mode != "I;16" else None
    (picture or Image.new("I;16", size, 700)).save(out, format, **options)
    return out.getvalue()


def pictures() -> list[Input]:
    good, photo = noise_png(1, 300, 200), saved("RGB", "JPEG")
    second = good.index(b"IDAT", good.index(b"IDAT") + 4) if good.count(b"IDAT") > 1 else len(good) // 2
    broken_chunk = good[:second] + bytes(4) + good[second + 4 :]
    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", zlib.compress(bytes(99)))
    sizes = [(1, 1), (2, 2), (1, 200), (200, 1), (3, 300), (300, 3), (27, 257), (332, 27), (30, 305)]
    too_long = [(1, 201), (1, 500), (10_000, 1), (1, 2000), (3, 4096)]
    return [
        image("one pixel that says it is a JPEG", png(Image.new("RGB", (1, 1))), kind="image/jpeg"),
        *(sized(*size) for size in sizes),
        *(sized(*size, "MEDIA_CORRUPT") for size in too_long),
        *(image(f"{mode} PNG", saved(mode, "PNG")) for mode in ("L", "LA", "P", "1", "I;16", "RGBA")),
        *(image(f"{mode} JPEG", saved(mode, "JPEG"), kind="image/jpeg") for mode in ("L", "CMYK")),
        image("transparent palette", saved("P", "PNG", transparency=0)),
        image("cut PNG", good[: len(good) // 2], "MEDIA_CORRUPT"),
        image("cut JPEG", photo[:-500], "MEDIA_CORRUPT", "image/jpeg"),
        image("broken chunk", broken_chunk, "MEDIA_CORRUPT"),
        image("bomb", bomb, "TOO_LARGE"),
        image("HTML", b"<html><body>404</body></html>", "MEDIA_UNSUPPORTED"),
        image("SVG", b"<svg xmlns='http://www.w3.org/2000/svg'/>", "MEDIA_UNSUPPORTED"),
    ]


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def sounds() -> list[Input]:
    tone = media.tone(RATE, RATE).astype(np.float32)
    whole = media.wav(tone, RATE)
    stereo = np.stack([media.tone(8_000, 8_000), media.tone(8_000, 8_000, 600)], axis=1).astype(np.float32)
    poisons = {"no number": np.nan, "endless": np.inf, "much too loud": 1e30}
    files = [
        ("no sample", media.wav(tone[:0], RATE), "MEDIA_CORRUPT"),
        ("one sample", media.wav(tone[:1], RATE), "MEDIA_CORRUPT"),
        ("10 ms", media.wav(tone[:160], RATE), "MEDIA_CORRUPT"),
        ("the shortest", media.wav(tone[:321], RATE), OK),
        ("a window", media.wav(np.tile(tone, 2), RATE), OK),
        ("longer than a window", media.wav(np.tile(tone, 3), RATE), "TOO_LARGE"),
        ("silence", media.wav(np.zeros(8_000, np.float32), RATE), OK),
        ("two channels at 8 kHz", media.wav(stereo, 8_000), OK),
        ("96 kHz", media.wav(media.tone(96_000, 96_000).astype(np.float32), 96_000), OK),
        ("a rate that no sound has", media.wav(tone, 900), "MEDIA_UNSUPPORTED"),
        ("cut", whole[: len(whole) // 2], "MEDIA_CORRUPT"),
        ("text", b"never a sound at all", "MEDIA_UNSUPPORTED"),
        *(
            (name, media.wav(np.append(tone, np.float32(value)), RATE), "MEDIA_CORRUPT")
            for name, value in poisons.items()
        ),
    ]
    return [Input(name, {"audio": data_uri(file, "audio/wav")}, expected) for name, file, expected in files]


def films() -> list[Input]:
    moving = [np.full((64, 80, 3), 20 * index, np.uint8) for index in range(12)]
    film = media.film("mp4", "libx264", moving)
    frames = [noise_png(index, 40, 30) for index in range(33)]
    lists = [
        ("one frame", frames[:1], OK),
        ("two frames", frames[:2], OK),
        ("three frames", frames[:3], OK),
        ("33 frames", frames, OK),
        ("frames of a pixel", [noise_png(index, 1, 1) for index in range(2)], OK),
        ("very long frames", [noise_png(index, 200, 1) for index in range(2)], OK),
        ("frames that are too long", [noise_png(index, 1, 201) for index in range(2)], "MEDIA_CORRUPT"),
        ("frames of two sizes", [frames[0], noise_png(5, 30, 40)], "MEDIA_CORRUPT"),
        ("a broken frame", [frames[0], frames[1][:60]], "MEDIA_CORRUPT"),
        ("a frame that is none", [frames[0], b"<html></html>"], "MEDIA_UNSUPPORTED"),
    ]
    files = [
        ("a film", film, OK),
        ("a film of one frame", media.film("mp4", "libx264", moving[:1]), OK),
        ("a film cut in its head", film[:40], "MEDIA_CORRUPT"),
        ("a sound", media.wav(np.zeros(900, np.float32), RATE), "MEDIA_UNSUPPORTED"),
    ]
    return [
        *(Input(name, {"video": [data_uri(one) for one in some]}, expected) for name, some, expected in lists),
        *(Input(name, {"video": data_uri(file, "video/mp4")}, expected) for name, file, expected in files),
    ]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder: Path = tmp_path_factory.mktemp("omni")
    Qwen25OmniAdapter.tiny_checkpoint(folder, seed=5)
    flags = ("--model-path", str(folder), "--cache-bytes", "0", "--allow-private-media-hosts")
    with World(*flags, torchrun=False) as started:
        yield started.start().wait_ready()


def encode(world: World, items: list[Item]) -> list[dict[str, Any]]:
    reply = world.http.post("/v1/encode", json={"items": items})
    entries = reply.json()["data"]
    assert [entry["index"] for entry in entries] == list(range(len(items)))
    if any(entry["status"] == OK for entry in entries):
        assert reply.status_code == 200
    else:
        assert 400 <= reply.status_code < 500, reply.text[:300]
    return list(entries)


def check(one: Input, entry: dict[str, Any]) -> None:
    if one.expected == OK:
        assert entry["status"] == OK, (one.name, entry["error"])
        rows = vector(entry)
        assert len(rows) == entry["num_tokens"] > 0, one.name
        assert np.isfinite(rows).all(), one.name
    else:
        assert entry["status"] == "error", one.name
        error = entry["error"]
        assert error["code"] == one.expected, (one.name, error)
        assert error["param"] == f"items[{entry['index']}]"
        assert len(error["message"].split()) >= 5, (one.name, error)


def processes(world: World) -> set[tuple[str, int]]:
    return {(process["role"], process["pid"]) for process in world.info()["processes"]}


GOOD = {"image": data_uri(noise_png(7, 90, 60))}


def test_each_beside_a_good_item_and_all_together(world: World) -> None:
    inputs = [*pictures(), *sounds(), *films()]
    assert len(inputs) >= 50
    (want,) = encode(world, [GOOD])
    before = processes(world)
    for one in inputs:
        entry, good = encode(world, [one.item, GOOD])
        check(one, entry)
        assert off_by(vector(good), vector(want)) <= TOLERANCE, f"beside {one.name}"
    for start in range(0, len(inputs), 20):
        some = inputs[start : start + 20]
        entries = encode(world, [*(one.item for one in some), GOOD])
        for one, entry in zip(some, entries[:-1], strict=True):
            check(one, entry)
        assert off_by(vector(entries[-1]), vector(want)) <= TOLERANCE
    assert encode(world, [GOOD])[0]["embedding"] == want["embedding"]
    # On a busy machine the second preparer may come later.
    assert processes(world) >= before, "none of them ended a process"
    assert world.http.get("/health/ready").status_code == 200


def test_of_each_kind_alone_what_fails_is_the_callers_fault(world: World) -> None:
    for one in (*pictures(), *sounds(), *films()):
        (entry,) = encode(world, [one.item])
        check(one, entry)


async def test_by_url(world: World) -> None:
    """The smallest picture, one that is none, one that is not there; then a good one from the same host."""
    files = {"/pixel": png(Image.new("RGB", (1, 1))), "/html": b"<html></html>", "/good": noise_png(7, 90, 60)}
    (want,) = encode(world, [GOOD])

    async def answer(exchange: Exchange) -> None:
        file = files.get(exchange.path)
        await exchange.reply(file or b"", "200 OK" if file else "404 Not Found")

    async with web(answer) as server:
        urls = [f"http://127.0.0.1:{server.port}{path}" for path in ("/pixel", "/html", "/none", "/good")]
        entries = await asyncio.to_thread(encode, world, [{"image": url} for url in urls])
    codes = [entry["error"]["code"] if entry["status"] != OK else OK for entry in entries]
    assert codes == [OK, "MEDIA_UNSUPPORTED", "FETCH_FAILED", OK]
    assert off_by(vector(entries[3]), vector(want)) <= TOLERANCE
