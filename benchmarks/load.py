"""How long loading a tower takes beside a plain read of the same tensors with safetensors.

    python -m benchmarks.load [--model-path FOLDER] [--repeat 7] [--cold] [--out FILE]

Without `--model-path` a Qwen3-VL of real proportions is made in a scratch folder: random tower, empty language half.
Each load and each read is a fresh process that has imported everything; the two take turns, with the file in the
page cache, or, with `--cold`, dropped from it before each (a disk below may still have a cache of its own). Both end
with a sum over all values, as loaded weights are views that no one has read yet. Prints one JSON object; `ratio` is the
median of load over read. The load includes building the class and the start's comparison of cut and uncut modules.
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
from pathlib import Path
from typing import Any

from benchmarks.circumstances import circumstances


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
        folder = args.model_path or _make(Path(scratch))
        kinds = ("read", "load")
        runs = [{kind: _run(kind, folder, cold=args.cold) for kind in kinds} for _ in range(args.repeat + 1)]
    # The first pair fills the page cache.
    record = {
        **circumstances("benchmarks.load"),
        "model": str(args.model_path or "Qwen3-VL, depth 27, hidden 1152, bfloat16, random"),
        "page_cache": "cold" if args.cold else "warm",
        **_summary(runs[1:]),
    }
    text = json.dumps(record, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


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


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    if runs[0]["load"]["bytes"] != runs[0]["read"]["bytes"]:
        raise RuntimeError("the two did not read the same tensors")
    seconds = {kind: [run[kind]["seconds"] for run in runs] for kind in ("load", "read")}
    return {
        "tower_mib": round(runs[0]["load"]["bytes"] / 2**20, 1),
        "load_s": [round(s, 3) for s in seconds["load"]],
        "read_s": [round(s, 3) for s in seconds["read"]],
        "ratio": round(statistics.median(a / b for a, b in zip(seconds["load"], seconds["read"], strict=True)), 2),
        "build_and_check_s": round(statistics.median(run["load"]["before_sum"] for run in runs), 3),
    }


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
    began = time.perf_counter()
    adapter: Any = load_adapter(folder, context)
    loaded = time.perf_counter()
    for parameter in adapter._model.parameters():
        if not parameter.is_meta:
            parameter.sum()
    ended = time.perf_counter()
    return {"seconds": ended - began, "before_sum": loaded - began, "bytes": adapter.tower_bytes}


def _read(folder: Path) -> dict[str, float]:
    import torch
    from safetensors import safe_open

    from spmd_encoder.models import registry
    from spmd_encoder.models.checkpoint import read_model_type, shard_keys

    prefixes = registry.find(read_model_type(folder)).tower_keys or ("",)
    torch.set_num_threads(1)
    size = 0
    began = time.perf_counter()
    for shard, keys in shard_keys(folder).items():
        if wanted := [key for key in keys if key.startswith(prefixes)]:
            with safe_open(folder / shard, framework="pt", device="cpu") as file:
                for key in wanted:
                    tensor = file.get_tensor(key)
                    tensor.sum()
                    size += tensor.numel() * tensor.element_size()
    return {"seconds": time.perf_counter() - began, "bytes": size}


def _make(folder: Path) -> Path:
    import torch
    from transformers import Qwen2VLImageProcessorPil, Qwen3VLConfig, Qwen3VLForConditionalGeneration

    from tests.harness import large_checkpoint

    # The defaults of the vision half are the real ones; the language half's are of no matter, but it is there.
    config = Qwen3VLConfig(text_config={"num_hidden_layers": 8, "hidden_size": 3584, "dtype": "bfloat16"})
    config.dtype = torch.bfloat16
    processor = Qwen2VLImageProcessorPil(patch_size=16)
    large_checkpoint.write(
        Qwen3VLForConditionalGeneration, config, processor, folder, ("model.visual.",), torch.bfloat16
    )
    return folder


if __name__ == "__main__":
    main()
