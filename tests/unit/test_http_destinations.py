"""`destination` of `/v1/encode`, and `/v1/staged`: real sockets and files behind a real server over a fake service."""

from __future__ import annotations

import base64
import json
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.numpy
import safetensors.torch
from safetensors import safe_open

from spmd_encoder.api.types import ItemOutcome, MediaItem, Modality, OutputKind
from spmd_encoder.client.receiver import EmbeddingReceiver
from spmd_encoder.config import Config
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.http.app import create_app
from spmd_encoder.media.daemon_threads import DaemonThreads
from spmd_encoder.transports.base import Parcel, ParcelHeader, PushEndpoint
from spmd_encoder.transports.budget import StagedBytes
from spmd_encoder.transports.registry import Resources, load_push
from tests.harness.fake_server import FakeServer, fake_server
from tests.harness.fake_service import FakeService, failing, picture, picture_file, size_embedding

pytestmark = pytest.mark.timeout(60)

RAW = "application/octet-stream"


def rows(item: MediaItem) -> ItemOutcome:
    """One row per pixel of height, each `[width, number of the row]`."""
    data = b"".join(struct.pack("<2f", item.width, row) for row in range(item.height))
    return replace(
        size_embedding(item), kind=OutputKind.TOKENS, shape=(item.height, 2), num_tokens=item.height, data=data
    )


def config(folder: Path | None = None, *, hosts: tuple[str, ...] = (), **sglang: float) -> Config:
    base = Config()
    destinations = replace(base.destinations, embedding_dir=str(folder) if folder else None, push_allowed_hosts=hosts)
    return replace(base, destinations=destinations, sglang=replace(base.sglang, **sglang))  # type: ignore[arg-type]


@contextmanager
def serving(settings: Config) -> Iterator[tuple[FakeServer, httpx.Client]]:
    service = FakeService()
    service.answer = rows
    with fake_server(service, settings) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        yield server, client


@pytest.fixture
def client(tmp_path: Path) -> Iterator[httpx.Client]:
    with serving(config(tmp_path)) as (_, client):
        yield client


@pytest.fixture
def receiver() -> Iterator[EmbeddingReceiver]:
    with EmbeddingReceiver() as receiver:
        yield receiver


def encode(client: httpx.Client, to: Any, *uris: str, **more: Any) -> httpx.Response:
    body = {"items": [{"image": uri} for uri in uris], "destination": to, **more}
    return client.post("/v1/encode", json=body)


def delivered(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    entries = reply.json()["data"]
    assert all("embedding" not in entry for entry in entries)
    return [entry["delivered"] for entry in entries]


def refused(reply: httpx.Response) -> tuple[int, str, str | None]:
    error = reply.json()["error"]
    return reply.status_code, error["code"], error["param"]


# -- the reply


def test_inline_is_the_default(client: httpx.Client) -> None:
    plain = encode(client, {"type": "inline"}, picture(5)).json()["data"]
    assert plain[0]["embedding"] and "delivered" not in plain[0]
    assert encode(client, None, picture(5)).json()["data"] == plain


WAYS: dict[str, Callable[[httpx.Client, str], httpx.Response]] = {
    "json": lambda client, to: encode(client, json.loads(to), picture(5)),
    "form": lambda client, to: client.post("/v1/encode", files={"image": picture_file(5)}, data={"destination": to}),
    "raw": lambda client, to: client.post(
        "/v1/encode", params={"destination": to}, content=picture_file(5), headers={"content-type": "image/png"}
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_content_type_may_say_it(client: httpx.Client, tmp_path: Path, way: str) -> None:
    (receipt,) = delivered(WAYS[way](client, '{"type": "file", "mm_hashes": ["h"]}'))
    assert receipt == {"type": "file", "mm_hash": "h", "path": "h/encoder_cache.safetensors", "num_bytes": 72}
    assert (tmp_path / receipt["path"]).exists()


@pytest.mark.parametrize(
    ("to", "param"),
    [
        ({"type": "elsewhere"}, "destination.type"),
        ({"mm_hashes": ["a"]}, "destination.type"),
        ({"type": "file", "root": "/"}, "destination.root"),
        ({"type": "file", "mm_hashes": []}, "destination.mm_hashes"),
        ({"type": "file", "mm_hashes": ["a", "b"]}, "destination.mm_hashes"),
        *(
            ({"type": "file", "mm_hashes": [bad]}, "destination.mm_hashes[0]")
            for bad in ("..", ".", "", "a/b", "../../etc/passwd", "a\u0000", ".hidden", "x" * 129, "ä")
        ),
        ({"type": "file", "mm_hashes": [1]}, "destination.mm_hashes[0]"),
        ({"type": "zmq"}, "destination.endpoint"),
        *(
            ({"type": "zmq", "endpoint": bad}, "destination.endpoint")
            for bad in (
                *("ipc:///tmp/x", "inproc://x", "http://host:1", "host:1", "tcp://host", "tcp://host:0", "tcp://*:5"),
                *("tcp://host:99999", "tcp://a;b:5", "tcp://user@host:5", "tcp://host:5/x", "tcp://eth0;host:5"),
                *("tcp://fe80::1:5", "tcp://[::1:5", "udp://host:5", "tcp://host:5,tcp://b:5", "tcp:// host:5"),
            )
        ),
        ({"type": "zmq", "endpoint": "tcp://h:5", "part": {}}, "destination.part.id"),
        ({"type": "zmq", "endpoint": "tcp://h:5", "part": {"id": ""}}, "destination.part.id"),
        ({"type": "zmq", "endpoint": "tcp://h:5", "part": {"id": "x", "index": 1}}, "destination.part"),
        ({"type": "staged", "keep": True}, "destination.keep"),
        ("staged", "destination"),
        ([], "destination"),
    ],
)
def test_what_is_no_destination_is_refused_before_any_work(tmp_path: Path, to: Any, param: str) -> None:
    with serving(config(tmp_path)) as (server, client):
        assert refused(encode(client, to, picture(5))) == (400, "INVALID_REQUEST", param)
        assert not server.service.seen


@pytest.mark.parametrize("text", ["{", "staged", "", '{"type": "staged"} x', "[" * 5000])
def test_text_that_is_no_json(client: httpx.Client, text: str) -> None:
    reply = WAYS["form"](client, text) if len(text) < 4096 else WAYS["raw"](client, text)
    assert refused(reply)[0] == 400
    assert refused(reply)[2] == "destination"


def test_given_twice(client: httpx.Client) -> None:
    body = {"items": [{"image": picture(5)}], "destination": {"type": "staged"}}
    reply = client.post("/v1/encode", json=body, params={"destination": '{"type": "staged"}'})
    assert refused(reply) == (400, "INVALID_REQUEST", "destination")


def test_deliveries_are_counted(client: httpx.Client) -> None:
    delivered(encode(client, {"type": "staged"}, picture(5), picture(6)))
    encode(client, {"type": "zmq", "endpoint": "tcp://127.0.0.1:1"}, picture(5))
    text = client.get("/metrics").text
    assert 'spmd_encoder_deliveries_total{outcome="ok"} 2.0' in text
    assert 'spmd_encoder_deliveries_total{outcome="failed"} 1.0' in text


# -- files


def test_files_are_named_by_hash_or_digest(client: httpx.Client, tmp_path: Path) -> None:
    reply = encode(client, {"type": "file", "mm_hashes": ["one", None]}, picture(5), picture(6), "data:,")
    assert refused(reply)[2] == "destination.mm_hashes"
    reply = encode(client, {"type": "file", "mm_hashes": ["one", None, "bad"]}, picture(5), picture(6), "data:,")
    entries = reply.json()["data"]
    assert [entry["status"] for entry in entries] == ["ok", "ok", "error"]
    digest = entries[1]["digest"].removeprefix("sha256:")
    assert [entry["delivered"]["mm_hash"] for entry in entries[:2]] == ["one", digest]
    names = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("."))
    assert names == sorted(["one", digest])
    tensors = safetensors.torch.load_file(tmp_path / "one" / "encoder_cache.safetensors")
    assert tensors["ec_cache"].tolist() == [[5, row] for row in range(9)]


def test_files_hold_rows(tmp_path: Path) -> None:
    with serving(config(tmp_path)) as (server, client):
        assert refused(encode(client, {"type": "file"}, picture(5), output="pooled")) == (
            *(400, "INVALID_REQUEST"),
            "output",
        )
        delivered(encode(client, {"type": "file"}, picture(5)))
        assert [request.output for request in server.service.seen] == [OutputKind.TOKENS]


def test_without_the_flag_no_file_is_written() -> None:
    with serving(config()) as (server, client):
        reply = encode(client, {"type": "file"}, picture(5))
        assert refused(reply) == (400, "INVALID_REQUEST", "destination")
        assert "--embedding-dir" in reply.json()["error"]["message"]
        assert not server.service.seen


def test_a_file_that_cannot_be_written_is_its_items_failure(client: httpx.Client, tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("in the way")
    reply = encode(client, {"type": "file", "mm_hashes": ["good", "bad"]}, picture(5), picture(6))
    good, bad = reply.json()["data"]
    assert (reply.status_code, good["status"]) == (200, "ok")
    assert (bad["error"]["code"], bad["error"]["param"]) == ("DELIVERY_FAILED", "items[1]")
    assert str(tmp_path) not in reply.text
    reply = encode(client, {"type": "file", "mm_hashes": ["bad"]}, picture(6))
    assert refused(reply) == (502, "DELIVERY_FAILED", "items[0]")


# -- a receiver


def test_every_item_is_pushed_failures_too(client: httpx.Client, receiver: EmbeddingReceiver) -> None:
    to = {"type": "zmq", "endpoint": receiver.endpoint, "part": {"id": "r-1", "index": 1, "count": 3}}
    reply = encode(client, to, picture(5), "data:,", picture(6), output="tokens", request_id="mine")
    first, bad, last = reply.json()["data"]
    assert first["delivered"] == {"type": "zmq", "endpoint": receiver.endpoint, "num_bytes": 72}
    assert bad["error"]["param"] == "items[1]"
    got = [receiver.receive(10) for _ in range(3)]
    assert [(h.request_id, h.index, h.num_items) for h, _ in got] == [("mine", n, 3) for n in range(3)]
    assert all(h.part is not None and (h.part.id, h.part.index, h.part.count) == ("r-1", 1, 3) for h, _ in got)
    assert got[1].header.error is not None and got[1].header.error.code == "INVALID_REQUEST"
    assert got[2].array.tolist() == [[6, row] for row in range(9)]
    assert (got[2].header.digest, list(got[2].header.grid or ())) == (last["digest"], last["grid"])


def test_a_receiver_that_is_not_there(client: httpx.Client) -> None:
    reply = encode(client, {"type": "zmq", "endpoint": "tcp://127.0.0.1:1"}, "data:,", picture(5), picture(6))
    codes = [entry["error"]["code"] for entry in reply.json()["data"]]
    assert codes == ["INVALID_REQUEST", "DELIVERY_FAILED", "DELIVERY_FAILED"]
    assert reply.json()["data"][2]["error"]["param"] == "items[2]"


def test_only_allowed_hosts_are_connected_to(receiver: EmbeddingReceiver) -> None:
    with serving(config(hosts=("Receiver.example", "127.0.0.2"))) as (server, client):
        reply = encode(client, {"type": "zmq", "endpoint": receiver.endpoint}, picture(5))
        assert refused(reply) == (400, "INVALID_REQUEST", "destination.endpoint")
        assert "--push-allowed-hosts" in reply.json()["error"]["message"]
        assert not server.service.seen
        reply = encode(client, {"type": "zmq", "endpoint": "tcp://receiver.EXAMPLE:5"}, picture(5))
        assert refused(reply)[1] == "DELIVERY_FAILED", "allowed, and not there"


async def test_sglangs_receivers_are_held_to_it_as_well() -> None:
    run = DaemonThreads(1).run
    push = load_push(config(hosts=("receiver.example",)), Resources(budget=StagedBytes(1), run=run, run_look_ups=run))
    header = ParcelHeader(part_id="p", num_parts=1, part_idx=0, modality=Modality.IMAGE)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        with pytest.raises(EncoderError, match="--push-allowed-hosts"):
            await push.deliver(Parcel(header=header), PushEndpoint("127.0.0.1", listener.getsockname()[1]))
        with pytest.raises(BlockingIOError):
            listener.accept()
    await push.close()


def test_a_delivery_that_has_begun_outlives_its_client(receiver: EmbeddingReceiver) -> None:
    """A receiver that greets late holds the delivery up, and the client hangs up meanwhile."""
    with serving(config()) as (server, client), socket.create_server(("127.0.0.1", 0)) as listener:
        to = {"type": "zmq", "endpoint": f"tcp://127.0.0.1:{listener.getsockname()[1]}"}
        with pytest.raises(httpx.ReadTimeout):
            client.post(
                "/v1/encode",
                json={"items": [{"image": picture(5)}], "destination": to},
                timeout=httpx.Timeout(20, read=1),
            )
        assert len(server.service.seen) == 1 and not server.service.cancelled
        # The connection was made and is still there: it is not the client's any more.
        connection, _ = listener.accept()
        connection.settimeout(30)
        assert connection.recv(10).startswith(b"\xff"), "a ZMTP greeting"
        connection.setblocking(False)
        with pytest.raises(BlockingIOError):
            while connection.recv(1000):
                pass
        connection.close()


# -- staged


def stage(client: httpx.Client, *uris: str, **more: Any) -> list[str]:
    receipts = delivered(encode(client, {"type": "staged"}, *uris, **more))
    return [receipt["staged_id"] for receipt in receipts]


def test_a_complete_read_releases(client: httpx.Client, tmp_path: Path) -> None:
    one, two = stage(client, picture(5), picture(6))
    reply = client.get(f"/v1/staged/{one}")
    assert reply.headers["content-type"] == "application/vnd.safetensors"
    assert safetensors.numpy.load(reply.content)["embedding"].tolist() == [[5, row] for row in range(9)]
    file = tmp_path / "file"
    file.write_bytes(reply.content)
    with safe_open(file, "np") as opened:
        about = json.loads(opened.metadata()["item"])
    assert (about["kind"], about["shape"], about["num_tokens"]) == ("tokens", [9, 2], 9)
    assert refused(client.get(f"/v1/staged/{one}")) == (404, "NOT_FOUND", None)
    reply = client.get(f"/v1/staged/{two}", headers={"accept": RAW})
    assert (reply.headers["x-spmd-dtype"], reply.headers["x-spmd-shape"]) == ("float32", "9,2")
    assert reply.content == b"".join(struct.pack("<2f", 6, row) for row in range(9))


def test_keep_and_delete(client: httpx.Client) -> None:
    (one,) = stage(client, picture(5))
    for _ in range(3):
        assert client.get(f"/v1/staged/{one}?keep=1").status_code == 200
    assert client.delete(f"/v1/staged/{one}").status_code == 204
    assert client.delete(f"/v1/staged/{one}").status_code == 404
    assert client.get(f"/v1/staged/{one}?keep=1").status_code == 404


@pytest.mark.parametrize("query", ["keep=2", "keep", "x=1", "keep=1&keep=1"])
def test_other_queries(client: httpx.Client, query: str) -> None:
    (one,) = stage(client, picture(5))
    assert refused(client.get(f"/v1/staged/{one}?{query}"))[:2] == (400, "INVALID_REQUEST")
    assert refused(client.delete(f"/v1/staged/{one}?{query}"))[:2] == (400, "INVALID_REQUEST")
    assert client.get(f"/v1/staged/{one}").status_code == 200


def test_a_read_that_is_cut_off_releases_nothing(client: httpx.Client) -> None:
    big = f"data:image/png;base64,{_tall()}"
    (one,) = stage(client, big)
    size = int(client.get(f"/v1/staged/{one}?keep=1").headers["content-length"])
    for _ in range(3):
        with client.stream("GET", f"/v1/staged/{one}") as reply:
            assert reply.status_code == 200
            assert next(reply.iter_raw(1000))
    assert len(client.get(f"/v1/staged/{one}").content) == size
    assert client.get(f"/v1/staged/{one}").status_code == 404


def _tall() -> str:
    """A picture with 8 MiB of rows: more than buffers between the two ends hold."""
    return base64.b64encode(picture_file(5, 2**20)).decode()


def test_what_is_full_says_so_before_it_encodes() -> None:
    with serving(config(max_staged_bytes=10_000)) as (server, client):
        ids = stage(client, picture(5), picture(6))
        reply = encode(client, {"type": "staged"}, picture(7))
        assert refused(reply) == (503, "OVERLOADED", "items[0]")
        assert "retry-after" in reply.headers and "--max-staged-bytes" in reply.text
        client.delete(f"/v1/staged/{ids[0]}")
        stage(client, picture(7))
    with serving(config(max_staged_bytes=8192)) as (server, client):
        stage(client, picture(5), picture(6))
        assert refused(encode(client, {"type": "staged"}, picture(7))) == (503, "OVERLOADED", None)
        assert len(server.service.seen) == 1, "nothing is encoded that has no place"


def test_it_expires() -> None:
    with serving(config(send_timeout_s=0.2)) as (_, client):
        (one,) = stage(client, picture(5))
        deadline = time.monotonic() + 10
        while client.get(f"/v1/staged/{one}?keep=1").status_code != 404:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_unknown_ids(client: httpx.Client) -> None:
    for path in ("x", "%00", "..%2F..", "x" * 5000):
        assert client.get(f"/v1/staged/{path}").status_code == 404
    assert client.post("/v1/staged/x").status_code == 405


# -- the service's refusals stay what they are


@pytest.fixture
async def refusing(tmp_path: Path) -> AsyncIterator[tuple[FakeService, httpx.AsyncClient]]:
    service = FakeService()
    app = create_app(service, config(tmp_path))
    async with (
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client,
        app.framework.router.lifespan_context(app.framework),
    ):
        yield service, client
    assert service.reserved == 0


@pytest.mark.parametrize("kind", ["file", "staged"])
async def test_a_refused_request_delivers_nothing(refusing: tuple[FakeService, httpx.AsyncClient], kind: str) -> None:
    service, client = refusing
    body = {"items": [{"image": picture(5)}], "destination": {"type": kind}}
    service.refusal = EncoderError(ErrorCode.QUEUE_FULL, "full", retry_after_s=2)
    reply = await client.post("/v1/encode", json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "QUEUE_FULL")
    service.refusal = None
    service.answer = failing(EncoderError(ErrorCode.NON_FINITE, "nan"), width=5)
    reply = await client.post("/v1/encode", json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "NON_FINITE")
    assert "spmd_encoder_deliveries_total{" not in (await client.get("/metrics")).text
