"""Sounds and films in the client, against the real HTTP front end."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from spmd_encoder.api.types import Detail, Embedding, HeldResult, ItemOptions, MediaItem, Modality, OutputKind
from spmd_encoder.client import AsyncClient, Audio, Client, Video
from spmd_encoder.client.__main__ import main
from spmd_encoder.client.media import SUFFIXES, File
from spmd_encoder.client.sources import MediaLike, named_modality
from spmd_encoder.media.frames import pack, unpack
from tests.harness.fake_server import FakeServer, fake_server
from tests.harness.fake_service import MODEL, picture, picture_file, size_embedding
from tests.harness.media import tone, wav

pytestmark = pytest.mark.timeout(60)

SOUND = wav(tone(1600, 16_000), 16_000)
FILM = pack([picture_file(3), picture_file(4)], 2.0)

HELD = HeldResult(kind=OutputKind.TOKENS, shape=(4, 2), dtype="float32", num_tokens=4, grid=None)


def answer(item: MediaItem) -> Embedding:
    details: dict[str, Detail] = {"second_per_grid_ts": 0.5, "timestamps": [0.25]}
    return replace(size_embedding(item), details={} if item.modality is Modality.IMAGE else details)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as server:
        server.service.answer = answer
        server.service.model = replace(MODEL, modalities=tuple(Modality))
        yield server


def seen(server: FakeServer) -> list[tuple[str, ItemOptions]]:
    return [(item.modality.value, item.options) for request in server.service.seen for item in request.items]


def test_items_of_every_modality_in_order(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(SOUND)
    (tmp_path / "b.mp4").write_bytes(FILM)
    items: list[MediaLike] = [
        picture_file(5),
        tmp_path / "a.wav",
        Audio(SOUND),
        str(tmp_path / "b.mp4"),
        Video(FILM, fps=4, max_frames=8),
        Video(FILM, fps=4, max_frames=8),
        picture(6),
        "data:audio/wav;base64," + "AAAA",
    ]
    with Client(server.url, concurrency=1) as client:
        results = client.encode(items, raise_on_error=False)
    assert [result.modality for result in results[:7]] == [
        *("image", "audio", "audio", "video", "video", "video", "image")
    ]
    assert results[3].details == {"second_per_grid_ts": 0.5, "timestamps": [0.25]}
    assert results[0].details == {}
    assert results[7].error is not None and results[7].error.code == "MEDIA_UNSUPPORTED"
    sampled = ("video", ItemOptions(fps=4, max_frames=8))
    plain = [(name, ItemOptions()) for name in ("image", "audio", "audio", "video")]
    assert seen(server) == [*plain, sampled, sampled, ("image", ItemOptions())]


def test_frames_are_one_film(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(picture_file(3))
    frames: list[File | Image.Image] = [tmp_path / "0.png", picture_file(4), Image.new("RGB", (5, 9))]
    with Client(server.url) as client:
        film, slow = client.encode([Video(frames, fps=8), Video(frames[:1])])
    clips = [unpack(item.data) for request in server.service.seen for item in request.items]
    assert [(clip.fps, len(clip.files)) for clip in clips] == [(8.0, 3), (2.0, 1)]
    assert bytes(clips[0].files[0]) == picture_file(3)
    assert film.digest != slow.digest
    assert slow.digest == "sha256:" + hashlib.sha256(pack([picture_file(3)], 2.0)).hexdigest()


@pytest.mark.parametrize(
    ("film", "kind", "said"),
    [
        (Video([picture_file(3)], max_frames=2), ValueError, "max_frames"),
        (Video([]), ValueError, "frames"),
        (Video(["https://h/a.png"]), TypeError, "URL"),
        (Video([5]), TypeError, "int"),  # type: ignore[list-item]
    ],
)
def test_frames_that_cannot_be(server: FakeServer, film: Video, kind: type[Exception], said: str) -> None:
    with Client(server.url) as client, pytest.raises(kind, match=said):
        client.encode([film])
    with Client(server.url) as client, pytest.raises(TypeError, match="list"):
        client.encode(film)  # type: ignore[arg-type]


def test_a_digest_is_one_of_a_modality(server: FakeServer) -> None:
    async def ask() -> list[bool]:
        digest = "sha256:" + hashlib.sha256(FILM).hexdigest()
        key = f"{digest}?video&fps=4.0"
        async with AsyncClient(server.url) as client:
            server.service.held = {key: HELD}
            found = await client.lookup([picture_file(3), Video(FILM, fps=4), Video(digest, fps=4), Video(digest)])
            await client.encode([Video(digest, fps=4)])
        return [held.held for held in found]

    assert asyncio.run(ask()) == [False, True, True, False]
    item = server.service.seen[-1].items[0]
    assert (item.modality, item.options.fps, item.held) == (Modality.VIDEO, 4.0, True)


def test_the_command_line(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    for name, data in (("a.png", picture_file(3)), ("b.wav", SOUND), ("c.mp4", FILM), ("notes.txt", b"no")):
        Path("in", name).write_bytes(data)
    argv = ["encode", "in", "--recursive", "--fps", "4", "--url", server.url, "--out", "out"]
    assert main(argv) == 0
    assert "3 items encoded, 0 failed" in capsys.readouterr().err
    assert sorted(seen(server)) == [
        ("audio", ItemOptions()),
        ("image", ItemOptions()),
        ("video", ItemOptions(fps=4)),
    ]
    index = [json.loads(line) for line in Path("out/index.jsonl").read_text().splitlines()]
    assert [(entry["modality"], entry.get("details", {}).get("second_per_grid_ts")) for entry in index] == [
        *(("image", None), ("audio", 0.5), ("video", 0.5))
    ]


def test_the_model_says_what_is_taken_from_folders(server: FakeServer, tmp_path: Path) -> None:
    server.service.model = replace(MODEL, modalities=(Modality.AUDIO,))
    (tmp_path / "a.png").write_bytes(picture_file(3))
    (tmp_path / "b.wav").write_bytes(SOUND)
    out = str(tmp_path / "o.safetensors")
    assert main(["encode", str(tmp_path), "--recursive", "--url", server.url, "--out", out]) == 0
    assert [name for name, _ in seen(server)] == ["audio"]


@pytest.mark.parametrize(
    ("name", "modality"),
    [
        ("a/b.WAV", "audio"),
        ("a?b.mp4", "video"),
        ("https://h/a.mp3?token=x.png", "audio"),
        ("https://h/a.png?as=x.mp3", None),
        ("http://[/x.mp4", "video"),
        ("DATA:video/mp4;base64,AAAA", "video"),
        ("a.png", None),
        ("wav", None),
    ],
)
def test_what_a_name_shows(name: str, modality: str | None) -> None:
    assert named_modality(name) == modality


def test_no_suffix_is_of_two_modalities() -> None:
    assert sum(map(len, SUFFIXES.values())) == len(frozenset().union(*SUFFIXES.values()))
