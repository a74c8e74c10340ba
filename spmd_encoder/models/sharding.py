"""Tensor parallelism from outside: slice transformers' Linears, all-reduce after the closing one.

transformers' modules stay single-device code. A `TowerPlan` says which Linears of which modules are cut;
`shard_tower` cuts them, `verify_sharding` compares each kind of cut module with an uncut copy. A group of one
goes the same way: its slices cover everything (views, no copies) and its all-reduce is over one rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from spmd_encoder.distributed.collectives import sum_over
from spmd_encoder.errors import StartupError
from spmd_encoder.models.linear import linear_block, packed

_PROBE_ROWS = 8
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
_HALF_TOLERANCE = 3e-2


def _call(module: nn.Module, hidden: Tensor) -> Tensor:
    out: Tensor = module(hidden)
    return out


def run_batched(module: nn.Module, hidden: Tensor) -> Tensor:
    """For an attention that takes `[batch, rows, width]` and returns a tuple with the output first."""
    out: Tensor = module(hidden.unsqueeze(0))[0]
    return out.squeeze(0)


@dataclass(frozen=True, kw_only=True)
class Split:
    """One module whose Linears are cut: `columns` keep a slice of their output rows, `row` of its input columns.

    `path` is the module's name within its block, "" for the block itself (such a split stands first: its uncut copy is
    one of the whole block). Names may lead through children. `heads` is the module's attribute with the number of heads
    (cuts are then at heads; the attribute is set to this rank's number), or that number itself where the module tells
    it from the width; None cuts single columns. `parts` equal blocks are stacked in each of `columns` (3 for a fused
    qkv). `norms` are modules whose `weight` goes over the columns of all heads and is cut with them. `run` feeds a
    hidden state `[rows, width]` to the module. `faster` makes, of the cut module, one that computes the same and takes
    its place.
    """

    path: str
    columns: tuple[str, ...]
    row: str
    heads: str | int | None = None
    parts: int = 1
    norms: tuple[str, ...] = ()
    run: Callable[[nn.Module, Tensor], Tensor] = _call
    faster: Callable[[nn.Module], nn.Module] | None = None


@dataclass(frozen=True, kw_only=True)
class TowerPlan:
    """How one tower is cut: the ModuleList `blocks` of exactly `num_blocks`, each with all of `in_block`, and
    `once`, whose paths start at the model. `others` are the model's further lists of blocks."""

    blocks: str
    num_blocks: int
    in_block: tuple[Split, ...]
    once: tuple[Split, ...] = ()
    others: tuple[TowerPlan, ...] = ()


@dataclass(frozen=True)
class Probe:
    """One cut module beside an uncut copy of it."""

    name: str
    split: Split
    full: nn.Module
    cut: nn.Module


class ColumnParallelLinear(nn.Module):
    """`y_r = x @ w_r.T + b_r`: this rank's slice of the output."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.in_features = weight.shape[1]  # transformers' code asks for it
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.fast: Tensor | None = None

    def block(self, x: Tensor) -> Tensor:
        """One block of rows, see `by_rows`."""
        return linear_block(x, self.weight, self.bias, self.fast)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` to `[..., this rank's columns]`."""
        return F.linear(x, self.weight, self.bias) if self.fast is None else self.block(x)


class RowParallelLinear(nn.Module):
    """`y = sum over ranks of x_r @ w_r.T`, plus the bias once (rank 0 holds it, so one rank gives nn.Linear's bits)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.group = group
        self.fast: Tensor | None = None

    def block(self, x: Tensor) -> Tensor:
        """This rank's summand for one block of rows, see `by_rows`."""
        return linear_block(x, self.weight, self.bias, self.fast)

    def reduce(self, y: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        return sum_over(self.group, y)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., this rank's columns]` to `[..., out]`, equal on all ranks."""
        return self.reduce(F.linear(x, self.weight, self.bias) if self.fast is None else self.block(x))


def pack_linears(model: nn.Module) -> None:
    """Give the cut Linears their weights in the layout of faster kernels, where there are any (`models.linear`)."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            module.fast = packed(module.weight)


def bounds(count: int, size: int, rank: int) -> tuple[int, int]:
    """This rank's half-open share of `count` units; the first ranks take one more where it does not divide."""
    base, extra = divmod(count, size)
    low = rank * base + min(rank, extra)
    return low, low + base + (rank < extra)


def shard_tower(model: nn.Module, plan: TowerPlan, group: dist.ProcessGroup) -> list[Probe]:
    """Cut `model` in place to this rank's share; returns a probe per kind of cut module for `verify_sharding`.

    Weights may be views of mapped files: rows stay views, columns are copied (only the slice takes memory).
    Raises StartupError where the model is not as the plan expects, or has fewer heads than the group has ranks;
    a rank alone has nothing to cut, and takes such a model whole.
    """
    try:
        targets = _targets(model, plan)
        for name, split, _ in targets:
            _check(model, name, split, group)
    except StartupError:
        if dist.get_world_size(group) == 1:
            return []
        raise
    if dist.get_world_size(group) == 1:  # nothing is cut: one module of each kind shows that ours compute the same
        kinds = [replace(split, path="") for _, split, _ in targets]
        targets = [(name, split, kinds.index(kinds[at]) == at) for at, (name, split, _) in enumerate(targets)]
    probes = []
    for name, split, first in targets:
        module = model.get_submodule(name)
        # The memo keeps the copy's parameters the same tensors: it costs no memory.
        full = copy.deepcopy(module, {id(p): p for p in module.parameters()}) if first else None
        _cut(module, split, group)
        if split.faster is not None:
            module = split.faster(module)
            model.set_submodule(name, module)
        if full is not None:
            probes.append(Probe(name, split, full, module))
    return probes


def refuse_cutting(group: dist.ProcessGroup, what: str) -> None:
    """Raises StartupError where more than one rank would share the weights of `what`, which is never cut."""
    if dist.get_world_size(group) > 1:
        raise StartupError(
            f"{what} cannot be split over ranks: give --tp-size 1, or --mm-encoder-tp-mode data, which gives each rank "
            "whole weights and items of its own"
        )


def verify_sharding(probes: Sequence[Probe]) -> float:
    """Feed each probe's two modules the same random input; returns the largest relative difference.

    Both modules must be on the device that they serve on. Collective: every rank of the group calls it. Raises
    StartupError (on every rank alike, as outputs are equal on all) where they differ by more than rounding.
    """
    worst = 0.0
    for probe in probes:
        weight = probe.full.get_submodule(probe.split.columns[0]).get_parameter("weight")
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(_PROBE_ROWS, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
        with torch.inference_mode():
            want = probe.split.run(probe.full, hidden).float()
            got = probe.split.run(probe.cut, hidden).float()
        if not bool(torch.isfinite(want).all()):
            raise StartupError(
                f"{probe.name} of this model gives values that are not finite: its weights are broken, or --dtype is "
                "too narrow for them; download it again, or give another --dtype"
            )
        difference = ((got - want).abs().max() / want.abs().max().clamp_min(1e-12)).item()
        # Written so that NaN fails too.
        if not difference <= _TOLERANCE.get(weight.dtype, _HALF_TOLERANCE):
            raise StartupError(
                f"the tensor-parallel {probe.name} differs from the whole one by {difference:.1e} of its size: "
                "this model cannot be split here; use --tp-size 1"
            )
        worst = max(worst, difference)
    return worst


def _targets(model: nn.Module, plan: TowerPlan) -> list[tuple[str, Split, bool]]:
    """(module name, its split, whether it is the first of its kind) of everything to cut."""
    try:
        blocks = model.get_submodule(plan.blocks)
    except AttributeError:
        raise _unexpected(f"it has no {plan.blocks}") from None
    count = sum(1 for _ in blocks.children())
    if count != plan.num_blocks:
        raise _unexpected(f"{plan.blocks} has {count} blocks instead of {plan.num_blocks}")
    names = [f"{plan.blocks}.{name}" for name, _ in blocks.named_children()]
    in_blocks = [
        (f"{block}.{split.path}".rstrip("."), split, block == names[0]) for block in names for split in plan.in_block
    ]
    once = [(split.path, split, True) for split in plan.once]
    return in_blocks + once + [target for other in plan.others for target in _targets(model, other)]


def _check(model: nn.Module, name: str, split: Split, group: dist.ProcessGroup) -> None:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise _unexpected(f"it has no {name}") from None
    linears = [_child(module, child) for child in (*split.columns, split.row)]
    for child, linear in zip((*split.columns, split.row), linears, strict=True):
        # Exactly Linear: a quantised or wrapped one keeps its weight in another form.
        if type(linear) is not nn.Linear:
            raise _unexpected(f"{name}.{child} is {type(linear).__name__} instead of Linear")
    *columns, row = (linear for linear in linears if isinstance(linear, nn.Linear))
    for child, linear in zip(split.columns, columns, strict=True):
        if linear.out_features != row.in_features * split.parts:
            raise _unexpected(f"{name}.{child} has {linear.out_features} rows for {row.in_features} columns")
    units = _units(module, split, row.in_features)
    if not isinstance(units, int) or units <= 0 or row.in_features % units:
        raise _unexpected(f"{name} has {units!r} heads over {row.in_features} columns")
    if units < dist.get_world_size(group):
        what = "columns" if split.heads is None else "heads"
        raise StartupError(f"--tp-size must be at most {units}, because {name} of this model has {units} {what}")


def _cut(module: nn.Module, split: Split, group: dist.ProcessGroup) -> None:
    row = _linear(module, split.row)
    width = row.in_features
    heads = _units(module, split, width)
    assert isinstance(heads, int)  # _check has seen it
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    low, high = bounds(heads, size, rank)
    start, stop = low * (width // heads), high * (width // heads)
    ranges = [(part * width + start, part * width + stop) for part in range(split.parts)]
    for name in split.columns:
        whole = _linear(module, name)
        cut_bias = None if whole.bias is None else _rows(whole.bias, ranges)
        module.set_submodule(name, ColumnParallelLinear(_rows(whole.weight, ranges), cut_bias))
    for name in split.norms:
        norm = module.get_submodule(name)
        norm.weight = nn.Parameter(norm.get_parameter("weight").detach()[start:stop], requires_grad=False)
    bias = row.bias.detach() if row.bias is not None and rank == 0 else None
    weight = row.weight.detach()[:, start:stop].contiguous()
    module.set_submodule(split.row, RowParallelLinear(weight, bias, group))
    if isinstance(split.heads, str):
        setattr(module, split.heads, high - low)


def _rows(tensor: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """The rows of all `ranges`, in order; a view where they adjoin."""
    merged: list[tuple[int, int]] = []
    for low, high in ranges:
        if merged and merged[-1][1] == low:
            merged[-1] = (merged[-1][0], high)
        else:
            merged.append((low, high))
    pieces = [tensor.detach()[low:high] for low, high in merged]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _units(module: nn.Module, split: Split, width: int) -> object:
    """How many units there are to be shared: heads, or columns. What is no number, or none, is not as expected."""
    if split.heads is None:
        return width
    return getattr(module, split.heads, None) if isinstance(split.heads, str) else split.heads


def _child(module: nn.Module, name: str) -> nn.Module | None:
    """The child of a name that may lead through others; None where there is none."""
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None


def _linear(module: nn.Module, name: str) -> nn.Linear:
    linear = module.get_submodule(name)
    assert isinstance(linear, nn.Linear)  # _check has seen it
    return linear


def _unexpected(what: str) -> StartupError:
    return StartupError(
        f"this model is not built as the tensor-parallel plan of its family expects ({what}), so it cannot be split; "
        "use --tp-size 1"
    )
