"""A tower without a server, in a process of its own: `benchmarks.raw` starts it and asks it, a line of JSON each.

It does with an item what a replica does, and nothing else: decode, preprocess, pack, forward, a look whether all
values are finite. Its answers have wall seconds and this process's CPU seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.processes import memory_of
from spmd_encoder.api.types import OutputKind
from spmd_encoder.config import cache_dir
from spmd_encoder.media.image import decode
from spmd_encoder.models.base import Features, LoadContext
from spmd_encoder.models.checkpoint import resolve_checkpoint
from spmd_encoder.models.loading import load_adapter, resolve_dtype
from spmd_encoder.worker.allocator import keep_freed_memory
from spmd_encoder.worker.device import pick_device

# As a scheduler: this many items are prepared ahead.
_AHEAD = 16


class RawTower:
    """`files` are the pictures; items are taken from them in a circle."""

    def __init__(self, model_path: str, device: str, files: Sequence[bytes]) -> None:
        folder = resolve_checkpoint(model_path, None, cache_dir())
        place, backend = pick_device(device, 0)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        assert dist.group.WORLD is not None
        context = LoadContext(dtype=resolve_dtype("auto", folder), device=place, group=dist.group.WORLD)
        self._adapter = load_adapter(folder, context)
        self._device = place
        self._files = files
        self._features: list[Features] = []
        self._loader: Iterator[Features] | None = None

    def prepare(self, index: int) -> Features:
        return self._adapter.preprocessor.preprocess(decode(self._files[index % len(self._files)]))

    def forward(self, items: Sequence[Features]) -> None:
        with torch.inference_mode():
            batch = {name: tensor.to(self._device) for name, tensor in self._adapter.pack(items).items()}
            for output in self._adapter.forward(batch):
                pooled = self._adapter.default_output is OutputKind.POOLED
                wanted = output.pooled if pooled else output.tokens
                assert wanted is not None
                if not bool(torch.isfinite(wanted.cpu()).all()):
                    raise RuntimeError("the model gave values that are not finite")

    def singles(self, items: Sequence[int]) -> dict[str, Any]:
        """Each item by itself, from its file to its values."""
        wall, cpu = [], []
        for index in items:
            began, cpu_began = time.perf_counter(), time.process_time()
            self.forward([self.prepare(index)])
            wall.append(time.perf_counter() - began)
            cpu.append(time.process_time() - cpu_began)
        return {"wall_s": wall, "cpu_s": cpu}

    def whole(self, batch: int, items: int, rate: float | None = None) -> dict[str, Any]:
        """Decode, preprocess and forward in turn, here; with `rate` an item begins so often a second at most."""
        return _timed(lambda: self._run((self.prepare(index) for index in _paced(items, rate)), batch))

    def forwards(self, batch: int, items: int) -> dict[str, Any]:
        """Items that are prepared already."""
        if not self._features:
            self._features = [self.prepare(index) for index in range(min(len(self._files), _AHEAD))]
        return _timed(lambda: self._run(itertools.islice(itertools.cycle(self._features), items), batch))

    def overlapped(self, batch: int, items: int) -> dict[str, Any]:
        """Another process decodes and preprocesses, as far ahead as a scheduler has it done; forwards here.

        That process goes on between calls until it is that far ahead, so a call finds as much as it leaves.
        """
        if self._loader is None:
            loader = DataLoader(
                _Endless(self),
                batch_size=None,
                num_workers=1,
                prefetch_factor=_AHEAD,
                multiprocessing_context="fork",
            )
            self._loader = iter(loader)
        taken = itertools.islice(self._loader, items)
        return _timed(lambda: self._run(taken, batch))

    def pairs(self, batch: int, pairs: int) -> dict[str, Any]:
        """CPU seconds of `batch` items as singles and as one batch, `pairs` times, the order changing."""
        self.forwards(batch, batch)
        items = list(itertools.islice(itertools.cycle(self._features), batch))
        sides = [("single", 1), ("fused", batch)]
        taken: dict[str, list[float]] = {"single": [], "fused": []}
        for pair in range(pairs + 1):
            for name, size in sides if pair % 2 else sides[::-1]:
                began = time.process_time()
                self._run(iter(items), size)
                if pair:  # the first one warms up
                    taken[name].append(time.process_time() - began)
        return {f"{name}_cpu_s": seconds for name, seconds in taken.items()}

    def memory(self) -> dict[str, Any]:
        """Of this process, after a forward has touched all weights."""
        self.forward([self.prepare(0)])
        return {**memory_of(os.getpid()), "tower_bytes": self._adapter.tower_bytes}

    def _run(self, items: Iterator[Features], batch: int) -> None:
        while group := list(itertools.islice(items, batch)):
            self.forward(group)


class _Endless(IterableDataset[Features]):
    def __init__(self, tower: RawTower) -> None:
        self._tower = tower

    def __iter__(self) -> Iterator[Features]:
        torch.set_num_threads(1)
        return (self._tower.prepare(index) for index in itertools.count())


def _paced(items: int, rate: float | None) -> Iterator[int]:
    began = time.perf_counter()
    for index in range(items):
        if rate is not None:
            time.sleep(max(0.0, began + index / rate - time.perf_counter()))
        yield index


def _timed(run: Callable[[], None]) -> dict[str, Any]:
    began, cpu = time.perf_counter(), time.process_time()
    run()
    return {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--pictures", type=Path, required=True, help="a folder of files, taken by name")
    args = parser.parse_args()
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever a library says is no answer
    torch.set_num_threads(args.threads)
    keep_freed_memory()  # as a worker
    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
    files = [path.read_bytes() for path in sorted(args.pictures.iterdir())]
    tower = RawTower(args.model_path, args.device, files)
    asked: dict[str, Callable[..., dict[str, Any]]] = {
        name: getattr(tower, name) for name in ("singles", "whole", "forwards", "overlapped", "pairs", "memory")
    }
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(asked[question.pop("do")](**question)), file=answers, flush=True)


if __name__ == "__main__":
    main()
