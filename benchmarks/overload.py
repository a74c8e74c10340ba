"""Health and control calls while a world is offered three times what it can serve.

    python -m benchmarks.overload [--times 3] [--duration-s 20] [--out benchmarks/results/NAME.json]

A world of two replicas on the CPU. What it can serve is measured first, in a closed loop. Then a process of its own
offers requests in an open loop, `/v1/encode` and SGLang's `/encode` with a registration in turns, and `/health`, the
gRPC health service and `/health/live` are asked meanwhile, over HTTP on a new connection each time. Prints one JSON
object.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import collections
import contextlib
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from benchmarks.bare_http import ask, http_request, json_request
from benchmarks.circumstances import MachineWatch, circumstances
from benchmarks.pictures import make_pictures
from tests.harness.grpc_client import GrpcClient
from tests.harness.sglang_receiver import Receiver
from tests.harness.world import World, free_port

EVICTION_S = 2.0
"""An SGLang language server drops an encoder whose `/health` takes longer."""
_GRPC_S = 10.0
_REPLY_S = 100.0
_MESSAGE_S = 30.0
_POLL_S = 0.05
_SIZE = (224, 224)
_CLOSED_CLIENTS = 64


@dataclass
class Offered:
    """What became of everything that was offered, each with one outcome: a status, or what went wrong."""

    outcomes: dict[str, collections.Counter[str]] = field(
        default_factory=lambda: {kind: collections.Counter() for kind in ("encodes", "parts", "registrations")}
    )
    registered: set[str] = field(default_factory=set)
    messages: collections.Counter[str] = field(default_factory=collections.Counter)
    per_s: float = 0.0

    def report(self) -> dict[str, Any]:
        return {
            "offered_per_s": round(self.per_s, 1),
            **{kind: dict(outcomes) for kind, outcomes in self.outcomes.items()},
            "parts_without_message": len(self.registered - self.messages.keys()),
            "parts_with_two_messages": sum(count > 1 for count in self.messages.values()),
        }


def _pictures(salt: int) -> Iterator[bytes]:
    """No two files equal, so that each is encoded: decoders do not read what comes after the end of a JPEG."""
    made = itertools.cycle(make_pictures([_SIZE], 32))
    return (next(made) + salt.to_bytes(4, "big") + number.to_bytes(8, "big") for number in itertools.count())


async def capacity(port: int, duration_s: float) -> float:
    """Requests per second that a closed loop gets."""
    pictures = _pictures(1)
    end = time.perf_counter() + duration_s
    done: collections.Counter[str] = collections.Counter()

    async def caller() -> None:
        while time.perf_counter() < end:
            done[await ask(port, _encode(next(pictures)))] += 1

    await asyncio.gather(*(caller() for _ in range(_CLOSED_CLIENTS)))
    return done["200"] / duration_s


async def offer(port: int, rate: float, duration_s: float) -> Offered:
    """Open loop, Poisson: arrivals wait for nobody. All requests are made before the first is sent."""
    pictures = _pictures(2)
    offered, rng = Offered(), random.Random(0)
    with Receiver() as receiver:
        arrivals: list[tuple[float, str, list[tuple[str, bytes]]]] = []
        due = 0.0
        while (due := due + rng.expovariate(rate)) < duration_s:
            number, picture = len(arrivals), next(pictures)
            calls = _part(f"part-{number}", picture, receiver, rng) if number % 2 else [("encodes", _encode(picture))]
            arrivals.append((due, f"part-{number}", calls))
        listening = asyncio.create_task(_listen(receiver, offered))
        began, tasks = time.perf_counter(), []
        for due, part_id, calls in arrivals:
            await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
            tasks += [asyncio.create_task(_call(port, kind, part_id, call, offered)) for kind, call in calls]
        offered.per_s = len(arrivals) / (time.perf_counter() - began)
        await asyncio.gather(*tasks)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MESSAGE_S):
                while offered.registered - offered.messages.keys():
                    await asyncio.sleep(0.05)
        listening.cancel()
    return offered


async def _listen(receiver: Receiver, offered: Offered) -> None:
    while True:
        offered.messages[(await receiver.message()).head.req_id] += 1


def _encode(picture: bytes) -> bytes:
    return http_request("/v1/encode?output=tokens", picture, "image/jpeg", close=True)


def _part(part_id: str, picture: bytes, receiver: Receiver, rng: random.Random) -> list[tuple[str, bytes]]:
    """Both calls of a part, in either order."""
    body = {"req_id": part_id, "num_parts": 1, "part_idx": 0, "modality": "IMAGE"}
    encode = {**body, "mm_items": [base64.b64encode(picture).decode()]}
    registration = {"req_id": part_id, "receive_count": 1, "receive_url": receiver.url}
    calls = [
        ("parts", json_request("/encode", encode, close=True)),
        ("registrations", json_request("/scheduler_receive_url", registration, close=True)),
    ]
    rng.shuffle(calls)
    return calls


async def _call(port: int, kind: str, part_id: str, request: bytes, offered: Offered) -> None:
    try:
        async with asyncio.timeout(_REPLY_S):
            outcome = await ask(port, request)
    except TimeoutError:
        outcome = "no reply in time"
    offered.outcomes[kind][outcome] += 1
    if (kind, outcome) == ("registrations", "200"):
        offered.registered.add(part_id)


@dataclass
class Poll:
    """Answers to one question that is asked again and again, with `limit_s` for each: seconds, and what was wrong."""

    limit_s: float
    seconds: list[float] = field(default_factory=list)
    wrong: collections.Counter[str] = field(default_factory=collections.Counter)

    async def run(self, question: Callable[[], Awaitable[str]]) -> None:
        """Until cancelled. `question` gives "" where the answer is right; it has `limit_s` for it."""
        while True:
            began = time.perf_counter()
            try:
                async with asyncio.timeout(self.limit_s):
                    wrong = await question()
            except TimeoutError:
                wrong = "no answer in time"
            except Exception as error:
                wrong = type(error).__name__
            self.seconds.append(time.perf_counter() - began)
            if wrong:
                self.wrong[wrong] += 1
            await asyncio.sleep(_POLL_S)

    def report(self) -> dict[str, Any]:
        p50, p99, top = np.percentile(self.seconds, [50, 99, 100]) * 1000
        return {
            "asked": len(self.seconds),
            "wrong": dict(self.wrong),
            **{name: round(float(ms), 1) for name, ms in (("p50_ms", p50), ("p99_ms", p99), ("max_ms", top))},
        }


async def poll_while(port: int, grpc_port: int, running: Awaitable[Any]) -> dict[str, Any]:
    """Asks until `running` is done, at little cost of its own: over HTTP by plain sockets."""
    client = GrpcClient(grpc_port)

    async def over_http(path: str) -> str:
        status = await ask(port, http_request(path, b"", "text/plain", "GET", close=True))
        return "" if status == "200" else status

    async def over_grpc() -> str:
        status = (await client.check(HealthCheckRequest())).status
        return "" if status == HealthCheckResponse.SERVING else str(status)

    polls = {"/health": Poll(EVICTION_S), "/health/live": Poll(EVICTION_S), "grpc": Poll(_GRPC_S)}
    asking = [
        asyncio.create_task(polls["/health"].run(lambda: over_http("/health"))),
        asyncio.create_task(polls["/health/live"].run(lambda: over_http("/health/live"))),
        asyncio.create_task(polls["grpc"].run(over_grpc)),
    ]
    try:
        await running
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await client.channel.close()
    return {name: poll.report() for name, poll in polls.items()}


def measure(world: World, grpc_port: int, *, times: float, warm_up_s: float, duration_s: float) -> dict[str, Any]:
    """Capacity, then `times` of it. The load is offered by another process, so that it does not hold up the polls."""
    served = asyncio.run(capacity(world.port, warm_up_s))
    rate = times * served
    command = [sys.executable, "-m", "benchmarks.overload", "--offer", str(world.port), str(rate), str(duration_s)]

    async def run() -> tuple[dict[str, Any], bytes]:
        child = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        reading = asyncio.create_task(child.communicate())
        polls = await poll_while(world.port, grpc_port, asyncio.shield(reading))
        return polls, (await reading)[0]

    polls, printed = asyncio.run(run())
    return {
        "served_per_s": round(served, 1),
        "wanted_per_s": round(rate, 1),
        "duration_s": duration_s,
        "offered": json.loads(printed),
        "polls": polls,
    }


@contextlib.contextmanager
def overload_world() -> Iterator[tuple[World, int]]:
    """Default limits, but no cache, so that the tower is what is overloaded."""
    port = free_port()
    flags = ("--model-path", "demo:qwen2.5-vl-tiny", "--device", "cpu", "--grpc-port", str(port), "--cache-bytes", "0")
    with World(*flags, nproc=2) as world:
        yield world.start().wait_ready(replicas=2), port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=float, default=3.0)
    parser.add_argument("--duration-s", type=float, default=20.0)
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    parser.add_argument("--offer", nargs=3, metavar=("PORT", "RATE", "SECONDS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.offer:
        port, rate, duration_s = args.offer
        print(json.dumps(asyncio.run(offer(int(port), float(rate), float(duration_s))).report()))
        return
    watch = MachineWatch.start()
    with overload_world() as (world, port):
        measured = measure(world, port, times=args.times, warm_up_s=5.0, duration_s=args.duration_s)
    text = json.dumps({**circumstances("benchmarks.overload"), **watch.until_now(), **measured}, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
