"""Soak: many small requests through each way of embeddings to their receiver, with clients that hang up.

    python -m benchmarks.soak [--requests 10000] [--only inline,grpc] [--out benchmarks/results/NAME]

For each a world of two replicas of the tiny demo model on the CPU. A share of the clients (5 %) goes away at a random
stage. Each request has one outcome; each process' memory and descriptors are sampled, and how fast they grow over the
second half is reported (see `soak_sampling`). Writes NAME.json and NAME.md. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import itertools
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.circumstances import MachineWatch, circumstances
from benchmarks.soak_sampling import Samples
from benchmarks.soak_traffic import BACKENDS, HUNG_UP, OK, Backend, SoakClient, Target
from tests.harness.world import World, free_port, noise_png

_LOST_S = 90.0
_SAMPLE_S = 1.5
_QUIET_S = 30.0
KEEP_S = 12
"""How long the server waits for receivers: what is left lying ends within the run, and a busy machine is in time."""
FLAGS = (
    *("--model-path", "demo:qwen2.5-vl-tiny", "--device", "cpu", "--send-timeout-s", str(KEEP_S)),
    *("--request-timeout-s", "30", "--embedding-dir-max-bytes", str(4 * 2**20)),
)
PENDING = (
    "spmd_encoder_items_in_hand",
    "spmd_encoder_inflight_bytes",
    "spmd_encoder_http_requests_in_flight",
    "spmd_encoder_grpc_calls_in_flight",
    "spmd_encoder_staged_bytes",
    "spmd_encoder_sglang_parts",
    'spmd_encoder_scheduler_queue_items{dp_rank="0"}',
    'spmd_encoder_scheduler_queue_items{dp_rank="1"}',
    'spmd_encoder_scheduler_running_items{dp_rank="0"}',
    'spmd_encoder_scheduler_running_items{dp_rank="1"}',
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`hot`: the share of requests with one of a few pictures that come again and again."""

    requests: int = 10_000
    clients: int = 12
    hang_ups: float = 0.05
    hot: float = 0.5
    seed: int = 0


@contextlib.contextmanager
def soak_world(*flags: str) -> Iterator[tuple[World, Target]]:
    grpc_port = free_port()
    with World(*FLAGS, "--grpc-port", str(grpc_port), *flags, nproc=2) as world:
        folder = world.folder / "embeddings"
        folder.mkdir()
        world.commands[0] += ["--embedding-dir", str(folder)]
        world.start().wait_ready(replicas=2)
        yield world, Target(world.port, grpc_port, folder, random.Random(0))


async def run(backend: Backend, world: World, target: Target, plan: Plan) -> dict[str, Any]:
    """All requests of one backend, then the quiet after them."""
    outcomes: collections.Counter[str] = collections.Counter()
    left: set[str] = set()
    samples = Samples(lambda: processes_of(world), outcomes.total)
    numbers = iter(range(plan.requests))
    sampling = asyncio.create_task(_sample(samples))
    began = time.perf_counter()
    clients = [backend.make(target) for _ in range(plan.clients)]
    try:
        await asyncio.gather(*(_client(client, numbers, target, plan, outcomes, left) for client in clients))
        wall_s = time.perf_counter() - began
    finally:
        sampling.cancel()
        await asyncio.gather(*(client.close() for client in clients))
    pending = await asyncio.to_thread(pending_after, world)
    await asyncio.to_thread(samples.take)
    pushed = target.arrived
    return {
        "backend": backend.name,
        "requests": plan.requests,
        "requests_per_s": round(plan.requests / wall_s, 1),
        "outcomes": dict(outcomes),
        "pushed_twice": sum(count > 1 for count in pushed.values()),
        "pushed_for_those_who_left": sum(request_id in left for request_id in pushed),
        "pending": pending,
        "epochs": [replica["epoch"] for replica in world.info()["replicas"]],
        "processes": samples.report(),
    }


async def _client(
    client: SoakClient,
    numbers: Iterator[int],
    target: Target,
    plan: Plan,
    outcomes: collections.Counter[str],
    left: set[str],
) -> None:
    for number in numbers:  # shared: each is one client's
        rng = random.Random(f"{plan.seed} {number}")
        picture = noise_png(number % 8 if rng.random() < plan.hot else 1000 + number, 28, 28)
        request_id = f"soak-{number}"
        try:
            async with asyncio.timeout(_LOST_S):
                if rng.random() < plan.hang_ups:
                    left.add(request_id)
                    await client.leave(request_id, picture)
                    outcome = HUNG_UP
                else:
                    outcome = await client.ask(request_id, picture)
        except TimeoutError:
            outcome = "lost"
        outcomes[outcome] += 1


async def _sample(samples: Samples) -> None:
    while True:
        await asyncio.to_thread(samples.take)
        await asyncio.sleep(_SAMPLE_S)


def processes_of(world: World) -> dict[str, psutil.Process]:
    """By role and rank; the launcher, which hosts the rendezvous store, too."""
    root = psutil.Process(world.launcher.pid)
    names = {root: "launcher and store"}
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in root.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                title = process.cmdline()[0]
                names[process] = title.partition(" epoch")[0].removeprefix("spmd_encoder ")
    numbered: dict[str, psutil.Process] = {}
    for process, name in sorted(names.items(), key=lambda entry: entry[0].pid):
        free = (f"{name} #{number}" if number else name for number in itertools.count())
        numbered[next(key for key in free if key not in numbered)] = process
    return numbered


def pending_after(world: World) -> dict[str, float]:
    """What the server still holds when it has had time to let go: the gauges that are not 0."""
    end = time.monotonic() + _QUIET_S
    while True:
        found = gauges(world)
        # The question itself is in flight.
        found["spmd_encoder_http_requests_in_flight"] -= 1
        held = {name: value for name, value in found.items() if value}
        if not held or time.monotonic() > end:
            return held
        time.sleep(0.2)


def gauges(world: World) -> dict[str, float]:
    lines = world.http.get("/metrics").text.splitlines()
    values = dict(line.rpartition(" ")[::2] for line in lines if not line.startswith("#"))
    return {name: float(values[name]) for name in PENDING}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="through each backend")
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--only", help="backends, by comma: " + ", ".join(backend.name for backend in BACKENDS))
    parser.add_argument("--cache-bytes", default="65536", help="small: full early, so that its fill is no growth")
    parser.add_argument("--out", type=Path, help="write .json and .md of this name")
    args = parser.parse_args()
    plan = Plan(requests=args.requests, clients=args.clients)
    watch = MachineWatch.start()
    runs = []
    for backend in BACKENDS:
        if args.only is None or backend.name in args.only.split(","):
            with soak_world(*backend.flags, "--cache-bytes", args.cache_bytes) as (world, target):
                runs.append(asyncio.run(run(backend, world, target, plan)))
            print(json.dumps(runs[-1]), flush=True)
    record = {
        **circumstances("benchmarks.soak"),
        **watch.until_now(),
        "cache_bytes": int(args.cache_bytes),
        "runs": runs,
    }
    if args.out:
        args.out.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n")
        args.out.with_suffix(".md").write_text(table(record))


def table(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    lines = [
        "# Soak",
        "",
        f"{record['date']}, commit {record['commit']}, {record['hardware']}: `{record['command']}`",
        f"{'; '.join(record['noise'])}; rates say little, growth and counts are not affected."
        if record["noise"]
        else "",
        "",
        "| backend | requests | ok | hung up | other | pushed twice | held at the end | re-forms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for run in record["runs"]:
        outcomes = run["outcomes"]
        ok, gone = outcomes.get(OK, 0), outcomes.get(HUNG_UP, 0)
        other = sum(outcomes.values()) - ok - gone
        cells = [run["backend"], run["requests"], ok, gone, other, run["pushed_twice"], len(run["pending"])]
        lines.append("| " + " | ".join(map(str, [*cells, sum(run["epochs"])])) + " |")
    lines += [
        "",
        "Growth over the second half, KiB per 1,000 requests, and descriptors:",
        "",
        "| backend | process | RSS | PSS | USS | MiB (USS) at the end | descriptors grew | descriptors at the end |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for run in record["runs"]:
        for name, grown in run["processes"].items():
            slopes = [f"{grown[f'{measure}_bytes_per_1000'] / 1024:.1f}" for measure in ("rss", "pss", "uss")]
            tail = [grown["uss_mib_end"], grown["fds_growth"], grown["fds_end"]]
            lines.append("| " + " | ".join(map(str, [run["backend"], name, *slopes, *tail])) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
