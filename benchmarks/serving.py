"""Load on a server that runs, or that `--start` starts: rates, latencies, errors, CPU and memory by role.

    python -m benchmarks.serving --url http://127.0.0.1:30000 --concurrency 16 --duration-s 20
    python -m benchmarks.serving --start "torchrun --nproc-per-node 2 -m spmd_encoder --port 30000" --rate 40

Prints one JSON object. Pictures go as raw bodies. The server and the load share this machine's cores. `--pictures` come
again and again: give the server `--cache-bytes 0` where its tower is to be measured and not its cache.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from benchmarks.load_generator import LoadPlan, run_load
from benchmarks.pictures import make_pictures, parse_sizes
from benchmarks.processes import Server, cpu_spent_s
from benchmarks.startup import circumstances
from spmd_encoder.client import Client

_START_S = 300.0
_END_S = 60.0


def main() -> None:
    args = _parser().parse_args()
    plan = LoadPlan(
        pictures=make_pictures(parse_sizes(args.sizes), args.pictures),
        items_per_request=args.items_per_request,
        output=args.output,
        concurrency=args.concurrency,
        rate=args.rate,
        duration_s=args.duration_s,
        num_requests=args.requests,
    )
    with started(args.start, args.url):
        report = measure(args.url, plan, warm_up_s=args.warm_up_s)
    loop = f"open, {args.rate:g} requests per s" if args.rate else f"closed, {args.concurrency} callers"
    settings = {"loop": loop, "sizes": args.sizes, "items_per_request": args.items_per_request}
    print(json.dumps({**circumstances("benchmarks.serving"), **settings, **report}, indent=2))


def measure(url: str, plan: LoadPlan, *, warm_up_s: float) -> dict[str, Any]:
    """One measurement after a warm-up that is not counted."""
    with Client(url) as client:
        client.wait_ready(_START_S)
        model = client.models()[0]
        server = Server.of(client.info()["processes"])
    asyncio.run(run_load(url, LoadPlan(**{**vars(plan), "duration_s": warm_up_s, "num_requests": None})))
    before = server.cpu_s()
    tally = asyncio.run(run_load(url, plan))
    after = server.cpu_s()
    spent = cpu_spent_s(before, after)
    report = tally.report(plan.items_per_request)
    num_items = max(1, report["requests"] * plan.items_per_request)
    return {
        "model": model["id"],
        **report,
        "server_cpu_s_by_role": spent,
        "server_cpu_ms_per_item": round(sum(spent.values()) / num_items * 1e3, 3),
        "pss_mib_by_role": server.pss_mib(),
    }


@contextlib.contextmanager
def started(command: str | None, url: str) -> Iterator[None]:
    """Runs `command` (none: nothing) until the block ends, then drains it. Raises where it does not get ready."""
    if command is None:
        yield
        return
    with tempfile.TemporaryFile() as log:
        launcher = subprocess.Popen(shlex.split(command), stdout=log, stderr=log)
        try:
            with Client(url) as client:
                client.wait_ready(_START_S)
            yield
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read()[-4000:].decode(errors="replace"))
            raise
        finally:
            launcher.send_signal(signal.SIGTERM)
            try:
                launcher.wait(_END_S)
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--start", help="a command that starts the server on --url; it is ended afterwards")
    parser.add_argument("--concurrency", type=int, default=16, help="callers of the closed loop")
    parser.add_argument("--rate", type=float, help="open loop: mean arrivals per second, Poisson")
    parser.add_argument("--duration-s", type=float, default=15.0)
    parser.add_argument("--requests", type=int, help="end after so many, if that is sooner")
    parser.add_argument("--warm-up-s", type=float, default=2.0)
    parser.add_argument("--sizes", default="448x448", help="of pictures, in turn: 448x448,640x480")
    parser.add_argument("--pictures", type=int, default=32, help="different ones")
    parser.add_argument("--items-per-request", type=int, default=1)
    parser.add_argument("--output", choices=("tokens", "pooled"))
    return parser


if __name__ == "__main__":
    main()
