"""The audio tower of Qwen3-Omni and Qwen3-ASR: chunks of one second, which are convolved by themselves, then attend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from spmd_encoder.models.base import Features

_CHUNKS_AT_ONCE = 32
"""Of a convolution, whose first result is a hundred times as large as what it is of."""


def positions(frames: int) -> int:
    """Of so many frames of one chunk, after three convolutions that take every second each."""
    for _ in range(3):
        frames = (frames - 1) // 2 + 1
    return frames


def chunk_lengths(frames: int, chunk: int) -> list[int]:
    """The frames of each chunk of a sound; only the last may have fewer than `chunk`."""
    return [min(chunk, frames - start) for start in range(0, frames, chunk)]


def chunk_tensors(features: Tensor, frames: int, chunk: int, width: int) -> dict[str, Tensor]:
    """The tensors of one sound, of `features` `[mel bins, frames or more]`.

    `input_features` `[chunks, mel bins, chunk]` with zeros behind, `chunk_frames` `[chunks]`, `chunk_widths` `[chunks]`
    (the columns that are convolved: `width`), `chunks` `[1]`.
    """
    lengths = chunk_lengths(frames, chunk)
    padded = F.pad(features[:, :frames], (0, len(lengths) * chunk - frames))
    return {
        "input_features": padded.reshape(len(features), -1, chunk).transpose(0, 1).contiguous(),
        "chunk_frames": torch.tensor(lengths),
        "chunk_widths": torch.tensor([width] * len(lengths)),
        "chunks": torch.tensor([len(lengths)]),
    }


def pack_chunks(items: Sequence[Features]) -> dict[str, Tensor]:
    """The items' tensors, one after the other."""
    return {name: torch.cat([item.tensors[name] for item in items]) for name in items[0].tensors}


def encode_chunks(tower: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, list[int]]:
    """Hidden states `[all rows, width]` after the tower's last norm, and how many of them each item has.

    As `forward` of the towers, but that the chunks of each item are padded as if it were alone: in company of a longer
    sound transformers pads one of less than a second further, and the convolutions see the difference.
    """
    counts = [positions(frames) for frames in batch["chunk_frames"].tolist()]
    rows = [row for chunks in _of_equal_width(batch) for row in _convolve(tower, chunks)]
    hidden = torch.cat([row[:count] for row, count in zip(rows, counts, strict=True)])
    chunk = batch["input_features"].shape[-1]
    window = positions(chunk) * (tower.n_window_infer // chunk)
    items, segments, start = [], [0], 0
    for number in batch["chunks"].tolist():
        items.append(sum(counts[start : start + number]))
        segments += [min(window, items[-1] - at) for at in range(0, items[-1], window)]
        start += number
    cu_seqlens = torch.tensor(segments, device=hidden.device).cumsum(0, dtype=torch.int32)
    for layer in tower.layers:
        hidden = layer(hidden, cu_seqlens)[0]
    return tower.ln_post(hidden), items


def _of_equal_width(batch: Mapping[str, Tensor]) -> list[Tensor]:
    """`[chunks, mel bins, width]` of neighbours of one width, a bounded number each."""
    features, start = batch["input_features"], 0
    parts: list[Tensor] = []
    for width, equal in groupby(batch["chunk_widths"].tolist()):
        stop = start + sum(1 for _ in equal)
        parts += torch.split(features[start:stop, :, :width], _CHUNKS_AT_ONCE)
        start = stop
    return parts


def _convolve(tower: Any, chunks: Tensor) -> Tensor:
    """`[chunks, mel bins, frames]` to `[chunks, positions, width]`, with each position's place in its chunk."""
    hidden = chunks[:, None].to(tower.conv2d1.weight.dtype)
    for convolution in (tower.conv2d1, tower.conv2d2, tower.conv2d3):
        hidden = F.gelu(convolution(hidden))
    count, channels, bins, places = hidden.shape
    hidden = tower.conv_out(hidden.permute(0, 3, 1, 2).reshape(count, places, channels * bins))
    places_in_chunk = tower.positional_embedding.positional_embedding[:places].to(hidden.dtype)
    return hidden + places_in_chunk  # type: ignore[no-any-return]
