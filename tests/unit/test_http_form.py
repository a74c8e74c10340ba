"""`POST /v1/encode` with multipart/form-data: files as items, text parts as options, hostile forms."""

from __future__ import annotations

import hashlib
import itertools
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_encoder.api.types import MediaItem, OutputKind
from spmd_encoder.config import Config
from spmd_encoder.errors import EncoderError
from spmd_encoder.frontends.base import ItemLimits
from spmd_encoder.frontends.http.app import create_app
from spmd_encoder.frontends.http.form import Form
from spmd_encoder.frontends.http.options import Options
from tests.harness.fake_service import FakeService, picture_file

BOUNDARY = "xyzzy"
FORM_TYPE = f"multipart/form-data; boundary={BOUNDARY}"
SERVER = replace(
    Config().server, max_body_bytes=40_000, max_items_per_request=4, max_image_bytes=5_000, max_image_pixels=10_000
)
PICTURE = picture_file(5)


@pytest.fixture
def service() -> FakeService:
    return FakeService(max_inflight_bytes=2**20)


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(service, replace(Config(), server=SERVER))
    async with (
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client,
        app.framework.router.lifespan_context(app.framework),
    ):
        yield client
    assert service.reserved == 0


def part(name: str, content: bytes = PICTURE, *headers: str, disposition: str | None = None) -> bytes:
    disposition = disposition or f'form-data; name="{name}"; filename="a.png"'
    head = [f"Content-Disposition: {disposition}", *headers]
    return f"--{BOUNDARY}\r\n".encode() + "\r\n".join([*head, "", ""]).encode() + content + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


async def send(client: httpx.AsyncClient, content: bytes, kind: str = FORM_TYPE) -> httpx.Response:
    return await client.post("/v1/encode", content=content, headers={"content-type": kind})


def widths(service: FakeService) -> list[int]:
    return [item.width for item in service.seen[-1].items]


PICTURE_NAMES = ("image", "images", "images[]", "file")


async def test_files_are_items_in_order_whatever_their_name(client: httpx.AsyncClient, service: FakeService) -> None:
    files = [(name, ("x", picture_file(width))) for width, name in enumerate(PICTURE_NAMES, 3)]
    reply = await client.post("/v1/encode", files=files)
    assert reply.status_code == 200
    assert [entry["index"] for entry in reply.json()["data"]] == [0, 1, 2, 3]
    assert widths(service) == [3, 4, 5, 6]
    assert reply.json()["data"][1]["digest"] == "sha256:" + hashlib.sha256(picture_file(4)).hexdigest()


async def test_text_parts_are_options(client: httpx.AsyncClient, service: FakeService) -> None:
    options = {"output": "tokens", "encoding_format": "float", "request_id": "mine", "model": "fake"}
    reply = await client.post("/v1/encode", files={"image": PICTURE}, data=options)
    assert reply.json()["id"] == reply.headers["x-request-id"] == "mine"
    assert reply.json()["data"][0]["embedding"] == [5, 9]
    assert service.seen[0].output is OutputKind.TOKENS
    assert (await client.post("/v1/encode?output=pooled", files={"image": PICTURE})).status_code == 200
    assert service.seen[1].output is OutputKind.POOLED


async def test_what_a_part_says_of_its_file_is_not_believed(client: httpx.AsyncClient, service: FakeService) -> None:
    tricks = [
        part("image", picture_file(3), "Content-Type: text/html"),
        part("image", picture_file(4), disposition='form-data; name="image"'),
        part("image", picture_file(5), disposition='FORM-DATA; filename="../../etc/passwd\\"; name=x"; name="image"'),
        part("image", picture_file(6), disposition="form-data; name=image; filename*=utf-8''%00.php; name*=x''file2"),
    ]
    assert (await send(client, form(*tricks))).status_code == 200
    assert widths(service) == [3, 4, 5, 6]


async def test_a_bad_file_is_its_items_failure(client: httpx.AsyncClient, service: FakeService) -> None:
    nested = b"--inner\r\n\r\n" + PICTURE + b"\r\n--inner--\r\n"
    body = form(
        part("image", b""),
        part("image"),
        part("file", b"\x89PNG" + b"secret" * 1000),
        part("image", nested, "Content-Type: multipart/mixed; boundary=inner"),
    )
    reply = await send(client, body)
    assert reply.status_code == 200
    outcomes = [entry.get("error", {"code": "ok", "param": None}) for entry in reply.json()["data"]]
    assert [(outcome["code"], outcome["param"]) for outcome in outcomes] == [
        ("INVALID_REQUEST", "items[0]"),
        ("ok", None),
        ("TOO_LARGE", "items[2]"),
        ("MEDIA_UNSUPPORTED", "items[3]"),
    ]
    assert "no bytes" in outcomes[0]["message"] and "--max-image-bytes" in outcomes[2]["message"]
    assert "secret" not in reply.text
    reply = await send(client, form(part("image", picture_file(200, 100))))
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "TOO_LARGE")


@pytest.mark.parametrize(
    ("parts", "status", "param", "says"),
    [
        ([], 400, "items", "no item"),
        ([part("output", b"tokens")], 400, "items", "no item"),
        ([part("picture")], 400, "picture", "unknown part `picture`"),
        ([part("x" * 2000)], 400, None, "unknown part"),
        ([part("image"), part("Image")], 400, "Image", "unknown part"),
        ([part("image")] * 5, 413, "items", "--max-items-per-request"),
        ([part("image"), part("output", b"best")], 400, "output", "best"),
        ([part("image"), part("output", b"tokens"), part("output", b"tokens")], 400, "output", "twice"),
        ([part("image", disposition='form-data; name="image"' + "; a" * 64)], 400, None, "more than 64 parameters"),
        ([part("image"), part("request_id", b"a\nb")], 400, "request_id", "printable"),
        ([part("image"), part("model", b"\xff")], 400, "model", "UTF-8"),
        ([part("image"), part("model", b"x" * 5000)], 400, "model", "4096"),
        ([part("image"), part("model", b"gpt")], 404, "model", "not served"),
        ([part("image", PICTURE, "Content-Transfer-Encoding: base64")], 400, "image", "Content-Transfer-Encoding"),
        ([part("image", disposition="form-data")], 400, None, "Content-Disposition"),
        ([part("image", disposition='attachment; name="image"')], 400, None, "Content-Disposition"),
        ([part("image", PICTURE, *["X-Many: 1"] * 100)], 400, None, "malformed"),
        ([part("image", PICTURE, "X-Long: " + "a" * 30_000)], 400, None, "malformed"),
        ([part("image", PICTURE, "no colon")], 400, None, "malformed"),
    ],
)
async def test_refused_forms(
    client: httpx.AsyncClient, service: FakeService, parts: list[bytes], status: int, param: str | None, says: str
) -> None:
    reply = await send(client, form(*parts))
    error = reply.json()["error"]
    assert (reply.status_code, param or error["param"]) == (status, error["param"])
    assert says in error["message"]
    assert len(error["message"]) < 500
    assert reply.headers["x-spmd-replica"] == "none"
    assert service.seen == []


@pytest.mark.parametrize(
    ("content", "kind", "says"),
    [
        (form(part("image")), "multipart/form-data", "no boundary"),
        (form(part("image")), "multipart/form-data; boundary=", "no boundary"),
        (form(part("image")), "multipart/form-data; boundary=" + "x" * 300, "too long"),
        (form(part("image")), "multipart/form-data; boundary=other", "malformed"),
        (form(part("image"))[:-6], FORM_TYPE, "closing boundary"),
        (part("image"), FORM_TYPE, "closing boundary"),
        (part("image")[:40], FORM_TYPE, "closing boundary"),
        (b"", FORM_TYPE, "closing boundary"),
        (b"secret", FORM_TYPE, "malformed near byte 0"),
        (part("image") + b"--xyzzy garbage", FORM_TYPE, "malformed"),
        (b"a preamble\r\n" + form(part("image")), FORM_TYPE, "malformed near byte 0"),
        (form(part("image")) + b"secret", FORM_TYPE, "goes on after its closing boundary"),
        (form(part("image")) + b"\r\n" * 9 + form(part("image")), FORM_TYPE, "goes on after its closing boundary"),
        (b"--xyzzy--\r\nsecret", FORM_TYPE, "goes on after its closing boundary"),
    ],
)
async def test_broken_forms(client: httpx.AsyncClient, content: bytes, kind: str, says: str) -> None:
    reply = await send(client, content, kind)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "INVALID_REQUEST")
    assert says in reply.json()["error"]["message"]
    assert "secret" not in reply.text


async def test_a_type_of_thousands_of_parameters_is_refused_unread(client: httpx.AsyncClient) -> None:
    type_ = FORM_TYPE + ";" * 60_000
    reply = await client.post("/v1/encode", content=form(part("image")), headers={"content-type": type_})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "INVALID_REQUEST")
    assert "more than 64 parameters" in reply.json()["error"]["message"]


def test_an_option_is_refused_as_soon_as_it_comes_again() -> None:
    reader = Form(FORM_TYPE, max_items=4, limits=ItemLimits(max_bytes=100, max_pixels=100))
    reader.feed(part("output", b"tokens"))
    with pytest.raises(EncoderError, match="twice"):
        reader.feed(part("output", b""))


async def test_the_rest_of_a_refused_form_is_not_awaited(client: httpx.AsyncClient) -> None:
    """Thousands of parts are refused when the first one too many is seen."""
    sent = 0

    async def parts() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(10_000):
            sent += 1
            yield part("image", b"x" * 60_000)

    app = create_app(FakeService(), Config())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as roomy:
        reply = await roomy.post("/v1/encode", content=parts(), headers={"content-type": FORM_TYPE})
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "TOO_LARGE")
    assert sent <= 256 + 8


async def test_a_form_is_bounded_as_a_whole_and_accounted_for(client: httpx.AsyncClient, service: FakeService) -> None:
    during: list[int] = []
    answer = service.answer

    def noting(item: MediaItem) -> Any:
        during.append(service.reserved)
        return answer(item)

    service.answer = noting
    body = form(part("image"))
    await send(client, body)
    assert during == [len(body)]
    reply = await send(client, form(part("image", bytes(40_000))))
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "TOO_LARGE")
    assert "--max-body-bytes" in reply.json()["error"]["message"]
    service.max_inflight_bytes = 10
    assert (await send(client, body)).json()["error"]["code"] == "OVERLOADED"


async def test_nothing_is_written_to_disk(client: httpx.AsyncClient, tmp_path: Path) -> None:
    before = tempfile.tempdir
    tempfile.tempdir = str(tmp_path / "missing")  # a temporary file could not be made
    try:
        big = create_app(FakeService(), Config())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(big), base_url="http://test") as roomy:
            reply = await roomy.post("/v1/encode", files={"image": picture_file(5) + bytes(3 * 2**20)})
    finally:
        tempfile.tempdir = before
    assert reply.status_code == 200


async def test_a_compressed_form_is_refused(client: httpx.AsyncClient) -> None:
    headers = {"content-type": FORM_TYPE, "content-encoding": "gzip"}
    reply = await client.post("/v1/encode", content=form(part("image")), headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (415, "MEDIA_UNSUPPORTED")


LIMITS = ItemLimits(max_bytes=2**20, max_pixels=10_000)


def parsed(body: bytes, cuts: Sequence[int]) -> list[str]:
    """The digests of a form that comes in pieces."""
    reader = Form(FORM_TYPE, max_items=100, limits=LIMITS)
    places = [0, *sorted(cuts), len(body)]
    pieces = [body[a:b] for a, b in itertools.pairwise(places)]
    for piece in pieces[:-1]:
        reader.feed(piece)
    items, _ = reader.finish(pieces[-1], Options())
    return [item.code.value if isinstance(item, EncoderError) else item.digest for item in items]


CONTENTS = [PICTURE, b"\r\n--xyzz\r\n-" + PICTURE, PICTURE + b"\r\n--xyzz", b"\r", b"\r\n\r\n", b"a--xyzzy--\r\n"]
BODY = form(*[part("image", content) for content in CONTENTS]) + b"\r\n \r\n"


@given(st.lists(st.integers(0, len(BODY)), max_size=30))
def test_pieces_do_not_matter(cuts: list[int]) -> None:
    assert parsed(BODY, cuts) == parsed(BODY, [])
    with pytest.raises(EncoderError, match="goes on"):
        parsed(BODY + b"x", [*cuts, len(BODY)] if len(cuts) % 2 else cuts)


@given(st.lists(st.sampled_from([b"--xyzzy", b"\r\n", b"-", b": ", b"image", b";", b'"', b"name=", b"\x00", PICTURE])))
def test_no_bytes_break_the_reader(words: list[bytes]) -> None:
    body = b"".join(words)
    for content in (body, part("image") + body, form(part("image", body))):
        try:
            parsed(content, range(0, len(content), 7))
        except EncoderError as error:
            assert error.code in {"INVALID_REQUEST", "TOO_LARGE"}
