"""A real world behind SGLang's routes: its rows are transformers', on both backends, in both orders of registering."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.harness.reference import QwenReference
from tests.harness.sglang_receiver import Message, Receiver
from tests.harness.world import World, data_uri, noise_png, off_by

TOLERANCE = 1e-5
SIZES = [(112, 84), (56, 56), (200, 60), (28, 300), (140, 140), (84, 28)]
PICTURES = [noise_png(70 + index, width, height) for index, (width, height) in enumerate(SIZES)]
PARTS = [PICTURES[:3], PICTURES[3:5], PICTURES[5:]]


@pytest.fixture(scope="module")
def reference(qwen_tiny: Path) -> QwenReference:
    return QwenReference(qwen_tiny)


@pytest.fixture(scope="module", params=["zmq_to_scheduler", "zmq_to_tokenizer"])
def served(request: pytest.FixtureRequest, qwen_tiny: Path) -> Iterator[tuple[World, str]]:
    flags = ("--model-path", str(qwen_tiny), "--encoder-transfer-backend", request.param, "--encoder-only")
    # Without a cache, so that every answer goes through the tower.
    with World(*flags, "--cache-bytes", "0", nproc=2) as world:
        yield world.start().wait_ready(replicas=2), request.param


def encode(http: httpx.AsyncClient, rid: str, index: int, port: int | None) -> asyncio.Task[httpx.Response]:
    body = {
        "mm_items": [data_uri(picture) for picture in PARTS[index]],
        "num_parts": len(PARTS),
        "part_idx": index,
        "req_id": f"{rid}_local_part_{index}",
        "modality": "IMAGE",
        "prefill_host": "127.0.0.1",
        "embedding_port": port,
    }
    return asyncio.create_task(http.post("/encode", json=body))


def register(http: httpx.AsyncClient, rid: str, receivers: list[Receiver]) -> list[asyncio.Task[httpx.Response]]:
    """What every rank says to the encoder of every part."""
    return [
        asyncio.create_task(
            http.post(
                "/scheduler_receive_url",
                json={
                    "req_id": f"{rid}_local_part_{index}",
                    "receive_count": len(receivers),
                    "receive_url": receiver.url,
                    "modality": "IMAGE",
                },
            )
        )
        for receiver in receivers
        for index in range(len(PARTS))
    ]


async def assemble(receiver: Receiver, rid: str) -> np.ndarray:
    """All parts' rows in order, as a language server's rank puts them together."""
    parts: dict[int, Message] = {}
    for _ in PARTS:
        message = await receiver.message()
        assert message.head.error_msg is None
        assert message.head.req_id == f"{rid}_local_part_{message.head.part_idx}"
        assert message.head.part_idx not in parts
        parts[message.head.part_idx] = message
        merged = sum(t * h * w // 4 for t, h, w in message.head.grid_dim)
        assert message.head.shape is not None and message.head.shape[0] == merged
        assert len(message.head.grid_dim) == len(PARTS[message.head.part_idx])
    assert await receiver.nothing_more()
    return np.concatenate([parts[index].values() for index in range(len(PARTS))])


@pytest.mark.parametrize("early", [True, False], ids=["early", "late"])
async def test_rows_are_transformers(served: tuple[World, str], reference: QwenReference, early: bool) -> None:
    world, backend = served
    expected = np.concatenate([reference.tokens(picture) for picture in PICTURES])
    rid = f"r-{early}"
    by_scheduler = backend == "zmq_to_scheduler"
    with Receiver() as one, Receiver() as two:
        receivers = [one, two] if by_scheduler else [one]
        async with httpx.AsyncClient(base_url=world.url, timeout=60) as http:
            waiting = register(http, rid, receivers) if by_scheduler and early else []
            if waiting:
                await asyncio.sleep(0.3)
                assert not any(task.done() for task in waiting)
            encodes = [encode(http, rid, index, None if by_scheduler else one.port) for index in range(len(PARTS))]
            if by_scheduler and not early:
                await asyncio.sleep(0.5)
                waiting = register(http, rid, receivers)
            replies = await asyncio.gather(*encodes, *waiting)
            assert [(reply.status_code, reply.json()) for reply in replies] == [(200, None)] * len(replies)
            for receiver in receivers:
                assert off_by(await assemble(receiver, rid), expected) <= TOLERANCE


async def test_a_broken_picture_fails_its_part_alone(served: tuple[World, str]) -> None:
    world, backend = served
    broken = data_uri(PICTURES[0][:200])
    async with httpx.AsyncClient(base_url=world.url, timeout=60) as http:
        with Receiver() as receiver:
            bad = {"mm_items": [broken], "num_parts": 1, "part_idx": 0, "modality": "IMAGE", "req_id": "bad"}
            reply = await http.post("/encode", json={**bad, "prefill_host": "127.0.0.1", "embedding_port": 9})
            assert reply.status_code == 400, reply.text
            assert "mm_items[0]" in reply.json()["message"]
            if backend == "zmq_to_scheduler":
                task = asyncio.create_task(
                    http.post(
                        "/scheduler_receive_url",
                        json={"req_id": "bad2", "receive_count": 1, "receive_url": receiver.url},
                    )
                )
                await http.post("/encode", json={**bad, "req_id": "bad2"})
                assert (await task).status_code == 200
                assert (await receiver.message()).head.error_code == 400


async def test_parts_that_wait_for_receivers_are_finished_by_a_drain(qwen_tiny: Path) -> None:
    with World("--model-path", str(qwen_tiny), nproc=2) as world, Receiver() as receiver:
        world.start().wait_ready(replicas=2)
        async with httpx.AsyncClient(base_url=world.url, timeout=60) as http:
            waiting = encode(http, "drained", 0, None)
            sizes = {"req_id": "drained_local_part_0", "part_idx": 0}
            (await http.post("/scheduler_receive_meta_data", json=sizes)).raise_for_status()
            world.terminate()
            await asyncio.to_thread(world.wait_for, "the drain", lambda: " draining" in world.log())
            assert (await encode(http, "late", 1, None)).status_code == 503
            registration = {"req_id": "drained_local_part_0", "receive_count": 1, "receive_url": receiver.url}
            (await http.post("/scheduler_receive_url", json=registration)).raise_for_status()
            message = await receiver.message()
            assert message.head.error_msg is None
            assert message.rows
            assert (await waiting).status_code == 200
        await asyncio.to_thread(world.wait_end)
        assert set(world.exit_codes().values()) == {0}


def test_the_log_says_what_becomes_of_foreign_flags(served: tuple[World, str]) -> None:
    world, _ = served
    assert world.log().count("--encoder-only of SGLang is accepted and does nothing") == 1
