"""The served towers beside transformers' own: the same weights, the same tensors, one process, one thread.

    python -m benchmarks.tower [--pairs 7] [--only NAME ...] [--gains] [--fast-linears] [--out FILE]

Ours and transformers' take turns, in an order that is turned round from one pair to the next. CPU time of the process
and wall time are both taken: other users of the machine disturb the first less. `speedup` is the median over pairs of
transformers' CPU time over ours at that batch size; `speedup_at_best_batch` compares each side's own best one.
`fused_over_single` is ours per picture in a batch over ours alone. `a_over_a` is transformers' over itself in the pair
before: equal things, so that whatever it strays from 1 is the machine. `difference` is the largest between the sides'
tokens, over the largest value.

Each side has the memory of its own process: ours keeps what it frees as a worker does (`worker.allocator`), theirs as
much as glibc keeps by itself when it has learnt most (64 MiB: twice the largest piece that it does not map).

`--gains` puts ours without one of its parts in transformers' place, for each part in turn (Qwen towers only). Then
`speedup` is what that part gains. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from benchmarks.circumstances import circumstances
from benchmarks.pictures import make_pictures
from benchmarks.tower_parts import PARTS, Run
from benchmarks.towers import GEOMETRIES, Geometry
from spmd_encoder.media.image import decode
from spmd_encoder.models.base import FamilyAdapter, LoadContext
from spmd_encoder.models.checkpoint import read_config
from spmd_encoder.models.loading import load_adapter
from spmd_encoder.models.qwen_vl import TOWER
from spmd_encoder.worker.allocator import KEPT_BYTES, give_back_freed_memory, keep_freed_memory

Batch = Mapping[str, Tensor]
_GLIBC_KEEPS = 64 * 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=list(GEOMETRIES), default=list(GEOMETRIES))
    parser.add_argument("--gains", action="store_true")
    parser.add_argument("--fast-linears", action="store_true", help="ours with the server's flag of that name")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as scratch:
        towers = {
            name: tower(GEOMETRIES[name], Path(scratch) / name, args.pairs, args.gains, args.fast_linears)
            for name in args.only
        }
    text = json.dumps(
        {**circumstances("benchmarks.tower"), "threads": 1, "fast_linears": args.fast_linears, "towers": towers},
        indent=2,
    )
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


def tower(geometry: Geometry, folder: Path, pairs: int, gains: bool, fast: bool) -> dict[str, Any]:
    """All that is measured of one tower."""
    geometry.write(folder)
    ours, whole = _ours(folder, fast), _theirs(folder)
    pictures = make_pictures([(geometry.side, geometry.side)], max(geometry.batches))
    items = [ours.preprocess(decode(data)) for data in pictures]
    batches = {size: ours.pack(items[:size]) for size in geometry.batches}
    if not gains:
        ask = getattr(whole, "get_image_features", whole)
        return compare(ours.forward, lambda batch: ask(**batch), batches, geometry.pictures, pairs)
    return {
        part: compare(
            ours.forward,
            less(_ours(folder, fast), _theirs(folder).get_submodule(TOWER)),
            *(batches, 1, pairs, KEPT_BYTES),
        )
        for part, less in PARTS.items()
    }


def compare(
    ours: Run, theirs: Run, batches: Mapping[int, Batch], pictures: int, pairs: int, theirs_kept: int = _GLIBC_KEEPS
) -> dict[str, Any]:
    """Both sides in turns; a side's measurement is of at least `pictures` pictures, whatever the batch size."""
    sides = {"ours": ours, "theirs": theirs}
    kept = {"ours": KEPT_BYTES, "theirs": theirs_kept}
    taken: dict[tuple[str, int], list[tuple[float, float]]] = {(side, size): [] for side in sides for size in batches}
    for pair in range(pairs + 1):
        for size, batch in batches.items():
            for side in sorted(sides, reverse=pair % 2 == 1):
                _settle(kept[side], sides[side], batch)
                seconds = _measure(sides[side], batch, max(1, pictures // size))
                if pair:  # the first one warms up
                    taken[side, size].append((seconds[0] / size, seconds[1] / size))
    with torch.inference_mode():
        alone = batches[min(batches)]
        difference = _difference(ours(alone), theirs(alone))
    return {"difference": difference, **_summary(taken, list(batches))}


def _settle(kept_bytes: int, run: Run, batch: Batch) -> None:
    """Begin with this side's memory, and with it in use."""
    give_back_freed_memory()
    keep_freed_memory(kept_bytes)
    with torch.inference_mode():
        run(batch)


def _measure(run: Run, batch: Batch, times: int) -> tuple[float, float]:
    """(CPU seconds, wall seconds) of one call."""
    with torch.inference_mode():
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(times):
            run(batch)
        return (time.process_time() - cpu) / times, (time.perf_counter() - wall) / times


def _summary(taken: Mapping[tuple[str, int], list[tuple[float, float]]], sizes: list[int]) -> dict[str, Any]:
    cpu = {key: [c for c, _ in values] for key, values in taken.items()}
    wall = {key: statistics.median(w for _, w in values) for key, values in taken.items()}
    middle = {key: statistics.median(values) for key, values in cpu.items()}
    by_size = {}
    for size in sizes:
        ours, theirs = cpu["ours", size], cpu["theirs", size]
        by_size[size] = {
            "speedup": _median_ratio(theirs, ours),
            "a_over_a": _median_ratio(theirs[1:], theirs),
            "a_over_a_spread": [
                round(f(a / b for a, b in zip(theirs[1:], theirs, strict=False)), 3) for f in (min, max)
            ],
            "fused_over_single": _median_ratio(ours, cpu["ours", sizes[0]]),
            "theirs_fused_over_single": _median_ratio(theirs, cpu["theirs", sizes[0]]),
            "cpu_ms_per_picture": {side: round(1e3 * middle[side, size], 2) for side in ("ours", "theirs")},
            "pictures_per_cpu_s": {side: round(1 / middle[side, size], 2) for side in ("ours", "theirs")},
            "pictures_per_wall_s": {side: round(1 / wall[side, size], 2) for side in ("ours", "theirs")},
        }
    best = {side: min(middle[side, size] for size in sizes) for side in ("ours", "theirs")}
    return {"speedup_at_best_batch": round(best["theirs"] / best["ours"], 3), "by_batch": by_size}


def _median_ratio(over: list[float], under: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(over, under, strict=False)), 3)


def _difference(ours: Any, theirs: Any) -> float:
    """Of the first picture's tokens. Either side may be what `FamilyAdapter.forward` gives."""
    got, want = _tokens(ours), _tokens(theirs)
    got = got[..., : want.shape[-1]]  # Qwen3-VL's rows hold its deepstack levels too
    return float((got - want[-len(got) :]).abs().max() / want.abs().max())


def _tokens(out: Any) -> Tensor:
    if isinstance(out, list):
        tokens: Tensor = out[0].tokens
        return tokens
    rows = out.pooler_output
    first: Tensor = rows[0] if isinstance(rows, (tuple, list)) else out.last_hidden_state[0]
    return first


def _ours(folder: Path, fast: bool) -> FamilyAdapter:
    assert dist.group.WORLD is not None
    cpu = torch.device("cpu")
    context = LoadContext(dtype=torch.float32, device=cpu, group=dist.group.WORLD, fast_linears=fast)
    return load_adapter(folder, context)


def _theirs(folder: Path) -> Any:
    models: Any = transformers  # its classes are only partly typed
    return getattr(models, read_config(folder)["architectures"][0]).from_pretrained(folder, dtype=torch.float32).eval()


if __name__ == "__main__":
    main()
