"""From outcomes to OpenAI's embeddings reply: all vectors, or the first failure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from spmd_encoder.api.types import Embedding, ItemFailure, ItemOutcome
from spmd_encoder.errors import EncoderError
from spmd_encoder.frontends.base import ItemNaming
from spmd_encoder.frontends.http.options import Encoding
from spmd_encoder.frontends.http.render import Rendered, base64_text, finite_values, json_rendered, numbers_text


class _Vector(msgspec.Struct, frozen=True):
    object: str
    index: int
    embedding: msgspec.Raw


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class _Reply(msgspec.Struct, frozen=True):
    object: str
    data: list[_Vector]
    model: str
    usage: _Usage


def render_openai(model: str, outcomes: Sequence[ItemOutcome], encoding: Encoding, name: ItemNaming) -> Rendered:
    """Vectors as numbers, or as base64 of little-endian float32. `usage` counts encoder tokens.

    The served dtypes are all widened to float32 exactly; a float64 would be rounded. Raises the first failed item's
    `EncoderError`, of its `name`: OpenAI's clients know no partial results.
    """
    vectors: list[_Vector] = []
    num_tokens = 0
    for index, outcome in enumerate(outcomes):
        if isinstance(outcome, ItemFailure):
            raise outcome.error
        try:
            vectors.append(_Vector("embedding", index, _text(outcome, encoding)))
        except EncoderError as error:
            raise error.at(name(index)) from None
        num_tokens += outcome.num_tokens
    return json_rendered(200, _Reply("list", vectors, model, _Usage(num_tokens, num_tokens)))


def _text(embedding: Embedding, encoding: Encoding) -> msgspec.Raw:
    values = finite_values(embedding)
    return numbers_text(values) if encoding == "float" else base64_text(values.astype(np.dtype("<f4")).data)
