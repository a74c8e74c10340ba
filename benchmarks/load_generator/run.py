"""Sends a load: the event loop's part."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import replace

import aiohttp

from benchmarks.load_generator.chaos import BadInput, Chaos, HangUp, all_chaos, hang_up
from benchmarks.load_generator.mix import Turn, turns
from benchmarks.load_generator.plan import LoadPlan
from benchmarks.load_generator.progress import Progress
from benchmarks.load_generator.requests import body_of, error_code, file_of, items_failed, stages_ms
from benchmarks.load_generator.schedule import due_times
from benchmarks.load_generator.tally import OK, Sample, Tally

_MOST_OUTSTANDING = 4096
_ACCEPT = "application/vnd.safetensors"


async def run_load(url: str, plan: LoadPlan, progress: Progress | None = None) -> Tally:
    """One measurement. What is refused counts by its code and is not sent again. Where it is cancelled, as by Ctrl-C,
    what was answered until then is the result, and `interrupted` is set. It ends early, and `server_ended` is set,
    where no connection could be made for `give_up_s`."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=plan.timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session:
        load = _Load(url, plan, session)
        telling = asyncio.create_task(progress.tell(load.tally)) if progress else None
        cpu = os.times()
        try:
            if plan.clients is None:
                await load.unbounded()
            else:
                await asyncio.gather(*(load.client() for _ in range(plan.clients)))
        except asyncio.CancelledError:
            load.tally.interrupted = True
        cpu_end = os.times()
        if telling:
            telling.cancel()
    load.tally.wall_s = load.now()
    load.tally.own_cpu_s = cpu_end.user + cpu_end.system - cpu.user - cpu.system
    return load.tally


class _Load:
    def __init__(self, url: str, plan: LoadPlan, session: aiohttp.ClientSession) -> None:
        self._url = url.rstrip("/")
        self._path = self._url + "/v1/encode" + (f"?output={plan.output}" if plan.output else "")
        self._plan = plan
        self._session = session
        self._bad: tuple[Chaos, ...] = tuple(all_chaos(plan.pools[0][0]))
        self._turns = self._due_turns()
        self._began = time.perf_counter()
        self._lost_since: float | None = None
        self.tally = Tally()

    def now(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._began

    async def client(self) -> None:
        """One of so many: takes the next request when its last one is over."""
        for due, turn in self._turns:  # shared: each is one client's
            now = self.now()
            # What was due before the end is sent, however late: leaving it out would hide the worst waits.
            if (now if due is None else due) >= self._plan.duration_s or self.tally.server_ended:
                return
            if due is not None and due > now:
                await asyncio.sleep(due - now)
            await self._one(turn, now if due is None else due)

    async def unbounded(self) -> None:
        """Every request when it is due, however many are under way."""
        running: set[asyncio.Task[None]] = set()
        try:
            for due, turn in self._turns:
                assert due is not None
                if due >= self._plan.duration_s or self.tally.server_ended:
                    break
                await asyncio.sleep(max(0.0, due - self.now()))
                if len(running) >= _MOST_OUTSTANDING:
                    self.tally.samples.append(Sample(due, due, due, "NOT_SENT", answered=False))
                    continue
                task = asyncio.create_task(self._one(turn, due))
                running.add(task)
                task.add_done_callback(running.discard)
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()  # before the session closes, which would look like the server's errors

    def _due_turns(self) -> Iterator[tuple[float | None, Turn]]:
        """(when it is due, or None for at once; what it is)."""
        plan = self._plan
        drawn = turns(
            shares=plan.shares or [1.0] * len(plan.pools),
            items_per_request=plan.items_per_request,
            reuse=plan.reuse,
            window=plan.window,
            chaos=plan.chaos,
            num_chaos=len(self._bad),
            seed=plan.seed,
        )
        due: Iterator[float | None] = itertools.repeat(None)
        if plan.rate is not None:
            due = iter(due_times(plan.rate, plan.arrivals, plan.seed))
        return itertools.islice(zip(due, drawn, strict=False), plan.num_requests)

    async def _one(self, turn: Turn, due: float) -> None:
        sample = Sample(due, self.now(), 0.0, items=len(turn.items))
        sample = await self._misbehave(sample, turn.chaos) if turn.chaos is not None else await self._ask(sample, turn)
        self.tally.samples.append(replace(sample, ended=self.now()))

    def _broke(self, error: Exception) -> str:
        """Its name. A server that takes its time is there: only a connection that fails speaks against that."""
        if isinstance(error, TimeoutError) or not isinstance(error, aiohttp.ClientConnectionError | OSError):
            self._lost_since = None
        elif self._lost_since is None:
            self._lost_since = self.now()
        elif self.now() - self._lost_since >= self._plan.give_up_s:
            self.tally.server_ended = True
        return type(error).__name__

    async def _ask(self, sample: Sample, turn: Turn) -> Sample:
        body, kind = body_of([file_of(item, self._plan.pools, self._plan.seed) for item in turn.items])
        try:
            async with self._session.post(
                self._path, data=body, headers={"content-type": kind, "accept": _ACCEPT}
            ) as reply:
                got = await reply.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return replace(sample, code=self._broke(error), answered=False)
        self._lost_since = None
        if reply.status != 200:
            return replace(sample, code=error_code(reply.status, got))
        if len(turn.items) > 1 and (failed := items_failed(got)) is not None:
            return replace(sample, code=failed)
        if self._plan.on_reply is not None:
            self._plan.on_reply(turn, got)
        headers = reply.headers
        return replace(
            sample,
            cached=int(headers.get("x-spmd-cached", 0)),
            replica=headers.get("x-spmd-replica", ""),
            stages_ms=stages_ms(headers.get("server-timing", "")),
        )

    async def _misbehave(self, sample: Sample, number: int) -> Sample:
        chaos = self._bad[number]
        if isinstance(chaos, HangUp):
            code = await hang_up(self._url, self._plan.pools[0][0], chaos)
            if code == OK:
                self._lost_since = None
            return replace(sample, chaos=chaos.name, code=code, expected=code == OK, answered=False)
        return await self._send_bad(replace(sample, chaos=chaos.name), chaos)

    async def _send_bad(self, sample: Sample, bad: BadInput) -> Sample:
        try:
            async with self._session.post(
                self._url + "/v1/encode" + bad.query, data=bad.body, headers={"content-type": bad.content_type}
            ) as reply:
                code = error_code(reply.status, await reply.read())
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return replace(sample, code=self._broke(error), expected=False, answered=False)
        self._lost_since = None
        return replace(sample, code=code, expected=reply.status in bad.statuses)
