"""An item's rows go out as many as were promised and finite, or not at all."""

from __future__ import annotations

import pytest
import torch

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
