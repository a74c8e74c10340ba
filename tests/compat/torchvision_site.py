"""A pytest plugin (`-p`): makes the torchvision of `make torchvision` importable before anything asks for it.

The wheel on PyPI is for the CUDA build of PyTorch. What is compared here is Python over PyTorch's own operators; the
wheel's compiled ones, of detection, cannot be loaded beside a CPU build and are not called. Two of them are named when
torchvision is imported: they get a declaration without a body.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch

_NAMED_AT_IMPORT = ("nms", "qnms")
_LIBRARY: Any = torch.library.Library  # not typed
_DECLARED = _LIBRARY("torchvision", "FRAGMENT")


def _make_importable(site: str) -> None:
    sys.path.insert(0, site)
    spec = importlib.util.find_spec("torchvision")
    assert spec is not None, f"{site} has no torchvision"
    assert spec.origin is not None
    try:
        load: Any = torch.ops.load_library
        load(next(Path(spec.origin).parent.glob("_C*.so")))
    except OSError:
        for name in _NAMED_AT_IMPORT:
            _DECLARED.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


if found := os.environ.get("TORCHVISION_SITE"):
    _make_importable(found)
