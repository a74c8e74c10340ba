"""Shared by all tests: checkpoints made once, worlds started once and reused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from spmd_encoder.models.base import LoadContext

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# The same examples in every run, so that no change fails by what another one's run would have found.
settings.register_profile("fixed", deadline=None, derandomize=True)
# New ones, and those that failed before: `make fuzz`.
settings.register_profile("fuzz", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("fixed")


@pytest.fixture(scope="session")
def qwen_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen2.5-VL checkpoint, float32, saved as several shards."""
    from spmd_encoder.models.qwen2_5_vl import Qwen25VLAdapter

    folder = tmp_path_factory.mktemp("qwen2_5_vl")
    Qwen25VLAdapter.tiny_checkpoint(folder, seed=7)
    return folder


@pytest.fixture(scope="session")
def dinov2_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from spmd_encoder.models.dinov2 import Dinov2Adapter

    folder = tmp_path_factory.mktemp("dinov2")
    Dinov2Adapter.tiny_checkpoint(folder, seed=7)
    return folder


@pytest.fixture(scope="module")
def context() -> Iterator[LoadContext]:
    """A group of one, for loading in this process: float32 on the CPU, one thread."""
    import torch
    import torch.distributed as dist

    from spmd_encoder.models.base import LoadContext

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield LoadContext(dtype=torch.float32, device=torch.device("cpu"), group=dist.group.WORLD)
    dist.destroy_process_group()
