"""Works that wait for a replica that holds their results in its cache. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from spmd_encoder.dispatcher.commands import Key
from spmd_encoder.dispatcher.directory import Directory
from spmd_encoder.dispatcher.work import Work


class WaitingHits:
    """Found by their keys and by their holders, since thousands may wait while others come and go. Whoever changes what
    the directory knows of a key takes its works out before, or after, and adds them again."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._works: dict[int, tuple[Work, tuple[int, ...]]] = {}
        """With the holders that it is found by."""
        self._by_key: dict[Key, dict[int, Work]] = {}
        self._by_holder: dict[int, dict[int, Work]] = {}

    def __len__(self) -> int:
        return len(self._works)

    def all(self) -> list[Work]:
        return [work for work, _ in self._works.values()]

    def of(self, replica: int) -> list[Work]:
        """Those that the replica may answer, oldest first."""
        works = self._by_holder.get(replica, {})
        return [works[work_id] for work_id in sorted(works)]

    def add(self, work: Work) -> bool:
        """False where no replica holds its result."""
        holders = self._directory.holders(work.key)
        if holders:
            self._works[work.work_id] = work, holders
            self._by_key.setdefault(work.key, {})[work.work_id] = work
            for replica in holders:
                self._by_holder.setdefault(replica, {})[work.work_id] = work
        return bool(holders)

    def discard(self, work_id: int) -> None:
        if (found := self._works.pop(work_id, None)) is None:
            return
        work, holders = found
        del self._by_key[work.key][work_id]
        if not self._by_key[work.key]:
            del self._by_key[work.key]
        for replica in holders:
            del self._by_holder[replica][work_id]

    def take(self, keys: Iterable[Key]) -> list[Work]:
        """All of these keys, which wait here no more."""
        works = [work for key in keys for work in self._by_key.get(key, {}).values()]
        for work in works:
            self.discard(work.work_id)
        return works
