"""The dispatcher over real sockets, with fakes for schedulers and keepers."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from spmd_encoder.api.cost import CostTable
from spmd_encoder.api.profiling import ProfileOptions, ProfileOutcome
from spmd_encoder.api.types import (
    Embedding,
    EncodeRequest,
    ItemFailure,
    MediaItem,
    Modality,
    ModelInfo,
    OutputKind,
    ProcessInfo,
    StageTimes,
)
from spmd_encoder.config import Config, LifecycleConfig, LimitsConfig
from spmd_encoder.dispatcher.dispatcher import DPDispatcher
from spmd_encoder.distributed.layout import Layout
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.runtime.control import launch_dp_runtime
from spmd_encoder.wire.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Completed,
    Endpoint,
    Failed,
    Heartbeat,
    Hello,
    Job,
    KeeperHello,
    Profile,
    Profiled,
    Reform,
    SchedulerStats,
    Stop,
    ToKeeper,
    ToScheduler,
    WorkerExited,
)
from spmd_encoder.wire.sockets import DealerSocket, new_context
from spmd_encoder.wire.streams import Stream, connect

MODEL = ModelInfo(
    name="m",
    family="f",
    model_type="t",
    dtype="float32",
    outputs=(OutputKind.TOKENS,),
    default_output=OutputKind.TOKENS,
    modalities=(Modality.IMAGE,),
    embedding_dims={OutputKind.TOKENS: 4},
    random_weights=True,
)


def count_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def until(condition: Callable[[], Any], what: str = "") -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"never came true: {what or condition}")


class Scheduler:
    """A replica's leader as the dispatcher sees it; answers at once unless `held`."""

    def __init__(
        self, world: World, replica: int, epoch: int = 0, *, secret: str | None = None, **changes: Any
    ) -> None:
        self.world, self.replica, self.epoch = world, replica, epoch
        self.socket: DealerSocket[Any] = DealerSocket(
            world.context,
            ToScheduler,
            secret=world.endpoint.token if secret is None else secret,
            name=b"r%d.%d.%d" % (replica, epoch, next(world.ids)),
            address=world.endpoint.work_address,
        )
        self.held = False
        self.probe_error: ErrorCode | None = None
        self.jobs: list[Job] = []
        self.open: list[Job] = []
        self.media: dict[int, bytes] = {}
        self.cancelled: list[int] = []
        self.profiles: list[Profile] = []
        self.task = asyncio.create_task(self._serve())
        hello = Hello(
            protocol=PROTOCOL_VERSION,
            config_digest=world.config.digest(),
            replica=replica,
            epoch=epoch,
            model=MODEL,
            cost=CostTable(fixed_tokens=10),
            load_s=1.0,
            tower_bytes=100,
        )
        fields = {name: getattr(hello, name) for name in hello.__struct_fields__} | changes
        self.socket.send(Hello(**fields))

    async def _serve(self) -> None:
        while True:
            message, frames = await self.socket.receive()
            if isinstance(message, Cancel):
                self.cancelled += message.job_ids
                continue
            if isinstance(message, Profile):
                self.profiles.append(message)
                continue
            assert len(frames) == len(message.jobs)
            for job, frame in zip(message.jobs, frames, strict=True):
                self.jobs.append(job)
                self.media[job.job_id] = bytes(frame)
                if job.probe and self.probe_error is not None:
                    self.socket.send(Failed(job_id=job.job_id, code=self.probe_error, message="broken"))
                elif job.probe or not self.held:
                    self.complete(job)
                else:
                    self.open.append(job)

    def complete(self, job: Job) -> None:
        message = Completed(
            job_id=job.job_id,
            kind=OutputKind.TOKENS,
            shape=(1, 4),
            dtype="uint8",
            num_tokens=1,
            grid=None,
            times=StageTimes(queue_s=0.5),
        )
        self.socket.send(message, (self.media[job.job_id][:4],))

    def release(self) -> None:
        self.held = False
        for job in self.open:
            self.complete(job)
        self.open.clear()

    def profiled(self, call: int = -1, *, path: str = "p", more: int = 0) -> None:
        """Answer a call for its ranks. `more` is added to the call's number."""
        ranks = self.world.layout.ranks_of(self.replica)
        outcomes = [ProfileOutcome(rank=r, dp_rank=self.replica, tp_rank=tp, path=path) for tp, r in enumerate(ranks)]
        self.socket.send(Profiled(call_id=self.profiles[call].call_id + more, outcomes=tuple(outcomes)))

    @property
    def real_jobs(self) -> list[Job]:
        return [job for job in self.jobs if not job.probe]

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.socket.close()


class Keeper:
    def __init__(self, stream: Stream[Any], rank: int) -> None:
        self.stream, self.rank = stream, rank
        self.got: list[Any] = []
        self.ended = False
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while (message := await self.stream.receive()) is not None:
            self.got.append(message)
        self.ended = True

    def reforms(self) -> list[Reform]:
        return [message for message in self.got if isinstance(message, Reform)]

    def report(self, epoch: int, *suspects: int, code: int = -9) -> None:
        self.stream.send(WorkerExited(rank=self.rank, epoch=epoch, code=code, suspects=suspects))

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.stream.close()


class World:
    def __init__(self, config: Config, layout: Layout, dispatcher: DPDispatcher, endpoint: Endpoint) -> None:
        self.config, self.layout, self.dispatcher, self.endpoint = config, layout, dispatcher, endpoint
        self.context = new_context()
        self.ids = iter(range(10**6))
        self.peers: list[Scheduler | Keeper] = []
        self.keepers: list[Keeper] = []

    def scheduler(self, replica: int, epoch: int = 0, **changes: Any) -> Scheduler:
        self.peers.append(made := Scheduler(self, replica, epoch, **changes))
        return made

    async def keeper(self, rank: int, **changes: Any) -> Keeper:
        stream = await connect(self.endpoint.control_address, ToKeeper)
        process = ProcessInfo(rank=rank, dp_rank=0, tp_rank=0, role="keeper", pid=1, epoch=None)
        hello = KeeperHello(
            protocol=PROTOCOL_VERSION,
            token=self.endpoint.token,
            rank=rank,
            process=process,
            nursery=None,
            versions={"torch": "2"},
        )
        fields = {name: getattr(hello, name) for name in hello.__struct_fields__} | changes
        stream.send(KeeperHello(**fields))
        self.peers.append(made := Keeper(stream, rank))
        return made

    async def up(self) -> list[Scheduler]:
        self.keepers = [await self.keeper(rank) for rank in range(self.layout.world_size)]
        schedulers = [self.scheduler(replica) for replica in self.layout.replicas]
        await until(lambda: self.dispatcher.ready_state().replicas_ready == self.layout.dp_size, "ready")
        return schedulers

    def encode(self, *data: bytes, deadline_s: float | None = None) -> asyncio.Task[Any]:
        request = EncodeRequest(request_id="q", items=tuple(map(item, data)), deadline_s=deadline_s)
        return asyncio.create_task(self.dispatcher.encode(request))

    def outstanding(self) -> list[int]:
        return [entry["outstanding_items"] for entry in self.dispatcher.info()["replicas"]]

    def metric(self, name: str) -> float:
        lines = self.dispatcher.metrics_text().decode().splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(name))


def item(data: bytes) -> MediaItem:
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    return MediaItem(modality=Modality.IMAGE, data=data, digest=digest, width=8, height=8)


def answers(outcomes: Any) -> list[bytes | ErrorCode]:
    return [bytes(out.data) if isinstance(out, Embedding) else out.error.code for out in outcomes]


@asynccontextmanager
async def world(
    folder: Path, dp: int = 1, tp: int = 1, *, limits: dict[str, Any] | None = None, **lifecycle: Any
) -> AsyncIterator[World]:
    config = Config(limits=LimitsConfig(**(limits or {})), lifecycle=LifecycleConfig(**lifecycle))
    layout = Layout(dp, tp)
    async with AsyncExitStack() as stack:
        dispatcher, endpoint = await launch_dp_runtime(config, layout, run_dir=folder, host="", stack=stack)
        made = World(config, layout, dispatcher, endpoint)
        try:
            yield made
            assert not dispatcher.ended.done() or dispatcher.ended.result().reason != ""
            assert not any(task.done() for task in dispatcher._tasks), "the dispatcher failed"
        finally:
            for peer in made.peers:
                await peer.close()
            made.context.destroy(linger=0)


async def refused(task: asyncio.Task[Any], code: ErrorCode) -> EncoderError:
    with pytest.raises(EncoderError) as caught:
        await asyncio.wait_for(task, 5)
    assert caught.value.code is code
    assert caught.value.retry_after_s
    return caught.value


async def done(task: asyncio.Task[Any]) -> list[bytes | ErrorCode]:
    return answers(await asyncio.wait_for(task, 8))


async def test_ready_after_a_probe_of_every_replica(tmp_path: Path) -> None:
    async with world(tmp_path, dp=2) as w:
        assert w.dispatcher.model_info() is None
        await refused(w.encode(b"early"), ErrorCode.NOT_READY)
        first = w.scheduler(0)
        await until(lambda: w.dispatcher.ready_state().replicas_ready == 1)
        assert [job.probe for job in first.jobs] == [True]
        assert not w.dispatcher.ready_state().ready, "the world has not started"
        await refused(w.encode(b"early"), ErrorCode.NOT_READY)
        w.scheduler(1)
        await until(lambda: w.dispatcher.ready_state().ready)
        assert w.dispatcher.model_info() == MODEL
        assert await done(w.encode(b"aaaa")) == [b"aaaa"]


async def test_a_start_deadline_lets_a_part_of_the_world_serve(tmp_path: Path) -> None:
    async with world(tmp_path, dp=2, start_deadline_s=0.2) as w:
        w.scheduler(1)
        await until(lambda: w.dispatcher.ready_state().ready)
        assert await done(w.encode(b"aaaa", b"bbbb")) == [b"aaaa", b"bbbb"]


async def test_outcomes_keep_the_order_of_the_items(tmp_path: Path) -> None:
    async with world(tmp_path, dp=2) as w:
        schedulers = await w.up()
        for scheduler in schedulers:
            scheduler.held = True
        data = [b"%04d" % number for number in range(12)]
        task = w.encode(*data)
        await until(lambda: sum(len(s.open) for s in schedulers) == 12)
        assert [len(s.open) for s in schedulers] == [6, 6]
        assert w.metric("spmd_encoder_items_in_hand") == 12
        for scheduler in reversed(schedulers):
            scheduler.open.reverse()
            scheduler.release()
        outcomes = await asyncio.wait_for(task, 5)
        assert answers(outcomes) == data
        assert {out.replica for out in outcomes} == {0, 1}
        assert [out.digest for out in outcomes] == [item(d).digest for d in data]
        assert w.outstanding() == [0, 0]
        assert w.metric('spmd_encoder_items_total{outcome="ok"}') == 12 + 2  # and the probes


async def test_items_that_front_ends_refuse_are_counted_beside_the_others(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        w.dispatcher.item_refused(ErrorCode.MEDIA_CORRUPT)
        assert w.metric('spmd_encoder_items_total{outcome="media_corrupt"}') == 1


async def test_an_items_failure_is_its_own(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        (scheduler,) = await w.up()
        scheduler.held = True
        task = w.encode(b"good", b"evil")
        await until(lambda: len(scheduler.open) == 2)
        evil = scheduler.open.pop()
        scheduler.socket.send(Failed(job_id=evil.job_id, code=ErrorCode.MEDIA_CORRUPT, message="cannot be read"))
        scheduler.release()
        good, bad = await asyncio.wait_for(task, 5)
        assert bytes(good.data) == b"good"
        assert isinstance(bad, ItemFailure)
        assert (bad.error.code, bad.error.message, bad.replica) == (ErrorCode.MEDIA_CORRUPT, "cannot be read", 0)


async def test_strangers_on_the_work_socket_disturb_nothing(tmp_path: Path) -> None:
    async with world(tmp_path, dp=2) as w:
        bad = [
            w.scheduler(0, secret="wrong"),
            w.scheduler(0, secret="ü"),
            w.scheduler(0, protocol=PROTOCOL_VERSION + 1),
            w.scheduler(0, config_digest="other"),
            w.scheduler(0, epoch=1),
            w.scheduler(7),
            w.scheduler(-1),
        ]
        nobody = w.context.socket(zmq.DEALER)
        nobody.connect(w.endpoint.work_address)
        await nobody.send_multipart([b"x" * 1000] * 5)
        raw = w.context.socket(zmq.DEALER)
        raw.plain_username, raw.plain_password = b"member", w.endpoint.token.encode()
        raw.connect(w.endpoint.work_address)
        deep = b"\x82\xa1x" + b"\x91" * 50_000 + b"\x90" + b"\xa4type\xa6Cancel"
        for frames in ([b""], [b"", b""], [b"\xc1"], [os.urandom(100)], [b"\x80"] * 5, [deep]):
            await raw.send_multipart(frames)
        schedulers = await w.up()
        for scheduler in schedulers:
            scheduler.held = True
        task = w.encode(b"aaaa")
        await until(lambda: any(s.open for s in schedulers))
        stolen = next(job for s in schedulers for job in s.open)
        bad[0].media[stolen.job_id] = b"fake"
        bad[0].complete(stolen)
        other = next(s for s in schedulers if not s.open)
        other.media[stolen.job_id] = b"fake"
        other.complete(stolen)  # a replica that does not have it in hand
        await asyncio.sleep(0.05)
        assert not task.done()
        for scheduler in schedulers:
            scheduler.release()
        assert await done(task) == [b"aaaa"]
        assert not any(stranger.jobs for stranger in bad)
        raw.close(linger=0)


async def test_strangers_on_the_control_socket_disturb_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        path = w.endpoint.control_address.removeprefix("unix:")
        for data in (b"", b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 8, b"\0\0\0\1\xc1"):
            _, writer = await asyncio.open_unix_connection(path)
            writer.write(data)
            await writer.drain()
            writer.close()
        strangers = [
            await w.keeper(0, token="wrong"),
            await w.keeper(0, protocol=PROTOCOL_VERSION + 1),
            await w.keeper(9),
            await w.keeper(-1),
        ]
        await until(lambda: all(stranger.ended for stranger in strangers))
        await w.up()
        assert await done(w.encode(b"aaaa")) == [b"aaaa"]
        assert w.keepers[0].got == []


async def test_a_keeper_that_sends_noise_is_lost_and_may_come_back(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.up()
        w.keepers[0].stream._writer.write(b"\0\0\0\1\xc1")
        await until(lambda: w.dispatcher.ready_state().replicas_ready == 0)
        await until(lambda: w.keepers[0].ended)
        back = await w.keeper(0)
        await until(lambda: back.reforms() == [Reform(replica=0, epoch=1, pause_s=0.5)])
        w.scheduler(0, epoch=1)
        await until(lambda: w.dispatcher.ready_state().ready)


async def test_a_lost_replicas_jobs_go_to_the_other(tmp_path: Path) -> None:
    async with world(tmp_path, dp=2) as w:
        first, second = await w.up()
        first.held = second.held = True
        task = w.encode(b"aaaa", b"bbbb", b"cccc", b"dddd")
        await until(lambda: len(first.open) == len(second.open) == 2)
        suspect, innocent = first.open
        w.keepers[0].report(0, suspect.job_id)
        await until(lambda: len(second.open) == 4)
        assert {job.job_id: job.alone for job in second.open[2:]} == {suspect.job_id: True, innocent.job_id: False}
        assert w.keepers[0].reforms() == [Reform(replica=0, epoch=1, pause_s=0.0)]
        assert w.keepers[1].reforms() == []
        first.release()  # a late voice from the dead epoch
        await asyncio.sleep(0.05)
        assert not task.done()
        second.release()
        assert await done(task) == [b"aaaa", b"bbbb", b"cccc", b"dddd"]
        assert w.dispatcher.ready_state().ready, "the other one serves"
        assert w.metric("spmd_encoder_items_retried") == 2
        assert w.metric('spmd_encoder_replica_reforms_total{dp_rank="0"}') == 1
        w.scheduler(0, epoch=0)
        again = w.scheduler(0, epoch=1)
        await until(lambda: w.dispatcher.ready_state().replicas_ready == 2)
        assert len(again.jobs) == 1


async def test_at_two_deaths_the_item_is_given_up_and_the_rest_is_served(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        (scheduler,) = await w.up()
        scheduler.held = True
        task = w.encode(b"evil", b"good")
        for epoch in (0, 1):
            await until(lambda: scheduler.open)  # noqa: B023
            evil = next(job for job in scheduler.open if scheduler.media[job.job_id] == b"evil")
            assert evil.alone is bool(epoch)
            w.keepers[0].report(epoch, evil.job_id)
            await until(lambda: len(w.keepers[0].reforms()) == epoch + 1)  # noqa: B023
            scheduler = w.scheduler(0, epoch=epoch + 1)
            scheduler.held = epoch == 0
        assert await done(task) == [ErrorCode.WORKER_DIED, b"good"]
        assert await done(w.encode(b"evil")) == [ErrorCode.WORKER_DIED]
        assert w.dispatcher.ready_state().ready


async def test_a_followers_death_waits_for_the_leaders_word(tmp_path: Path) -> None:
    async with world(tmp_path, tp=2) as w:
        (scheduler,) = await w.up()
        scheduler.held = True
        task = w.encode(b"aaaa", b"bbbb")
        await until(lambda: len(scheduler.open) == 2)
        w.keepers[1].report(0)
        await until(lambda: all(keeper.reforms() for keeper in w.keepers))
        assert w.outstanding() == [2], "nobody has said yet what was being worked on"
        w.keepers[0].report(0, scheduler.open[1].job_id)
        await until(lambda: w.outstanding() == [0])
        again = w.scheduler(0, epoch=1)
        assert await done(task) == [b"aaaa", b"bbbb"]
        assert [job.alone for job in again.real_jobs] == [False, True]


async def test_a_keepers_loss_settles_its_replicas_jobs(tmp_path: Path) -> None:
    async with world(tmp_path, dp=2) as w:
        first, second = await w.up()
        first.held = True
        task = w.encode(b"aaaa", b"bbbb")
        await until(lambda: len(first.open) == 1)
        await w.keepers[0].close()
        assert await done(task) == [b"aaaa", b"bbbb"]
        assert len(second.real_jobs) == 2
        assert w.dispatcher.ready_state().replicas_ready == 1
        await w.keepers[1].close()
        await until(lambda: w.dispatcher.ready_state().replicas_ready == 0)
        await refused(w.encode(b"cccc"), ErrorCode.NOT_READY)


async def test_a_failed_probe_forms_the_replica_anew(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        keeper = await w.keeper(0)
        bad = w.scheduler(0)
        bad.probe_error = ErrorCode.NON_FINITE
        await until(lambda: keeper.reforms() == [Reform(replica=0, epoch=1, pause_s=0.5)])
        assert not w.dispatcher.ready_state().started
        keeper.report(0)
        w.scheduler(0, epoch=1)
        await until(lambda: w.dispatcher.ready_state().ready)


async def test_an_idle_replica_is_probed_and_a_busy_one_is_not(tmp_path: Path) -> None:
    async with world(tmp_path, dp=2, probe_interval_s=0.15) as w:
        idle, busy = await w.up()
        busy.held = idle.held = True
        task = w.encode(b"aaaa", b"bbbb")
        await until(lambda: idle.open and busy.open)
        idle.release()
        await until(lambda: sum(job.probe for job in idle.jobs) >= 3)
        assert sum(job.probe for job in busy.jobs) == 1
        idle.probe_error = ErrorCode.INTERNAL
        await until(lambda: w.keepers[0].reforms())
        busy.release()
        assert await done(task) == [b"aaaa", b"bbbb"]


async def test_a_full_queue_says_when_to_come_back(tmp_path: Path) -> None:
    async with world(tmp_path, limits={"max_queued_items": 3}) as w:
        (scheduler,) = await w.up()
        scheduler.held = True
        task = w.encode(b"aaaa", b"bbbb")
        await until(lambda: len(scheduler.open) == 2)
        error = await refused(w.encode(b"cccc", b"dddd"), ErrorCode.QUEUE_FULL)
        assert "--max-queued-items" in error.message
        assert w.metric('spmd_encoder_requests_refused_total{code="QUEUE_FULL"}') == 1
        scheduler.release()
        assert await done(task) == [b"aaaa", b"bbbb"]
        assert await done(w.encode(b"cccc", b"dddd")) == [b"cccc", b"dddd"]


async def test_a_caller_that_goes_takes_its_items_along(tmp_path: Path) -> None:
    async with world(tmp_path, limits={"max_batch_items": 1}) as w:
        (scheduler,) = await w.up()
        scheduler.held = True
        task = w.encode(*(b"%04d" % number for number in range(5)))
        await until(lambda: len(scheduler.open) == 3)  # the window
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert w.metric("spmd_encoder_items_in_hand") == 0
        await until(lambda: sorted(scheduler.cancelled) == [job.job_id for job in scheduler.real_jobs])
        assert w.outstanding() == [3], "charged until the replica has answered"
        scheduler.release()
        await until(lambda: w.outstanding() == [0])
        assert await done(w.encode(b"next")) == [b"next"]
        assert len(scheduler.real_jobs) == 4


async def test_a_deadline_is_an_answer(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        (scheduler,) = await w.up()
        scheduler.held = True
        patient = w.encode(b"bbbb")
        task = w.encode(b"aaaa", deadline_s=0.1)
        await until(lambda: len(scheduler.open) == 2)
        assert sorted(job.budget_s < 0.2 for job in scheduler.open) == [False, True]
        assert await done(task) == [ErrorCode.DEADLINE_EXCEEDED]
        await until(lambda: scheduler.cancelled)
        assert await done(w.encode(b"cccc", deadline_s=0.0)) == [ErrorCode.DEADLINE_EXCEEDED]
        assert not patient.done()
        scheduler.release()
        assert await done(patient) == [b"bbbb"]


async def test_a_result_without_its_tensor_fails_its_item_alone(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        (scheduler,) = await w.up()
        scheduler.held = True
        task = w.encode(b"aaaa")
        await until(lambda: scheduler.open)
        scheduler.media[scheduler.open[0].job_id] = b""
        completed = Completed(
            job_id=scheduler.open[0].job_id,
            kind=OutputKind.TOKENS,
            shape=(),
            dtype="uint8",
            num_tokens=0,
            grid=None,
            times=StageTimes(),
        )
        scheduler.socket.send(completed)
        assert await done(task) == [ErrorCode.INTERNAL]
        scheduler.held = False
        assert await done(w.encode(b"bbbb")) == [b"bbbb"]


async def test_a_full_queue_says_how_long_it_will_take(tmp_path: Path) -> None:
    async with world(tmp_path, limits={"max_queued_items": 4}) as w:
        (scheduler,) = await w.up()
        assert await done(w.encode(b"aaaa")) == [b"aaaa"]  # 10 tokens, and as many for the probe, in the last moment
        scheduler.held = True
        tasks = [w.encode(b"%d" % number) for number in range(4)]
        await until(lambda: w.outstanding() == [4])
        error = await refused(w.encode(b"more"), ErrorCode.QUEUE_FULL)
        assert error.retry_after_s is not None
        assert error.retry_after_s >= 2.0, "40 tokens, at 20 in a second or slower"
        scheduler.release()
        for task in tasks:
            await task


async def test_drain_finishes_what_is_accepted_and_takes_nothing_new(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        (scheduler,) = await w.up()
        scheduler.held = True
        task = w.encode(b"aaaa")
        await until(lambda: scheduler.open)
        drain = asyncio.create_task(w.dispatcher.drain(5.0))
        await asyncio.sleep(0.01)
        state = w.dispatcher.ready_state()
        assert (state.ready, state.draining) == (False, True)
        await refused(w.encode(b"bbbb"), ErrorCode.DRAINING)
        assert not drain.done()
        scheduler.release()
        assert await asyncio.wait_for(drain, 5) is True
        assert await done(task) == [b"aaaa"]
        await w.dispatcher.stop_world(Stop(exit_code=0))
        await until(lambda: w.keepers[0].got == [Stop(exit_code=0)])
        await w.keepers[0].close()
        await asyncio.sleep(0.02)
        assert w.dispatcher.info()["replicas"][0]["state"] == "gone"


async def test_a_drain_that_is_cut_off_says_so(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        (scheduler,) = await w.up()
        scheduler.held = True
        task = w.encode(b"aaaa")
        await until(lambda: scheduler.open)
        assert await w.dispatcher.drain(0.05) is False
        assert await done(task) == [ErrorCode.DRAINING]


async def test_a_world_that_does_not_come_up_ends(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        keeper = await w.keeper(0)
        for epoch in range(5):
            keeper.stream.send(
                WorkerExited(rank=0, epoch=epoch, code=1, reason="no model there", last_lines=("line one",))
            )
        stop = await asyncio.wait_for(asyncio.shield(w.dispatcher.ended), 5)
        assert stop.exit_code == 1
        assert all(text in stop.reason for text in ("replica 0", "no model there", "line one"))
        assert [reform.pause_s for reform in keeper.reforms()] == [0.5, 1.0, 2.0, 4.0]


async def test_a_worker_that_never_says_hello_is_replaced(tmp_path: Path) -> None:
    async with world(tmp_path, load_timeout_s=0.1) as w:
        keeper = await w.keeper(0)
        await until(lambda: keeper.reforms())
        assert keeper.reforms()[0] == Reform(replica=0, epoch=1, pause_s=0.5)


async def test_counters_do_not_jump_back_over_epochs(tmp_path: Path) -> None:
    name = 'spmd_encoder_scheduler_batches_total{dp_rank="0"}'
    async with world(tmp_path) as w:
        (old,) = await w.up()
        old.socket.send(Heartbeat(stats=SchedulerStats(batches=5)))
        await until(lambda: name in w.dispatcher.metrics_text().decode() and w.metric(name) == 5)
        w.keepers[0].report(0)
        await until(lambda: w.keepers[0].reforms())
        old.socket.send(Heartbeat(stats=SchedulerStats(batches=99)))
        new = w.scheduler(0, epoch=1)
        await until(lambda: w.dispatcher.ready_state().ready)
        assert w.metric(name) == 5
        new.socket.send(Heartbeat(stats=SchedulerStats(batches=2)))
        await until(lambda: w.metric(name) == 7)


async def test_bytes_in_flight_are_bounded(tmp_path: Path) -> None:
    async with world(tmp_path, limits={"max_inflight_bytes": 100}) as w:
        with w.dispatcher.reserve(60):
            assert w.metric("spmd_encoder_inflight_bytes") == 60
            with pytest.raises(EncoderError) as caught, w.dispatcher.reserve(41):
                pass
            assert caught.value.code is ErrorCode.OVERLOADED
            assert caught.value.retry_after_s
            with w.dispatcher.reserve(40):
                pass
        with pytest.raises(EncoderError), w.dispatcher.reserve(101):
            pass
        with pytest.raises(ZeroDivisionError), w.dispatcher.reserve(50):
            1 // 0  # noqa: B018
        assert w.metric("spmd_encoder_inflight_bytes") == 0


async def test_close_answers_everybody_and_leaves_nothing_open(tmp_path: Path) -> None:
    tasks = len(asyncio.all_tasks())
    threads = threading.active_count()
    open_files = count_open_files()
    for _ in range(2):
        async with world(tmp_path) as w:
            (scheduler,) = await w.up()
            scheduler.held = True
            task = w.encode(b"aaaa")
            await until(lambda: scheduler.open)  # noqa: B023
        assert await done(task) == [ErrorCode.DRAINING]
        await refused(w.encode(b"bbbb"), ErrorCode.DRAINING)
    await until(lambda: len(asyncio.all_tasks()) == tasks, "no task is left")
    await until(lambda: threading.active_count() == threads)
    await until(lambda: count_open_files() <= open_files + 1, "no file is left open")


async def test_info_is_plain_data_without_secrets(tmp_path: Path) -> None:
    async with world(tmp_path, dp=2) as w:
        await w.up()
        info = w.dispatcher.info()
        assert [entry["state"] for entry in info["replicas"]] == ["ready", "ready"]
        assert info["layout"] == {"world_size": 2, "dp_size": 2, "tp_size": 1}
        assert info["versions"]["torch"] == "2"
        assert [process["rank"] for process in info["processes"]] == [0, 1]
        assert w.endpoint.token not in repr(info)
        assert "faults" not in info["config"]
        assert dataclasses.asdict(MODEL) == info["model"]


def profile_said(task: asyncio.Task[Any]) -> list[tuple[int, str]]:
    return [(outcome.rank, outcome.path or str(outcome.code)) for outcome in task.result()]


async def test_a_profile_is_asked_of_all_replicas_beside_the_work(tmp_path: Path) -> None:
    async with world(tmp_path, dp=2, tp=2) as w:
        schedulers = await w.up()
        for scheduler in schedulers:
            scheduler.held = True
        encodes = w.encode(b"aaaa", b"bbbb")
        await until(lambda: w.outstanding() == [1, 1])
        options = ProfileOptions(name="n", num_steps=3)
        start = asyncio.create_task(w.dispatcher.profile_start(options))
        await until(lambda: all(s.profiles for s in schedulers))
        assert [s.profiles[0].start for s in schedulers] == [options, options]
        assert w.outstanding() == [1, 1]
        for scheduler, path in zip(schedulers, "ab", strict=True):
            scheduler.profiled(more=7, path="another call's")
            scheduler.profiled(path=path)
            scheduler.profiled(path="said twice")
        await asyncio.wait_for(start, 5)
        assert profile_said(start) == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
        stop = asyncio.create_task(w.dispatcher.profile_stop())
        await until(lambda: all(len(s.profiles) == 2 for s in schedulers))
        assert [s.profiles[1].start for s in schedulers] == [None, None]
        for scheduler in schedulers:
            scheduler.profiled(0, path="an old call's")
            scheduler.profiled()
        await asyncio.wait_for(stop, 5)
        assert profile_said(stop) == [(rank, "p") for rank in range(4)]
        for scheduler in schedulers:
            scheduler.release()
        assert await done(encodes) == [b"aaaa", b"bbbb"]


async def test_a_replica_that_is_lost_while_it_profiles_is_named(tmp_path: Path) -> None:
    async with world(tmp_path, dp=2, tp=2) as w:
        schedulers = await w.up()
        start = asyncio.create_task(w.dispatcher.profile_start(ProfileOptions(name="n")))
        await until(lambda: all(s.profiles for s in schedulers))
        schedulers[0].profiled()
        w.keepers[2].report(0)
        await asyncio.wait_for(start, 5)
        assert profile_said(start) == [(0, "p"), (1, "p"), (2, "NOT_READY"), (3, "NOT_READY")]
        assert "lost" in start.result()[2].message
        stop = asyncio.create_task(w.dispatcher.profile_stop())
        await until(lambda: len(schedulers[0].profiles) == 2)
        schedulers[0].profiled()
        await asyncio.wait_for(stop, 5)
        assert profile_said(stop) == [(0, "p"), (1, "p"), (2, "NOT_READY"), (3, "NOT_READY")]
        assert "not ready" in stop.result()[2].message


async def test_a_profile_that_is_not_answered_ends(tmp_path: Path) -> None:
    async with world(tmp_path, dp=2, limits={"request_timeout_s": 0.3}) as w:
        schedulers = await w.up()
        start = asyncio.create_task(w.dispatcher.profile_start(ProfileOptions(name="n")))
        await until(lambda: schedulers[1].profiles)
        schedulers[1].profiled()
        await asyncio.wait_for(start, 5)
        assert profile_said(start) == [(0, "DEADLINE_EXCEEDED"), (1, "p")]
        assert w.dispatcher.ready_state().replicas_ready == 2


async def test_no_profile_before_the_start_or_in_the_end(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        options = ProfileOptions(name="n")
        await refused(asyncio.create_task(w.dispatcher.profile_start(options)), ErrorCode.NOT_READY)
        (scheduler,) = await w.up()
        await w.dispatcher.drain(1.0)
        await refused(asyncio.create_task(w.dispatcher.profile_start(options)), ErrorCode.DRAINING)
        stop = asyncio.create_task(w.dispatcher.profile_stop())
        await until(lambda: scheduler.profiles)
        scheduler.profiled()
        assert [outcome.path for outcome in await stop] == ["p"]
