"""Which item is worked on next, and which items share a forward: pure, no clocks, no sockets.

Life of an item: waiting -> preparing (decode and preprocess) -> prepared -> running -> gone. Rules:

- oldest first: whatever is prepared when the caller asks for a batch makes one;
- a batch holds items of one key, at most `max_items` of them and `max_tokens` of cost (one larger item runs alone);
- an item marked `alone` is worked on with nothing beside it, from preparation to the end of its forward, so that
  a worker's death in that time is its own;
- at most `lookahead` items are in preparation or prepared, so that memory is bounded and cancelling is cheap.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum, auto


class Stage(Enum):
    WAITING = auto()
    PREPARING = auto()
    PREPARED = auto()
    RUNNING = auto()


@dataclass
class _Entry:
    job_id: int
    alone: bool
    stage: Stage = Stage.WAITING
    key: Hashable = None
    cost: int = 0


@dataclass
class Batcher:
    max_items: int
    max_tokens: int
    lookahead: int
    _entries: dict[int, _Entry] = field(default_factory=dict)  # insertion order is age

    def add(self, job_id: int, *, alone: bool) -> None:
        if job_id in self._entries:
            raise ValueError(f"job {job_id} is here already")
        self._entries[job_id] = _Entry(job_id, alone)

    def remove(self, job_id: int) -> bool:
        """Forget an item that is not running. Returns whether it was forgotten."""
        entry = self._entries.get(job_id)
        if entry is None or entry.stage is Stage.RUNNING:
            return False
        del self._entries[job_id]
        return True

    def stage(self, job_id: int) -> Stage | None:
        entry = self._entries.get(job_id)
        return entry.stage if entry else None

    def next_to_prepare(self) -> int | None:
        """The oldest waiting item that may be prepared now; it is then preparing."""
        oldest, begun, ahead = None, 0, 0
        for entry in self._entries.values():  # for every item, several times: one pass
            if entry.stage is Stage.WAITING:
                oldest = oldest or entry
                continue
            if entry.alone:
                return None
            begun += 1
            ahead += entry.stage is not Stage.RUNNING
        if oldest is None or ahead >= self.lookahead or (oldest.alone and begun):
            return None
        oldest.stage = Stage.PREPARING
        return oldest.job_id

    def prepared(self, job_id: int, *, key: Hashable, cost: int) -> bool:
        """The item's features are there. False where it was removed meanwhile."""
        entry = self._entries.get(job_id)
        if entry is None:
            return False
        entry.stage, entry.key, entry.cost = Stage.PREPARED, key, cost
        return True

    def next_batch(self) -> list[int]:
        """The next batch, oldest item first; empty where nothing is prepared. Its items are then running."""
        batch = self._forming()
        for entry in batch:
            entry.stage = Stage.RUNNING
        return [entry.job_id for entry in batch]

    def forming(self) -> tuple[int, int, bool]:
        """Items and cost of what `next_batch` would return now, and whether another item like them has room there."""
        batch = self._forming()
        items, cost = len(batch), sum(entry.cost for entry in batch)
        return items, cost, items < self.max_items and cost * (items + 1) <= self.max_tokens * max(items, 1)

    def finished(self, job_ids: list[int]) -> None:
        for job_id in job_ids:
            del self._entries[job_id]

    def _forming(self) -> list[_Entry]:
        ready = [e for e in self._entries.values() if e.stage is Stage.PREPARED]
        if not ready:
            return []
        batch, tokens = [ready[0]], ready[0].cost
        for entry in ready[1:]:
            if len(batch) == self.max_items:
                break
            if entry.key == batch[0].key and tokens + entry.cost <= self.max_tokens:
                batch.append(entry)
                tokens += entry.cost
        return batch

    @property
    def waiting(self) -> int:
        return sum(e.stage is not Stage.RUNNING for e in self._entries.values())

    @property
    def running(self) -> int:
        return sum(e.stage is Stage.RUNNING for e in self._entries.values())
