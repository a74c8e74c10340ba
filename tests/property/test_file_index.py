"""The bookkeeping of a folder's bytes: never above the limit, never one that somebody is busy with, oldest first."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from spmd_encoder.transports.file_index import FileIndex

KEYS = st.sampled_from("abcdef")
SIZES = st.integers(1, 40)
LIMIT = 100


class IndexMachine(RuleBasedStateMachine):
    """Beside the index a list of entries, the least recently used first, and who is busy with how much."""

    def __init__(self) -> None:
        super().__init__()
        self.index = FileIndex(LIMIT)
        self.entries: list[tuple[str, int]] = []
        self.busy: dict[str, int] = {}

    def without(self, key: str) -> list[tuple[str, int]]:
        return [entry for entry in self.entries if entry[0] != key]

    @rule(key=KEYS)
    def begin(self, key: str) -> None:
        assert self.index.is_busy(key) == (key in self.busy)
        if key not in self.busy:
            self.index.begin(key)
            self.busy[key] = 0

    @precondition(lambda self: self.busy)
    @rule(data=st.data(), size=SIZES)
    def write(self, data: st.DataObject, size: int) -> None:
        """Reserve, at the cost of others, as a writer does."""
        key = data.draw(st.sampled_from(sorted(self.busy)))
        while not self.index.reserve(key, size):
            oldest = self.index.oldest()
            expected = next((name for name, _ in self.entries if name not in self.busy), None)
            assert oldest == expected
            if oldest is None:
                return
            self.index.forget(oldest)
            self.entries = self.without(oldest)
        self.busy[key] += size

    @precondition(lambda self: any(self.busy.values()))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(key for key, size in self.busy.items() if size)))
        self.index.commit(key, self.busy[key])
        self.entries = [*self.without(key), (key, self.busy[key])]
        self.busy[key] = 0

    @precondition(lambda self: self.busy)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.busy)))
        self.index.end(key)
        del self.busy[key]

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.entries))
        self.index.add(*entry)
        self.entries = [*self.without(entry[0]), entry]

    @rule(key=KEYS)
    def forget(self, key: str) -> None:
        self.index.forget(key)
        self.entries = self.without(key)

    @invariant()
    def the_count_is_right(self) -> None:
        assert self.index.used == sum(size for _, size in self.entries) + sum(self.busy.values())
        assert self.index.used <= LIMIT
        assert len(self.index) == len(self.entries)
        assert all((key in self.index) == any(key == name for name, _ in self.entries) for key in "abcdef")


TestIndex = IndexMachine.TestCase
