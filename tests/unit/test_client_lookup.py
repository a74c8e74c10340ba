"""The client's look-ups, items by digest, and its time limit as the server hears of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from spmd_encoder.api.types import HeldResult, ItemFailure, ItemOutcome, MediaItem, OutputKind
from spmd_encoder.client import (
    AsyncClient,
    BadReplyError,
    Client,
    Held,
    ItemError,
    NoReplyInTimeError,
    RefusedError,
)
from spmd_encoder.client.__main__ import main
from spmd_encoder.client.flows import Digest, Flows, Request, Send
from spmd_encoder.client.lookup import MAX_DIGESTS
from spmd_encoder.client.reply import Reply
from spmd_encoder.client.sources import source_of
from spmd_encoder.errors import EncoderError, ErrorCode
from tests.harness.fake_server import FakeServer, fake_server
from tests.harness.fake_service import picture_file, size_embedding

pytestmark = pytest.mark.timeout(60)

ROWS = HeldResult(kind=OutputKind.TOKENS, shape=(4, 2), dtype="bfloat16", num_tokens=4, grid=(1, 4, 4), replicas=(1, 0))
NOBODYS = "sha256:" + "0" * 64


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as server:
        yield server


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def test_pictures_of_every_kind_and_digests(server: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(picture_file(3))
    server.service.held = {digest(picture_file(3)): ROWS}
    with Client(server.url) as client:
        found = client.lookup(
            [path, picture_file(4), NOBODYS, picture_file(3), Image.new("RGB", (5, 5))], output="tokens"
        )
        assert found[0] == Held(
            index=0,
            name=str(path),
            digest=digest(picture_file(3)),
            held=True,
            replicas=(1, 0),
            shape=(4, 2),
            dtype="bfloat16",
            num_tokens=4,
            grid=(1, 4, 4),
        )
        assert [held.held for held in found] == [True, False, False, True, False]
        assert found[2] == Held(index=2, name=NOBODYS, digest=NOBODYS, held=False)
        sent = client.encode([Image.new("RGB", (5, 5))])
        assert sent[0].digest == found[4].digest, "a picture in memory is written as the same file each time"
    assert [output for _, output in server.service.looked_up] == [OutputKind.TOKENS]


async def test_awaited(server: FakeServer) -> None:
    server.service.held = {digest(picture_file(3)): ROWS}
    async with AsyncClient(server.url) as client:
        assert [held.held for held in await client.lookup([picture_file(3), NOBODYS])] == [True, False]
        assert await client.lookup([]) == []


def test_what_cannot_be_looked_up(server: FakeServer, tmp_path: Path) -> None:
    with Client(server.url) as client:
        with pytest.raises(ItemError, match="No such file"):
            client.lookup([tmp_path / "none.png"])
        with pytest.raises(ValueError, match="is a URL"):
            client.lookup(["http://a.test/b.png"])
        with pytest.raises(TypeError, match="list of items"):
            client.lookup(NOBODYS)
        with pytest.raises(RefusedError) as caught:
            client.lookup([NOBODYS], output="sums")  # type: ignore[arg-type]
        assert caught.value.code == "INVALID_REQUEST"
        with pytest.raises(RefusedError, match="not served here"):
            Client(server.url, model="gpt").lookup([NOBODYS])


def test_many_digests_take_several_requests() -> None:
    sources = [source_of(NOBODYS, index) for index in range(MAX_DIGESTS + 1)]
    flow = Flows().lookup(sources, None)
    sizes: list[int] = []
    step: object = flow.send(None)
    while True:
        assert isinstance(step, Digest)
        send = flow.send(step.run())
        assert isinstance(send, Send)
        asked = json.loads(send.request.content or b"")["digests"]
        sizes.append(len(asked))
        body = json.dumps({"data": [{"digest": one, "held": False} for one in asked]}).encode()
        try:
            step = flow.send(Reply(200, {}, body))
        except StopIteration as end:
            found = end.value
            break
    assert sizes == [MAX_DIGESTS, 1]
    assert [held.index for held in found] == list(range(MAX_DIGESTS + 1))


@pytest.mark.parametrize(
    "body", [b"{}", b'{"data": [{}]}', b'{"data": []}', b'{"data": [{"digest": "x", "held": false}]}']
)
def test_nonsense_is_no_answer(body: bytes) -> None:
    flow = Flows().lookup([source_of(NOBODYS, 0)], None)
    step = flow.send(None)
    assert isinstance(step, Digest)
    flow.send(step.run())
    with pytest.raises(BadReplyError):
        flow.send(Reply(200, {}, body))


def test_by_digest_and_then_with_its_bytes(server: FakeServer) -> None:
    def answer(item: MediaItem) -> ItemOutcome:
        if item.held and item.digest == NOBODYS:
            return ItemFailure(error=EncoderError(ErrorCode.NOT_FOUND, "no cache holds it"))
        return size_embedding(item)

    server.service.answer = answer
    known = digest(picture_file(3))
    with Client(server.url) as client:
        results = client.encode([known, NOBODYS, picture_file(4)], raise_on_error=False)
        assert [result.ok for result in results] == [True, False, True]
        assert results[0].digest == known
        assert results[1].error is not None
        assert (results[1].error.code, results[1].error.name) == ("NOT_FOUND", NOBODYS)
        (alone,) = client.encode([NOBODYS], raise_on_error=False)
        assert alone.error is not None, "said of the picture, not of the request"
    seen = [[(item.held, item.digest == known) for item in request.items] for request in server.service.seen]
    assert [(True, True), (True, False)] in seen


def test_on_the_command_line(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(picture_file(3))
    server.service.held = {digest(picture_file(3)): ROWS}
    assert main(["lookup", str(path), NOBODYS, "--output", "tokens", "--url", server.url]) == 0
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(line["name"], line["held"], line["replicas"]) for line in lines] == [
        (str(path), True, [1, 0]),
        (NOBODYS, False, []),
    ]
    assert "1 of 2 results are held" in err
    assert main(["lookup", str(tmp_path / "none.png"), "--url", server.url]) == 2


@pytest.mark.parametrize(
    ("left_s", "wanted"), [(300.0, "299.500"), (1.0, "0.900"), (0.0001, "0.001"), (1e12, "999999999.000")]
)
def test_the_server_is_told_to_be_done_a_little_earlier(left_s: float, wanted: str) -> None:
    assert Send(Request(method="POST", path="/v1/encode"), 0.0).timeout(left_s) == {"x-request-timeout": wanted}
    assert Send(Request(method="GET", path="/info"), 0.0).timeout(left_s) == {}


def test_the_servers_word_of_where_the_time_went(server: FakeServer) -> None:
    server.service.answer = lambda _: ItemFailure(
        error=EncoderError(ErrorCode.DEADLINE_EXCEEDED, "the request's time was over in the stage queue")
    )
    with Client(server.url, timeout_s=0.4) as client, pytest.raises(NoReplyInTimeError, match="in the stage queue"):
        client.encode([picture_file(3)])
    left_s = server.service.seen[0].deadline_s
    assert left_s is not None
    assert left_s <= 0.36
    with Client(server.url, timeout_s=100) as client:  # the server's own limit
        (result,) = client.encode([picture_file(3)], raise_on_error=False)
        assert result.error is not None
        assert result.error.code == "DEADLINE_EXCEEDED"
