"""A dispatcher over real sockets, with fakes for schedulers and keepers."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from spmd_encoder.api.cost import CostTable
from spmd_encoder.api.profiling import ProfileOutcome
from spmd_encoder.api.types import (
    Embedding,
    EncodeRequest,
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
    Hello,
    Job,
    KeeperHello,
    Profile,
    Profiled,
    Reform,
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
            decoders={"pyav": "1", "video_codecs": ["h264"]},
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
        await asyncio.wait_for(task, 30)
    assert caught.value.code is code
    assert caught.value.retry_after_s
    return caught.value


async def done(task: asyncio.Task[Any]) -> list[bytes | ErrorCode]:
    return answers(await asyncio.wait_for(task, 30))
