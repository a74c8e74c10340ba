"""Loads the encoder half of a checkpoint into transformers' own class; the rest never takes memory.

The class is built on the meta device, only the wanted weights get storage, and on a CPU they stay views of the
mapped safetensors files, shared between ranks through the page cache: nothing here clones, or casts to an equal
dtype. Functions of transformers that are not public are used here and in `models.building` only (tested: 5.24).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import (
    GroupWeightRename,
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from spmd_encoder.errors import StartupError
from spmd_encoder.models.base import LoadContext
from spmd_encoder.models.building import build_on_meta, built, check_heads, make_buffers
from spmd_encoder.models.checkpoint import broken, no_room, shard_keys
from spmd_encoder.models.leftovers import Leftovers, doubles
from spmd_encoder.models.prefetch import prefetch
from spmd_encoder.models.sharding import TowerPlan, pack_linears, shard_tower, verify_sharding

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

ModelT = TypeVar("ModelT", bound=PreTrainedModel)
LoadedT = TypeVar("LoadedT")


def warm_up() -> None:
    """Have transformers compile its table of weights' names, over a thousand patterns, which it then keeps.

    A process that was forked after this loads a tenth of a second sooner.
    """
    table: Any = get_checkpoint_conversion_mapping
    table("")


def from_folder(cls: type[LoadedT], folder: Path, **options: Any) -> LoadedT:
    """A configuration or processor of transformers, from local files only, loaded with `options`.

    Raises StartupError where the folder's file is missing or not usable.
    """
    try:
        loaded: LoadedT = cls.from_pretrained(  # type: ignore[attr-defined]
            folder, local_files_only=True, trust_remote_code=False, **options
        )
    except Exception as error:  # whatever transformers finds wrong with a file of the user's
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise StartupError(f"{folder}: {cls.__name__} cannot be read from this checkpoint ({first})") from None
    return loaded


def load_tower(
    cls: type[ModelT],
    config: PreTrainedConfig,
    folder: Path,
    keep: str | tuple[str, ...],
    plan: TowerPlan,
    context: LoadContext,
) -> ModelT:
    """`cls` with this rank's share of the modules under `keep` ("" for all) on the device, the rest on meta.

    `keep` are paths of modules or parameters; their weights are in `context.dtype`, non-persistent buffers as the
    model makes them. The model is in eval mode and without gradients. Collective over the group (`verify_sharding`).
    Raises StartupError that names a shard that is missing or broken, or weights that are missing.
    """
    model = load_whole(cls, config, folder, keep, context.dtype)
    probes = shard_tower(model, plan, context.group)
    place(model, context)
    if context.fast_linears:
        pack_linears(model)
    for probe in probes:
        place(probe.full, context)
    verify_sharding(probes)
    return model


def load_whole(
    cls: type[ModelT],
    config: PreTrainedConfig,
    folder: Path,
    keep: str | tuple[str, ...],
    fallback_dtype: torch.dtype,
) -> ModelT:
    """`load_tower` on the CPU, before any cutting and in the dtype that the files have.

    `fallback_dtype` is used instead where the files mix dtypes.
    """
    kept = _Kept(keep)
    shards = shard_keys(folder)
    with ExitStack() as files:
        # Names and renames do not depend on the dtype, which only the files can tell.
        model = built(cls, config, folder, fallback_dtype)
        check_heads(model, folder, kept)
        own = model.state_dict()
        picked = _pick(model, own, folder, shards, kept, files)
        leftovers = Leftovers(folder, model, picked.unknown, kept)
        leftovers.refuse_projection()
        floats = [piece for key, piece in picked.slices.items() if own[picked.names[key]].is_floating_point()]
        stored = {_FLOATS.get(piece.get_dtype()) for piece in floats}
        if None in stored:
            raise StartupError(f"{folder}: the encoder's weights are quantised, which is not supported here")
        if len(stored) == 1 and (dtype := stored.pop()) is not None and dtype != fallback_dtype:
            model = build_on_meta(cls, config, dtype)
            own = model.state_dict()
        if picked.needs_conversion:
            _fill(model, folder, picked, kept, leftovers)
        else:
            _assign(model, own, folder, picked, kept, leftovers)
    make_buffers(model, folder, kept)
    left = [n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta and n in kept]
    if left:
        raise StartupError(f"{folder}: {len(left)} tensors of the encoder got no value, first {left[0]}")
    model.train(False)
    model.requires_grad_(False)
    return model


def place(module: nn.Module, context: LoadContext) -> None:
    """Bring all that is not on meta to the device, parameters to the dtype too. What is right already stays."""
    for parameter in module.parameters():
        if not parameter.is_meta:
            parameter.data = parameter.data.to(context.device, context.dtype)
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if not buffer.is_meta:
                setattr(owner, name, buffer.to(context.device))


def real_bytes(module: nn.Module) -> int:
    """Bytes of the parameters that are not on meta."""
    return sum(p.numel() * p.element_size() for p in module.parameters() if not p.is_meta)


class _Kept:
    """Whether a module or tensor lies at or below one of the paths; an empty path keeps all."""

    def __init__(self, paths: str | tuple[str, ...]) -> None:
        self._prefixes = tuple(f"{path}." if path else "" for path in ((paths,) if isinstance(paths, str) else paths))

    def __contains__(self, name: object) -> bool:
        return f"{name}.".startswith(self._prefixes)


@dataclass(frozen=True)
class _Picked:
    """`slices` are lazy, by the names in the files; `names` has the model's name of each. `needs_conversion`: some are
    not just renamed but cut or joined, or renamed by a rule that keeps state. `unknown` are names in the files that the
    model has no use for, each as it is called after renaming."""

    slices: Mapping[str, Any]
    names: Mapping[str, str]
    needs_conversion: bool
    unknown: Mapping[str, str]


def _pick(
    model: PreTrainedModel,
    own: dict[str, Tensor],
    folder: Path,
    shards: Mapping[str, Sequence[str]],
    kept: _Kept,
    files: ExitStack,
) -> _Picked:
    """The wanted weights of `own`, the model's, which the kernel begins to read. Shards without any are not opened."""
    mapping = get_model_conversion_mapping(model)
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    slices: dict[str, Any] = {}
    names: dict[str, str] = {}
    converted: set[str] = set()
    opened: dict[Path, list[str]] = {}
    unknown: dict[str, str] = {}
    for shard, keys in sorted(shards.items()):
        wanted = []
        for key in sorted(keys):
            name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, own)
            if name in own and name in kept:
                wanted.append(key)
                names[key] = name
                if pattern is not None:
                    converted.add(key)
            elif name not in own:
                unknown[key] = name
        if not wanted:
            continue
        try:
            file = files.enter_context(safe_open(folder / shard, framework="pt", device="cpu"))
            slices.update({key: file.get_slice(key) for key in wanted})
        except FileNotFoundError:
            raise StartupError(f"{folder} lacks the weights file {shard}, which its index names; download it") from None
        except (OSError, SafetensorError) as error:
            raise broken(folder / shard, error) from None
        except (MemoryError, RuntimeError):  # torch's is the latter
            raise no_room(folder / shard) from None
        opened[folder / shard] = wanted
    for key in [*doubles(folder, slices, names, converted)]:
        del slices[key], names[key]
    prefetch(opened)
    keeps_state = any(isinstance(m, GroupWeightRename) for m in mapping)
    return _Picked(slices, names, bool(converted) or keeps_state, unknown)


def _assign(
    model: PreTrainedModel,
    own: Mapping[str, Tensor],
    folder: Path,
    picked: _Picked,
    kept: _Kept,
    leftovers: Leftovers,
) -> None:
    """What `_fill` does where weights are only renamed: transformers would compile two patterns for each of them."""
    missing = sorted(name for name in own.keys() - set(picked.names.values()) if name in kept)
    leftovers.refuse(missing)
    weights = {}
    for key, piece in picked.slices.items():
        name = picked.names[key]
        _refuse_shape(folder, name, piece.get_shape(), own[name].shape)
        weights[name] = piece[...].to(own[name].dtype)
    _assign_tensors(model, weights)


def _assign_tensors(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """What `load_state_dict(assign=True)` does, of these tensors alone and not of every module."""
    modules = dict(model.named_modules())
    for name, tensor in weights.items():
        path, _, own = name.rpartition(".")
        holder = modules[path]
        if own in holder._parameters:
            holder._parameters[own] = nn.Parameter(tensor, requires_grad=False)
        else:
            holder._buffers[own] = tensor


def _refuse_shape(folder: Path, name: str, found: Sequence[int], expected: Sequence[int]) -> None:
    if tuple(found) != tuple(expected):
        raise StartupError(
            f"{folder}: the weight {name} has shape {tuple(found)} where config.json asks for {tuple(expected)}"
        )


def _fill(model: PreTrainedModel, folder: Path, picked: _Picked, kept: _Kept, leftovers: Leftovers) -> None:
    # A fresh mapping: some renamings keep state while keys are renamed.
    mapping: Any = get_model_conversion_mapping(model)
    config = LoadStateDictConfig(dtype=model.dtype, device_map={"": "cpu"}, weight_mapping=mapping)
    with no_progress_bar():
        info, _ = convert_and_load_state_dict_in_model(model, dict(picked.slices), config)
    leftovers.refuse(sorted(key for key in info.missing_keys if key in kept))
    for key, found, expected in sorted(info.mismatched_keys, key=str):
        _refuse_shape(folder, key, found, expected)
    if info.conversion_errors:
        raise StartupError(f"{folder}: the weight {sorted(info.conversion_errors)[0]} cannot be converted")


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """No bars of transformers: reading takes a second at most, and every rank would draw one into the log."""
    switches: Any = transformers_logging
    enabled = switches.is_progress_bar_enabled()
    switches.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            switches.enable_progress_bar()
