"""Strangers at every socket of a world of two nodes: noise, floods, half frames, many connections.

None of it ends, stops or fills a process, gets into the log, or keeps the world from its work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import zmq
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from spmd_encoder.api.types import ProcessInfo
from spmd_encoder.frontends.grpc.protos import encoder_pb2 as pb
from spmd_encoder.frontends.grpc.protos import sglang_pb2
from spmd_encoder.keeper.nursery_name import PING, PONG
from spmd_encoder.wire.codec import Codec
from spmd_encoder.wire.messages import PROTOCOL_VERSION, Failed, Heartbeat, KeeperHello, Message, SchedulerStats
from spmd_encoder.wire.orders import FollowerHello
from tests.harness import zmtp
from tests.harness.examples import examples, within
from tests.harness.noise import MARK, noise
from tests.harness.strangers import Inside, Place, crowd, other_ports
from tests.harness.world import World, data_uri, free_port, noise_png, off_by

pytestmark = within(280)

EXAMPLES = examples(25, database=None, suppress_health_check=list(HealthCheck))
PICTURE = noise_png(3, 56, 56)
FLOOD_BYTES = 300 * 2**20
GROWTH_BYTES = 100 * 2**20
PROCESS = ProcessInfo(rank=0, dp_rank=0, tp_rank=0, role=MARK.decode(), pid=1, epoch=None)
REGISTRATION = b'{"req_id": "%s", "receive_count": 1, "receive_url": "127.0.0.1:9"}' % MARK


def encoded(message: Message) -> bytes:
    return Codec[Any](Message).encode(message)


def stream_frame(message: Message) -> bytes:
    body = encoded(message)
    return len(body).to_bytes(4, "big") + body


def post(path: str, body: bytes, kind: str = "application/json") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


HELLO = KeeperHello(protocol=PROTOCOL_VERSION, token=MARK.decode(), rank=0, process=PROCESS, nursery=None, versions={})
BEAT = Heartbeat(stats=SchedulerStats(), evicted=(("sha256:" + MARK.decode(), "tokens"),))
FAILED = Failed(job_id=1, code="INTERNAL", message=MARK.decode())  # type: ignore[arg-type]
MESSAGES = [encoded(message) for message in (BEAT, FAILED, FollowerHello(tp_rank=1), HELLO)]
HANDSHAKE = zmtp.greeting() + zmtp.plain_hello(b"member", MARK) + zmtp.ready(b"INITIATE", b"DEALER")
VALID = {
    "http": [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        post("/v1/encode", b'{"items": [{"image": "%s"}]}' % data_uri(PICTURE).encode()),
        post("/v1/encode", PICTURE + MARK, "image/png"),
        post("/encode", REGISTRATION),
        post("/scheduler_receive_url", REGISTRATION),
    ],
    "grpc": [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5) + b"\0\0\x10\x01\4\0\0\0\1" + MARK],
    "work": [HANDSHAKE + zmtp.frame(message) for message in MESSAGES] + [zmtp.greeting(b"NULL")],
    "orders": [HANDSHAKE + zmtp.frame(message) for message in MESSAGES],
    "control": [stream_frame(HELLO), stream_frame(BEAT)],
    "nursery": [b"fork", PING],
}


@dataclass
class Served:
    world: World
    inside: Inside
    grpc_port: int
    places: Mapping[str, Place]
    rows: np.ndarray[Any, Any]

    def good_path(self) -> None:
        """It encodes as before, over HTTP and gRPC, and its nurseries answer."""
        assert off_by(self.world.encode([PICTURE])[0], self.rows) <= 1e-5
        with grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}") as channel:
            encode: Any = channel.unary_unary(
                "/spmd_encoder.v1.Encoder/Encode", pb.EncodeRequest.SerializeToString, pb.EncodeResponse.FromString
            )
            (result,) = encode(pb.EncodeRequest(items=[pb.Item(data=PICTURE)]), timeout=30).results
            assert result.HasField("embedding")
        for nursery in self.inside.nurseries:
            with nursery.connect() as caller:
                caller.sendall(PING)
                assert caller.recv(16) == PONG

    def memory(self) -> int:
        return sum(psutil.Process(seen.pid).memory_info().rss for seen in self.world.seen)


@pytest.fixture(scope="module")
def served(qwen_tiny: Path) -> Iterator[Served]:
    port = free_port()
    flags = ("--model-path", str(qwen_tiny), "--tp-size", "2", "--grpc-port", str(port), "--cache-bytes", "0")
    with World(*flags, "--log-level", "debug", nproc=1, agents=2) as world:
        world.start().wait_ready()
        inside = Inside.of(world)
        places = {
            "http": Place("http", world.port),
            "grpc": Place("grpc", port),
            "work": inside.work,
            "orders": inside.orders,
            "control": inside.control,
            "nursery": inside.nurseries[0],
        }
        pids = sorted(process["pid"] for process in world.info()["processes"])
        served = Served(world, inside, port, places, world.encode([PICTURE])[0])
        yield served
        assert sorted(process["pid"] for process in world.info()["processes"]) == pids, "nobody was replaced"
        assert world.epoch(0) == 0
        log = world.log()
        assert MARK.decode() not in log
        assert inside.token not in log
        assert "Traceback" not in log, log[-4000:]


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", VALID)
def test_noise(served: Served, name: str) -> None:
    place = served.places[name]

    @EXAMPLES
    @given(noise(VALID[name]), st.integers(0, 200))
    def check(data: bytes, cut: int) -> None:
        place.say(data[:cut], data[cut:])
        assert served.world.http.get("/health").status_code == 200

    check()
    served.good_path()


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", ["work", "orders"])
def test_noise_of_those_who_know_the_secret(served: Served, name: str) -> None:
    """Any number of frames, none of them from a member's name."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.plain_username, dealer.plain_password = b"member", served.inside.token.encode()
        dealer.connect(f"tcp://127.0.0.1:{served.places[name].address}")

        @EXAMPLES
        @given(st.lists(noise(MESSAGES), min_size=1, max_size=4))
        def check(frames: list[bytes]) -> None:
            dealer.send_multipart(frames)

        check()
        assert served.world.http.get("/health").status_code == 200
        served.good_path()


@pytest.mark.hypothesis
def test_noise_in_calls(served: Served) -> None:
    """Well-framed calls with messages that are none, or of others."""
    item = pb.Item(data=PICTURE, url=MARK.decode())
    valid = [
        pb.EncodeRequest(items=[item], request_id=MARK.decode()).SerializeToString(),
        sglang_pb2.EncodeRequest(mm_items=[MARK.decode()], req_id="r", num_parts=1).SerializeToString(),
        sglang_pb2.SchedulerReceiveUrlRequest(req_id="r", receive_url="127.0.0.1:9").SerializeToString(),
    ]
    methods = [
        "/spmd_encoder.v1.Encoder/Encode",
        "/spmd_encoder.v1.Encoder/Info",
        "/sglang.grpc.encoder.SglangEncoder/Encode",
        "/sglang.grpc.encoder.SglangEncoder/SchedulerReceiveUrl",
        "/grpc.health.v1.Health/Check",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ]
    with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:

        @EXAMPLES
        @given(st.sampled_from(methods), noise(valid))
        def check(method: str, data: bytes) -> None:
            with contextlib.suppress(grpc.RpcError):
                channel.unary_unary(method)(data, timeout=0.5)

        check()
    served.good_path()


@pytest.mark.parametrize("name", VALID)
def test_many_connections_with_half_a_frame_each(served: Served, name: str) -> None:
    valid = VALID[name][0]
    half = b"" if name == "nursery" else valid[: len(valid) // 2]
    with crowd(served.places[name], 150, half):
        served.good_path()
    served.good_path()


@pytest.mark.parametrize("name", ["work", "orders", "control", "http", "grpc"])
def test_a_flood_fills_nobody(served: Served, name: str) -> None:
    """One frame, or request, that says that it is endless, and begins to be."""
    before = served.memory()
    promise = {
        "control": b"\xff\xff\xff\xff",
        "http": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: ",
        "grpc": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff\xff\xff",
    }.get(name, zmtp.greeting() + zmtp.head(2**34, zmtp.COMMAND))
    with served.places[name].connect() as sock:
        sock.sendall(promise)
        sent = zmtp.flood(sock, FLOOD_BYTES)
        # What follows a refused request is thrown away for a moment, so that its reply arrives.
        assert sent < FLOOD_BYTES or name == "http", "it is hung up on"
        assert served.memory() - before < GROWTH_BYTES
    served.good_path()


def test_noise_at_torchs_own_ports(served: Served) -> None:
    """What gloo listens on between ranks."""
    places = other_ports(served.world, list(served.places.values()))
    assert places
    for place in places:
        for data in (b"x", MARK * 100, bytes(64), b"\xff" * 64):
            place.say(data)
    served.good_path()
