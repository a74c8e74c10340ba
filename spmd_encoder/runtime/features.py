"""Tensors as bytes and back, between the processes of one replica."""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_encoder.media.line import Prepared
from spmd_encoder.models.base import Features


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes, without a copy where it is contiguous already."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return flat.numpy().data


def features_of(prepared: Prepared) -> Features:
    """What the preparer made, over the buffers that came; no copy."""
    item = prepared.item
    tensors = {
        spec.name: torch.frombuffer(buffer, dtype=getattr(torch, spec.dtype)).reshape(spec.shape)
        for spec, buffer in zip(item.tensors, prepared.buffers, strict=True)
    }
    return Features(
        tensors=tensors,
        num_tokens=item.num_tokens,
        cost=item.cost,
        grid=item.grid,
        modality=item.modality,
        details=item.details,
    )
