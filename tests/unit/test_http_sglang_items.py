"""Items and bodies of SGLang's calls: what is taken, and what is said of the rest."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from spmd_encoder.api.types import Detail, Embedding, ItemOptions, MediaItem, OutputKind
from spmd_encoder.media.frames import pack
from tests.harness.fake_service import picture, picture_file
from tests.harness.media import tone, wav
from tests.harness.sglang_receiver import LongTensor, Receiver
from tests.harness.sglang_server import Served, config, ok, refused, rows_of, serving

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """The default backend, zmq_to_scheduler."""
    async with serving(config()) as served:
        yield served


# -- items


async def sent(served: Served, *items: Any, **fields: Any) -> httpx.Response:
    with Receiver() as receiver:
        return await served.encode("r_local_part_0", *items, embedding_port=receiver.port, **fields)


def good_forms(folder: Path) -> dict[str, Any]:
    data = picture_file(3)
    file = folder / "a b.png"
    file.write_bytes(data)
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    text = base64.b64encode(data).decode()
    return {
        "data URI": picture(3),
        "bare base64": text,
        "object": {"url": picture(3)},
        "object with options": {"url": picture(3), "detail": "auto", "max_dynamic_patch": 4},
        "object with its digest": {"url": text, "content_hash": digest},
        "digest in capitals": {"url": text, "content_hash": "sha256:" + digest[7:].upper()},
        "nested": [[picture(3)]],
        "file URL": "file://" + str(file).replace(" ", "%20"),
        "path": str(file),
    }


async def test_forms_of_items(tmp_path: Path) -> None:
    async with serving(config(allowed_local_media_path=str(tmp_path))) as served:
        for name, item in good_forms(tmp_path).items():
            reply = await sent(served, item)
            assert reply.status_code == 200, (name, reply.text)
        ok(await sent(served, mm_items=picture(3)))  # a scalar
        ok(await sent(served, [picture(3), picture(5)], [picture(4)]))
        assert [item.width for item in served.service.seen[-1].items] == [3, 5, 4]


async def test_jpeg_base64_begins_like_a_path(served: Served) -> None:
    refused(await sent(served, base64.b64encode(b"\xff\xd8\xff\xe0 no picture").decode()), 400, "mm_items[0]")


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"url": picture(3), "content_hash": "sha256:" + "0" * 64}, ["mm_items[0]", "content_hash"]),
        ({"url": picture(3), "content_hash": "md5:1"}, ["mm_items[0]", "sha256:"]),
        ({"image": picture(3)}, ["mm_items[0]", "url"]),
        ({"url": 5}, ["mm_items[0]", "url"]),
        ([], ["mm_items"]),
        (5, ["mm_items[0]"]),
        ("", ["mm_items[0]"]),
        ("!!!", ["mm_items[0]", "base64"]),
        ("/etc/passwd.png", ["mm_items[0]", "--allowed-local-media-path"]),
        ("file:///etc/passwd", ["mm_items[0]", "--allowed-local-media-path"]),
        ("photo.png", ["mm_items[0]", "absolute"]),
        ("http://127.0.0.1:1/x.png?token=SECRET", ["mm_items[0]"]),
        ("data:image/png;base64,AAAA", ["mm_items[0]"]),
        ([[[[[[[[[[picture(3)]]]]]]]]]], ["nested"]),
        (None, ["mm_items[0]"]),
    ],
)
async def test_bad_items_are_a_400_that_echoes_nothing(served: Served, item: Any, words: list[str]) -> None:
    message = refused(await sent(served, item), 400, *words)
    assert "SECRET" not in message and "passwd" not in message
    assert not served.service.seen
    await served.idle()


async def test_an_errors_text_holds_no_media(served: Served) -> None:
    text = "data:image/png;base64," + "QUJD" * 1000
    assert "QUJD" not in refused(await sent(served, text), 400)


async def test_one_bad_item_fails_the_part_before_work(served: Served) -> None:
    refused(await sent(served, picture(3), "data:,x", picture(4)), 400, "mm_items[1]")
    assert not served.service.seen


def sound_rows(item: MediaItem) -> Embedding:
    frames = round(100 * item.seconds)
    details: dict[str, Detail] = {"audio_feature_length": frames}
    return replace(rows_of(replace(item, width=frames // 4)), details=details, grid=None)


async def test_sounds_come_with_their_lengths_as_a_tensor(served: Served, tmp_path: Path) -> None:
    served.service.answer = sound_rows
    sounds = [wav(tone(count, 16_000), 16_000) for count in (1600, 4800)]
    items = [base64.b64encode(data).decode() for data in sounds]
    with Receiver() as receiver:
        call = served.later(served.encode("a", items[0], {"url": items[1]}, modality="AUDIO"))
        ok(await served.register(receiver, "a"))
        message = await receiver.message()
        ok(await call)
    assert message.head.modality.name == "AUDIO"
    assert message.head.grid_dim == LongTensor([10, 30])
    assert message.head.shape == [2 + 7, 2]
    assert vars(message.head)["video_timestamps"] is None
    assert [item.seconds for item in served.service.seen[0].items] == [0.1, 0.3]


def film_rows(item: MediaItem) -> Embedding:
    details: dict[str, Detail] = {"timestamps": [0.25, item.options.fps or 0.0], "second_per_grid_ts": 0.5}
    return replace(rows_of(replace(item, width=3)), details=details, grid=(2, 2, 3))


async def test_films_come_with_grids_times_and_options(served: Served) -> None:
    served.service.answer = film_rows
    clip = base64.b64encode(pack([picture_file(3), picture_file(3)], 1.0)).decode()
    film = {"url": clip, "fps": 4, "max_frames": 8, "max_tokens_per_frame": 5}
    with Receiver() as receiver:
        call = served.later(served.encode("v", clip, film, modality="video"))
        ok(await served.register(receiver, "v"))
        head = (await receiver.message()).head
        ok(await call)
    assert head.modality.name == "VIDEO"
    assert head.grid_dim == [[2, 2, 3], [2, 2, 3]]
    assert vars(head)["video_timestamps"] == [[0.25, 0.0], [0.25, 4.0]]
    assert vars(head)["second_per_grid_ts"] == [0.5, 0.5]
    assert served.service.seen[0].items[1].options == ItemOptions(fps=4, max_frames=8)


@pytest.mark.parametrize("option", [{"fps": -1}, {"fps": "2"}, {"max_frames": 0}, {"max_frames": 1.5}])
async def test_options_out_of_range(served: Served, option: dict[str, Any]) -> None:
    clip = base64.b64encode(pack([picture_file(3)], 1.0)).decode()
    refused(await sent(served, {"url": clip, **option}, modality="VIDEO"), 400, "mm_items[0]", "fps", "max_frames")


@pytest.mark.parametrize("modality", ["VIDEO", "audio"])
async def test_a_picture_is_no_film_and_no_sound(served: Served, modality: str) -> None:
    refused(await sent(served, modality=modality), 400, "mm_items[0]")
    with Receiver() as receiver:
        served.later(served.encode("v", modality=modality))
        while served.front_end.shared.dialect.num_parts < 2:
            await asyncio.sleep(0.01)
        ok(await served.register(receiver, "v"))
        head = (await receiver.message()).head
        assert (head.error_code, head.modality.name) == (400, modality.upper())


async def test_a_model_without_tokens(served: Served) -> None:
    assert served.service.model is not None
    served.service.model = replace(served.service.model, outputs=(OutputKind.POOLED,))
    refused(await sent(served), 400, "tokens")


async def test_items_that_do_not_fit_together(served: Served) -> None:
    def answer(item: MediaItem) -> Embedding:
        made = rows_of(item)
        return replace(made, dtype="float16" if item.width == 4 else "float32")

    served.service.answer = answer
    refused(await sent(served, picture(3), picture(4)), 500, "one table")


# -- bodies


@pytest.mark.parametrize(
    ("changes", "word", "req_id"),
    [
        ({"req_id": None}, "req_id", None),
        ({"req_id": ""}, "req_id", None),
        ({"req_id": 5}, "req_id", None),
        ({"req_id": "x" * 513}, "req_id", None),
        ({"modality": None}, "modality", "r_local_part_0"),
        ({"modality": "SMELL"}, "modality", "r_local_part_0"),
        ({"mm_items": None}, "mm_items", "r_local_part_0"),
        ({"mm_items": []}, "mm_items", "r_local_part_0"),
        ({"num_parts": 0}, "num_parts", "r_local_part_0"),
        ({"num_parts": True}, "num_parts", "r_local_part_0"),
        ({"num_parts": "2"}, "num_parts", "r_local_part_0"),
        ({"part_idx": 2}, "part_idx", "r_local_part_0"),
        ({"part_idx": -1}, "part_idx", "r_local_part_0"),
        ({"part_idx": False}, "part_idx", "r_local_part_0"),
        ({"embedding_port": 0}, "port", "r_local_part_0"),
        ({"embedding_port": 65536}, "port", "r_local_part_0"),
        ({"embedding_port": "80"}, "port", "r_local_part_0"),
        ({"embedding_port": []}, "port", "r_local_part_0"),
        ({"embedding_port": 80, "prefill_host": None}, "prefill_host", "r_local_part_0"),
        ({"embedding_port": 80, "prefill_host": "a b"}, "host", "r_local_part_0"),
        ({"embedding_port": 80, "prefill_host": "a/b"}, "host", "r_local_part_0"),
    ],
)
async def test_fields_of_encode(served: Served, changes: dict[str, Any], word: str, req_id: str | None) -> None:
    refused(
        await served.encode(**changes) if "req_id" not in changes else await _with(served, changes),
        400,
        word,
        req_id=req_id,
    )
    assert not served.service.seen


async def _with(served: Served, changes: dict[str, Any]) -> httpx.Response:
    body = {"mm_items": [picture(3)], "num_parts": 1, "part_idx": 0, "modality": "IMAGE", **changes}
    return await served.http.post("/encode", json=body)


@pytest.mark.parametrize("path", ["/encode", "/scheduler_receive_url", "/scheduler_receive_meta_data", "/send"])
async def test_bodies_that_are_no_object(served: Served, path: str) -> None:
    for body in (b"", b"[]", b"nonsense", b'{"req_id": "x"', b"\xff", b"[" * 60_000):
        reply = await served.http.post(path, content=body, headers={"content-type": "application/json"})
        refused(reply, 422, "JSON object", req_id=None)
    reply = await served.http.post(path, content=b"{}", headers={"content-type": "text/plain"})
    refused(reply, 415, "application/json", req_id=None)


@pytest.mark.parametrize(
    "changes",
    [
        {"receive_url": "nohost"},
        {"receive_url": "host:0"},
        {"receive_url": "host:99999"},
        {"receive_url": "a b:80"},
        {"receive_url": "[::1:80"},
        {"receive_url": None},
        {"receive_count": 0},
        {"receive_count": None},
        {"receive_count": True},
        {"receive_count": 10**9},
        {"req_id": None},
    ],
)
async def test_fields_of_a_registration(served: Served, changes: dict[str, Any]) -> None:
    body = {"req_id": "r", "receive_count": 1, "receive_url": "127.0.0.1:80", **changes}
    reply = await served.http.post("/scheduler_receive_url", json=body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["status"] == "error"
    assert served.front_end.shared.dialect.num_parts == 0


async def test_a_control_body_is_small(served: Served) -> None:
    reply = await served.http.post("/scheduler_receive_url", json={"req_id": "r", "x": "y" * 100_000})
    refused(reply, 413, req_id=None)


async def test_too_many_items() -> None:
    async with serving(config(max_items_per_request=2)) as served:
        refused(await sent(served, picture(1), picture(2), picture(3)), 400, "--max-items-per-request")
