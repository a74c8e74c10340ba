"""One replica's life, step by step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from spmd_encoder.dispatcher.replica import (
    FAILED_PAUSE_S,
    START_TRIES,
    Effect,
    EndWorld,
    ReformReplica,
    Replica,
    ReplicaState,
    SendProbe,
    SettleJobs,
    TakeWork,
)

LEADER, FOLLOWER = 2, 3


@pytest.fixture
def replica() -> Replica:
    return Replica(index=1, leader_rank=LEADER)


@pytest.fixture
def ready(replica: Replica) -> Replica:
    bring_up(replica)
    return replica


def bring_up(replica: Replica) -> None:
    assert replica.hello(replica.epoch) == [SendProbe()]
    assert replica.state is not ReplicaState.READY
    assert replica.probe_done(replica.epoch, None) == [TakeWork()]
    assert replica.state is ReplicaState.READY


def die(replica: Replica, rank: int = LEADER, *suspects: int, fatal: bool = False) -> list[Effect]:
    return replica.worker_exited(rank, replica.epoch, suspects=suspects, fatal=fatal, reason="it died")


def reforms(effects: Sequence[Effect]) -> list[ReformReplica]:
    return [effect for effect in effects if isinstance(effect, ReformReplica)]


def test_ready_only_after_a_probe(replica: Replica) -> None:
    assert replica.probe_done(0, None) == [], "no hello yet"
    assert replica.hello(1) == []
    bring_up(replica)
    assert replica.hello(0) == [], "it said hello already"
    assert replica.probe_done(0, None) == [], "an idle probe says nothing new"


def test_a_failed_probe_forms_it_anew(ready: Replica) -> None:
    assert ready.probe_done(0, "NaN") == [ReformReplica(1, 0.0)]
    assert ready.state is ReplicaState.LOST
    assert "NaN" in ready.last_reason
    assert die_of(ready, 0, (5,)) == [SettleJobs((5,))]
    assert ready.state is ReplicaState.HEALING
    bring_up(ready)


def die_of(replica: Replica, epoch: int, suspects: tuple[int, ...]) -> list[Effect]:
    return replica.worker_exited(LEADER, epoch, suspects=suspects, fatal=False, reason="late")


def test_the_leaders_death_settles_at_once(ready: Replica) -> None:
    assert die(ready, LEADER, 7, 8) == [ReformReplica(1, 0.0), SettleJobs((7, 8))]
    assert ready.state is ReplicaState.HEALING
    assert die_of(ready, 0, (7,)) == [], "the same death, told twice"


def test_a_followers_death_waits_for_the_leaders_report(ready: Replica) -> None:
    assert die(ready, FOLLOWER) == [ReformReplica(1, 0.0)]
    assert ready.state is ReplicaState.LOST
    assert die_of(ready, 0, (7,)) == [SettleJobs((7,))]
    assert ready.state is ReplicaState.HEALING


def test_without_a_report_nobody_knows(ready: Replica) -> None:
    die(ready, FOLLOWER)
    assert ready.no_report() == [SettleJobs(None)]
    assert ready.no_report() == []
    assert die_of(ready, 0, (7,)) == [], "the report came too late"


def test_a_hello_before_the_report_settles_first(ready: Replica) -> None:
    die(ready, FOLLOWER)
    assert ready.hello(1) == [SettleJobs(None), SendProbe()]
    assert die_of(ready, 0, (7,)) == []
    assert ready.probe_done(1, None) == [TakeWork()]


def test_a_second_loss_while_lost_settles_once(ready: Replica) -> None:
    die(ready, FOLLOWER)
    assert die(ready, FOLLOWER) == [ReformReplica(2, 0.0)]
    assert die_of(ready, 1, (9,)) == [], "epoch 1 had no jobs"
    assert die_of(ready, 0, (7,)) == [SettleJobs((7,))]


def test_growing_pauses_and_then_the_end(replica: Replica) -> None:
    pauses = []
    for _ in range(START_TRIES - 1):
        (reform,) = reforms(die(replica))
        pauses.append(reform.pause_s)
    assert pauses == [0.5, 1.0, 2.0, 4.0]
    effects = die(replica)
    (end,) = [effect for effect in effects if isinstance(effect, EndWorld)]
    assert "replica 1" in end.reason
    assert "5 times" in end.reason
    assert "it died" in end.reason
    assert not reforms(effects)
    assert replica.state is ReplicaState.FAILED


def test_a_fatal_start_ends_the_world_at_once(replica: Replica) -> None:
    effects = die(replica, fatal=True)
    assert [type(effect) for effect in effects] == [SettleJobs, EndWorld]


def test_once_ready_it_goes_on_trying(ready: Replica) -> None:
    states, pauses = [], []
    for _ in range(START_TRIES + 3):
        (reform,) = reforms(die(ready, fatal=len(states) == 0))
        states.append(ready.state)
        pauses.append(reform.pause_s)
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, FAILED_PAUSE_S, FAILED_PAUSE_S, FAILED_PAUSE_S]
    assert states[-3:] == [ReplicaState.FAILED] * 3
    assert states[0] is ReplicaState.FAILED, "fatal"
    assert states[1] is ReplicaState.HEALING
    bring_up(ready)
    assert reforms(die(ready)) == [ReformReplica(ready.epoch, 0.0)], "a success forgets the failures"


def test_a_hopeless_replica_is_failed_also_by_way_of_lost(ready: Replica) -> None:
    for _ in range(START_TRIES + 1):
        die(ready)
    ready.hello(ready.epoch)
    die(ready, FOLLOWER)
    assert ready.state is ReplicaState.LOST
    ready.no_report()
    assert ready.state is ReplicaState.FAILED


def test_a_keeper_goes_and_comes_back(ready: Replica) -> None:
    assert ready.keeper_lost(FOLLOWER) == [SettleJobs(None)]
    assert ready.state is ReplicaState.FAILED
    assert die(ready) == [], "nothing can be formed without it"
    assert ready.stalled(ready.epoch, "silent") == []
    assert ready.keeper_back(LEADER) == [], "that one was never away"
    assert ready.keeper_back(FOLLOWER) == [ReformReplica(1, 0.5), SettleJobs(())]
    bring_up(ready)


def test_all_keepers_must_be_back(ready: Replica) -> None:
    ready.keeper_lost(LEADER)
    ready.keeper_lost(FOLLOWER)
    assert ready.keeper_back(LEADER) == []
    assert reforms(ready.keeper_back(FOLLOWER))


def test_a_worker_without_its_keeper_gets_no_work(replica: Replica) -> None:
    replica.keeper_lost(LEADER)
    assert replica.hello(0) == []
    assert replica.probe_done(0, None) == []
    assert replica.state is ReplicaState.FAILED


def test_a_keeper_lost_while_lost_settles(ready: Replica) -> None:
    die(ready, FOLLOWER)
    assert ready.keeper_lost(LEADER) == [SettleJobs(None)]
    assert ready.no_report() == []


def test_stale_events_do_nothing(ready: Replica) -> None:
    die(ready)
    assert ready.epoch == 1
    assert ready.hello(0) == []
    assert ready.stalled(0, "old") == []
    assert ready.probe_done(0, "old") == []
    assert die_of(ready, 0, ()) == []
    assert (ready.epoch, ready.last_reason) == (1, "it died")


def test_draining_is_only_shown(ready: Replica) -> None:
    ready.drain()
    assert ready.shown_state is ReplicaState.DRAINING
    assert ready.state is ReplicaState.READY
    assert reforms(die(ready)), "it heals for the sake of what it had in hand"
    assert ready.shown_state is ReplicaState.HEALING


def test_nothing_brings_it_back_from_gone(ready: Replica) -> None:
    ready.gone()
    assert die(ready) == []
    assert ready.hello(0) == []
    assert ready.stalled(0, "x") == []
    assert ready.probe_done(0, "x") == []
    assert ready.no_report() == []
    ready.keeper_lost(LEADER)
    assert ready.keeper_back(LEADER) == []
    assert ready.state is ReplicaState.GONE
