"""The roll call among threads over a store in memory, also one that remembers earlier starts."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from spmd_encoder.config import Config, parse_config
from spmd_encoder.distributed.rollcall import Facts, Start, _Chair, close_start, judge, roll_call, was_aborted
from spmd_encoder.errors import StartupError
from spmd_encoder.wire.messages import Endpoint

CONFIG = Config().to_json()


class MemoryStore:
    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self._values[key] = value

    def get(self, key: str) -> str:
        with self._lock:
            return self._values.get(key, "")

    def compare_set(self, key: str, desired: str) -> str:
        with self._lock:
            return self._values.setdefault(key, desired)


def endpoint(rank: int, *, bound: bool = True) -> Endpoint:
    return Endpoint(bound=bound, work_address=f"w{rank}", control_address=f"c{rank}", token=f"t{rank}")


class World:
    """Members of a world of `size` ranks, each answering in a thread of its own."""

    def __init__(self, size: int, store: MemoryStore | None = None, start: str = "s") -> None:
        self.size = size
        self.store = store or MemoryStore()
        self.start = start
        self._pool = ThreadPoolExecutor(size + 4)

    def call(
        self,
        rank: int,
        *,
        attempt: int = 0,
        config: str = CONFIG,
        at: Endpoint | str | None = "own",
        timeout_s: float = 8.0,
    ) -> Future[Start]:
        facts = Facts(config, endpoint(rank) if at == "own" else at)  # type: ignore[arg-type]
        keeper = f"{self.start}-keeper{rank}"
        return self._pool.submit(
            roll_call,
            self.store,
            rank=rank,
            world_size=self.size,
            keeper_id=keeper,
            attempt=attempt,
            facts=facts,
            timeout_s=timeout_s,
        )

    def call_all(self, **more: Any) -> list[Future[Start]]:
        ranks = list(range(self.size))
        random.Random(self.size).shuffle(ranks)
        calls = {rank: self.call(rank, **more) for rank in ranks}
        return [calls[rank] for rank in range(self.size)]

    def results(self, calls: list[Future[Start]]) -> list[Start]:
        return [call.result(15) for call in calls]


def agreed(starts: list[Start]) -> str:
    """The one name that all have agreed upon."""
    assert len({start.world.start_name for start in starts}) == 1
    assert len({(start.world.elected_rank, start.world.token) for start in starts}) == 1
    return starts[0].world.start_name


def refusal(call: Future[Start]) -> StartupError:
    with pytest.raises(StartupError) as caught:
        call.result(15)
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize("size", range(1, 7))
def test_all_agree_and_the_lowest_is_elected(size: int) -> None:
    world = World(size)
    starts = world.results(world.call_all())
    name = agreed(starts)
    assert not any(start.formed for start in starts)
    won = starts[-1].world
    assert (won.elected_rank, won.work_address, won.control_address, won.token) == (0, "w0", "c0", "t0")
    assert [close_start(world.store, name) for _ in range(size)] == [True] * size
    assert not was_aborted(world.store, name)


@pytest.mark.parametrize("size", [1, 3])
def test_starts_over_one_store_do_not_mix(size: int) -> None:
    """torchrun keeps its store over restarts: the keys of the earlier start, whatever its end, mislead nobody."""
    store, names = MemoryStore(), set()
    for number in range(4):
        world = World(size, store, start=f"start{number}")
        name = agreed(world.results(world.call_all()))
        names.add(name)
        if number % 2:
            assert close_start(store, name)
    assert len(names) == 4


def test_stale_keys_do_not_let_a_start_go_without_a_rank() -> None:
    store = MemoryStore()
    old = World(3, store, start="old")
    agreed(old.results(old.call_all()))
    new = World(3, store, start="new")
    early = [new.call(0), new.call(1)]
    with pytest.raises(TimeoutError):
        early[0].result(0.3)
    last = new.call(2)
    agreed(new.results([*early, last]))


def test_a_member_that_starts_anew_before_the_verdict_counts_once() -> None:
    world = World(3)
    dead = [world.call(1, attempt=0, timeout_s=0.2)]
    with pytest.raises(StartupError):
        dead[0].result(15)
    starts = world.results([world.call(0), world.call(1, attempt=1), world.call(2)])
    agreed(starts)
    assert not any(start.formed for start in starts)


def test_rank_0_that_starts_anew_presides_again() -> None:
    world = World(2)
    refusal(world.call(0, attempt=0, timeout_s=0.2))
    agreed(world.results([world.call(1), world.call(0, attempt=1)]))


def test_the_acknowledgement_of_a_worker_that_has_gone_does_not_count() -> None:
    store = MemoryStore()

    def answer(rank: int, token: str) -> None:
        facts = Facts(CONFIG, endpoint(rank)).to_dict()
        store.set(f"member/{rank}", json.dumps({"token": token, "facts": facts}))

    answer(0, "a/0")
    answer(1, "b/0")
    chair = _Chair(store, 2)
    chair.preside()
    name, tokens = json.loads(store.get("current"))
    assert tokens == ["a/0", "b/0"]
    store.set(f"ack/{name}/1", "b/0")
    answer(1, "b/1")
    store.set(f"ack/{name}/0", "a/0")
    chair.preside()
    assert json.loads(store.get("current")) == [name, ["a/0", "b/1"]]
    assert not store.get(f"verdict/{name}")
    store.set(f"ack/{name}/1", "b/1")
    chair.preside()
    assert store.get(f"verdict/{name}")


@pytest.mark.parametrize("lost", [0, 2])
def test_a_member_that_starts_anew_before_the_end_aborts_the_start(lost: int) -> None:
    world = World(3)
    name = agreed(world.results(world.call_all()))
    again = world.call(lost, attempt=1)
    with pytest.raises(TimeoutError):
        again.result(0.3)
    assert was_aborted(world.store, name)
    assert [close_start(world.store, name) for _ in range(2)] == [False, False]
    others = [world.call(rank, attempt=1) for rank in range(3) if rank != lost]
    starts = world.results([again, *others])
    assert agreed(starts) != name
    assert not any(start.formed for start in starts)
    assert close_start(world.store, starts[0].world.start_name)


@pytest.mark.parametrize("lost", [0, 2])
def test_a_member_that_starts_anew_after_the_end_joins_the_world_as_it_is(lost: int) -> None:
    world = World(3)
    starts = world.results(world.call_all())
    assert close_start(world.store, agreed(starts))
    late = world.call(lost, attempt=1).result(15)
    assert late.formed
    assert late.world == starts[0].world
    assert not was_aborted(world.store, late.world.start_name)
    assert world.call(lost, attempt=2).result(15).formed


def test_done_and_abort_exclude_each_other() -> None:
    for _ in range(20):
        store = MemoryStore()
        with ThreadPoolExecutor(4) as pool:
            closed = [pool.submit(close_start, store, "n") for _ in range(3)]
            aborted = pool.submit(store.compare_set, "outcome/n", "abort")
        verdicts = {call.result() for call in closed}
        assert len(verdicts) == 1
        assert verdicts == {aborted.result() == "done"}


def test_configurations_that_differ_are_named_by_every_rank() -> None:
    world = World(3)
    other = parse_config(["--max-batch-items", "9"], {})[0].to_json()
    calls = [world.call(0), world.call(1), world.call(2, config=other)]
    for call in calls:
        error = refusal(call)
        assert error.exit_code == 2
        assert all(word in error.message for word in ("--max-batch-items", "rank 0 has 8", "rank 2 has 9"))


def test_a_port_that_nobody_could_bind() -> None:
    world = World(2)
    calls = [world.call(0, at=endpoint(0, bound=False)), world.call(1, at=None)]
    for call in calls:
        error = refusal(call)
        assert error.exit_code == 3
        assert "port" in error.message


def test_the_lowest_bound_candidate_wins() -> None:
    world = World(4)
    calls = [
        world.call(0, at=None),
        world.call(1, at=endpoint(1, bound=False)),
        world.call(2),
        world.call(3),
    ]
    starts = world.results(calls)
    agreed(starts)
    assert (starts[0].world.elected_rank, starts[0].world.token) == (2, "t2")


@pytest.mark.parametrize("silent", [0, 1, 2])
@pytest.mark.parametrize("stale", [False, True])
def test_silent_ranks_are_named(silent: int, stale: bool) -> None:
    store = MemoryStore()
    if stale:
        old = World(3, store, start="old")
        agreed(old.results(old.call_all()))
    world = World(3, store, start="new")
    calls = [world.call(rank, timeout_s=0.4) for rank in range(3) if rank != silent]
    for call in calls:
        error = refusal(call)
        assert error.exit_code == 3
        assert f"[{silent}]" in error.message


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda raw: raw | {"port": 1}, ["--port", "30000", "1"]),
        (lambda raw: raw | {"new_flag": True}, ["--new-flag", "None", "True"]),
        (lambda raw: {k: v for k, v in raw.items() if k != "dtype"}, ["--dtype", "'auto'", "None"]),
    ],
)
def test_judge_names_the_flag_and_both_values(
    change: Callable[[dict[str, Any]], dict[str, Any]], named: list[str]
) -> None:
    other = json.dumps(change(json.loads(CONFIG)))
    verdict = judge("n", [Facts(CONFIG, endpoint(0)), Facts(CONFIG), Facts(other)])
    assert verdict["exit_code"] == 2
    assert all(word in verdict["error"] for word in [*named, "rank 2"])
    assert "error" not in judge("n", [Facts(CONFIG, endpoint(0)), Facts(CONFIG)])
