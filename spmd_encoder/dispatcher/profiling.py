"""Calls to the profilers of all replicas: who was asked, who has answered, who cannot any more."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from spmd_encoder.api.profiling import ProfileOptions, ProfileOutcome
from spmd_encoder.dispatcher.fleet import Fleet
from spmd_encoder.distributed.layout import Layout
from spmd_encoder.errors import ErrorCode
from spmd_encoder.wire.messages import Profile, Profiled

Answer = asyncio.Future[Sequence[ProfileOutcome]]


class ProfileCalls:
    """Every rank has an outcome within `timeout_s`, whatever becomes of it."""

    def __init__(self, layout: Layout, fleet: Fleet, timeout_s: float) -> None:
        self._layout = layout
        self._fleet = fleet
        self._timeout_s = timeout_s
        self._ids = itertools.count(1)
        # By call, replica and the epoch that was asked.
        self._open: dict[tuple[int, int, int], Answer] = {}

    async def call(self, start: ProfileOptions | None) -> list[ProfileOutcome]:
        """Ask every ready replica to start, or, with None, to stop. One outcome per rank of the world, in order."""
        call_id = next(self._ids)
        asked = {
            replica: (call_id, replica, self._fleet.epoch(replica))
            for replica in self._layout.replicas
            if self._fleet.is_ready(replica)
        }
        answers: dict[int, Answer] = {replica: asyncio.get_running_loop().create_future() for replica in asked}
        self._open |= {key: answers[replica] for replica, key in asked.items()}
        try:
            for replica in asked:
                self._fleet.send(replica, Profile(call_id=call_id, start=start))
            if answers:
                await asyncio.wait(answers.values(), timeout=self._timeout_s)
        finally:
            for key in asked.values():
                del self._open[key]
        outcomes: list[ProfileOutcome] = []
        for replica in self._layout.replicas:
            answer = answers.get(replica)
            if answer is None:
                outcomes += self._failed(replica, ErrorCode.NOT_READY, "its replica is not ready")
            elif answer.done():
                outcomes += answer.result()
            else:
                text = f"its replica did not answer within {self._timeout_s:g} s (--request-timeout-s)"
                outcomes += self._failed(replica, ErrorCode.DEADLINE_EXCEEDED, text)
        return outcomes

    def answered(self, replica: int, message: Profiled) -> None:
        answer = self._open.get((message.call_id, replica, self._fleet.epoch(replica)))
        if answer is not None and not answer.done():
            answer.set_result(message.outcomes)

    def check(self) -> None:
        """Replicas that were lost since they were asked owe nothing any more."""
        for (_, replica, epoch), answer in self._open.items():
            if not answer.done() and (self._fleet.epoch(replica) != epoch or not self._fleet.is_ready(replica)):
                text = "its replica was lost before it answered"
                answer.set_result(self._failed(replica, ErrorCode.NOT_READY, text))

    def _failed(self, replica: int, code: ErrorCode, message: str) -> list[ProfileOutcome]:
        outcomes = []
        for rank in self._layout.ranks_of(replica):
            dp_rank, tp_rank = self._layout.coordinates(rank)
            outcomes.append(ProfileOutcome(rank=rank, dp_rank=dp_rank, tp_rank=tp_rank, code=code, message=message))
        return outcomes
