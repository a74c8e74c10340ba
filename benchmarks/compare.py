"""Served against raw: a server's items per second over those of the same tower without one, measured in turn.

    python -m benchmarks.compare --model-path demo:qwen2.5-vl-tiny --record

Each round measures offline, served, offline, one after another, with nothing else of ours at work: the server idles
while the tower runs and the tower while the server does. The ratio is served over the mean of its two neighbours; the
second offline run over the first is the A/A line, which shows what the machine's own unrest does to a ratio of equal
things. A difference from 1 within the A/A spread means nothing. Prints JSON; `--record` keeps it in `results/`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.load_generator import LoadPlan, run_load
from benchmarks.offline import OfflineTower
from benchmarks.pictures import make_pictures, parse_sizes
from benchmarks.processes import Server, cpu_spent_s
from benchmarks.serving import started
from benchmarks.startup import circumstances
from spmd_encoder.client import Client

_RESULTS = Path(__file__).parent / "results"


def main() -> None:
    args = _parser().parse_args()
    before = round(os.getloadavg()[0], 2)
    pictures = make_pictures(parse_sizes(args.sizes), 32)
    tower = OfflineTower(args.model_path, device=args.device)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = f"{sys.executable} -m torch.distributed.run --nproc-per-node 1 -m spmd_encoder"
    server += f" --port {port} --model-path {args.model_path} --device {args.device} --log-level warning"
    server += " --cache-bytes 0"  # the pictures come again and again, and each is to be worked out
    url = f"http://127.0.0.1:{port}"
    with started(server, url):
        report = compare(tower, url, pictures, rounds=args.rounds, items=args.items, concurrency=args.concurrency)
    tower.close()
    settings = {
        "model": args.model_path,
        "sizes": args.sizes,
        "items_per_run": args.items,
        "concurrency": args.concurrency,
        "compute_threads": tower.num_threads,
        "cores_allowed": len(os.sched_getaffinity(0)),
        "load_average_1_min": {"before": before, "after": round(os.getloadavg()[0], 2)},
    }
    result = {**circumstances("benchmarks.compare"), **settings, **report}
    text = json.dumps(result, indent=2)
    print(text)
    if args.record:
        name = re.sub(r"[^a-z0-9.]+", "-", args.name or args.model_path.lower()).strip("-")
        (_RESULTS / f"{result['date']}-served-vs-raw-{name}.json").write_text(text + "\n")


def compare(
    tower: OfflineTower, url: str, pictures: Sequence[bytes], *, rounds: int, items: int, concurrency: int
) -> dict[str, Any]:
    """`rounds` of offline, served, offline, after one of each that does not count."""
    plan = LoadPlan(pictures=pictures, concurrency=concurrency, duration_s=600.0, num_requests=items)
    with Client(url) as client:
        processes = Server.of(client.info()["processes"])
    loader = tower.loader(pictures, items)
    tower.run(loader)
    asyncio.run(run_load(url, plan))
    first, served, second = [], [], []
    generator_cpu_s = raw_cpu_s = 0.0
    spent: dict[str, float] = {}
    for number in range(rounds):
        cpu = processes.cpu_outside_s()
        first.append(tower.run(loader))
        raw_cpu_s += processes.cpu_outside_s() - cpu
        before = processes.cpu_s()
        tally = asyncio.run(run_load(url, plan))
        for role, seconds in cpu_spent_s(before, processes.cpu_s()).items():
            spent[role] = spent.get(role, 0.0) + seconds
        if tally.errors:
            raise RuntimeError(f"the server refused work: {dict(tally.errors)}")
        generator_cpu_s += tally.own_cpu_s
        served.append(items / tally.wall_s)
        second.append(tower.run(loader))
        print(f"round {number}: {first[-1]:.1f} {served[-1]:.1f} {second[-1]:.1f} items/s", file=sys.stderr)
    ratios = [s / ((a + b) / 2) for a, s, b in zip(first, served, second, strict=True)]
    noise = [b / a for a, b in zip(first, second, strict=True)]
    return {
        "served_over_raw": spread(ratios),
        "raw_over_raw": spread(noise),
        "raw_items_per_s": spread([*first, *second]),
        "served_items_per_s": spread(served),
        "server_cpu_ms_per_item_by_role": {r: round(s / items / rounds * 1e3, 3) for r, s in spent.items()},
        "raw_cpu_ms_per_item": round(raw_cpu_s / items / rounds * 1e3, 3),
        "generator_cpu_ms_per_item": round(generator_cpu_s / items / rounds * 1e3, 3),
        "pss_mib_by_role": processes.pss_mib(),
        "rounds": [[round(v, 2) for v in values] for values in zip(first, served, second, strict=True)],
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    low, _, high = statistics.quantiles(values, n=4)
    kept = {"median": statistics.median(values), "quartile_1": low, "quartile_3": high}
    return {name: round(value, 3) for name, value in {**kept, "min": min(values), "max": max(values)}.items()}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="demo:qwen2.5-vl-tiny")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=_at_least_7, default=7)
    parser.add_argument("--items", type=int, default=256, help="in each run")
    parser.add_argument("--concurrency", type=int, default=24, help="callers; below two full batches they cannot fill")
    parser.add_argument("--sizes", default="448x448")
    parser.add_argument("--record", action="store_true", help="write the result into benchmarks/results")
    parser.add_argument("--name", help="of the record (default: the model's)")
    return parser


def _at_least_7(text: str) -> int:
    if int(text) < 7:
        raise argparse.ArgumentTypeError("a median of fewer than 7 rounds says too little")
    return int(text)


if __name__ == "__main__":
    main()
