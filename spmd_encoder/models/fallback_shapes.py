"""How many rows a model gives, found out before the forward by a run in which weights have no values.

The model's weights are on the meta device, which has shapes alone, and an item's tensors are real. So what a model's
code decides by an item (its size, grids, masks) it decides here as it will later, and what comes of weights costs no
arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

_LIKE_ITS_ARGUMENT = frozenset(
    {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "new_tensor"}
)
"""What makes tensors on its argument's device out of plain numbers: they keep their values."""


class ShapeRun(TorchFunctionMode):
    """While it is on, tensors with and without values may meet, and what comes of both has none.

    `touched` are the names of those of the model's tensors that were used. A model that asks for a value that depends
    on weights fails with torch's own error (RuntimeError).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        self.touched: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name, given = getattr(func, "__name__", ""), dict(kwargs or {})
        if name in ("__get__", "__set__"):  # an attribute: of a weight's only those count that are tensors, as `.T`
            found = func(*args, **given)
            if isinstance(found, Tensor):
                self._note(args)
            return found
        self._note([args, given])
        if name == "to":
            return _to(args, given)
        if name in _LIKE_ITS_ARGUMENT:
            return func(*args, **{"device": "cpu", **given, **_off_meta(given)})
        given.update(_off_meta(given))
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves([args, given])):
            # An index with values says how much is taken; one without could not.
            index_stays = name == "__getitem__" and args[0].is_meta
            args = args if index_stays else tree_map(_without_values, args)
            given = tree_map(_without_values, given)
        return func(*args, **given)

    def _note(self, used: Any) -> None:
        self.touched.update(self._names[id(leaf)] for leaf in tree_leaves(used) if id(leaf) in self._names)


def _off_meta(given: Mapping[str, Any]) -> dict[str, Any]:
    """What is made of plain numbers keeps its values, whichever device a weight has told."""
    device = given.get("device")
    return {"device": "cpu"} if device is not None and torch.device(device).type == "meta" else {}


def _without_values(leaf: Any) -> Any:
    """Single numbers stay as they are: torch takes them with tensors of any device, and they may be sizes."""
    return leaf.to("meta") if isinstance(leaf, Tensor) and leaf.ndim else leaf


def _to(args: Sequence[Any], given: Mapping[str, Any]) -> Any:
    """`Tensor.to`, without a move to or from the device that has no values."""
    tensor, *others = args
    wanted = [given.get("dtype"), given.get("other"), *others]
    dtypes = [one.dtype if isinstance(one, Tensor) else one for one in wanted]
    dtype = next((one for one in dtypes if isinstance(one, torch.dtype)), None)
    return tensor if dtype is None else tensor.to(dtype)
