"""A replica's machine under any order of events, true, late or false."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

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
from tests.harness.examples import examples

LEADER = 4
ages = st.sampled_from([0, 0, 0, 0, 1, 2, -1])
"""How many epochs behind an event is; negative for a lie about the future."""


class ReplicaMachine(RuleBasedStateMachine):
    @initialize(tp=st.integers(1, 3))
    def begin(self, tp: int) -> None:
        self.ranks = range(LEADER, LEADER + tp)
        self.replica = Replica(index=2, leader_rank=LEADER)
        self.epoch = 0
        self.has_work = False
        """The ledger may hold jobs of this replica: a probe or more was sent since the last SettleJobs."""
        self.work_epoch = -1
        self.probe_ok = False
        self.hello_seen = False
        self.was_ready = False
        self.missing: set[int] = set()
        self.ended = False
        self.gone = False

    def see(self, effects: Sequence[Effect]) -> None:
        settles = [effect for effect in effects if isinstance(effect, SettleJobs)]
        assert len(settles) <= 1
        for effect in effects:
            match effect:
                case ReformReplica(epoch, pause_s):
                    assert epoch == self.epoch + 1, "epochs grow one by one"
                    assert not self.gone, "nothing is formed while the world ends"
                    assert not self.missing
                    assert 0 <= pause_s <= FAILED_PAUSE_S
                    self.epoch, self.hello_seen, self.probe_ok = epoch, False, False
                case SettleJobs():
                    self.has_work = False
                case SendProbe():
                    assert not self.has_work, "jobs of a lost epoch are not settled yet"
                    assert not self.missing
                    self.has_work, self.work_epoch = True, self.epoch
                case TakeWork():
                    assert self.probe_ok, "ready without a probe of this epoch"
                    assert self.work_epoch == self.epoch
                    self.has_work = True
                    self.was_ready = True
                case EndWorld(reason):
                    assert not self.was_ready
                    assert reason
                    self.ended = True

    @staticmethod
    def ended_now(effects: Sequence[Effect]) -> bool:
        return any(isinstance(effect, EndWorld) for effect in effects)

    def at(self, age: int) -> int:
        return self.epoch - age

    @rule(age=ages)
    def hello(self, age: int) -> None:
        effects = self.replica.hello(self.at(age))
        if age or self.hello_seen or self.gone or self.missing:
            assert effects == []
        else:
            assert SendProbe() in effects
            self.hello_seen = True
        self.see(effects)

    @rule(age=ages, ok=st.booleans())
    def probe_done(self, age: int, ok: bool) -> None:
        self.probe_ok = self.probe_ok or (ok and not age and self.hello_seen)
        effects = self.replica.probe_done(self.at(age), None if ok else "broken")
        if age:
            assert effects == []
        self.see(effects)

    @rule(age=ages, data=st.data(), suspects=st.sets(st.integers(1, 9)), fatal=st.sampled_from([False, False, True]))
    def worker_exited(self, age: int, data: st.DataObject, suspects: set[int], fatal: bool) -> None:
        rank = data.draw(st.sampled_from(self.ranks))
        lost, reported = self.replica.state is ReplicaState.LOST, self.work_epoch == self.at(age)
        effects = self.replica.worker_exited(rank, self.at(age), suspects=suspects, fatal=fatal, reason="it died")
        if age and not (lost and reported and rank == LEADER):
            assert effects == []
        settled = [effect.suspects for effect in effects if isinstance(effect, SettleJobs)]
        if lost and settled and not self.ended_now(effects):
            assert set(settled[0] or ()) == suspects, "the leader's report is what settles"
        self.see(effects)

    @rule(age=ages)
    def stalled(self, age: int) -> None:
        effects = self.replica.stalled(self.at(age), "no sign of life")
        if age:
            assert effects == []
        self.see(effects)

    @rule()
    def no_report(self) -> None:
        self.see(self.replica.no_report())

    @rule(data=st.data())
    def keeper_lost(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(self.ranks))
        self.missing.add(rank)
        effects = self.replica.keeper_lost(rank)
        assert effects == [SettleJobs(None)]
        self.see(effects)

    @rule(data=st.data())
    def keeper_back(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(self.ranks))
        was_missing = rank in self.missing
        self.missing.discard(rank)
        effects = self.replica.keeper_back(rank)
        if not was_missing or self.missing or self.gone:
            assert effects == []
        else:
            assert any(isinstance(effect, ReformReplica | EndWorld) for effect in effects)
        self.see(effects)

    @rule()
    def drain(self) -> None:
        self.replica.drain()

    @rule(dice=st.integers(0, 9))
    def world_ends(self, dice: int) -> None:
        if dice == 0:
            self.replica.gone()
            self.gone = True

    @invariant()
    def laws(self) -> None:
        if not hasattr(self, "replica"):
            return
        replica = self.replica
        assert replica.epoch == self.epoch
        assert replica.was_ready == self.was_ready
        assert (replica.state is ReplicaState.GONE) == self.gone
        if replica.state is ReplicaState.READY:
            assert self.probe_ok
            assert not self.missing
        if self.has_work and self.work_epoch != self.epoch and not self.gone:
            assert replica.state is ReplicaState.LOST, "nobody will settle the jobs of a lost epoch"

    def teardown(self) -> None:
        """Whatever happened, a replica whose keepers are here comes back, unless the world ends."""
        if not hasattr(self, "replica") or self.gone or self.ended:
            return
        for rank in self.ranks:
            self.missing.discard(rank)
            self.see(self.replica.keeper_back(rank))
        if self.ended:
            return
        self.see(self.replica.no_report())
        if self.replica.state is not ReplicaState.READY:
            self.hello_seen = True
            self.see(self.replica.hello(self.epoch))
            self.probe_ok = True
            effects = self.replica.probe_done(self.epoch, None)
            self.see(effects)
            assert effects == [TakeWork()]
        assert self.replica.state is ReplicaState.READY
        assert self.replica.failures < START_TRIES


TestReplica = ReplicaMachine.TestCase
TestReplica.settings = examples(120, stateful_step_count=40)
