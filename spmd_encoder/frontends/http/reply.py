"""The way of a reply to its client: in pieces, with its request's account held until it is sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from spmd_encoder.frontends.http.render import Rendered

# A slow client holds up one piece, and its time is counted per piece.
_PIECE_BYTES = 256 * 1024


class HeldResponse(Response):
    """A reply that closes `held` (the account of its request's bytes) when it is sent, or cannot be."""

    def __init__(self, rendered: Rendered, held: ExitStack) -> None:
        length = str(sum(len(part) for part in rendered.body))
        headers = {**rendered.headers, "content-length": length}
        super().__init__(None, rendered.status, headers, media_type=rendered.media_type)
        self._parts = rendered.body
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for piece in self._pieces():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _pieces(self) -> Iterator[memoryview]:
        for part in self._parts:
            for start in range(0, len(part), _PIECE_BYTES):
                yield part[start : start + _PIECE_BYTES]
