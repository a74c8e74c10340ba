"""A request's exchange over HTTP: routes fill it, the envelope writes it."""

from __future__ import annotations

from starlette.requests import Request

from spmd_encoder.frontends.exchange import Exchange

SCOPE_KEY = "spmd_encoder.exchange"


def exchange_of(request: Request) -> Exchange:
    """This request's exchange, which the envelope put into its scope."""
    exchange = request.scope[SCOPE_KEY]
    assert isinstance(exchange, Exchange)
    return exchange
