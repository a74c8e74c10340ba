"""A keeper's connection to the dispatcher: says hello, reports, obeys."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import assert_never

from spmd_encoder.api.stillness import Stillness
from spmd_encoder.api.types import ProcessInfo
from spmd_encoder.keeper.rank_worker import RankWorker
from spmd_encoder.wire.codec import WireError
from spmd_encoder.wire.messages import (
    PROTOCOL_VERSION,
    FromKeeper,
    KeeperHello,
    Reform,
    Stop,
    ToKeeper,
    WorldRecord,
)
from spmd_encoder.wire.streams import Stream, connect

log = logging.getLogger(__name__)

PROGRESS_S = 1.0
RECONNECT_S = 5.0
RETRY_S = 0.1
LONG_GAP_S = 3.0


class DispatcherLostError(Exception):
    """The elected rank's keeper does not answer any more."""


class ControlClient:
    def __init__(
        self,
        process: ProcessInfo,
        worker: RankWorker,
        *,
        nursery: Callable[[], ProcessInfo | None],
        versions: dict[str, str],
    ) -> None:
        self._process = process
        self._worker = worker
        self._nursery = nursery
        self._versions = versions
        self._stream: Stream[ToKeeper] | None = None

    def report(self, message: FromKeeper) -> None:
        """Dropped while there is no connection: `RankWorker.state` says it again after the next hello."""
        if self._stream is not None:
            self._stream.send(message)

    async def run(self, world: WorldRecord) -> Stop:
        """Until the dispatcher says stop. Raises DispatcherLostError when it stays away for RECONNECT_S."""
        while True:
            self._stream = await self._connect(world)
            beat = asyncio.create_task(self._progress())
            try:
                if (stop := await self._obey(self._stream)) is not None:
                    return stop
            finally:
                beat.cancel()
                self._stream.close()
                self._stream = None
            log.warning("the connection to the dispatcher was lost; connecting again")

    async def _connect(self, world: WorldRecord) -> Stream[ToKeeper]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RECONNECT_S):
                while True:
                    try:
                        stream: Stream[ToKeeper] = await connect(world.control_address, ToKeeper)
                    except OSError:
                        await asyncio.sleep(RETRY_S)
                        continue
                    hello = KeeperHello(
                        protocol=PROTOCOL_VERSION,
                        token=world.token,
                        rank=self._process.rank,
                        process=self._process,
                        nursery=self._nursery(),
                        versions=self._versions,
                    )
                    for message in (hello, *self._worker.state()):
                        stream.send(message)
                    return stream
        raise DispatcherLostError("the dispatcher (the elected rank's keeper) is gone")

    async def _obey(self, stream: Stream[ToKeeper]) -> Stop | None:
        while True:
            try:
                message = await stream.receive()
            except WireError as error:
                log.error("the dispatcher said something that is no message: %s", error)
                return None
            match message:
                case None:
                    return None
                case Reform():
                    self._worker.reform(message)
                case Stop():
                    return message
                case _:
                    assert_never(message)

    async def _progress(self) -> None:
        stillness = Stillness(PROGRESS_S)
        while True:
            if (gap_s := stillness.gap_s()) > 0:
                # A second or two is a busy machine at the start; more is a stop, a freeze or starvation.
                log.log(
                    logging.WARNING if gap_s > LONG_GAP_S else logging.DEBUG,
                    "this process stood still for %.1f s",
                    gap_s,
                )
                self._worker.slept(gap_s)
            if (progress := self._worker.progress()) is not None:
                self.report(progress)
            await asyncio.sleep(PROGRESS_S)
