"""An item's rows go out as many as were promised and finite, or not at all."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmd_encoder.api.types import OutputKind
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.models.base import Features, TowerOutput
from spmd_encoder.runtime.engine import finish

FEATURES = Features(tensors={}, num_tokens=3, cost=12, grid=(1, 3, 4))


@pytest.mark.parametrize("rows", [0, 2, 4, 376])
@pytest.mark.parametrize("kind", OutputKind)
def test_another_number_of_rows_than_was_promised(rows: int, kind: OutputKind) -> None:
    outcome = finish(kind, FEATURES, TowerOutput(tokens=torch.ones(rows, 5), pooled=torch.ones(5)))
    assert isinstance(outcome, EncoderError)
    assert outcome.code is ErrorCode.INTERNAL
    assert f"{rows} rows where 3 were promised" in outcome.message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_value_that_is_not_finite(value: float, dtype: torch.dtype) -> None:
    good, bad = torch.ones(3, 5, dtype=dtype), torch.ones(3, 5, dtype=dtype)
    bad[1, 4] = value
    for kind, output in (
        (OutputKind.TOKENS, TowerOutput(tokens=bad)),
        (OutputKind.POOLED, TowerOutput(tokens=good, pooled=bad[1])),
    ):
        outcome = finish(kind, FEATURES, output)
        assert isinstance(outcome, EncoderError)
        assert outcome.code is ErrorCode.NON_FINITE
    outcome = finish(OutputKind.TOKENS, FEATURES, TowerOutput(tokens=good))
    assert not isinstance(outcome, EncoderError)
    assert (outcome.shape, outcome.num_tokens, outcome.grid) == ((3, 5), 3, (1, 3, 4))


@given(
    rows=st.integers(1, 70),
    width=st.integers(2, 70),
    value=st.sampled_from([float("nan"), float("inf"), float("-inf")]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    is_cut=st.booleans(),
    data=st.data(),
)
def test_it_is_found_wherever_it_is(
    rows: int, width: int, value: float, dtype: torch.dtype, is_cut: bool, data: st.DataObject
) -> None:
    """In tensors of every size and stride, as the kernel takes several values at a time."""
    tokens = torch.randn(rows, 2 * width).to(dtype)[:, ::2] if is_cut else torch.randn(rows, width).to(dtype)
    features = Features(tensors={}, num_tokens=rows, cost=1)
    assert not isinstance(finish(OutputKind.TOKENS, features, TowerOutput(tokens=tokens)), EncoderError)
    tokens[data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, width - 1))] = value
    outcome = finish(OutputKind.TOKENS, features, TowerOutput(tokens=tokens))
    assert isinstance(outcome, EncoderError) and outcome.code is ErrorCode.NON_FINITE
