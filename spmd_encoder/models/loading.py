"""From a checkpoint's folder to a loaded adapter."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path

import torch

from spmd_encoder.api.types import Modality
from spmd_encoder.errors import StartupError
from spmd_encoder.media.capabilities import without_decoder
from spmd_encoder.models import registry
from spmd_encoder.models.base import FamilyAdapter, LoadContext, Preprocessor
from spmd_encoder.models.checkpoint import read_config, read_model_type
from spmd_encoder.models.settings import refuse_absurd_sizes, settings_of

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def adapter_class(entry: registry.FamilyEntry) -> type[FamilyAdapter]:
    """The family's adapter class; imports its module."""
    module, _, name = entry.adapter.partition(":")
    cls = getattr(importlib.import_module(module), name)
    assert isinstance(cls, type) and issubclass(cls, FamilyAdapter), f"{entry.adapter} is no FamilyAdapter"
    return cls


def load_adapter(folder: Path, context: LoadContext) -> FamilyAdapter:
    """This rank's shard of the checkpoint. Collective over `context.group`. Raises StartupError."""
    cls = adapter_class(registry.find(read_model_type(folder)))
    with settings_of(folder):
        refuse_absurd_sizes(folder)
        adapter = cls.load(folder, context)
        adapter.cost_table()  # its arithmetic too is on the checkpoint's settings
    return adapter


def load_preprocessor(folder: Path) -> Preprocessor:
    """Only what makes features for the checkpoint in `folder`. Raises StartupError."""
    cls = adapter_class(registry.find(read_model_type(folder)))
    with settings_of(folder):
        refuse_absurd_sizes(folder)
        return cls.load_preprocessor(folder)


def modalities_of(folder: Path) -> tuple[Modality, ...]:
    """What the family of the checkpoint in `folder` takes. Raises StartupError."""
    return adapter_class(registry.find(read_model_type(folder))).modalities


def served_modalities(adapter: FamilyAdapter) -> tuple[Modality, ...]:
    """Those of the family's that can be had here: with the checkpoint's settings, and with what is installed.

    The log has the reason of each other one. Raises StartupError where none is left.
    """
    reasons = {**without_decoder(adapter.modalities), **adapter.preprocessor.not_served()}
    for modality in adapter.modalities:
        if modality in reasons:
            log.warning("no %s is offered: %s", modality, reasons[modality])
    served = tuple(modality for modality in adapter.modalities if modality not in reasons)
    if not served:
        why = "; ".join(f"{modality}: {reasons[modality]}" for modality in adapter.modalities)
        raise StartupError(f"nothing that this model takes can be had here: {why}")
    return served


def resolve_dtype(wanted: str, folder: Path) -> torch.dtype:
    """The dtype that `--dtype` means; `auto` is the checkpoint's, or bfloat16 in the place of a float16 in which towers
    of its family overflow.

    Raises StartupError for a dtype that is not served, and for float16 that is asked for where it overflows.
    """
    name = stored_dtype(folder) if wanted == "auto" else wanted
    if name not in _DTYPES:
        raise StartupError(f"dtype {name} is not served; give --dtype {', '.join(_DTYPES)}")
    if name == "float16" and not (entry := registry.find(read_model_type(folder))).float16_safe:
        if wanted == name:
            raise StartupError(
                f"--dtype float16: towers of the family {entry.family} are known to overflow in it; give --dtype "
                "bfloat16 or float32"
            )
        name = "bfloat16"
    return _DTYPES[name]


def stored_dtype(folder: Path) -> str:
    """What `config.json` says of the weights' dtype, float32 where it says nothing. Raises StartupError."""
    config = read_config(folder)
    # Newer files say `dtype`, older ones `torch_dtype`; some say it only of a part.
    parts = [config, *(p for k in ("vision_config", "text_config") if isinstance(p := config.get(k), dict))]
    said = [part.get(key) for part in parts for key in ("dtype", "torch_dtype")]
    return next((str(s).removeprefix("torch.") for s in said if s and s != "auto"), "float32")
