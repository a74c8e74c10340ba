"""The checkpoints that scenarios measure, by name; each is made once per machine. Imports no torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args

from spmd_encoder.config import cache_dir

Tower = Literal["tiny", "mid", "siglip-base", "siglip-tiny", "qwen-1280"]
DEMO: Mapping[str, str] = MappingProxyType({"tiny": "demo:qwen2.5-vl-tiny"})
"""Made by the server itself. Its tower takes less time than HTTP."""
MADE = tuple(name for name in get_args(Tower) if name not in DEMO)
"""`mid`: a Qwen2.5-VL tower of width 320. `siglip-base`: base/16 at 224. `qwen-1280`: a Qwen2.5-VL tower of its real
width, depth 8, with window attention. `siglip-tiny`: next to nothing."""

# Raised when what `make_checkpoint` writes changes.
_RECIPE = 1


def model_path(name: str) -> str:
    """For `--model-path`. Raises ValueError for an unknown name, RuntimeError where it cannot be made."""
    if name in DEMO:
        return DEMO[name]
    if name not in MADE:
        raise ValueError(f"there is no tower {name!r}; there are: {', '.join(get_args(Tower))}")
    folder = cache_dir() / "benchmarks" / f"{name}-r{_RECIPE}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=folder.parent))
        try:
            _make(name, scratch)
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return str(folder)


def _make(name: str, folder: Path) -> None:
    print(f"making the checkpoint {name}, once", file=sys.stderr)
    command = [sys.executable, "-m", "benchmarks.make_checkpoint", name, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the checkpoint {name} could not be made: {done.stderr[-2000:]}")
