"""What families of sounds share: the log-mel extractor of Whisper, and the layers of encoders built like Whisper's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from spmd_encoder.errors import EncoderError, ErrorCode, StartupError
from spmd_encoder.media.base import Sound
from spmd_encoder.models.attention import SegmentAttention
from spmd_encoder.models.sharding import Split, TowerPlan, run_batched

LONGEST_S = 1800.0
"""Seconds that a sound of unknown length is priced as where a family has no bound of its own: the server's default."""


def check_length(sound: Sound, max_s: float, *, min_samples: int = 1) -> None:
    """Raises EncoderError: TOO_LARGE above `max_s` seconds, MEDIA_CORRUPT below `min_samples`."""
    count = len(sound.samples)
    if count > max_s * sound.rate:
        # Of a few samples too many, so many digits that the two numbers are not the same.
        digits = next((n for n in range(2, 10) if round(count / sound.rate, n) > max_s), 10)
        raise EncoderError(
            ErrorCode.TOO_LARGE,
            f"the sound lasts {count / sound.rate:.{digits}f} s, and this model takes at most {max_s:g} s; "
            "send it in pieces",
        )
    if count < min_samples:
        raise EncoderError(
            ErrorCode.MEDIA_CORRUPT,
            f"the sound lasts {1000 * count / sound.rate:.1f} ms, and this model takes at least "
            f"{1000 * min_samples / sound.rate:.1f} ms",
        )


def extract(extractor: Any, sound: Sound, *, window: int | None = None, **options: Any) -> dict[str, Tensor]:
    """The extractor's tensors for one sound, with a mask of what is no padding as `attention_mask`.

    With `window` the sound is cut into pieces of so many samples, each of which is a row of the batch.
    """
    samples = sound.samples
    pieces = samples if window is None else [samples[at : at + window] for at in range(0, len(samples), window)]
    made = extractor(pieces, sampling_rate=sound.rate, return_attention_mask=True, return_tensors="pt", **options)
    return {name: tensor for name, tensor in made.items() if isinstance(tensor, torch.Tensor)}


def _run_feed_forward(layer: nn.Module, hidden: Tensor) -> Tensor:
    block: Any = layer
    out: Tensor = block.fc2(block.activation_fn(block.fc1(hidden)))
    return out


def whisper_plan(layers: str, num_layers: int, *, once: tuple[Split, ...] = ()) -> TowerPlan:
    """The plan of a ModuleList of layers like Whisper's: `self_attn` and, in the layer itself, `fc1` and `fc2`."""
    feed_forward = Split(path="", columns=("fc1",), row="fc2", run=_run_feed_forward)
    attention = Split(
        path="self_attn",
        columns=("q_proj", "k_proj", "v_proj"),
        row="out_proj",
        heads="num_heads",
        run=run_batched,
    )
    return TowerPlan(blocks=layers, num_blocks=num_layers, in_block=(feed_forward, attention), once=once)


class AudioAttention(SegmentAttention):
    """Takes the place of transformers' own in towers that attend within chunks: over packed sounds, without a mask."""

    def __init__(self, attention: Any) -> None:
        super().__init__(attention, closing="out_proj")

    def forward(self, hidden_states: Tensor, cu_seqlens: Tensor, **_: Any) -> Tensor:
        """`[rows, width]` to the same. `cu_seqlens` `[segments + 1]` int32 are the segments' ends after a 0."""
        return self.attend(hidden_states[None], cu_seqlens, None)[0]


def _run_segments(attention: nn.Module, hidden: Tensor) -> Tensor:
    """The attention of one block over two segments of unequal length."""
    rows, first = hidden.shape[0], hidden.shape[0] // 3
    out: Tensor = attention(hidden, torch.tensor([0, first, rows], dtype=torch.int32, device=hidden.device))
    return out


def chunk_plan(layers: str, num_layers: int, *, once: tuple[Split, ...] = ()) -> TowerPlan:
    """As `whisper_plan`, for layers that take packed sounds and the ends of chunks."""
    plan = whisper_plan(layers, num_layers, once=once)
    feed_forward, attention = plan.in_block
    return replace(plan, in_block=(feed_forward, replace(attention, run=_run_segments, faster=AudioAttention)))


def key_mask(lengths: Tensor, size: int) -> Tensor:
    """`[batch, 1, 1, size]` bool: which of `size` positions each item has. It broadcasts over queries: none that
    counts is masked, so no mask grows with the square of the length."""
    return (torch.arange(size, device=lengths.device) < lengths[:, None])[:, None, None]


def check_mels(config_bins: int, extractor: Any, where: object) -> None:
    """Raises StartupError where the extractor makes other features than the tower takes."""
    if extractor.feature_size != config_bins:
        raise StartupError(
            f"{where}: preprocessor_config.json makes {extractor.feature_size} mel bins, but config.json asks for "
            f"{config_bins}"
        )


def check_window(positions: int, extractor: Any, where: object) -> None:
    """Raises StartupError where the extractor's window is not the one of a tower with so many positions."""
    if extractor.nb_max_frames != 2 * positions:
        raise StartupError(
            f"{where}: preprocessor_config.json makes windows of {extractor.nb_max_frames} frames, but config.json "
            f"asks for {2 * positions}"
        )
