"""What the ranks of a world must have in common, besides the configuration."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

import torch
import transformers

from spmd_encoder import __version__
from spmd_encoder.wire.messages import PROTOCOL_VERSION


def versions_fact() -> str:
    return (
        f"spmd_encoder {__version__}, protocol {PROTOCOL_VERSION}, python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )


def weights_fact(folder: Path) -> str:
    """The checkpoint's identity, cheap to tell: its JSON files' content and its weight files' sizes."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.json")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}\0".encode())
    return "sha256:" + digest.hexdigest()
