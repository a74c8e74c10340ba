"""A run without values tells shapes, keeps what an item decides, and sees which weights are used."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from spmd_encoder.models.fallback_shapes import ShapeRun


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.second = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)
        self.newline = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor, mask: Tensor, grid: Tensor) -> Tensor:
        """The rows of `mask`, in as many pieces as `grid` says, with a newline after each."""
        hidden = self.second(torch.relu(self.first(x)))
        bias = torch.arange(len(x), device=hidden.device, dtype=hidden.dtype)[:, None]
        pad = torch.zeros_like(hidden)
        pad[: len(x)] = hidden + bias
        kept = torch.cat([pad[:0], hidden.to(x.device, torch.float32)])[mask]
        sizes = grid.prod(-1).tolist()
        pieces = [torch.cat([piece, self.newline[None]]) for piece in torch.split(kept, sizes)]
        return torch.cat(pieces)


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    mask = torch.tensor([True, True, False, True, True, True, True])
    return torch.randn(7, 6), mask, torch.tensor([[1, 2], [2, 2]])


def _run(model: nn.Module, *inputs: Tensor) -> tuple[Tensor, set[str]]:
    run = ShapeRun(model)
    with torch.inference_mode(), run:
        return model(*inputs), run.touched


def test_shapes_are_those_of_the_real_run() -> None:
    inputs = _inputs()
    with torch.device("meta"):
        hollow = Small()
    got, _ = _run(hollow, *inputs)
    assert got.is_meta
    assert got.shape == Small()(*inputs).shape == (8, 4)


def test_an_item_decides_as_in_the_real_run() -> None:
    x, mask, grid = _inputs()
    with torch.device("meta"):
        hollow = Small()
    mask[:2] = False
    assert _run(hollow, x, mask, torch.tensor([[2, 2]]))[0].shape == (5, 4)
    with pytest.raises(RuntimeError, match="split"):  # four rows are not six
        _run(hollow, x, mask, grid)


def test_the_weights_that_were_used_are_known() -> None:
    with torch.device("meta"):
        hollow = Small()
    _, touched = _run(hollow, *_inputs())
    assert touched == {"first.weight", "first.bias", "second.weight", "second.bias", "newline"}


def test_a_weight_s_shape_and_dtype_are_no_use_of_it() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.asked = nn.Linear(2, 2)
            self.turned = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            rows: Tensor = x.to(self.asked.weight.dtype).to(self.asked.weight.device) @ self.turned.weight.T
            return rows.new_zeros(len(rows)) if self.asked.weight.shape[0] != 2 else rows

    with torch.device("meta"):
        hollow = Asks()
    got, touched = _run(hollow, torch.ones(4, 3))
    assert got.shape == (4, 2)
    assert touched == {"turned.weight"}


def test_what_depends_on_a_weight_s_value_is_an_error() -> None:
    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return x if (x * self.gate).sum() > 0 else x[:1]

    with torch.device("meta"):
        hollow = Decides()
    with pytest.raises((RuntimeError, NotImplementedError)):
        _run(hollow, torch.ones(4, 3))
