"""This server beside SGLang's own encoder server: the same checkpoint, the same requests, the same receiver, in turns.

    python -m benchmarks.head_to_head --sglang-python .venv-compat/bin/python [--torchvision-site .torchvision]

Both run at once, and one is asked while the other has nothing to do. First their rows are compared. Then each number
of clients asks one and the other for some seconds, `--rounds` times: what is told is the median of the ratios of those
that follow each other. Writes head-to-head.json and head-to-head.md into `--results`. On the CPU, one thread per
replica. `make compat` makes the virtual environment with SGLang, `make torchvision` the folder with torchvision.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.checkpoints import model_path
from benchmarks.circumstances import MachineWatch, circumstances
from benchmarks.head_to_head_load import closed_loop, rows_of
from benchmarks.head_to_head_report import Pair, Sample, Setting, report
from benchmarks.head_to_head_servers import Running, SGLang, ours, sglang
from benchmarks.pictures import make_pictures
from benchmarks.raw import raw_processes
from benchmarks.suite import RESULTS, write_page
from spmd_encoder.config import cache_dir
from spmd_encoder.models import demo

_NAME = "head-to-head"
_ABOUT = "This server over SGLang 0.5.23's own encoder server, asked in turns; 1 is equal."
_KEPT = [(224, 224), (448, 336)]
_RESIZED = [(300, 200), (64, 500)]
_WARM_UP_S = 2.0
_RAW_ITEMS = 32


@dataclass(frozen=True)
class Load:
    """Square pictures of `side` pixels, which is a multiple of the patches' so that nobody has to resize them."""

    tower: str
    side: int
    target: float


LOADS = {"mid": Load("mid", 224, 1.2), "tiny": Load("tiny", 224, 1.2), "server": Load("tiny", 56, 3.0)}
"""Of `mid` nearly all is the tower, of `tiny` half, of `server`, with its four rows per picture, next to nothing."""


def measure(args: argparse.Namespace, name: str, dp: int, serials: Iterator[int]) -> Setting:
    """Both servers from their start to their end. No serial is taken twice, so that no file is sent twice."""
    load = LOADS[name]
    setting, checkpoint = Setting(name, dp, load.target), _folder(load.tower)
    pictures = make_pictures([(load.side, load.side)], 32)
    setting.raw_cpu_ms = raw_cpu_ms(checkpoint, pictures)
    with contextlib.ExitStack() as stack:
        servers = {
            "ours": stack.enter_context(ours(checkpoint, dp)),
            "sglang": stack.enter_context(sglang(_theirs(args), checkpoint, dp)),
        }
        setting.rows_differ = rows_differ(servers, _KEPT)
        setting.resized_rows_differ = rows_differ(servers, _RESIZED)
        for running in servers.values():
            closed_loop(running.port, pictures, serials, max(args.clients), _WARM_UP_S)
        for number, clients in itertools.product(range(args.rounds), args.clients):
            # Who goes first changes, so that a machine that gets slower is to nobody's advantage.
            order = sorted(servers, reverse=bool(number % 2))
            samples = {who: sample(servers[who], pictures, serials, clients, args.seconds) for who in order}
            setting.pairs.setdefault(clients, []).append(Pair(**samples))
            print(f"{setting.name}, {clients} clients: {samples}", file=sys.stderr, flush=True)
        setting.pss = {who: running.pss() for who, running in servers.items()}
    setting.end_s = {who: running.end_s for who, running in servers.items()}
    setting.left = {who: running.left for who, running in servers.items()}
    return setting


def raw_cpu_ms(checkpoint: str, pictures: Sequence[bytes]) -> dict[int, float]:
    """CPU milliseconds of a picture that is decoded, preprocessed and encoded in batches, and nothing else."""
    with raw_processes(checkpoint, pictures) as raw:
        raw.first("whole", batch=8, items=16)
        spent = {size: raw.first("whole", batch=size, items=_RAW_ITEMS)["cpu_s"] for size in (1, 8)}
    return {size: float(seconds) * 1e3 / _RAW_ITEMS for size, seconds in spent.items()}


def sample(running: Running, pictures: Sequence[bytes], serials: Iterator[int], clients: int, seconds: float) -> Sample:
    before = running.cpu_s()
    load = closed_loop(running.port, pictures, serials, clients, seconds)
    return Sample(load.per_s, load.p50_ms, (running.cpu_s() - before) * 1e3 / load.requests)


def rows_differ(servers: Mapping[str, Running], sizes: Sequence[tuple[int, int]]) -> float:
    """The largest difference as a share of the largest value, of pictures of these sizes.

    Raises RuntimeError where there are not as many values.
    """
    pictures = make_pictures(sizes, len(sizes), seed=1)
    mine, theirs = (rows_of(servers[who].port, pictures) for who in ("ours", "sglang"))
    if [len(rows) for rows in mine] != [len(rows) for rows in theirs]:
        raise RuntimeError("the servers' rows have different shapes")
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(mine, theirs, strict=True))


def _theirs(args: argparse.Namespace) -> SGLang:
    return SGLang(args.sglang_python, args.torchvision_site, args.image_processor_backend, args.sglang_max_batch_size)


def _folder(tower: str) -> str:
    """A demo model has a name here, which SGLang does not know."""
    path = model_path(tower)
    return str(demo.prepare(path, cache_dir())) if path.startswith(demo.PREFIX) else path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sglang-python", required=True, help="the interpreter of a virtual environment with SGLang")
    parser.add_argument("--torchvision-site", default=".torchvision", help="a folder with torchvision for it")
    parser.add_argument(
        "--image-processor-backend",
        choices=["auto", "torchvision", "pil"],
        default="auto",
        help="SGLang's; with pil, pictures are resized as here",
    )
    parser.add_argument("--sglang-max-batch-size", type=int, default=8, help="requests per forward there; 8 is its own")
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("--dp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--quick", action="store_true", help="see that it works: one round of a second")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the record")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.seconds = 1, 1.0
    # Servers that were started are ended in `finally`, which SIGTERM by itself would pass over.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    watch, serials = MachineWatch.start(), itertools.count()
    settings = [measure(args, name, dp, serials) for name in args.loads for dp in args.dp]
    record = {
        "scenario": _NAME,
        "about": _ABOUT,
        **circumstances("benchmarks.head_to_head"),
        "quick": args.quick,
        **watch.until_now(),
        **report(settings).to_dict(),
    }
    args.results.mkdir(parents=True, exist_ok=True)
    (args.results / f"{_NAME}.json").write_text(json.dumps(record, indent=1) + "\n")
    write_page(record, args.results)
    print((args.results / f"{_NAME}.md").read_text())


if __name__ == "__main__":
    main()
