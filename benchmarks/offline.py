"""The same tower without a server: decode, preprocess, forward in batches; items per second.

    python -m benchmarks.offline --model-path demo:qwen2.5-vl-tiny --items 256

It does what a replica does with an item, and nothing else: one thread prepares while another runs forwards of full
batches, with as many compute threads as a server's only rank has. `--prepared` leaves the preparation out of the time.
"""

from __future__ import annotations

import argparse
import json
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.pictures import make_pictures, parse_sizes
from benchmarks.startup import circumstances
from spmd_encoder.api.types import OutputKind
from spmd_encoder.config import Config, cache_dir
from spmd_encoder.media.image import decode
from spmd_encoder.models.base import Features, LoadContext, TowerOutput
from spmd_encoder.models.checkpoint import resolve_checkpoint
from spmd_encoder.models.loading import load_adapter, resolve_dtype
from spmd_encoder.worker.device import pick_device, set_thread_count

# As a scheduler: this many batches are prepared ahead.
_LOOKAHEAD_BATCHES = 3


class OfflineTower:
    """The model alone in this process, on a process group of one."""

    def __init__(self, model_path: str, *, dtype: str = "auto", device: str = "auto") -> None:
        self.num_threads = set_thread_count(1)
        folder = resolve_checkpoint(model_path, None, cache_dir())
        place, backend = pick_device(device, 0)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        group = dist.group.WORLD
        assert group is not None
        self._adapter = load_adapter(folder, LoadContext(dtype=resolve_dtype(dtype, folder), device=place, group=group))
        self._limits = Config().limits
        self._max_pixels = Config().server.max_image_pixels

    def close(self) -> None:
        dist.destroy_process_group()

    def prepare(self, picture: bytes) -> Features:
        return self._adapter.preprocess(decode(picture, max_pixels=self._max_pixels))

    def run(self, pictures: Sequence[bytes], num_items: int) -> float:
        """Items per second of `num_items` items, the pictures in a circle, preparation included."""
        ready: queue.Queue[Features | None] = queue.Queue(_LOOKAHEAD_BATCHES * self._limits.max_batch_items)

        def prepare_all() -> None:
            for index in range(num_items):
                ready.put(self.prepare(pictures[index % len(pictures)]))
            ready.put(None)

        began = time.perf_counter()
        thread = threading.Thread(target=prepare_all)
        thread.start()
        self._forward_all(iter(ready.get, None))
        seconds = time.perf_counter() - began
        thread.join()
        return num_items / seconds

    def run_prepared(self, features: Sequence[Features], num_items: int) -> float:
        """Items per second of the forwards alone."""
        began = time.perf_counter()
        self._forward_all(features[index % len(features)] for index in range(num_items))
        return num_items / (time.perf_counter() - began)

    def _forward_all(self, items: Iterator[Features]) -> None:
        for batch in self._batches(items):
            with torch.inference_mode():
                tensors = self._adapter.pack(batch)
                for output in self._adapter.forward(tensors):
                    self._take(output)

    def _take(self, output: TowerOutput) -> None:
        """To the CPU and looked at, as a server must."""
        wanted = output.pooled if self._adapter.default_output is OutputKind.POOLED else output.tokens
        assert wanted is not None
        if not bool(torch.isfinite(wanted.cpu()).all()):
            raise RuntimeError("the model gave values that are not finite")

    def _batches(self, items: Iterator[Features]) -> Iterator[list[Features]]:
        """Full batches, in order, by the server's own limits."""
        batch: list[Features] = []
        for item in items:
            fits = (
                len(batch) < self._limits.max_batch_items
                and sum(other.cost for other in batch) + item.cost <= self._limits.max_batch_tokens
                and all(self._adapter.batch_key(item) == self._adapter.batch_key(other) for other in batch[:1])
            )
            if batch and not fits:
                yield batch
                batch = []
            batch.append(item)
        if batch:
            yield batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="demo:qwen2.5-vl-tiny")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--items", type=int, default=256)
    parser.add_argument("--sizes", default="448x448")
    parser.add_argument("--prepared", action="store_true", help="time the forwards alone")
    args = parser.parse_args()
    pictures = make_pictures(parse_sizes(args.sizes), 32)
    tower = OfflineTower(args.model_path, device=args.device)
    tower.run(pictures, min(32, args.items))
    if args.prepared:
        rate = tower.run_prepared([tower.prepare(picture) for picture in pictures], args.items)
    else:
        rate = tower.run(pictures, args.items)
    report: dict[str, Any] = {"model": args.model_path, "threads": tower.num_threads, "items_per_s": round(rate, 2)}
    tower.close()
    print(json.dumps({**circumstances("benchmarks.offline"), **report}, indent=2))


if __name__ == "__main__":
    main()
