"""From outcomes to a safetensors body: the embeddings as they are, and the rest of the JSON reply in its metadata."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from spmd_encoder.api.types import Embedding, ItemOutcome
from spmd_encoder.frontends.http.render import Rendered, Text, render_entries
from spmd_encoder.transports.safetensors import SafetensorsWriter

MEDIA_TYPE = "application/vnd.safetensors"
RESPONSE_KEY = "response"


def render_safetensors(request_id: str, model: str, outcomes: Sequence[ItemOutcome]) -> Rendered:
    """Tensor `"<index>"` for each good item, in its dtype; `__metadata__` has the JSON reply without `embedding` under
    the key `response`. Where every item failed, the JSON reply itself. Copies no embedding."""
    file = SafetensorsWriter()

    def add(index: int, embedding: Embedding) -> Text:
        file.add(str(index), embedding)
        return msgspec.UNSET

    reply, is_any_good = render_entries(request_id, model, outcomes, add)
    if not is_any_good:
        return reply
    parts = file.finish({RESPONSE_KEY: str(reply.body[0], "utf-8")})
    return Rendered(200, parts, media_type=MEDIA_TYPE)
