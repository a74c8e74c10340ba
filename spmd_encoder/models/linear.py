"""Linear layers in pieces that a CPU likes, with exactly the sums of `F.linear`.

oneDNN's kernels are faster than MKL's, which torch takes for float32 (a tenth on an AMD CPU), but sum in another
order: results then differ from transformers' by 1.5e-6 of their size. They are not used.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

BLOCK = 256
"""Rows of one block. A layer's values for so many rows fit into the cache of one core."""
_SLICE = 512
"""Outputs that are computed in one go. MKL on an AMD CPU makes 1280 to 3420, the real Qwen2.5-VL's, at 67 to 73
GFLOP/s as a whole and at 93 in such slices; layers of up to twice as many outputs gain nothing."""


def linear_block(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` of one block, `[rows, in]` to `[rows, out]`, to the bit."""
    wide = weight.shape[0]
    if wide <= 2 * _SLICE or x.is_cuda or x.dtype is not torch.float32:
        return F.linear(x, weight, bias)
    out = x.new_empty(len(x), wide)
    for start in range(0, wide, _SLICE):
        piece = slice(start, start + _SLICE)
        if bias is None:
            torch.mm(x, weight[piece].t(), out=out[:, piece])
        else:
            torch.addmm(bias[piece], x, weight[piece].t(), out=out[:, piece])
    return out


def by_rows(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """`function` of all `inputs`, `[rows, ...]` each, whose rows do not depend on each other.

    On a CPU it is called for a block of rows at a time: each pass over a tensor that left the cache costs as much as
    several within it, and large tensors cost a page fault for every 4 KB too.
    """
    if inputs[0].is_cuda or len(inputs[0]) <= BLOCK:
        return function(*inputs)
    starts = range(0, len(inputs[0]), BLOCK)
    return torch.cat([function(*(tensor[start : start + BLOCK] for tensor in inputs)) for start in starts])
