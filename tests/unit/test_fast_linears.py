"""`--fast-linears`: other kernels for the same numbers, within a tolerance."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from spmd_encoder.models import registry
from spmd_encoder.models.base import LoadContext
from spmd_encoder.models.linear import linear_block, packed
from spmd_encoder.models.loading import adapter_class, load_adapter
from spmd_encoder.models.sharding import ColumnParallelLinear, RowParallelLinear
from tests.harness.samples import forwards, samples

needs_onednn = pytest.mark.skipif(packed(torch.zeros(4, 4)) is None, reason="this torch has no such kernels")


@needs_onednn
@pytest.mark.parametrize("family", ["qwen2_5_vl", "siglip", "whisper"])
def test_towers_stay_within_the_tolerance(family: str, tmp_path: Path, context: LoadContext) -> None:
    entry = next(entry for entry in registry.FAMILIES if entry.family == family)
    adapter_class(entry).tiny_checkpoint(tmp_path, seed=3)
    adapter = load_adapter(tmp_path, dataclasses.replace(context, fast_linears=True))
    modules = [m for m in adapter._model.modules() if isinstance(m, ColumnParallelLinear | RowParallelLinear)]  # type: ignore[attr-defined]
    assert modules
    assert all(module.fast is not None for module in modules)
    wanted = samples(adapter, tmp_path)
    for want, got in zip(wanted, forwards(adapter, [one.features for one in wanted]), strict=True):
        assert (got.tokens - want.tokens).abs().max() <= 1e-5 * want.tokens.abs().max()


@needs_onednn
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 20, 7), (700, 33, 100)])
def test_a_block_is_the_linear(shape: tuple[int, int, int]) -> None:
    rows, width, out = shape
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, width), torch.randn(out, width), torch.randn(out)
    for given in (bias, None):
        want = torch.nn.functional.linear(x, weight, given)
        torch.testing.assert_close(linear_block(x, weight, given, packed(weight)), want, rtol=1e-5, atol=1e-5)


def test_other_kinds_of_weights_are_left_as_they_are() -> None:
    assert packed(torch.zeros(4, 4, dtype=torch.bfloat16)) is None
    assert packed(torch.zeros(4, 4, dtype=torch.float64)) is None
