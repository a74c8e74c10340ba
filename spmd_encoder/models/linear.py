"""Linear layers in pieces that a CPU likes, with the sums of `F.linear` in the same order.

oneDNN's kernels are faster than MKL's, which torch takes for float32 (by 10 to 50 % on an AMD CPU), but sum in another
order: results then differ from transformers' by some 2e-6 of their size. They want the weights in a layout of their
own, so that these are no longer the mapped file's, which all ranks of a node share. `--fast-linears` asks for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

BLOCK = 512
"""About so many rows make one block: a layer's values for them stay near a core. 256 and 1024 are 0 to 3 % slower."""
_SLICE = 512
"""Outputs of a wide layer that are computed in one go. For one block MKL on an AMD CPU makes the real Qwen2.5-VL's 1280
to 3420 at 70 GFLOP/s as a whole and at 92 in such slices; other layers of over 2560 outputs gain 2 to 10 %, narrower
ones nothing."""
_WIDE = 2560


def packed(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's layout for `linear_block`; None where this torch, or the weight's kind, has none.

    The operators are those that torch's own compiler calls (`torch/_inductor/fx_passes/mkldnn_fusion.py`).
    """
    if weight.is_cuda or weight.dtype is not torch.float32:
        return None
    operators: Any = torch.ops.mkldnn
    try:
        made: Tensor = operators._reorder_linear_weight(weight, BLOCK)
        operators._linear_pointwise(weight[:1], made, None, "none", [], "")
    except (AttributeError, RuntimeError):  # another release's operators
        return None
    return made


def linear_block(x: Tensor, weight: Tensor, bias: Tensor | None, fast: Tensor | None = None) -> Tensor:
    """`F.linear` of one block, `[rows, in]` to `[rows, out]`; by oneDNN where `fast` is the packed weight."""
    if fast is not None:
        operators: Any = torch.ops.mkldnn
        return operators._linear_pointwise(x, fast, bias, "none", [], "")  # type: ignore[no-any-return]
    width = weight.shape[0]
    if width <= _WIDE or x.is_cuda or x.dtype is not torch.float32:
        return F.linear(x, weight, bias)
    out = x.new_empty(len(x), width)
    for start in range(0, width, _SLICE):
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
    blocks = 1 if inputs[0].is_cuda else round(len(inputs[0]) / BLOCK)
    if blocks <= 1:
        return function(*inputs)
    # Of nearly equal size: a last one of a few rows would read all weights for little.
    split = zip(*(tensor.tensor_split(blocks) for tensor in inputs), strict=True)
    return torch.cat([function(*block) for block in split])
