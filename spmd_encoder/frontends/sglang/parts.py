"""Which part of which request is where, and who gets its rows: pure, no clocks, no sockets.

A part is one `/encode`. Its receivers are named in it, or register by calls of their own: before, while and after it
is encoded. Each receiver is sent one message for a part, the rows or an error, and none twice. Calls return commands,
which the caller carries out. All that is remembered is bounded in number and time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from spmd_encoder.frontends.sglang.refusal import RefusalError
from spmd_encoder.transports.base import PushEndpoint

MAX_RECEIVERS = 1024
EXPECTED_TIMES = 4
"""Receivers may wait for so many times as many parts as may be in hand."""


class Phase(Enum):
    EXPECTED = "a receiver knows of it, /encode has not come"
    ENCODING = "its rows are being made"
    STAGED = "its rows are there and go to receivers as they come"
    DONE = "all receivers have their rows"
    FAILED = "receivers get an error"


@dataclass
class Part:
    """`key` tells two lives of one id apart. `told` are the receivers that were sent a message."""

    key: int
    part_id: str
    phase: Phase
    deadline: float
    digest: bytes = b""
    named: bool = False
    """Whether `/encode` named the receivers."""
    count: int | None = None
    receivers: dict[PushEndpoint, int] = field(default_factory=dict)
    """With the number of their calls that registered them."""
    told: set[PushEndpoint] = field(default_factory=set)
    served: int = 0
    error: RefusalError | None = None
    waiters: int = 0
    """Calls that wait for `/encode`."""
    callers: int = 0
    """Calls of `/encode` that wait for the end."""
    lonely_since: float | None = None

    @property
    def is_closed(self) -> bool:
        return self.phase is Phase.DONE or self.phase is Phase.FAILED

    @property
    def is_wanted(self) -> bool:
        """Whether somebody would miss it. Receivers that `/encode` named are its caller's own."""
        return self.callers > 0 or (bool(self.receivers) and not self.named)


@dataclass(frozen=True)
class Begun:
    """`/encode` has come: early registrations are answered."""

    key: int


@dataclass(frozen=True)
class Deliver:
    key: int
    receiver: PushEndpoint


@dataclass(frozen=True)
class Tell:
    """Send an error message."""

    key: int
    receiver: PushEndpoint
    error: RefusalError


@dataclass(frozen=True)
class Settle:
    """`/encode` is answered, with success where `error` is None, and rows that are not being sent are let go of."""

    key: int
    error: RefusalError | None


@dataclass(frozen=True)
class Abandon:
    """Nobody wants the rows that are being made."""

    key: int


@dataclass(frozen=True)
class Forget:
    """Nothing more will come of this key. Who waits for its `/encode` waits in vain."""

    key: int


Command = Begun | Deliver | Tell | Settle | Abandon | Forget


@dataclass(frozen=True, kw_only=True)
class PartLimits:
    """Seconds, and numbers of parts. `early_s`: how long a receiver waits for `/encode`. `staged_s`: how long rows wait
    for receivers. `late_s`: how long the end of a part is remembered. `lonely_s`: how long a part that nobody wants is
    kept for a caller that comes back."""

    early_s: float
    staged_s: float
    late_s: float
    lonely_s: float = 5.0
    max_active: int = 1024
    max_expected: int = 4096
    max_closed: int = 4096


class Parts:
    """`is_fetched`: `/encode` is answered when the rows are there, and these wait for receivers that ask for them."""

    def __init__(self, limits: PartLimits, *, is_fetched: bool = False) -> None:
        self._limits = limits
        self._is_fetched = is_fetched
        self._keys = itertools.count(1)
        self._by_id: dict[str, Part] = {}
        self._by_key: dict[int, Part] = {}
        self._open: dict[int, Part] = {}
        self._closed: dict[int, Part] = {}  # in the order of their ends, and so of their deadlines
        self._num_expected = 0

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def num_active(self) -> int:
        """Parts that are encoded or staged."""
        return len(self._open) - self._num_expected

    def get(self, key: int) -> Part | None:
        return self._by_key.get(key)

    def find(self, part_id: str) -> Part | None:
        return self._by_id.get(part_id)

    # -- calls

    def begin(
        self, part_id: str, digest: bytes, now: float, receivers: Sequence[PushEndpoint] = ()
    ) -> tuple[Part, bool, list[Command]]:
        """`/encode`: its part, and whether it is a new one, to be made where it is ENCODING. A body with an equal
        digest waits for the first's end. Each call is ended by `leave`.

        Raises `RefusalError`: 409 where the id is at work with another body, 400 where it contradicts receivers.
        """
        part = self._by_id.get(part_id)
        if part is not None and part.phase is not Phase.EXPECTED:
            if part.digest == digest and part.phase is not Phase.FAILED:
                part.callers += 1
                part.lonely_since = None
                return part, False, []
            if not part.is_closed:
                raise RefusalError(409, "this req_id is being encoded already, with another body")
        is_full = self.num_active >= self._limits.max_active
        if receivers and part is not None and part.phase is Phase.EXPECTED and part.receivers:
            raise RefusalError(400, "receivers have registered for this req_id, and the request names others")
        commands: list[Command] = []
        if part is not None and part.is_closed:
            # An id may be used again after its end, and a failure may be tried again.
            commands += self._forget(part)
            part = None
        if part is None:
            part = self._new(part_id, now)
        self._num_expected -= 1
        part.phase = Phase.ENCODING
        part.digest, part.callers = digest, 1
        if receivers:
            part.named, part.count = True, len(receivers)
            part.receivers = dict.fromkeys(receivers, 1)
        commands.append(Begun(part.key))
        if is_full:
            # As a part that fails, so that receivers hear of it.
            commands += self._fail(part, RefusalError(503, "too many requests are in hand; try again later"), now)
        return part, True, commands

    def register(self, part_id: str, receiver: PushEndpoint, count: int, now: float) -> tuple[Part, list[Command]]:
        """A receiver, one of `count`. Where the part's phase is EXPECTED the call waits for `Begun` or `Forget`, and
        must be ended by `stop_waiting`.

        Raises `RefusalError`: 400 where it contradicts what is known of the part, 503 where too many wait.
        """
        if not 1 <= count <= MAX_RECEIVERS:
            raise RefusalError(400, f"receive_count must be 1 to {MAX_RECEIVERS}")
        part = self._by_id.get(part_id)
        if part is None:
            part = self._expect(part_id, now)
        self._check_receiver(part, receiver, count)
        part.count = count
        part.receivers[receiver] = part.receivers.get(receiver, 0) + 1
        part.lonely_since = None
        match part.phase:
            case Phase.EXPECTED:
                part.waiters += 1
                return part, []
            case Phase.STAGED | Phase.FAILED:
                return part, self._messages(part)
            case _:
                return part, []

    def watch(self, part_id: str, now: float) -> Part:
        """Who only asks for a part. Raises and waits as `register` does."""
        part = self._by_id.get(part_id) or self._expect(part_id, now)
        part.waiters += part.phase is Phase.EXPECTED
        return part

    def stop_waiting(self, key: int, receiver: PushEndpoint | None) -> list[Command]:
        """A call that waited is over. One that hung up before `/encode` came is as if it had never been."""
        part = self._by_key.get(key)
        if part is None:
            return []
        part.waiters -= 1
        if part.phase is Phase.EXPECTED:
            if receiver is not None:
                self._unregister(part, receiver)
            if not part.waiters:
                return self._forget(part)
        return []

    def leave(self, key: int, now: float) -> None:
        """A caller of `/encode` has its answer, or has gone."""
        part = self._by_key.get(key)
        if part is not None:
            part.callers -= 1
            if not part.is_wanted:
                part.lonely_since = now

    # -- what becomes of it

    def staged(self, key: int, now: float) -> list[Command]:
        """The rows are there."""
        part = self._by_key.get(key)
        if part is None or part.phase is not Phase.ENCODING:
            return []
        part.phase = Phase.STAGED
        part.deadline = now + self._limits.staged_s
        return self._messages(part)

    def failed(self, key: int, error: RefusalError, now: float) -> list[Command]:
        """There will be no rows."""
        part = self._by_key.get(key)
        return [] if part is None or part.is_closed else self._fail(part, error, now)

    def delivered(self, key: int, error: RefusalError | None, now: float) -> list[Command]:
        """One `Deliver` was carried out, or failed."""
        part = self._by_key.get(key)
        if part is None or part.phase is not Phase.STAGED:
            return []
        if error is not None:
            return self._fail(part, error, now)
        part.served += 1
        if part.served != part.count:
            return []
        return [Settle(key, None), *self._close(part, Phase.DONE, now)]

    def tick(self, now: float) -> list[Command]:
        """What time has brought about."""
        commands: list[Command] = []
        while self._closed and now >= (oldest := next(iter(self._closed.values()))).deadline:
            commands += self._forget(oldest)
        for part in list(self._open.values()):
            if part.phase is Phase.EXPECTED:
                if now >= part.deadline:
                    commands += self._forget(part)
            elif self._is_lonely(part, now):
                commands += self._fail(part, RefusalError(503, "the caller of /encode has gone"), now)
            elif part.phase is Phase.STAGED and now >= part.deadline:
                commands += self._fail(part, self._unclaimed(part), now)
        return commands

    def fail_all(self, error: RefusalError, now: float) -> list[Command]:
        """The server ends."""
        commands: list[Command] = []
        for part in list(self._open.values()):
            if part.phase is Phase.EXPECTED:
                commands += self._forget(part)
            else:
                commands += self._fail(part, error, now)
        return commands

    # -- steps

    def _new(self, part_id: str, now: float) -> Part:
        part = Part(next(self._keys), part_id, Phase.EXPECTED, now + self._limits.early_s)
        self._by_id[part_id] = self._by_key[part.key] = self._open[part.key] = part
        self._num_expected += 1
        return part

    def _expect(self, part_id: str, now: float) -> Part:
        if self._num_expected >= self._limits.max_expected:
            raise RefusalError(503, "too many receivers wait for requests that have not come; try again later")
        return self._new(part_id, now)

    def _check_receiver(self, part: Part, receiver: PushEndpoint, count: int) -> None:
        if part.named:
            raise RefusalError(400, "the request to encode named its receivers by embedding_port; none can register")
        if part.count is not None and part.count != count:
            raise RefusalError(400, f"receive_count is {count}, but another receiver of this req_id said {part.count}")
        if receiver not in part.receivers and len(part.receivers) >= count:
            raise RefusalError(400, f"all {count} receivers of this req_id have registered already")

    def _unregister(self, part: Part, receiver: PushEndpoint) -> None:
        part.receivers[receiver] -= 1
        if not part.receivers[receiver]:
            del part.receivers[receiver]
        if not part.receivers:
            part.count = None

    def _is_lonely(self, part: Part, now: float) -> bool:
        """Whether nobody has wanted it for long."""
        if part.lonely_since is None or (self._is_fetched and part.phase is Phase.STAGED):
            return False
        return now >= part.lonely_since + self._limits.lonely_s

    def _messages(self, part: Part) -> list[Command]:
        """One message to every receiver that had none."""
        new = [receiver for receiver in part.receivers if receiver not in part.told]
        part.told.update(new)
        error = part.error
        return [Deliver(part.key, receiver) if error is None else Tell(part.key, receiver, error) for receiver in new]

    def _fail(self, part: Part, error: RefusalError, now: float) -> list[Command]:
        abandoned: list[Command] = [Abandon(part.key)] if part.phase is Phase.ENCODING else []
        part.error = error
        # Receivers that the request named are its caller's own: the reply's status tells them.
        messages = [] if part.named else self._messages(part)
        return [*abandoned, Settle(part.key, error), *messages, *self._close(part, Phase.FAILED, now)]

    def _close(self, part: Part, phase: Phase, now: float) -> list[Command]:
        part.phase = phase
        part.deadline = now + self._limits.late_s
        del self._open[part.key]
        self._closed[part.key] = part
        if len(self._closed) <= self._limits.max_closed:
            return []
        return self._forget(next(iter(self._closed.values())))

    def _forget(self, part: Part) -> list[Command]:
        del self._by_id[part.part_id], self._by_key[part.key]
        self._open.pop(part.key, None)
        self._closed.pop(part.key, None)
        self._num_expected -= part.phase is Phase.EXPECTED
        return [Forget(part.key)]

    def _unclaimed(self, part: Part) -> RefusalError:
        if part.count is None:
            who = "no receiver has registered"
        elif len(part.receivers) < part.count:
            who = f"{len(part.receivers)} of {part.count} receivers have registered"
        else:
            who = f"{part.served} of {part.count} receivers have taken the embeddings"
        return RefusalError(504, f"{who} within {self._limits.staged_s:g} s (--send-timeout-s)")
