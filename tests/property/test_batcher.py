"""The batcher under any order of arrivals, preparations, batches, ends and removals."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from spmd_encoder.scheduler.batcher import Batcher, Stage
from tests.harness.examples import examples


@dataclass
class Known:
    alone: bool
    stage: Stage = Stage.WAITING
    key: str = ""
    cost: int = 0


class BatcherMachine(RuleBasedStateMachine):
    @initialize(items=st.integers(1, 4), tokens=st.integers(1, 20), lookahead=st.integers(1, 6))
    def begin(self, items: int, tokens: int, lookahead: int) -> None:
        self.items, self.tokens, self.lookahead = items, tokens, lookahead
        self.box = Batcher(max_items=items, max_tokens=tokens, lookahead=lookahead)
        self.jobs: dict[int, Known] = {}
        self.next_id = 0

    def at(self, *stages: Stage) -> list[int]:
        return [job_id for job_id, known in self.jobs.items() if known.stage in stages]

    @rule(alone=st.sampled_from([False, False, False, True]), count=st.integers(1, 3))
    def add(self, alone: bool, count: int) -> None:
        for _ in range(count):
            self.jobs[self.next_id] = Known(alone)
            self.box.add(self.next_id, alone=alone)
            self.next_id += 1

    @rule()
    def prepare(self) -> None:
        waiting, begun = self.at(Stage.WAITING), self.at(Stage.PREPARING, Stage.PREPARED, Stage.RUNNING)
        job_id = self.box.next_to_prepare()
        if job_id is not None:
            assert job_id == waiting[0], "oldest first"
            assert len(self.at(Stage.PREPARING, Stage.PREPARED)) < self.lookahead
            assert not (self.jobs[job_id].alone and begun)
            assert not any(self.jobs[other].alone for other in begun)
            self.jobs[job_id].stage = Stage.PREPARING
        elif waiting:
            held_up = (
                len(self.at(Stage.PREPARING, Stage.PREPARED)) >= self.lookahead
                or any(self.jobs[other].alone for other in begun)
                or (self.jobs[waiting[0]].alone and begun)
            )
            assert held_up, "the oldest may be prepared and is not"

    @rule(data=st.data(), key=st.sampled_from("ab"), cost=st.integers(1, 25))
    def prepared(self, data: st.DataObject, key: str, cost: int) -> None:
        if preparing := self.at(Stage.PREPARING):
            job_id = data.draw(st.sampled_from(preparing))
            assert self.box.prepared(job_id, key=key, cost=cost)
            known = self.jobs[job_id]
            known.stage, known.key, known.cost = Stage.PREPARED, key, cost
        assert not self.box.prepared(self.next_id + 1, key=key, cost=cost)

    @rule()
    def batch(self) -> None:
        ready = self.at(Stage.PREPARED)
        batch = self.box.next_batch()
        if not ready:
            assert batch == []
            return
        assert batch[0] == ready[0], "the oldest leads"
        assert batch == sorted(set(batch))
        assert set(batch) <= set(ready)
        assert len({self.jobs[job_id].key for job_id in batch}) == 1
        assert len(batch) <= self.items
        cost = sum(self.jobs[job_id].cost for job_id in batch)
        assert len(batch) == 1 or cost <= self.tokens
        left = [j for j in ready if j not in batch and self.jobs[j].key == self.jobs[batch[0]].key]
        if len(batch) < self.items:
            assert all(cost + self.jobs[job_id].cost > self.tokens for job_id in left), "room was wasted"
        for job_id in batch:
            self.jobs[job_id].stage = Stage.RUNNING

    @rule()
    @precondition(lambda self: self.at(Stage.RUNNING))
    def finish(self) -> None:
        running = self.at(Stage.RUNNING)
        self.box.finished(running)
        for job_id in running:
            del self.jobs[job_id]

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.jobs:
            job_id = data.draw(st.sampled_from(sorted(self.jobs)))
            runs = self.jobs[job_id].stage is Stage.RUNNING
            assert self.box.remove(job_id) is not runs
            if not runs:
                del self.jobs[job_id]
        assert not self.box.remove(self.next_id)

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "box"):
            return
        assert {j: self.box.stage(j) for j in range(self.next_id)} == {
            j: self.jobs[j].stage if j in self.jobs else None for j in range(self.next_id)
        }
        assert self.box.running == len(self.at(Stage.RUNNING))
        assert self.box.waiting == len(self.jobs) - self.box.running
        begun = self.at(Stage.PREPARING, Stage.PREPARED, Stage.RUNNING)
        if any(self.jobs[job_id].alone for job_id in begun):
            assert len(begun) == 1, "something is beside an item that must be alone"

    def teardown(self) -> None:
        """Nobody starves: with prompt preparation everything comes to its batch."""
        if not hasattr(self, "box"):
            return
        for _ in range(2 * len(self.jobs) + 2):
            self.box.finished(self.at(Stage.RUNNING))
            self.jobs = {job_id: known for job_id, known in self.jobs.items() if known.stage is not Stage.RUNNING}
            while (job_id := self.box.next_to_prepare()) is not None:
                self.jobs[job_id].stage = Stage.PREPARING
            for job_id in self.at(Stage.PREPARING):
                self.box.prepared(job_id, key="k", cost=1)
                self.jobs[job_id].stage = Stage.PREPARED
            for job_id in self.box.next_batch():
                self.jobs[job_id].stage = Stage.RUNNING
        assert not self.jobs


TestBatcher = BatcherMachine.TestCase
TestBatcher.settings = examples(80, stateful_step_count=40)
