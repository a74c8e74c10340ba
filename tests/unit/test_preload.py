"""After a family's preload a fork has nothing left to import, and the process that forks has one thread."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from spmd_encoder.models import registry
from spmd_encoder.models.loading import adapter_class

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of each family why it is wrong, or nothing."""
    folder = tmp_path_factory.mktemp("preload")
    for entry in registry.FAMILIES:
        adapter_class(entry).tiny_checkpoint(folder / entry.family, seed=0)
    env = {"OMP_NUM_THREADS": "1", "PATH": "/usr/bin", "HOME": str(folder)}
    command = [sys.executable, "-m", "tests.harness.preloads", str(folder)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("family", [entry.family for entry in registry.FAMILIES])
def test_preload_starts_no_thread_and_leaves_nothing_to_import(said: dict[str, str], family: str) -> None:
    assert said[family] == ""
