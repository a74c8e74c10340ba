"""Who may come in, and when those who may not should try again: one rule for requests of one item and of many.

A request is taken as a whole or not at all, before any of it is decoded. Its items and their price in encoder tokens
are counted in the ledger, its bytes here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from spmd_encoder.config import LimitsConfig
from spmd_encoder.dispatcher.fleet import Fleet
from spmd_encoder.dispatcher.inflight import InflightBytes
from spmd_encoder.dispatcher.ledger import Ledger
from spmd_encoder.dispatcher.pace import Pace
from spmd_encoder.distributed.layout import Layout
from spmd_encoder.errors import EncoderError, ErrorCode

RETRY_AFTER_S = 1.0
_GOLDEN = 0.6180339887
"""Steps of this size, modulo 1, are spread evenly however many there are (https://oeis.org/A094214)."""
_UNTIL_ROOM = frozenset({ErrorCode.QUEUE_FULL, ErrorCode.OVERLOADED})


class Admission:
    """`started`: all replicas were up once, or the start deadline passed."""

    def __init__(self, limits: LimitsConfig, layout: Layout, fleet: Fleet, ledger: Ledger) -> None:
        self._layout = layout
        self._fleet = fleet
        self._ledger = ledger
        self._bytes = InflightBytes(limits.max_inflight_bytes)
        self._pace = Pace(limits.request_timeout_s)
        self._place = 0.0
        """Of the last refused caller in the time until there is room, from 0 to 1."""
        self.started = False
        self.draining = False

    @property
    def inflight_bytes(self) -> int:
        return self._bytes.used

    def check_open(self) -> None:
        """Raises `EncoderError` DRAINING or NOT_READY."""
        if self.draining:
            raise EncoderError(
                ErrorCode.DRAINING, "the server is shutting down; ask another one", retry_after_s=RETRY_AFTER_S
            )
        if not self.started or self._fleet.all_failed():
            states = ", ".join(f"{n} {state}" for state, n in self._fleet.state_counts().items())
            raise EncoderError(
                ErrorCode.NOT_READY, f"no replica can take requests yet ({states})", retry_after_s=RETRY_AFTER_S
            )

    @contextlib.contextmanager
    def reserve(self, num_bytes: int) -> Iterator[None]:
        """Raises `EncoderError` OVERLOADED."""
        try:
            self._bytes.take(num_bytes)
        except EncoderError as error:
            raise self.refusal(error) from None
        try:
            yield
        finally:
            self._bytes.give_back(num_bytes)

    def refusal(self, error: EncoderError) -> EncoderError:
        """A refusal as its caller gets it: with when to try again, where that helps. Callers are spread over the time
        that it takes, at the present pace, until what is in hand is answered: so they do not come back all at once, to
        a server that has had nothing to do for a while."""
        retry_after_s = error.retry_after_s
        if error.code in _UNTIL_ROOM:
            in_hand = sum(self._ledger.load(replica).outstanding_tokens for replica in self._layout.replicas)
            wait_s = self._pace.wait_s(self._ledger.waiting_tokens + in_hand, time.monotonic())
            self._place = (self._place + _GOLDEN) % 1.0
            retry_after_s = RETRY_AFTER_S + self._place * (wait_s - RETRY_AFTER_S)
        return EncoderError(error.code, error.message, param=error.param, retry_after_s=retry_after_s)

    def coming(self) -> None:
        """A request's items are about to enter the ledger."""
        if not self._ledger.num_items or not self._ledger.is_encoding:
            self._pace.begin()

    def answered(self, tokens: int) -> None:
        self._pace.answered(tokens, time.monotonic())
