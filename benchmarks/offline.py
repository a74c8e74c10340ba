"""The same tower without a server: decode, preprocess, forward in batches; items per second.

    python -m benchmarks.offline --model-path demo:qwen2.5-vl-tiny --items 256

It does what a replica does with an item, and nothing else: as many processes prepare, with one thread each, as a
server's only rank has, and forwards of full batches run on as many compute threads. `--prepared` leaves the
preparation out of the time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from benchmarks.pictures import make_pictures, parse_sizes
from benchmarks.startup import circumstances
from spmd_encoder.api.types import OutputKind
from spmd_encoder.config import Config, cache_dir
from spmd_encoder.media.image import decode
from spmd_encoder.models.base import Features, LoadContext, TowerOutput
from spmd_encoder.models.checkpoint import resolve_checkpoint
from spmd_encoder.models.loading import load_adapter, resolve_dtype
from spmd_encoder.worker.device import default_preparers, pick_device, set_thread_count

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

    def loader(self, pictures: Sequence[bytes], num_items: int) -> DataLoader[Features]:
        """`num_items` items, the pictures in a circle, from processes that stay for further runs."""
        dataset = _Items(self, pictures, num_items)
        ahead = _LOOKAHEAD_BATCHES * self._limits.max_batch_items
        return DataLoader(
            dataset,
            batch_size=None,
            num_workers=default_preparers(1),
            prefetch_factor=ahead,
            persistent_workers=True,
            multiprocessing_context="fork",
        )

    def run(self, loader: DataLoader[Features]) -> float:
        """Items per second of all of the loader's items, preparation included."""
        num_items = len(loader.dataset)  # type: ignore[arg-type]
        began = time.perf_counter()
        self._forward_all(iter(loader))
        return num_items / (time.perf_counter() - began)

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


class _Items(Dataset[Features]):
    def __init__(self, tower: OfflineTower, pictures: Sequence[bytes], num_items: int) -> None:
        self._tower = tower
        self._pictures = pictures
        self._num_items = num_items

    def __len__(self) -> int:
        return self._num_items

    def __getitem__(self, index: int) -> Features:
        return self._tower.prepare(self._pictures[index % len(self._pictures)])


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
    loader = tower.loader(pictures, args.items)
    tower.run(loader)
    if args.prepared:
        rate = tower.run_prepared([tower.prepare(picture) for picture in pictures], args.items)
    else:
        rate = tower.run(loader)
    report: dict[str, Any] = {"model": args.model_path, "threads": tower.num_threads, "items_per_s": round(rate, 2)}
    tower.close()
    print(json.dumps({**circumstances("benchmarks.offline"), **report}, indent=2))


if __name__ == "__main__":
    main()
