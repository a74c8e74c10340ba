"""Parts and their receivers against a model that only counts what each receiver was sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from spmd_encoder.frontends.sglang.parts import (
    Abandon,
    Begun,
    Command,
    Deliver,
    Forget,
    PartLimits,
    Parts,
    Phase,
    Settle,
    Tell,
)
from spmd_encoder.frontends.sglang.refusal import RefusalError
from spmd_encoder.transports.base import PushEndpoint
from tests.harness.examples import examples

LIMITS = PartLimits(early_s=10.0, staged_s=20.0, late_s=30.0, lonely_s=5.0, max_active=5, max_expected=4, max_closed=3)
RECEIVERS = [PushEndpoint("rank", port) for port in (1, 2, 3)]
FULL = RefusalError(503, "full")
ids = st.sampled_from(["a", "b", "c", "d", "e", "f"])
endpoints = st.sampled_from(RECEIVERS)


class PartsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.parts = Parts(LIMITS)
        self.now = 100.0
        self.messages: Counter[tuple[int, PushEndpoint]] = Counter()
        self.begun: set[int] = set()
        self.begun_said: Counter[int] = Counter()
        self.settled: dict[int, RefusalError | None] = {}
        self.forgotten: set[int] = set()
        self.abandoned: set[int] = set()
        self.rows_sent: Counter[int] = Counter()
        self.under_way: list[int] = []
        self.callers: list[int] = []
        self.waiting: list[tuple[int, PushEndpoint | None]] = []
        self.accepted: dict[int, set[PushEndpoint]] = {}
        """Receivers whose registration was answered with success."""
        self.named: set[int] = set()

    def do(self, commands: Sequence[Command]) -> None:
        for command in commands:
            assert command.key not in self.forgotten
            match command:
                case Begun(key):
                    self.begun_said[key] += 1
                    for waited, receiver in self.waiting:
                        if waited == key and receiver is not None:
                            self.accepted.setdefault(key, set()).add(receiver)
                    self.waiting = [entry for entry in self.waiting if entry[0] != key]
                case Deliver(key, receiver):
                    self.messages[key, receiver] += 1
                    self.under_way.append(key)
                case Tell(key, receiver, error):
                    assert error.message
                    self.messages[key, receiver] += 1
                case Settle(key, error):
                    assert key not in self.settled, "answered once"
                    self.settled[key] = error
                case Abandon(key):
                    assert key in self.begun
                    self.abandoned.add(key)
                case Forget(key):
                    self.forgotten.add(key)
                    self.waiting = [entry for entry in self.waiting if entry[0] != key]

    def keys(self, *phases: Phase) -> list[int]:
        return [key for key in self.begun if (part := self.parts.get(key)) is not None and part.phase in phases]

    # -- what comes from outside

    @rule(part_id=ids, digest=st.sampled_from([b"x", b"y"]), named=st.lists(endpoints, unique=True, max_size=2))
    def encode(self, part_id: str, digest: bytes, named: list[PushEndpoint]) -> None:
        try:
            part, new, commands = self.parts.begin(part_id, digest, self.now, named)
        except RefusalError as refusal:
            assert refusal.status in {400, 409}
            return
        assert new == (part.key not in self.begun)
        if new and named:
            self.named.add(part.key)
        self.begun.add(part.key)
        self.callers.append(part.key)
        self.do(commands)

    @rule(part_id=ids, receiver=endpoints, count=st.integers(0, 3))
    def register(self, part_id: str, receiver: PushEndpoint, count: int) -> None:
        try:
            part, commands = self.parts.register(part_id, receiver, count, self.now)
        except RefusalError as refusal:
            assert refusal.status in {400, 503}
            return
        if part.phase is Phase.EXPECTED:
            self.waiting.append((part.key, receiver))
        else:
            self.accepted.setdefault(part.key, set()).add(receiver)
        self.do(commands)

    @rule(part_id=ids)
    def watch(self, part_id: str) -> None:
        try:
            part = self.parts.watch(part_id, self.now)
        except RefusalError as refusal:
            assert refusal.status == 503
            return
        if part.phase is Phase.EXPECTED:
            self.waiting.append((part.key, None))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def hang_up(self, data: st.DataObject) -> None:
        key, receiver = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        self.do(self.parts.stop_waiting(key, receiver))

    @precondition(lambda self: self.callers)
    @rule(data=st.data())
    def caller_goes(self, data: st.DataObject) -> None:
        self.parts.leave(self.callers.pop(data.draw(st.integers(0, len(self.callers) - 1))), self.now)

    # -- what becomes of parts

    @precondition(lambda self: self.keys(Phase.ENCODING))
    @rule(data=st.data(), good=st.booleans())
    def encoded(self, data: st.DataObject, good: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.keys(Phase.ENCODING))))
        self.do(self.parts.staged(key, self.now) if good else self.parts.failed(key, FULL, self.now))

    @precondition(lambda self: self.begun)
    @rule(data=st.data())
    def late_result(self, data: st.DataObject) -> None:
        """Work that was abandoned may end all the same."""
        key = data.draw(st.sampled_from(sorted(self.begun)))
        if key not in self.keys(Phase.ENCODING):
            assert not self.parts.staged(key, self.now)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), good=st.booleans())
    def sent(self, data: st.DataObject, good: bool) -> None:
        key = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        self.rows_sent[key] += good
        self.do(self.parts.delivered(key, None if good else RefusalError(502, "gone"), self.now))

    @rule(seconds=st.sampled_from([0.5, 5.0, 11.0]))
    def time(self, seconds: float) -> None:
        self.now += seconds
        self.do(self.parts.tick(self.now))

    @rule()
    def the_server_ends(self) -> None:
        self.do(self.parts.fail_all(RefusalError(503, "ending"), self.now))
        assert not self.keys(Phase.ENCODING, Phase.STAGED)
        assert not self.waiting

    # -- what holds always

    @invariant()
    def no_receiver_is_sent_a_part_twice(self) -> None:
        assert all(count == 1 for count in self.messages.values())

    @invariant()
    def early_calls_hear_once(self) -> None:
        assert all(count == 1 for count in self.begun_said.values())
        assert set(self.begun_said) == self.begun

    @invariant()
    def bounded(self) -> None:
        assert self.parts.num_active <= LIMITS.max_active
        assert len(self.parts) <= LIMITS.max_active + LIMITS.max_expected + LIMITS.max_closed
        assert len(self.parts) - self.parts.num_active - LIMITS.max_closed <= LIMITS.max_expected

    @invariant()
    def success_means_that_all_have_it(self) -> None:
        for key, error in self.settled.items():
            if error is None:
                assert self.rows_sent[key] >= 1
                part = self.parts.get(key)
                assert part is None or self.rows_sent[key] == part.count

    @invariant()
    def who_registered_is_told(self) -> None:
        """Once a part has ended, or has rows, every receiver whose registration was accepted has its message."""
        for key in self.keys(Phase.STAGED, Phase.DONE, Phase.FAILED):
            if key not in self.named:
                for receiver in self.accepted.get(key, ()):
                    assert self.messages[key, receiver] == 1

    def teardown(self) -> None:
        """Whatever happened, time ends it all, and nothing is remembered."""
        for key in self.callers:
            self.parts.leave(key, self.now)
        for key in self.keys(Phase.ENCODING):
            self.do(self.parts.staged(key, self.now))
        for _ in range(3):
            self.now += 100.0
            self.do(self.parts.tick(self.now))
        assert len(self.parts) == 0
        assert self.parts.num_active == 0
        assert set(self.settled) == self.begun
        assert not self.waiting


class FetchedPartsMachine(PartsMachine):
    def __init__(self) -> None:
        super().__init__()
        self.parts = Parts(LIMITS, is_fetched=True)


PartsMachine.TestCase.settings = examples(100, stateful_step_count=40)
FetchedPartsMachine.TestCase.settings = PartsMachine.TestCase.settings
TestParts = PartsMachine.TestCase
TestFetchedParts = FetchedPartsMachine.TestCase


@pytest.mark.parametrize(("is_fetched", "phase"), [(False, Phase.FAILED), (True, Phase.STAGED)])
def test_rows_that_are_fetched_outlive_the_caller_of_encode(is_fetched: bool, phase: Phase) -> None:
    parts = Parts(LIMITS, is_fetched=is_fetched)
    part, _, _ = parts.begin("a", b"", 0.0)
    parts.staged(part.key, 1.0)
    parts.leave(part.key, 1.0)
    parts.tick(1.0 + LIMITS.lonely_s)
    assert part.phase is phase
    parts.tick(1.0 + LIMITS.staged_s)
    assert part.phase is Phase.FAILED


def test_rows_that_are_made_for_nobody_are_given_up() -> None:
    parts = Parts(LIMITS, is_fetched=True)
    part, _, _ = parts.begin("a", b"", 0.0)
    parts.leave(part.key, 1.0)
    commands = parts.tick(1.0 + LIMITS.lonely_s)
    assert Abandon(part.key) in commands and part.phase is Phase.FAILED
