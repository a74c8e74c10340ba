"""Load on a running server: rates, latencies, errors by code.

    python -m benchmarks.load_generator http://127.0.0.1:30000 --clients 32 --duration-s 20
    python -m benchmarks.load_generator http://127.0.0.1:30000 --rate 80 --sizes 224x224:0.8,1024x768:0.2 --reuse 0.3

Without --rate the loop is closed: each client sends when its last reply is here, so a slow server is asked less and
hides its worst moments. With --rate requests are due at times that wait for nobody, and a latency counts from when its
request was due (no coordinated omission), also where --clients bounds how many are under way. `service_ms` counts from
the sending instead, and `sent_late_ms` is the difference: where it grows without --clients, this generator is too slow.

Progress goes to stderr, the result as JSON to stdout. The exit code is 1 where a request failed that was meant well,
or a bad one got another answer than it should, as where the server ends meanwhile: the load ends early after five
seconds in which no connection could be made, and `server_ended` is true. It is 2 where the URL is none, no server gets
ready there, --json cannot be written, or --processes is given and they are not on this machine; 130 after Ctrl-C,
which reports what was answered until then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from pathlib import Path

from benchmarks.load_generator.mix import parse_sizes
from benchmarks.load_generator.plan import Arrivals, LoadPlan
from benchmarks.load_generator.progress import Progress
from benchmarks.load_generator.run import run_load
from benchmarks.pictures import make_pictures
from benchmarks.processes import Server, cpu_spent_s
from spmd_encoder.client import Client, EncoderClientError

_CLIENTS = 16
_UNTIL_READY_S = 300.0
_INTERRUPTED = 128 + 2


def main() -> int:
    parser = _parser()
    args = parser.parse_args()
    try:
        plan = _plan(args)
        if args.json:
            args.json.open("a").close()  # rather now than after the load
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"argument --json: {args.json}: {error.strerror}")
    try:
        server = _server(args.url, args.processes)
    except (ValueError, EncoderClientError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED
    before = server.cpu_s() if server else {}
    tally = asyncio.run(run_load(args.url, plan, None if args.no_progress else Progress(sys.stderr)))
    report = {"url": args.url, "sizes": args.sizes, "seed": args.seed, **_loop(args), **tally.report()}
    if server and not server.is_alive:
        report["server_ended"] = True
    elif server and not tally.interrupted:
        spent = cpu_spent_s(before, server.cpu_s())
        report["server_cpu_s_by_role"] = spent
        for name in ("answered", "ok"):
            report[f"server_cpu_ms_per_{name}"] = round(sum(spent.values()) / max(1, report[name]) * 1e3, 3)
        report["server_pss_mib_by_role"] = server.pss_mib()
    text = json.dumps(report, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    if report["server_ended"]:
        seen = f"no connection for {plan.give_up_s:g} s" if tally.server_ended else "its processes are gone"
        print(f"the server has ended meanwhile: {seen}", file=sys.stderr)
    if tally.interrupted:
        return _INTERRUPTED
    unexpected = any(code.startswith("!") for outcomes in report["chaos"].values() for code in outcomes)
    return int(bool(report["errors"]) or unexpected)


def _plan(args: argparse.Namespace) -> LoadPlan:
    sizes, shares = parse_sizes(args.sizes)
    return LoadPlan(
        pools=[make_pictures([size], args.pictures, seed=index) for index, size in enumerate(sizes)],
        shares=shares,
        reuse=args.reuse,
        window=args.reuse_window,
        chaos=args.chaos,
        items_per_request=args.items_per_request,
        output=args.output,
        clients=_clients(args),
        rate=args.rate,
        arrivals=Arrivals(args.arrivals),
        duration_s=args.duration_s,
        num_requests=args.requests,
        timeout_s=args.timeout_s,
        seed=args.seed,
    )


def _clients(args: argparse.Namespace) -> int | None:
    if args.clients is None and args.rate is None:
        return _CLIENTS
    given: int | None = args.clients
    return given


def _server(url: str, with_processes: bool) -> Server | None:
    with Client(url) as client:
        print(f"waiting up to {_UNTIL_READY_S:.0f} s for {url} to be ready", file=sys.stderr)
        client.wait_ready(_UNTIL_READY_S)
        return Server.of(client.info()["processes"]) if with_processes else None


def _loop(args: argparse.Namespace) -> dict[str, object]:
    if args.rate is None:
        return {"loop": "closed", "clients": _clients(args)}
    return {"loop": "open", "arrivals": args.arrivals, "rate": args.rate, "clients": args.clients}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.load_generator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("url")
    add("--clients", type=int, help=f"requests under way at a time (default: {_CLIENTS}; with --rate no bound)")
    add("--rate", type=float, help="requests per second: makes the loop open")
    add("--arrivals", choices=[a.value for a in Arrivals], default="poisson", help="of an open loop")
    add("--duration-s", type=float, default=15.0)
    add("--requests", type=int, help="end after so many, if that is sooner")
    add("--sizes", default="224x224", help="of pictures, with their shares: 224x224:0.8,1024x768:0.2")
    add("--pictures", type=int, default=16, help="different ones of each size; every file is unlike all others anyway")
    add("--items-per-request", type=int, default=1)
    add("--output", choices=("tokens", "pooled"))
    add("--reuse", type=float, default=0.0, help="share of items that were sent before, which a cache may hold")
    add("--reuse-window", type=int, default=256, help="out of so many that were new last")
    add("--chaos", type=float, default=0.0, help="share of requests that are bad or hung up on")
    add("--timeout-s", type=float, default=300.0, help="for one request")
    add("--seed", type=int, default=random.randrange(2**32), help="equal seeds send equal loads (default: a new one)")
    add("--processes", action="store_true", help="CPU and memory of the server's processes; on its own machine")
    add("--json", type=Path, help="write the result here too")
    add("--no-progress", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())
