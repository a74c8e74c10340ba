"""Random weights that are the same bytes on every machine, for tests and for `demo:qwen2.5-vl-tiny`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from spmd_encoder.models.weights import no_progress_bar


def write_random(cls: type[PreTrainedModel], config: PreTrainedConfig, processor: Any, out: Path, seed: int) -> None:
    """Save `cls` with weights drawn from `seed`, and `processor`'s configuration, into `out`.

    Weights have about unit gain, and norms and biases are random too: with the usual zeros a bias that is added
    twice, or never, would not be seen.
    """
    model = cls(config)
    # The bit generator's raw stream is fixed by numpy's policy, and all that follows is exact or correctly rounded.
    # The normal distribution of torch or numpy is neither: its last bits depend on the CPU.
    stream = np.random.PCG64(seed)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            if not tensor.is_floating_point():  # an index that the model computes, or a count
                continue
            raw = np.asarray(stream.random_raw(tensor.numel()), dtype=np.uint64)
            unit = (raw >> np.uint64(40)).astype(np.float32) / np.float32(2**23) - np.float32(1)
            offset, scale = _range(name, tensor.shape)
            values = np.float32(offset) + unit * np.float32(scale)
            tensor.copy_(torch.from_numpy(values.reshape(tuple(tensor.shape))))
    out.mkdir(parents=True, exist_ok=True)
    with no_progress_bar():
        model.save_pretrained(out)
    processor.save_pretrained(out)


def tiny_tokenizer(pad: str, bos: str, *special: str) -> PreTrainedTokenizerFast:
    """Knows the words that processors put around a picture (1 to 6), and `pad` (7), `bos` (8) and `special` tokens."""
    words = ("<unk>", "user", "\n", "Describe", "the", "image", ".")
    made = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    made.pre_tokenizer = Split(Regex(r"\w+|\n|[^\w\s]"), "removed", invert=True)
    made.add_special_tokens([pad, bos, *special])
    make: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = make(tokenizer_object=made, unk_token=words[0], pad_token=pad, bos_token=bos)
    return tokenizer


def _range(name: str, shape: torch.Size) -> tuple[float, float]:
    """(centre, half width) of a weight's uniform distribution."""
    if len(shape) < 2:
        return (0.0, 0.2) if name.endswith("bias") else (1.0, 0.2)
    if shape[0] == 1:  # class token, positions
        return 0.0, 0.5
    return 0.0, math.sqrt(3 * shape[0] / math.prod(shape))
