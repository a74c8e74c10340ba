"""How long loading a tower takes beside a plain read of the same tensors with safetensors.

    python -m benchmarks.load [--model-path FOLDER] [--repeat 7] [--cold] [--out FILE]

Without `--model-path` two Qwen3-VL are made in a scratch folder, random tower, empty language half: one of real
proportions, and one of as many layers and three times the bytes. What both sizes take tells the part of a load that
is the same for any size (`fixed_s`: building the class, its names) from what grows with the bytes (`per_gb_s`:
reading them, the start's comparison of cut and uncut modules). It is processor time where the file is cached.

Each load and each read is a fresh process that has imported everything; the two take turns, with the file in the
page cache, or, with `--cold`, dropped from it before each (a disk below may still have a cache of its own). Both end
with a sum over all values, as loaded weights are views that no one has read yet. Prints one JSON object. `ratio` is the
median of load over read; `cpu` is by the processor time of all threads, which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.circumstances import circumstances

SIZES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "hidden 1152": {},
        "hidden 2048": {"hidden_size": 2048, "intermediate_size": 7648, "out_hidden_size": 6368},
    }
)
"""What each vision half has in the place of the real one's values. Layers cost time to build, so all have as many."""
KINDS = ("read", "load")
CLOCKS = ("wall", "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", type=Path)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--cold", action="store_true", help="drop the weights from the page cache before each run")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    parser.add_argument("--child", choices=["load", "read"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(_load(args.model_path) if args.child == "load" else _read(args.model_path)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folders = [args.model_path] if args.model_path else [_make(Path(scratch) / name, name) for name in SIZES]
        found = _measured(folders, args.repeat, cold=args.cold)
    record = {
        **circumstances("benchmarks.load"),
        "model": str(args.model_path or f"Qwen3-VL, depth 27, bfloat16, random: {', '.join(SIZES)}"),
        "page_cache": "cold" if args.cold else "warm",
        "towers": found,
        **({"line": line_through(found, "wall" if args.cold else "cpu")} if len(found) > 1 else {}),
    }
    text = json.dumps(record, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


def _measured(folders: Sequence[Path], repeat: int, *, cold: bool) -> list[dict[str, Any]]:
    """A summary of each. They take turns too, so that what else the machine does meanwhile meets all of them."""
    rounds = [[{kind: _run(kind, one, cold=cold) for kind in KINDS} for one in folders] for _ in range(repeat + 1)]
    return [summary_of(list(runs)) for runs in zip(*rounds[1:], strict=True)]  # the first fills the page cache


def _run(kind: str, folder: Path, *, cold: bool) -> dict[str, Any]:
    for path in folder.glob("*.safetensors") if cold else ():
        with path.open("rb+") as file:
            os.fsync(file.fileno())  # what is not on the disk yet cannot be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    command = [sys.executable, "-m", "benchmarks.load", "--child", kind, "--model-path", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def summary_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    if runs[0]["load"]["bytes"] != runs[0]["read"]["bytes"]:
        raise RuntimeError("the two did not read the same tensors")
    found: dict[str, Any] = {"tower_mib": round(runs[0]["load"]["bytes"] / 2**20, 1)}
    for clock in CLOCKS:
        seconds = {kind: [run[kind][clock] for run in runs] for kind in KINDS}
        ratios = [load / read for load, read in zip(seconds["load"], seconds["read"], strict=True)]
        found[clock] = {
            **{f"{kind}_s": [round(s, 3) for s in seconds[kind]] for kind in KINDS},
            "ratio": round(statistics.median(ratios), 2),
            "build_and_check_s": round(statistics.median(run["load"][f"{clock}_before_sum"] for run in runs), 3),
        }
    return found


def line_through(found: list[dict[str, Any]], clock: str) -> dict[str, Any]:
    """Through the least values of both sizes, to which a busy machine adds least: what any size takes, and what a GB
    (10^9 bytes) adds."""
    small, large = ((one["tower_mib"] * 2**20 / 1e9, one[clock]) for one in found)
    line: dict[str, Any] = {"clock": clock}
    for kind in KINDS:
        low, high = (min(one[1][f"{kind}_s"]) for one in (small, large))
        per_gb = (high - low) / (large[0] - small[0])
        line[kind] = {"fixed_s": round(low - per_gb * small[0], 3), "per_gb_s": round(per_gb, 3)}
    return {**line, "ratio_per_gb": round(line["load"]["per_gb_s"] / line["read"]["per_gb_s"], 2)}


def _load(folder: Path) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    from spmd_encoder.models import registry
    from spmd_encoder.models.base import LoadContext
    from spmd_encoder.models.checkpoint import read_model_type
    from spmd_encoder.models.loading import load_adapter, resolve_dtype

    registry.preload(read_model_type(folder))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    dtype = resolve_dtype("auto", folder)
    context = LoadContext(dtype=dtype, device=torch.device("cpu"), group=dist.group.WORLD)
    began = _now()
    adapter: Any = load_adapter(folder, context)
    loaded = _now()
    for parameter in adapter._model.parameters():
        if not parameter.is_meta:
            parameter.sum()
    ended = _now()
    before = {f"{clock}_before_sum": loaded[clock] - began[clock] for clock in CLOCKS}
    return {**{clock: ended[clock] - began[clock] for clock in CLOCKS}, **before, "bytes": adapter.tower_bytes}


def _now() -> dict[str, float]:
    return {"wall": time.perf_counter(), "cpu": time.process_time()}


def _read(folder: Path) -> dict[str, float]:
    import torch
    from safetensors import safe_open

    from spmd_encoder.models import registry
    from spmd_encoder.models.checkpoint import read_model_type, shard_keys

    prefixes = registry.find(read_model_type(folder)).tower_keys or ("",)
    torch.set_num_threads(1)
    size = 0
    began = _now()
    for shard, keys in shard_keys(folder).items():
        if wanted := [key for key in keys if key.startswith(prefixes)]:
            with safe_open(folder / shard, framework="pt", device="cpu") as file:
                for key in wanted:
                    tensor = file.get_tensor(key)
                    tensor.sum()
                    size += tensor.numel() * tensor.element_size()
    ended = _now()
    return {**{clock: ended[clock] - began[clock] for clock in CLOCKS}, "bytes": size}


def _make(folder: Path, size: str) -> Path:
    import torch
    from transformers import Qwen2VLImageProcessorPil, Qwen3VLConfig, Qwen3VLForConditionalGeneration

    from tests.harness import large_checkpoint

    # The defaults of the vision half are the real ones; the language half's are of no matter, but it is there.
    text = {"num_hidden_layers": 8, "hidden_size": 3584, "dtype": "bfloat16"}
    config = Qwen3VLConfig(vision_config=dict(SIZES[size]), text_config=text)
    config.dtype = torch.bfloat16
    processor = Qwen2VLImageProcessorPil(patch_size=16)
    large_checkpoint.write(
        Qwen3VLForConditionalGeneration, config, processor, folder, ("model.visual.",), torch.bfloat16
    )
    return folder


if __name__ == "__main__":
    main()
