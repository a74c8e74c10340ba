"""`destination` of the client's calls: both clients and the command line against the server's own HTTP front end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from PIL import Image

from spmd_encoder.api.types import Detail
from spmd_encoder.client import (
    AsyncClient,
    BadReplyError,
    ChunkLimits,
    Client,
    Destination,
    EncoderClientError,
    FileReceipt,
    ItemsFailedError,
    NoReplyError,
    PushReceipt,
    RefusedError,
    Result,
    Staged,
    StagedReceipt,
    ToFiles,
    ToReceiver,
    read_embedding_file,
)
from spmd_encoder.client.__main__ import main
from spmd_encoder.client.flows import Broken, Flows, Load, Pause, Send
from spmd_encoder.client.receiver import EmbeddingReceiver
from spmd_encoder.client.reply import Reply, delivered_of, staged_of
from spmd_encoder.client.sources import source_of
from spmd_encoder.config import Config
from spmd_encoder.errors import EncoderError, ErrorCode
from tests.harness.fake_server import FakeServer, fake_server
from tests.harness.fake_service import FakeService, failing, picture, picture_file, size_embedding

pytestmark = pytest.mark.timeout(60)

Call = Callable[..., Any]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    (tmp_path / "cache").mkdir()
    base, service = Config(), FakeService()
    service.answer = lambda item: replace(size_embedding(item), shape=(1, 2))
    destinations = replace(base.destinations, embedding_dir=str(tmp_path / "cache"))
    with fake_server(service, replace(base, destinations=destinations)) as server:
        yield server


@pytest.fixture(params=["sync", "async"])
def call(request: pytest.FixtureRequest, server: FakeServer) -> Call:
    """`call(method, *args, **kwargs)` on a fresh client of either kind, whose requests hold two pictures at most."""
    limits = ChunkLimits(items=2)

    def run(method: str, *args: Any, **kwargs: Any) -> Any:
        if request.param == "sync":
            with Client(server.url, limits=limits, retries=0) as blocking:
                return getattr(blocking, method)(*args, **kwargs)

        async def go() -> Any:
            async with AsyncClient(server.url, limits=limits, retries=0) as aio:
                return await getattr(aio, method)(*args, **kwargs)

        return asyncio.run(go())

    return run


def tensor(path: Path) -> list[list[float]]:
    values: list[list[float]] = safetensors.numpy.load_file(path)["ec_cache"].tolist()
    return values


# -- files


def test_files_of_several_requests_have_their_own_hashes(call: Call, tmp_path: Path) -> None:
    images = [picture_file(3), picture_file(4), picture(5), tmp_path / "missing.png", picture_file(6)]
    to = ToFiles(["three", "four", None, "none", "six"])
    with pytest.raises(ItemsFailedError) as caught:
        call("encode", images, destination=to)
    assert [(error.index, error.code) for error in caught.value.errors] == [(3, "UNREADABLE")]
    receipts = [result.delivered for result in caught.value.results]
    digest = caught.value.results[2].digest.removeprefix("sha256:")
    names = ["three", "four", digest, None, "six"]
    assert receipts == [name and FileReceipt(name, f"{name}/encoder_cache.safetensors", 8) for name in names]
    for receipt, width in zip(receipts, (3, 4, 5, None, 6), strict=True):
        if isinstance(receipt, FileReceipt):
            assert tensor(tmp_path / "cache" / receipt.path) == [[width, 9]]


def test_without_hashes_files_are_named_by_digest(call: Call, tmp_path: Path) -> None:
    (result,) = call("encode", [picture_file(3)], destination=ToFiles())
    assert result.delivered.mm_hash == result.digest.removeprefix("sha256:")
    assert tensor(tmp_path / "cache" / result.delivered.path) == [[3, 9]]


def test_a_file_is_read_with_its_facts(call: Call, server: FakeServer, tmp_path: Path) -> None:
    details: dict[str, Detail] = {"second_per_grid_ts": 0.5, "timestamps": [0.25, 1.0]}
    server.service.answer = lambda item: replace(size_embedding(item), shape=(1, 2), details=details)
    (result,) = call("encode", [picture_file(3)], destination=ToFiles(["film"]))
    assert result.details == details
    file = tmp_path / "cache" / result.delivered.path
    read = read_embedding_file(file)
    assert (read.details, read.grid, read.digest, read.num_tokens) == (details, (1, 1, 1), result.digest, 1)
    assert read.embedding.tolist() == [[3, 9]] and read.embedding.dtype == "float32"
    assert read_embedding_file(str(file), as_="torch").embedding.tolist() == [[3, 9]]


def test_a_file_of_another_program_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "encoder_cache.safetensors"
    safetensors.numpy.save_file({"ec_cache": np.zeros((2, 3), np.float32)}, file)
    with pytest.raises(BadReplyError):  # vLLM's own has no facts
        read_embedding_file(file)
    safetensors.numpy.save_file({"other": np.zeros((2, 3), np.float32)}, file)
    with pytest.raises(BadReplyError, match="other tensors than `ec_cache`"):
        read_embedding_file(file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(BadReplyError, match="no valid safetensors"):
        read_embedding_file(file)
    with pytest.raises(FileNotFoundError):
        read_embedding_file(tmp_path / "missing")


def test_hashes_are_as_many_as_pictures(call: Call, server: FakeServer) -> None:
    for hashes in (["a"], ["a", "b", "c"]):
        with pytest.raises(ValueError, match=f"{len(hashes)} mm_hashes were given for 2 pictures"):
            call("encode", [picture_file(3), picture_file(4)], destination=ToFiles(hashes))
    assert not server.service.seen
    with pytest.raises(ValueError, match="more pictures than the 1 mm_hashes"):
        call("encode", iter([picture_file(3), picture_file(4)]), destination=ToFiles(["a"]))


# -- a receiver


def test_pushed_embeddings(call: Call, server: FakeServer) -> None:
    server.service.answer = failing(EncoderError(ErrorCode.NON_FINITE, "the model gave NaN"), width=5)
    with EmbeddingReceiver() as receiver:
        to = ToReceiver(receiver.endpoint, part="request-42")
        results = call("encode", [picture_file(w) for w in (3, 4, 5)], destination=to, raise_on_error=False)
        assert [result.delivered for result in results] == [PushReceipt(receiver.endpoint, 8)] * 2 + [None]
        assert results[2].error.code == "NON_FINITE"
        received = [receiver.receive(10) for _ in results]
    assert {header.part.id for header, _ in received if header.part} == {"request-42"}
    arrays = {header.digest: array.tolist() for header, array in received if header.error is None}
    assert arrays == {result.digest: [width, 9] for result, width in zip(results, (3, 4), strict=False)}


def test_a_receiver_that_is_away_fails_its_pictures(call: Call) -> None:
    with pytest.raises(ItemsFailedError) as caught:
        call("encode", [picture_file(3), picture_file(4)], destination=ToReceiver("tcp://127.0.0.1:1"))
    assert [error.code for error in caught.value.errors] == ["DELIVERY_FAILED"] * 2


# -- staged


def test_what_is_staged_is_fetched_once_or_kept(call: Call) -> None:
    one, two = call("encode", [picture_file(3), picture_file(4)], destination=Staged())
    assert isinstance(one.delivered, StagedReceipt) and one.delivered.num_bytes == 8
    with pytest.raises(EncoderClientError, match=r"images\[0\] is not here"):
        one.numpy()
    for _ in range(2):
        kept = call("fetch", one.delivered, keep=True)
        assert kept.embedding.tolist() == [[3, 9]]
    fetched = call("fetch", two.delivered.staged_id, as_="torch")
    assert (fetched.embedding.tolist(), fetched.digest, fetched.grid) == ([[4, 9]], two.digest, (1, 1, 1))
    assert call("fetch", one.delivered).embedding.tolist() == [[3, 9]]
    for receipt in (one.delivered, two.delivered, "..", "a/b"):
        with pytest.raises(RefusedError) as caught:
            call("fetch", receipt)
        assert (caught.value.status, caught.value.code) == (404, "NOT_FOUND")


def test_a_destination_that_the_server_does_not_have(call: Call, server: FakeServer) -> None:
    with pytest.raises(RefusedError) as caught:
        call("encode", [picture_file(3)], destination=ToReceiver("ipc:///tmp/x"))
    assert (caught.value.code, caught.value.param) == ("INVALID_REQUEST", "destination.endpoint")
    with pytest.raises(RefusedError) as caught:
        call("encode", [picture_file(3)], destination=ToFiles(["../x"]))
    assert caught.value.param == "destination.mm_hashes[0]"
    assert not server.service.seen


# -- the command line


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    for name, width in (("a.png", 3), ("b.png", 4)):
        Image.new("RGB", (width, 9)).save(name)
    Path("bad.png").write_bytes(b"junk")
    return ["a.png", "bad.png", "b.png"]


def test_the_command_line_tells_where_each_is(
    server: FakeServer, photos: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["encode", *photos, "--url", server.url, "--to", "files"]) == 1
    said = capsys.readouterr()
    lines = [json.loads(line) for line in said.out.splitlines()]
    assert [line["path"] for line in lines] == ["a.png", "b.png"]
    assert [tensor(Path("cache") / line["delivered"]["path"]) for line in lines] == [[[3, 9]], [[4, 9]]]
    assert lines[0]["delivered"]["mm_hash"] == lines[0]["digest"].removeprefix("sha256:")
    assert "failed: bad.png" in said.err and "2 items encoded, 1 failed: files" in said.err
    with EmbeddingReceiver() as receiver:
        assert main(["encode", "a.png", "--url", server.url, "--to", receiver.endpoint]) == 0
        assert receiver.receive(10).array.tolist() == [[3, 9]]


def test_the_command_line_takes_one_of_both(
    server: FakeServer, photos: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for more in ([], ["--to", "files", "--out", "o.safetensors"], ["--to", "foo"]):
        with pytest.raises(SystemExit) as caught:
            main(["encode", "a.png", "--url", server.url, *more])
        assert caught.value.code == 2
    assert "'foo' is neither `files` nor a receiver's tcp://HOST:PORT" in capsys.readouterr().err
    assert not server.service.seen


# -- what is sent again: on no clock and no socket


def reply(status: int, body: Any, **headers: str) -> Reply:
    return Reply(status, headers, json.dumps(body).encode())


BUSY = reply(503, {"error": {"message": "later", "code": "OVERLOADED"}})
FAILED = {"index": 0, "status": "error", "error": {"message": "no room", "code": "OVERLOADED"}}
GOOD = {"index": 0, "status": "ok", "delivered": {"type": "zmq", "endpoint": "tcp://h:5", "num_bytes": 8}}


def sends(to: Destination, *outcomes: Reply | Broken) -> tuple[int, list[Result] | EncoderClientError]:
    """How often a picture is sent where these are the outcomes, and what comes of it."""
    flow: Generator[Any, Any, list[Result]] = Flows(retries=5).encode([source_of(b"x", 0)], None, "numpy", to)
    rest, number = iter(outcomes), 0
    outcome: Any = None
    while True:
        try:
            step = flow.send(outcome)
        except StopIteration as end:
            return number, end.value
        except EncoderClientError as error:
            return number, error
        match step:
            case Load():
                outcome = step.run()
            case Send():
                number += 1
                outcome = next(rest)
            case Pause():
                outcome = None


PUSH = ToReceiver("tcp://h:5")


def test_a_push_that_may_have_happened_is_not_asked_for_again() -> None:
    number, error = sends(PUSH, Broken("reset", was_made=True))
    assert number == 1 and isinstance(error, NoReplyError) and "not sent again" in error.message
    number, results = sends(PUSH, reply(503, {"data": [FAILED]}))
    assert number == 1 and isinstance(results, list)
    assert results[0].error is not None and results[0].error.code == "OVERLOADED"


def test_a_push_that_was_refused_as_a_whole_is_asked_for_again() -> None:
    number, results = sends(PUSH, BUSY, Broken("no connection"), reply(200, {"data": [GOOD]}))
    assert number == 3 and isinstance(results, list) and results[0].delivered == PushReceipt("tcp://h:5", 8)


@pytest.mark.parametrize("to", [ToFiles(), Staged()])
def test_what_may_happen_twice_is_asked_for_again(to: Destination) -> None:
    broken = Broken("reset", was_made=True)
    number, results = sends(to, broken, reply(503, {"data": [FAILED]}), reply(200, {"data": [GOOD]}))
    assert number == 3 and isinstance(results, list) and results[0].ok


@pytest.mark.parametrize(
    "body",
    [
        {"data": []},
        {"data": [{**GOOD, "index": 1}]},
        {"data": [{"index": 0, "status": "ok"}]},
        {"data": [{**GOOD, "delivered": {"type": "pigeon"}}]},
        {},
    ],
)
def test_replies_that_are_none(body: Any) -> None:
    with pytest.raises((BadReplyError, RefusedError)):
        delivered_of(reply(200, body), [source_of(b"x", 0)])


def test_a_staged_reply_that_is_none() -> None:
    for given in (reply(200, {}), Reply(200, {"content-type": "application/vnd.safetensors"}, b"\0" * 8)):
        with pytest.raises(BadReplyError):
            staged_of(given, "id", "numpy")
