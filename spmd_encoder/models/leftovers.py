"""Weights in the files that the model has no place for, or has one place for two of: what they tell of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from spmd_encoder.errors import StartupError

_COMPUTED = frozenset(
    ("position_ids", "inv_freq", "original_inv_freq", "relative_position_index", "num_batches_tracked", "mask_token")
)
"""What files hold although models compute it, by now or in inference, or use it in training alone."""

_PROJECTIONS = frozenset(("custom_text_proj", "embedding_proj_layer"))
"""A retriever's last layer, as colpali-engine and as transformers call it."""


class Leftovers:
    """`unknown` are the names in the files that `model` has no use for, each with what it would be called in it; `kept`
    are the names of all that is loaded."""

    def __init__(self, folder: Path, model: PreTrainedModel, unknown: Mapping[str, str], kept: Container[str]) -> None:
        self._folder = folder
        self._model = model
        self._modules = dict(model.named_modules(remove_duplicate=False))
        places = {key: _placed(name, model, self._modules) for key, name in unknown.items()}
        self._homes = {key: self._home(name) for key, name in places.items() if name in kept}
        computed = {name for name, _ in model.named_buffers()}
        ignored = re.compile("|".join(f"({p})" for p in _ignored(model)) or r"(?!)")
        self.strays = sorted(
            key
            for key, home in self._homes.items()
            if places[key] not in computed
            and places[key].rpartition(".")[2] not in _COMPUTED
            and not ignored.search(places[key])
            and not self._may_leave_out(home)
        )
        """Names of weights that would have to be in modules that are loaded, and are not."""
        self._unknown = unknown
        self._kept = kept

    def refuse(self, missing: Sequence[str]) -> None:
        """Raises StartupError where weights are missing, and where files hold more than config.json asks for."""
        if missing:
            lacks = f"{self._folder} lacks {len(missing)} weights of the encoder, first {missing[0]}"
            if misnamed := self._misnamed(missing):
                lacks += (
                    f"; it has {len(misnamed)} by names that transformers {transformers.__version__} does not know of "
                    f"this model, first {misnamed[0]}: take a newer conversion, or load and save it with an older "
                    "release"
                )
            raise StartupError(lacks)
        if self.strays:
            raise StartupError(
                f"{self._folder}: its files hold {len(self.strays)} weights of the encoder that config.json has no "
                f"place for, first {self.strays[0]}: config.json does not belong to these weights; download both from "
                "one revision of the checkpoint"
            )

    def refuse_projection(self) -> None:
        """Raises StartupError for a retriever whose projection has no part in the model: it would be left out."""
        if any(path.rpartition(".")[2] in _PROJECTIONS for path in self._modules):
            return
        for key in sorted(self._unknown):
            if not _PROJECTIONS.isdisjoint(key.split(".")):
                raise StartupError(
                    f"{self._folder}: its files hold {key}, the projection of a retriever of colpali-engine, which "
                    f"{type(self._model).__name__} of transformers does not have: take the checkpoint whose name ends "
                    "in -hf (ColPali, ColQwen2), or convert it"
                )

    def _misnamed(self, missing: Sequence[str]) -> list[str]:
        """Names of weights that may be the missing ones: strays, and what lies beside a module without any weight."""
        expected = {name for name in self._model.state_dict() if name in self._kept}
        lost = set(_paths(missing)) - set(_paths(expected - set(missing)))
        beside = {path.rpartition(".")[0] for path in lost}
        return sorted({*self.strays, *(key for key, home in self._homes.items() if home in beside)})

    def _home(self, name: str) -> str:
        """The path of the innermost module that the weight would be in."""
        return next((path for path in reversed([*_paths([name])]) if path in self._modules), "")

    def _may_leave_out(self, path: str) -> bool:
        """Whether a module has parts only sometimes: it is the whole model, or holds a stack of layers, beside which
        there may be a head, a decoder, a teacher. Layers themselves, and modules without any, are always whole."""
        inside = [self._modules[above] for above in [*_paths([f"{path}."])] if above in self._modules]
        if any(isinstance(module, nn.ModuleList | nn.ParameterList) for module in inside):
            return False
        return not path or any(isinstance(module, nn.ModuleList) for module in self._modules[path].modules())


def doubles(
    folder: Path, slices: Mapping[str, Any], names: Mapping[str, str], converted: Container[str]
) -> Iterator[str]:
    """Names in the files of weights that are there by another one too. Raises StartupError where their values differ.

    What is `converted` is joined of several, and there only a name that another one ends in is the same again.
    """
    known: dict[str, str] = {}
    for key in sorted(names, key=lambda key: (key.count("."), key)):
        ends = [".".join(key.split(".")[first:]) for first in range(key.count(".") + 1)] if key in converted else [""]
        first = next((known[same] for end in ends if (same := f"{names[key]}={end}") in known), None)
        if first is None:
            known[f"{names[key]}={ends[0]}"] = key
            continue
        one, other = slices[first][...], slices[key][...]
        if one.dtype != other.dtype or not torch.equal(one, other):
            raise StartupError(
                f"{folder}: its files hold the weight {names[key]} twice, as {first} and as {key}, with other values: "
                "download the checkpoint again, or remove the one that does not belong to it"
            )
        yield key


def _paths(names: Iterable[str]) -> Iterator[str]:
    """The paths of all modules that weights with these names are in, of each from the outermost on."""
    for name in names:
        for end, letter in enumerate(name):
            if letter == ".":
                yield name[:end]


def _placed(name: str, model: PreTrainedModel, modules: Container[str]) -> str:
    """The name with the prefix of the model that `model` wraps, or without its own, as transformers finds weights."""
    prefix, first = model.base_model_prefix, name.partition(".")[0]
    if not prefix or first in modules:
        return name
    if first == prefix:
        return name.removeprefix(f"{prefix}.")
    return f"{prefix}.{name}" if f"{prefix}.{first}" in modules else name


def _ignored(model: Any) -> Iterable[str]:
    """Patterns of what transformers expects to find too much; each model has those of its parts as well."""
    return sorted(model._keys_to_ignore_on_load_unexpected or ())
