"""SGLang's encoder as a service, whatever carries its calls: parts are encoded, and pushed to who registered for them.

`parts.py` decides; here are the tasks, clocks and bytes around it. Calls that register never wait for an encode: they
touch nothing but `Parts`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, assert_never

from spmd_encoder.api.service import EncoderService
from spmd_encoder.api.types import OutputKind
from spmd_encoder.config import Config
from spmd_encoder.errors import EncoderError, time_over
from spmd_encoder.frontends.base import ItemLimits, check_output
from spmd_encoder.frontends.remote import Fetcher, fetch_and_encode
from spmd_encoder.frontends.sglang.media import Wanted, check_items, item_name
from spmd_encoder.frontends.sglang.metrics import DialectMetrics
from spmd_encoder.frontends.sglang.parts import (
    EXPECTED_TIMES,
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
from spmd_encoder.frontends.sglang.staging import parcel_of
from spmd_encoder.transports.base import Parcel, ParcelError, ParcelHeader, PushEndpoint, RemoteMemory, Transport
from spmd_encoder.transports.budget import StagedBytes

log = logging.getLogger(__name__)

_TICK_S = 0.25
_LAST_WORDS_S = 1.0


@dataclass(frozen=True, kw_only=True)
class EncodeCall:
    """One `/encode`. `header` says which part it is, `items` may be what is wrong with them. Equal bodies have equal
    digests. `receivers` is empty where they register. The caller wants nothing after `deadline`
    (`time.monotonic`)."""

    header: ParcelHeader
    items: Sequence[Wanted] | EncoderError
    digest: bytes
    receivers: tuple[PushEndpoint, ...] = ()
    deadline: float = math.inf


@dataclass(eq=False)
class _Landing:
    """Where a receiver wants the rows, and what came of it."""

    memory: RemoteMemory
    done: asyncio.Future[RefusalError | None]


@dataclass(eq=False)
class _Life:
    """What the world outside `Parts` has of a part. `header` names it. `staged` counts the parcel's bytes.
    `landings` are of receivers that have asked for the rows."""

    begun: asyncio.Future[bool]
    """Whether `/encode` came."""
    settled: asyncio.Future[RefusalError | None]
    sized: asyncio.Future[ParcelHeader | None]
    header: ParcelHeader | None = None
    work: asyncio.Task[None] | None = None
    parcel: Parcel | None = None
    sending: int = 0
    staged: ExitStack = field(default_factory=ExitStack)
    landings: dict[PushEndpoint, _Landing] = field(default_factory=dict)

    def destination(self, receiver: PushEndpoint) -> PushEndpoint | RemoteMemory:
        return self.landings[receiver].memory if receiver in self.landings else receiver

    def landed(self, receiver: PushEndpoint, error: RefusalError | None) -> None:
        if receiver in self.landings:
            _resolve(self.landings[receiver].done, error)


class SglangDialect:
    """Belongs to one event loop. `transport` takes what its backend has for a destination. `is_fetched`: receivers ask
    for the rows by `send`, and `encode` returns when these are there."""

    def __init__(
        self,
        service: EncoderService,
        config: Config,
        *,
        pool: Executor,
        fetcher: Fetcher,
        transport: Transport[Parcel, Any],
        budget: StagedBytes,
        metrics: DialectMetrics,
        lonely_s: float = 5.0,
        is_fetched: bool = False,
    ) -> None:
        self._service = service
        self._config = config
        self._pool = pool
        self._fetcher = fetcher
        self._transport = transport
        self._metrics = metrics
        limits, wait_s = config.limits, config.sglang.send_timeout_s
        self._parts = Parts(
            PartLimits(
                early_s=limits.request_timeout_s,
                staged_s=wait_s,
                late_s=wait_s,
                lonely_s=lonely_s,
                max_active=limits.max_queued_items,
                max_expected=EXPECTED_TIMES * limits.max_queued_items,
                max_closed=EXPECTED_TIMES * limits.max_queued_items,
            ),
            is_fetched=is_fetched,
        )
        self._is_fetched = is_fetched
        self._staged = budget
        self._lives: dict[int, _Life] = {}
        self._sends: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_parts(self) -> int:
        """Parts that anything is remembered of."""
        return len(self._parts)

    @property
    def staged_bytes(self) -> int:
        return self._staged.used

    # -- calls

    async def encode(self, call: EncodeCall, media: ExitStack, reserve: Callable[[int], None]) -> ParcelHeader:
        """Return when all receivers have the part's rows, or may fetch them, and what these are. Raises `RefusalError`.

        A cancelled call may be made again: an equal one takes its place. `media` is closed when the items are not
        needed any more; `reserve` adds to it what is fetched.
        """
        started, modality = _now(), call.header.modality
        self._metrics.received(modality, None if isinstance(call.items, EncoderError) else len(call.items))
        with ExitStack() as unused:
            unused.push(media)
            part, is_new, commands = self._parts.begin(call.header.part_id, call.digest, _now(), call.receivers)
            life = self._life(part.key)
            if is_new:
                life.header = call.header
                if part.phase is Phase.ENCODING:
                    unused.pop_all()
                    life.work = asyncio.create_task(self._make(part.key, life, call, media, reserve))
        # Not at once, since a part whose own time is over says in which stage.
        patience = None if call.deadline == math.inf else max(0.0, call.deadline - started) + _LAST_WORDS_S
        del call  # its items, for which the work has the account
        self._carry_out(commands)
        wanted: asyncio.Future[Any] = life.sized if self._is_fetched else life.settled
        try:
            await asyncio.wait({wanted}, timeout=patience)
        finally:
            self._parts.leave(part.key, _now())
        error = life.settled.result() if life.settled.done() else None
        if not wanted.done():
            error = RefusalError.of(time_over("delivery" if life.sized.done() else "forward"))
        self._metrics.answered(modality, _now() - started, error is None)
        if error is not None:
            raise RefusalError(error.status, error.message)
        header = life.sized.result()
        assert header is not None
        return header

    async def register(self, part_id: str, receiver: PushEndpoint, count: int) -> None:
        """Take note of a receiver, one of `count`; waits for a request to encode that has not come yet.

        Raises `RefusalError`: 400, 503, or 504 where it does not come.
        """
        part, commands = self._parts.register(part_id, receiver, count, _now())
        life = self._life(part.key)
        self._carry_out(commands)
        if part.phase is Phase.EXPECTED:
            await self._begun(part.key, life, receiver)

    async def send(self, part_id: str, memory: RemoteMemory, count: int) -> None:
        """Return when the rows are in `memory`, which is one of `count` receivers'; not before they are on their way
        there no more. Raises `RefusalError`: 400, 404, the part's own failure, or 502."""
        part = self._parts.find(part_id)
        if part is None or part.phase is Phase.EXPECTED:
            raise RefusalError(404, "nothing is known of this req_id: /send comes after /encode, while its rows wait")
        life = self._life(part.key)
        landing = life.landings.get(memory.endpoint)
        if landing is not None and landing.memory != memory:
            raise RefusalError(400, "this receiver has named another buffer for this req_id before")
        part, commands = self._parts.register(part_id, memory.endpoint, count, _now())
        if landing is None:
            done = asyncio.get_running_loop().create_future()
            landing = life.landings[memory.endpoint] = _Landing(memory, done)
        self._carry_out(commands)
        await asyncio.wait({landing.done})
        if (error := landing.done.result()) is not None:
            raise RefusalError(error.status, error.message)

    async def sizes(self, part_id: str) -> ParcelHeader:
        """What a part's rows are, once they are there. Raises `RefusalError`."""
        part = self._parts.watch(part_id, _now())
        life = self._life(part.key)
        self._carry_out(())
        if part.phase is Phase.EXPECTED:
            await self._begun(part.key, life, None)
        await asyncio.wait({life.sized})
        header = life.sized.result()
        if header is None:
            # A receiver passes the status on to its user, as it does with that of /encode.
            error = life.settled.result() if life.settled.done() else None
            raise RefusalError(error.status, error.message) if error else RefusalError(500, "the encode failed")
        return header

    async def drain(self) -> None:
        """Return when no part is being encoded or has rows that wait for receivers, which may still register."""
        while self._parts.num_active:
            await asyncio.sleep(_TICK_S)

    async def close(self) -> None:
        """Tell all who wait that the server ends. May be called again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._carry_out(self._parts.fail_all(RefusalError(503, "the server is ending"), _now()))
        if self._sends:
            await asyncio.wait(self._sends, timeout=_LAST_WORDS_S)
        works = {life.work for life in self._lives.values() if life.work is not None}
        for task in (*self._sends, *works):
            task.cancel()
        await asyncio.gather(*self._sends, *works, return_exceptions=True)
        await self._transport.close()

    # -- the work of a part

    async def _make(
        self, key: int, life: _Life, call: EncodeCall, media: ExitStack, reserve: Callable[[int], None]
    ) -> None:
        try:
            with media:
                parcel = await self._encoded(call, reserve)
            if life.settled.done():
                return
            life.staged.enter_context(self._staged.hold(parcel.num_bytes))
            life.parcel = parcel
            _resolve(life.sized, parcel.header)
            commands = self._parts.staged(key, _now())
        except EncoderError as error:
            commands = self._parts.failed(key, RefusalError.of(error), _now())
        except Exception:
            log.exception("a part of a request could not be encoded")
            unknown = RefusalError(500, "the server failed on this request; its log says why")
            commands = self._parts.failed(key, unknown, _now())
        self._carry_out(commands)

    async def _encoded(self, call: EncodeCall, reserve: Callable[[int], None]) -> Parcel:
        if isinstance(call.items, EncoderError):
            raise call.items
        self._staged.check_room()
        check_output(self._service, OutputKind.TOKENS)
        outcomes = await fetch_and_encode(
            self._service,
            [item.source for item in call.items],
            self._fetcher,
            limits=ItemLimits.of(self._config),
            pool=self._pool,
            reserve=reserve,
            request_id=call.header.part_id,
            output=OutputKind.TOKENS,
            timeout_s=min(self._config.limits.request_timeout_s, call.deadline - _now()),
            check=partial(check_items, wanted=call.items),
            name=item_name,
        )
        return parcel_of(call.header, outcomes)

    # -- commands

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Begun(key):
                    _resolve(self._life(key).begun, True)
                case Deliver(key, receiver):
                    life = self._life(key)
                    assert life.parcel is not None
                    life.sending += 1
                    self._send(self._deliver(key, life, life.parcel, receiver))
                case Tell(key, receiver, refusal):
                    life = self._life(key)
                    assert life.header is not None
                    if receiver in life.landings:
                        life.landed(receiver, refusal)
                    else:
                        self._send(self._tell(life.header, receiver, refusal))
                case Settle(key, error):
                    self._settle(key, error)
                case Abandon(key):
                    if (work := self._lives[key].work) is not None:
                        work.cancel()
                case Forget(key):
                    self._forget(key)
                case _:
                    assert_never(command)
        if self._timer is None and len(self._parts):
            self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _settle(self, key: int, error: RefusalError | None) -> None:
        life = self._lives[key]
        if error is not None:
            log.info("a part of a request ends with %d: %s", error.status, error.message)
        _resolve(life.settled, error)
        _resolve(life.sized, None)
        self._let_go(life)

    def _forget(self, key: int) -> None:
        if (life := self._lives.pop(key, None)) is not None:
            _resolve(life.begun, False)
            _resolve(life.sized, None)

    def _let_go(self, life: _Life) -> None:
        """Of the rows, when nobody needs them any more."""
        if life.settled.done() and not life.sending:
            life.parcel = None
            life.staged.close()

    def _send(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._sends.add(task)
        task.add_done_callback(self._sends.discard)

    async def _deliver(self, key: int, life: _Life, parcel: Parcel, receiver: PushEndpoint) -> None:
        error = None
        started = _now()
        try:
            await self._transport.deliver(parcel, life.destination(receiver))
        except EncoderError as failure:
            error = RefusalError.of(failure)
        except BaseException:
            life.landed(receiver, RefusalError(503, "the server is ending"))
            raise
        finally:
            del parcel
            life.sending -= 1
            self._let_go(life)
        life.landed(receiver, error)
        self._metrics.pushed(_now() - started, error is None)
        self._carry_out(self._parts.delivered(key, error, _now()))

    async def _tell(self, header: ParcelHeader, receiver: PushEndpoint, refusal: RefusalError) -> None:
        error = ParcelError(status=refusal.status, message=refusal.message)
        try:
            await self._transport.deliver(Parcel(header=header, error=error), receiver)
        except EncoderError as failure:
            log.warning("a receiver could not be told of an error: %s", failure.message)

    # -- small parts

    async def _begun(self, key: int, life: _Life, receiver: PushEndpoint | None) -> None:
        try:
            await asyncio.wait({life.begun})
        finally:
            self._carry_out(self._parts.stop_waiting(key, receiver))
        if not life.begun.result():
            raise RefusalError(504, "no /encode has come for this req_id in time")

    def _life(self, key: int) -> _Life:
        if (life := self._lives.get(key)) is None:
            new = asyncio.get_running_loop().create_future
            life = self._lives[key] = _Life(begun=new(), settled=new(), sized=new())
        return life

    def _tick(self) -> None:
        self._timer = None
        self._carry_out(self._parts.tick(_now()))


def _now() -> float:
    return time.monotonic()


def _resolve(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)
