"""A real world that serves HTTP and gRPC at once: equal numbers, transformers' numbers, one readiness, one end."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from spmd_encoder.frontends.grpc.protos import encoder_pb2 as pb
from spmd_encoder.frontends.grpc.protos import sglang_pb2
from tests.harness.grpc_client import GrpcClient, data_items, metadata_of
from tests.harness.reference import QwenReference
from tests.harness.sglang_receiver import Receiver
from tests.harness.world import World, data_uri, free_port, noise_png, off_by

SIZES = [(112, 84), (56, 56), (200, 60), (28, 300), (140, 140), (84, 28)]
SLOW = noise_png(160, 56, 56)
"""Takes a second longer than the others."""
PICTURES = [noise_png(170 + index, width, height) for index, (width, height) in enumerate(SIZES)]


@pytest.fixture(scope="module")
def served(qwen_tiny: Path) -> Iterator[tuple[World, int]]:
    port = free_port()
    # Without a cache, so that every answer goes through the tower.
    flags = ("--model-path", str(qwen_tiny), "--grpc-port", str(port), "--cache-bytes", "0")
    slow = {"SPMD_ENCODER_FAULTS": f"slow@sha256:{hashlib.sha256(SLOW).hexdigest()}"}
    with World(*flags, nproc=2, env=slow) as world:
        yield world.start().wait_ready(replicas=2), port


def rows(result: pb.ItemResult) -> np.ndarray:
    got = result.embedding
    assert got.dtype == "float32"
    return np.frombuffer(got.data, np.float32).reshape(list(got.shape))


async def test_both_give_transformers_rows(served: tuple[World, int], qwen_tiny: Path) -> None:
    world, port = served
    reference = QwenReference(qwen_tiny)
    async with GrpcClient(port) as client:
        http, call = (
            asyncio.to_thread(world.encode, PICTURES),
            client.encode(pb.EncodeRequest(items=data_items(*PICTURES))),
        )
        over_http, over_grpc = await asyncio.gather(http, call)
        assert set(metadata_of(await call.trailing_metadata())["x-spmd-replica"]) <= set("0,1")
    for picture, http_rows, result in zip(PICTURES, over_http, over_grpc.results, strict=True):
        assert off_by(http_rows, reference.tokens(picture)) <= 1e-6
        assert off_by(rows(result), reference.tokens(picture)) <= 1e-6
        assert sum(t * h * w // 4 for t, h, w in [result.embedding.grid]) == len(http_rows)


async def test_a_part_is_encoded_over_grpc_and_registered_over_http(served: tuple[World, int], qwen_tiny: Path) -> None:
    world, port = served
    wanted = np.concatenate([QwenReference(qwen_tiny).tokens(picture) for picture in PICTURES])
    request = sglang_pb2.EncodeRequest(
        mm_items=[data_uri(picture) for picture in PICTURES], req_id="g", num_parts=1, part_idx=0
    )
    with Receiver() as receiver:
        async with GrpcClient(port) as client:
            encode = client.sglang_encode(request)
            body = {"req_id": "g", "receive_url": receiver.url, "receive_count": 1}
            reply = await asyncio.to_thread(world.http.post, "/scheduler_receive_url", json=body)
            assert reply.status_code == 200
            assert (await encode).embedding_len == len(wanted)
            assert off_by((await receiver.message()).values(), wanted) <= 1e-5


async def test_info_models_and_metrics(served: tuple[World, int]) -> None:
    world, port = served
    async with GrpcClient(port) as client:
        info = (await client.info(pb.InfoRequest())).info
        assert [int(p["pid"]) for p in info["processes"]] == [p["pid"] for p in world.info()["processes"]]
        (model,) = (await client.models(pb.ModelsRequest())).models
        assert model.id == world.http.get("/v1/models").json()["data"][0]["id"]
    line = 'spmd_encoder_grpc_calls_total{code="OK",method="spmd_encoder.v1.Encoder/Models"}'
    assert line in world.http.get("/metrics").text


async def test_a_nursery_that_dies_is_started_beside_grpc(served: tuple[World, int]) -> None:
    """The keeper starts processes while gRPC's threads run."""
    world, port = served
    async with GrpcClient(port) as client:
        watch = client.watch(HealthCheckRequest(service="spmd_encoder.v1.Encoder"))
        assert (await watch.read()).status == HealthCheckResponse.SERVING
        os.kill(world.pid("nursery"), signal.SIGKILL)
        assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
        assert (await watch.read()).status == HealthCheckResponse.SERVING
        reply = await client.encode(pb.EncodeRequest(items=data_items(PICTURES[0])))
        assert reply.results[0].HasField("embedding")


async def test_the_end_drains_both(served: tuple[World, int]) -> None:
    world, port = served
    world.note_processes()
    async with GrpcClient(port) as client:
        watch = client.watch(HealthCheckRequest())
        assert (await watch.read()).status == HealthCheckResponse.SERVING
        calls = [client.encode(pb.EncodeRequest(items=data_items(SLOW, picture))) for picture in PICTURES]
        await asyncio.to_thread(world.wait_for, "calls in flight", lambda: in_flight(world) == len(calls))
        world.terminate()
        assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
        for call in calls:
            assert all(result.HasField("embedding") for result in (await call).results)
    await asyncio.to_thread(world.wait_end)
    assert world.exit_codes() == {0: 0, 1: 0}, world.log()[-3000:]
    world.assert_nothing_left()
    with socket.create_server(("127.0.0.1", port)):
        pass
    assert "absl::" not in world.log()  # gRPC keeps its words to itself


def in_flight(world: World) -> float:
    lines = world.http.get("/metrics").text.splitlines()
    (line,) = (line for line in lines if line.startswith("spmd_encoder_grpc_calls_in_flight "))
    return float(line.split()[1])


def test_a_taken_grpc_port_ends_the_start_at_once(qwen_tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with World("--grpc-port", str(port), "--model-path", str(qwen_tiny), torchrun=False) as world:
            assert world.start().wait_end() == [3]
            assert f"127.0.0.1:{port} is taken by another process; choose another --grpc-port" in world.log()
            assert "nursery" not in world.log(), "nothing is loaded before the port is there"


def without_grpc(folder: Path) -> dict[str, str]:
    """An environment in which no interpreter finds the packages of the extra."""
    (folder / "sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "absent = {'grpc', 'grpc_health', 'grpc_reflection', 'grpc_status', 'google'}\n"
        "PathFinder.find_spec = lambda name, *rest: None if name in absent else find(name, *rest)\n"
    )
    return {"PYTHONPATH": str(folder)}


def test_without_the_extra_the_flag_is_a_usage_error(tmp_path: Path) -> None:
    with World("--grpc-port", str(free_port()), torchrun=False, env=without_grpc(tmp_path)) as world:
        assert world.start().wait_end() == [2]
        assert "--grpc-port needs packages that are not installed (grpc, " in world.log()
        assert "pip install 'spmd-encoder[grpc]'" in world.log()
        assert "nursery" not in world.log()


def test_the_server_works_without_the_extra(tmp_path: Path, qwen_tiny: Path) -> None:
    with World("--model-path", str(qwen_tiny), torchrun=False, env=without_grpc(tmp_path)) as world:
        world.start().wait_ready()
        assert len(world.encode(PICTURES[:1])) == 1
