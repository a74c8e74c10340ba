"""One rank's profiler, and the orders that reach it through a leader and its followers."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spmd_encoder.api.profiling import (
    MAX_FORWARDS,
    MAX_FORWARDS_WITH_STACK,
    ProfileActivity,
    ProfileOptions,
    ProfileOutcome,
)
from spmd_encoder.distributed.channel import FollowerChannel, LeaderChannel
from spmd_encoder.errors import ErrorCode
from spmd_encoder.wire.messages import TensorSpec
from spmd_encoder.wire.sockets import new_context
from spmd_encoder.worker.compute import ComputeThread
from spmd_encoder.worker.encoder import ForwardResult, MMEncoder
from spmd_encoder.worker.profiling import Profiler
from spmd_encoder.worker.worker import FollowerWorker, LeaderWorker

CPU = torch.device("cpu")


def who(tp_rank: int = 1) -> ProfileOutcome:
    return ProfileOutcome(rank=4 + tp_rank, dp_rank=2, tp_rank=tp_rank)


def options(name: str = "n", **fields: Any) -> ProfileOptions:
    return ProfileOptions(name=name, **fields)


def forward(profiler: Profiler, count: int = 1) -> None:
    for _ in range(count):
        with profiler.forward():
            torch.ones(3, 3) @ torch.ones(3, 3)


def ask(profiler: Profiler, start: ProfileOptions | None) -> ProfileOutcome:
    return profiler.obey(start).result(20)


def forwards(outcome: ProfileOutcome) -> int:
    assert outcome.code is None, outcome.message
    events = trace(outcome.path)
    assert any(event.get("name") == "aten::mm" for event in events)
    return sum(event.get("name") == "encoder_forward" and event.get("ph") == "X" for event in events)


def trace(path: str) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        return list(json.load(file)["traceEvents"])


def test_what_is_between_start_and_stop_is_recorded(tmp_path: Path) -> None:
    profiler = Profiler(who(), CPU, str(tmp_path))
    forward(profiler)
    planned = ask(profiler, options(record_shapes=True))
    assert planned == ProfileOutcome(rank=5, dp_rank=2, tp_rank=1, path=str(tmp_path / "n-rank5-dp2-tp1.trace.json.gz"))
    forward(profiler, 3)
    done = ask(profiler, None)
    forward(profiler)
    assert done == planned
    assert forwards(done) == 3
    (product,) = (e for e in trace(done.path) if e.get("name") == "aten::mm" and e["args"]["Ev Idx"] < 20)
    assert product["args"]["Input Dims"] == [[3, 3], [3, 3]]
    assert list(tmp_path.iterdir()) == [Path(done.path)]


def test_starting_and_stopping_twice(tmp_path: Path) -> None:
    profiler = Profiler(who(), CPU, str(tmp_path))
    assert ask(profiler, None).message == "profiling does not run"
    assert ask(profiler, options("a")).code is None
    again = ask(profiler, options("b"))
    assert (again.code, again.message, again.path) == (ErrorCode.INVALID_REQUEST, "profiling runs already", "")
    forward(profiler)
    assert forwards(ask(profiler, None)) == 1
    assert ask(profiler, None).message == "profiling does not run"
    assert ask(profiler, options("c")).code is None
    forward(profiler, 2)
    assert forwards(ask(profiler, None)) == 2


@pytest.mark.parametrize("fields", [{"num_steps": 2}, {}, {"with_stack": True}], ids=str)
def test_a_recording_ends_by_itself(tmp_path: Path, fields: dict[str, Any]) -> None:
    asked = options(**fields)
    count = asked.num_steps or (MAX_FORWARDS_WITH_STACK if asked.with_stack else MAX_FORWARDS)
    profiler = Profiler(who(), CPU, str(tmp_path))
    ask(profiler, asked)
    forward(profiler, count + 3)
    assert forwards(ask(profiler, None)) == count
    assert ask(profiler, None).message == "profiling does not run"


def test_many_in_turn_while_the_last_ones_are_being_written(tmp_path: Path) -> None:
    profiler = Profiler(who(), CPU, str(tmp_path))
    stopped = []
    for number in range(20):
        ask(profiler, options(f"{number}"))
        forward(profiler, 4)
        stopped.append(profiler.obey(None))
    assert [forwards(outcome.result(20)) for outcome in stopped] == [4] * 20


def test_one_that_ended_by_itself_may_be_followed_by_another(tmp_path: Path) -> None:
    profiler = Profiler(who(), CPU, str(tmp_path))
    ask(profiler, options("a", num_steps=1))
    forward(profiler)
    ask(profiler, options("b"))
    forward(profiler, 2)
    done = ask(profiler, None)
    assert Path(done.path).name.startswith("b-")
    assert forwards(done) == 2


@pytest.mark.parametrize("output_dir", ["/elsewhere", "..", "in/../../out", "link", "link/deeper"])
def test_a_request_writes_inside_the_folder_only(tmp_path: Path, output_dir: str) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "link").symlink_to(tmp_path)
    outcome = ask(Profiler(who(), CPU, str(own)), options(output_dir=output_dir))
    assert outcome.code is ErrorCode.INVALID_REQUEST
    assert "--profile-dir" in outcome.message
    assert sorted(tmp_path.rglob("*")) == [own, own / "link"]


def test_a_folder_inside_is_made(tmp_path: Path) -> None:
    for name, output_dir in (("a", "x/y"), ("b", str(tmp_path / "x" / "z"))):
        profiler = Profiler(who(), CPU, str(tmp_path))
        ask(profiler, options(name, output_dir=output_dir))
        forward(profiler)
        assert Path(ask(profiler, None).path).parent == (tmp_path / output_dir)


def test_without_a_folder_of_its_own_a_private_temporary_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    profiler = Profiler(who(), CPU, None)
    refused = ask(profiler, options(output_dir=str(tmp_path)))
    assert refused.code is ErrorCode.INVALID_REQUEST
    assert "--profile-dir" in refused.message
    assert not list(tmp_path.iterdir())
    folder = Path(ask(profiler, options()).path).parent
    assert (folder.parent, folder.stat().st_mode & 0o777) == (tmp_path, 0o700)
    forward(profiler)
    assert forwards(ask(profiler, None)) == 1


def test_what_cannot_be_written_is_said_at_once_or_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    profiler = Profiler(who(), CPU, str(tmp_path))
    outcome = ask(profiler, options(output_dir="file/x"))
    assert (outcome.code, outcome.message.split(":")[0]) == (ErrorCode.INTERNAL, "NotADirectoryError")
    Path(ask(profiler, options()).path).mkdir()
    forward(profiler)
    outcome = ask(profiler, None)
    assert (outcome.code, outcome.message.split(":")[0]) == (ErrorCode.INTERNAL, "IsADirectoryError")
    ask(profiler, options("again"))
    forward(profiler)
    assert forwards(ask(profiler, None)) == 1


def test_a_gpu_where_there_is_none_and_memory(tmp_path: Path) -> None:
    profiler = Profiler(who(), CPU, str(tmp_path))
    refused = ask(profiler, options(activities=(ProfileActivity.CPU, ProfileActivity.GPU)))
    assert (refused.code, refused.message) == (ErrorCode.INVALID_REQUEST, "activity GPU: this rank runs on cpu")
    ask(profiler, options(activities=(ProfileActivity.MEM,)))
    forward(profiler)
    done = ask(profiler, None)
    assert any(event.get("name") == "[memory]" for event in trace(done.path))


class FakeEncoder(MMEncoder):
    """Counts its batches instead of running them."""

    def __init__(self) -> None:
        self.device = CPU
        self.batches = 0

    def run(self, specs: Sequence[TensorSpec], tensors: Mapping[str, torch.Tensor] | None) -> ForwardResult:
        self.batches += 1
        return ForwardResult([], 0.0)


class FakeProfiler(Profiler):
    """torch has one profiler per process, so that a group within one has fakes. The path is how many forwards it saw.

    While it is `slow`, its answers are the test's to give."""

    def __init__(self, tp_rank: int, *, broken: bool = False, slow: bool = False) -> None:
        super().__init__(who(tp_rank), CPU, None)
        self.broken, self.slow = broken, slow
        self.seen = 0
        self.asked: list[Future[ProfileOutcome]] = []

    def obey(self, start: ProfileOptions | None) -> Future[ProfileOutcome]:
        if self.broken:
            return self._failed(OSError("no disk"))
        self.asked.append(Future())
        if not self.slow:
            self.asked[-1].set_result(replace(self._who, path=str(self.seen)))
        return self.asked[-1]

    @contextmanager
    def forward(self) -> Iterator[None]:
        yield
        self.seen += 1


class Group:
    def __init__(self, leader: LeaderWorker, followers: list[FollowerWorker], encoders: list[FakeEncoder]) -> None:
        self.leader, self.followers, self.encoders = leader, followers, encoders

    async def batch(self) -> None:
        await self.leader.execute({}, before=lambda: None, after=lambda _: None)


@asynccontextmanager
async def group(folder: Path, *profilers: Profiler) -> AsyncIterator[Group]:
    """A leader and followers over real sockets and compute threads, a profiler for each."""
    async with AsyncExitStack() as stack:
        contexts = [new_context() for _ in profilers]
        for context in contexts:
            stack.callback(context.destroy, linger=0)
        encoders, threads = [FakeEncoder() for _ in profilers], [ComputeThread() for _ in profilers]
        for thread in threads:
            stack.callback(thread.close)
        channel = LeaderChannel(contexts[0], set(range(1, len(profilers))), "secret", path=folder / "o", host="")
        stack.callback(channel.close)
        followers = []
        for tp_rank in range(1, len(profilers)):
            end = FollowerChannel(contexts[tp_rank], address=channel.address, tp_rank=tp_rank, token="secret")
            stack.callback(end.close)
            followers.append(FollowerWorker(encoders[tp_rank], threads[tp_rank], end, profilers[tp_rank]))
        await channel.wait_for_followers(5)
        leader = LeaderWorker(encoders[0], threads[0], channel, profilers[0])
        tasks = [asyncio.create_task(work) for work in (leader.listen(), *(f.follow() for f in followers))]
        yield Group(leader, followers, encoders)
        leader.stop()
        await asyncio.wait_for(asyncio.gather(*tasks[1:]), 30)
        tasks[0].cancel()
        await asyncio.gather(tasks[0], return_exceptions=True)


async def test_all_ranks_of_a_group_start_and_stop_between_the_same_batches(tmp_path: Path) -> None:
    async with group(tmp_path, FakeProfiler(0), FakeProfiler(1), FakeProfiler(2)) as g:
        await g.batch()
        started = await g.leader.profile(options())
        assert [(outcome.tp_rank, outcome.path) for outcome in started] == [(0, "1"), (1, "1"), (2, "1")]
        await asyncio.gather(g.batch(), g.batch())
        stopped, _ = await asyncio.gather(g.leader.profile(None), g.batch())
        assert [(outcome.tp_rank, outcome.path) for outcome in stopped] == [(0, "3"), (1, "3"), (2, "3")]
    assert [encoder.batches for encoder in g.encoders] == [4, 4, 4]
    assert [g.leader.last_order, *(follower.last_order for follower in g.followers)] == [5, 5, 5]


async def test_a_failure_on_one_rank_is_its_own(tmp_path: Path) -> None:
    async with group(tmp_path, FakeProfiler(0), FakeProfiler(1, broken=True), FakeProfiler(2)) as g:
        first, second, third = await g.leader.profile(options())
        assert (first.path, third.path) == ("0", "0")
        assert (second.rank, second.code, second.message) == (5, ErrorCode.INTERNAL, "OSError: no disk")
        await g.batch()
    assert [encoder.batches for encoder in g.encoders] == [1, 1, 1]


async def test_no_batch_waits_for_a_trace(tmp_path: Path) -> None:
    slow = FakeProfiler(1, slow=True)
    async with group(tmp_path, FakeProfiler(0), slow) as g:
        first, second = (asyncio.create_task(g.leader.profile(start)) for start in (options(), None))
        await asyncio.sleep(0)
        await g.batch()
        while g.followers[0].last_order < 2:
            await asyncio.sleep(0.005)
        assert not first.done() and not second.done()
        slow.asked[1].set_result(who(1))
        assert (await second)[1] == who(1)
        assert not first.done()
        slow.asked[0].set_result(who(1))
        assert (await first)[1] == who(1)
