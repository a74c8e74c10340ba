"""Builds transformers' own classes without memory: on the meta device, which has shapes alone.

What `config.json` asks for is met here first, so what is wrong or absurd in it is told here, before anything is taken.
Functions of transformers that are not public are used here and in `models.weights` only (tested: 5.24).
"""

from __future__ import annotations

import copy
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from spmd_encoder.errors import StartupError
from spmd_encoder.models.lean_imports import deferred_compiler

ModelT = TypeVar("ModelT", bound=PreTrainedModel)

_MOST_PARAMETERS = 2**17
"""Of one model. Real ones have some thousand, and as many take seconds to build."""
_MOST_BUFFER_BYTES = 2**30
"""Of all that a model computes and no file has: rotary frequencies, fixed positions. Real ones take some MiB."""


def build_on_meta(cls: type[ModelT], config: PreTrainedConfig, dtype: torch.dtype) -> ModelT:
    """The whole model in SDPA or eager attention, none of whose tensors has values yet.

    Raises whatever the model's code finds wrong with `config`; OverflowError for more parameters than models have.
    """
    build: Any = cls._from_config
    attention = "sdpa" if cls._supports_sdpa else "eager"
    with deferred_compiler(), torch.device("meta"), no_init_weights(), _bounded():
        try:
            model: ModelT = build(copy.deepcopy(config), dtype=dtype, attn_implementation=attention)
        except ValueError:  # a part has no SDPA: transformers then chooses for each
            model = build(config, dtype=dtype)
    return model


@contextmanager
def _bounded() -> Iterator[None]:
    """Lets no more than so many parameters be made: a layer takes memory and a millisecond even without values."""
    made = 0

    def count(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal made
        made += parameter is not None
        if made > _MOST_PARAMETERS:
            raise OverflowError(f"it has more than {_MOST_PARAMETERS} weights: too many layers, or parts of one")

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def built(cls: type[ModelT], config: PreTrainedConfig, folder: Path, dtype: torch.dtype) -> ModelT:
    """`build_on_meta`. Raises StartupError that names the class and the cause."""
    try:
        return build_on_meta(cls, config, dtype)
    except Exception as error:  # whatever a model's code finds wrong with numbers that are the user's
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise StartupError(f"{folder}: transformers cannot build {cls.__name__} from config.json ({first})") from None


def check_heads(model: PreTrainedModel, folder: Path, kept: Container[str]) -> None:
    """Raises StartupError for heads that do not divide an attention's width: some models find out only as they run."""
    for name, module in model.named_modules():
        heads, width = getattr(module, "num_heads", None), _query_width(module)
        if isinstance(heads, int) and heads and (heads < 0 or width % heads) and name in kept:
            raise StartupError(
                f"{folder}: config.json asks for {heads} heads in {name}, whose {width} values they do not divide"
            )


def _query_width(module: nn.Module) -> int:
    """Values of all heads' queries together; 0 where the module has none that are known."""
    for name, share in (("q_proj", 1), ("q", 1), ("qkv", 3)):
        layer = getattr(module, name, None)
        if isinstance(layer, nn.Linear) and (share == 1 or layer.out_features == share * layer.in_features):
            return layer.out_features // share
    return 0


def make_buffers(model: PreTrainedModel, folder: Path, kept: Container[str]) -> None:
    """Give non-persistent buffers (rotary frequencies) their values, which no file has, by the model's own rule.

    `_init_weights` of the nearest model class knows it; all else of the module is marked as initialised before.
    Raises StartupError for buffers larger than those of any real model.
    """
    _refuse_large_buffers(model, folder, kept)
    owners: dict[str, PreTrainedModel] = {n: m for n, m in model.named_modules() if isinstance(m, PreTrainedModel)}
    with torch.no_grad():
        for name, module in model.named_modules():
            stale = [n for n, b in module.named_buffers(recurse=False) if b.is_meta]
            if not stale or name not in kept:
                continue
            # The module's rule may reach into its children.
            for tensor in [*module.parameters(), *module.buffers()]:
                tensor._is_hf_initialized = True
            for buffer in stale:
                setattr(module, buffer, torch.empty_like(getattr(module, buffer), device="cpu"))
            owner = max((n for n in owners if f"{name}.".startswith(f"{n}." if n else "")), key=len)
            initialise: Any = owners[owner]._init_weights
            initialise(module)


def _refuse_large_buffers(model: PreTrainedModel, folder: Path, kept: Container[str]) -> None:
    stale = [(name, buffer) for name, buffer in model.named_buffers() if buffer.is_meta and name in kept]
    if sum(buffer.numel() * buffer.element_size() for _, buffer in stale) > _MOST_BUFFER_BYTES:
        name, buffer = max(stale, key=lambda one: one[1].numel())
        raise StartupError(
            f"{folder}: config.json asks for {name} of the shape {tuple(buffer.shape)}, which is computed and not "
            f"loaded, and takes more memory than in any model; download the file again"
        )
