"""TP = 3, 4 (2: `make sweep`) under a real torchrun give the numbers of transformers' whole model, for each family.

The file is its own program: torchrun runs it on every rank, once per size, over all checkpoints.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.harness.families import SAME_TOWER

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-5
"""Largest difference over largest value at TP > 1."""
FAMILIES = "families.json"
NUMBERS = ("difference", "bfloat16_difference", "spread_difference", "largest_share")


def write_checkpoints(root: Path) -> list[str]:
    """Tiny checkpoints below `root`; their folders' names."""
    from transformers import BitImageProcessorPil, Dinov2Config, Dinov2Model

    from spmd_encoder.models import registry
    from spmd_encoder.models.loading import adapter_class
    from spmd_encoder.models.tiny import write_random

    for entry in registry.FAMILIES:
        adapter_class(entry).tiny_checkpoint(root / entry.family, seed=5)
    config = Dinov2Config(hidden_size=48, num_hidden_layers=2, num_attention_heads=6, image_size=112, patch_size=14)
    config.use_swiglu_ffn = True  # as in DINOv2 giant
    processor = BitImageProcessorPil(crop_size={"height": 112, "width": 112})
    write_random(Dinov2Model, config, processor, root / "dinov2-swiglu", seed=5)
    return [*(entry.family for entry in registry.FAMILIES), "dinov2-swiglu"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    root = tmp_path_factory.mktemp("tp")
    return root, write_checkpoints(root)


# Worlds of two ranks compare one family of each kind: `test_families.py`.
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.sweep), 3, 4])
def test_split_towers_equal_whole_ones(checkpoints: tuple[Path, list[str]], tmp_path: Path, size: int) -> None:
    root, names = checkpoints
    # Towers that several families have are cut for all of them at one size only.
    names = [name for name in names if size == 3 or name not in SAME_TOWER]
    (tmp_path / FAMILIES).write_text(json.dumps(names))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    report = tmp_path / "report.json"
    done = subprocess.run(
        [*command, __file__, str(root), str(report)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(report.read_text())
    print(json.dumps(found, indent=1))
    for name in names:
        assert found[name]["difference"] <= TOLERANCE, found
        assert found[name]["bfloat16_difference"] <= 0.1, found
        assert found[name]["spread_difference"] <= 1e-6, found
        # No rank holds the whole tower, and nothing but what cannot be split is held twice.
        assert found[name]["largest_share"] < 0.8, found
        # Each kind of module that is cut is compared with a whole one at the start.
        assert len(found[name]["wrong cuts"]) >= (1 if name == "dinov3_convnext" else 2), found
        for kind, said in found[name]["wrong cuts"].items():
            assert f"{kind} differs from the whole one" in said, (name, kind, said)
    assert "has 4 blocks instead of 5" in found["wrong plan"]
    assert "use --tp-size 1" in found["wrong plan"]
    assert "--tp-size must be at most 1" in found["too few heads"]


def relative(got: Any, want: Any) -> float:
    """Largest difference over largest value; infinite where shapes differ or only one is there."""
    if got is None or want is None or got.shape != want.shape:
        return 0.0 if got is want else float("inf")
    return float((got.float() - want).abs().max() / want.abs().max())


def compare(folder: Path, group: Any, alone: Any) -> dict[str, float]:
    """Differences between this group's split tower and transformers' whole model, singles and one mixed batch.

    `alone` is a group of this rank only, for the size of the tower that is not split.
    """
    import torch
    import torch.distributed as dist

    from spmd_encoder.models.base import LoadContext
    from spmd_encoder.models.loading import load_adapter
    from tests.harness.samples import forwards, samples

    cpu = torch.device("cpu")
    adapter = load_adapter(folder, LoadContext(dtype=torch.float32, device=cpu, group=group))
    half = load_adapter(folder, LoadContext(dtype=torch.bfloat16, device=cpu, group=group))
    unsplit = load_adapter(folder, LoadContext(dtype=torch.float32, device=cpu, group=alone))
    wanted = samples(adapter, folder)
    worst, worst_half = 0.0, 0.0
    for want, in_batch in zip(wanted, forwards(adapter, [sample.features for sample in wanted]), strict=True):
        (single,), (rough,) = forwards(adapter, [want.features]), forwards(half, [want.features])
        for out in (single, in_batch):
            worst = max(worst, relative(out.tokens, want.tokens), relative(out.pooled, want.pooled))
        worst_half = max(worst_half, relative(rough.tokens, want.tokens), relative(rough.pooled, want.pooled))
    worst_spread = spread_items(unsplit, wanted, group)
    # Every rank's numbers count, not rank 0's alone.
    numbers = torch.tensor([worst, worst_half, worst_spread, adapter.tower_bytes / unsplit.tower_bytes])
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    return dict(zip(NUMBERS, numbers.tolist(), strict=True))


def spread_items(adapter: Any, wanted: Any, group: Any) -> float:
    """The largest difference where each rank has whole weights and its own items: batches of one (all other ranks have
    none), two, and as many as are there."""
    import torch
    import torch.distributed as dist

    from spmd_encoder.worker.encoder import MMEncoder, specs_of
    from spmd_encoder.worker.spread import SpreadItems

    encoder = MMEncoder(adapter, SpreadItems(group), torch.device("cpu"))
    leads, worst = dist.get_rank(group) == 0, 0.0
    by_key: dict[Any, list[Any]] = {}
    for sample in wanted:
        by_key.setdefault((sample.features.modality, adapter.batch_key(sample.features)), []).append(sample)
    for samples in by_key.values():
        for count in sorted({1, min(2, len(samples)), len(samples)}):
            items = [sample.features for sample in samples[:count]]
            shares = encoder.spread.shares([item.cost for item in items])
            tensors = [adapter.pack([items[i] for i in share]) if share else {} for share in shares]
            outputs = encoder.run([specs_of(shard) for shard in tensors], tensors if leads else None).outputs
            order = [index for share in shares for index in share]
            assert len(outputs) == (count if leads else 0)
            for index, out in zip(order, outputs, strict=False):
                want = samples[index]
                worst = max(worst, relative(out.tokens, want.tokens), relative(out.pooled, want.pooled))
    return worst


def refusals(root: Path, group: Any) -> dict[str, str]:
    """What is said of a model that the plan does not fit, and of too few heads."""
    import dataclasses
    from unittest import mock

    import torch

    from spmd_encoder.errors import StartupError
    from spmd_encoder.models import sharding
    from spmd_encoder.models.base import LoadContext
    from spmd_encoder.models.loading import load_adapter
    from spmd_encoder.models.qwen2_5_vl import Qwen25VLAdapter

    context = LoadContext(dtype=torch.float32, device=torch.device("cpu"), group=group)

    def reason(patch: Any) -> str:
        try:
            with patch:
                load_adapter(root / "qwen2_5_vl", context)
        except StartupError as error:
            return error.message
        return "nothing was refused"

    plan_of: Callable[[Any], sharding.TowerPlan] = Qwen25VLAdapter.plan

    def longer(config: Any) -> sharding.TowerPlan:
        return dataclasses.replace(plan_of(config), num_blocks=5)

    def one_head(config: Any) -> sharding.TowerPlan:
        plan = plan_of(config)
        attention = dataclasses.replace(plan.in_block[0], heads="num_key_value_groups")
        return dataclasses.replace(plan, in_block=(attention, *plan.in_block[1:]))

    return {
        "wrong plan": reason(mock.patch.object(Qwen25VLAdapter, "plan", longer)),
        "too few heads": reason(mock.patch.object(Qwen25VLAdapter, "plan", one_head)),
    }


def wrong_cuts(folder: Path, group: Any) -> dict[str, str]:
    """What is said where the modules of one kind are cut wrongly, for each kind that this checkpoint's plan cuts."""
    from unittest import mock

    import torch

    from spmd_encoder.errors import StartupError
    from spmd_encoder.models import sharding
    from spmd_encoder.models.base import LoadContext
    from spmd_encoder.models.loading import load_adapter

    context = LoadContext(dtype=torch.float32, device=torch.device("cpu"), group=group)
    cut: Callable[[Any, sharding.Split, Any], None] = sharding._cut
    kinds: set[str] = set()

    def noting(module: Any, split: sharding.Split, group: Any) -> None:
        kinds.add(split.path)
        cut(module, split, group)

    def same_for_all(count: int, size: int, rank: int) -> tuple[int, int]:
        return 0, count // size

    with mock.patch.object(sharding, "_cut", noting):
        load_adapter(folder, context)
    said = {}
    for kind in sorted(kinds):

        def wrong(module: Any, split: sharding.Split, group: Any, kind: str = kind) -> None:
            bounds = same_for_all if split.path == kind else sharding.bounds
            with mock.patch.object(sharding, "bounds", bounds):
                cut(module, split, group)

        try:
            with mock.patch.object(sharding, "_cut", wrong):
                load_adapter(folder, context)
            said[kind] = "nothing was refused"
        except StartupError as error:
            said[kind] = error.message
    return said


def main(root: Path, report: Path) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    group = dist.group.WORLD
    alone, _ = dist.new_subgroups(1)
    families: list[str] = json.loads(report.with_name(FAMILIES).read_text())
    found: dict[str, Any] = {name: compare(root / name, group, alone) for name in families}
    for name in families:
        found[name]["wrong cuts"] = wrong_cuts(root / name, group)
    found |= refusals(root, group)
    if dist.get_rank() == 0:
        report.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
