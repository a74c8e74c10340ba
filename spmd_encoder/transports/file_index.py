"""Which of a folder's entries go when there are too many bytes: pure bookkeeping, least recently used first."""

from __future__ import annotations

from collections import OrderedDict


class FileIndex:
    """Sizes in bytes by key. An entry that somebody is busy with is never chosen to go."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._busy: dict[str, int] = {}
        self._used = 0

    @property
    def used(self) -> int:
        """Bytes of all entries, and what is reserved for new ones."""
        return self._used

    def __contains__(self, key: str) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, key: str, size: int) -> None:
        """An entry that is there, as the most recently used; its former size counts no more."""
        self.forget(key)
        self._sizes[key] = size
        self._used += size

    def forget(self, key: str) -> None:
        """An entry that is gone."""
        self._used -= self._sizes.pop(key, 0)

    def is_busy(self, key: str) -> bool:
        return key in self._busy

    def begin(self, key: str) -> None:
        """Somebody is busy with `key`, and nobody else was."""
        assert key not in self._busy
        self._busy[key] = 0

    def reserve(self, key: str, size: int) -> bool:
        """Take `size` bytes for a new version of `key`, beside its present one. False where they are not free: then
        another entry must go (`oldest`), or somebody else be done first."""
        if self._used + size > self.max_bytes:
            return False
        self._busy[key] += size
        self._used += size
        return True

    def commit(self, key: str, size: int) -> None:
        """What was reserved for the new version is its entry now, in place of the former one."""
        self.forget(key)
        self._busy[key] -= size
        self._sizes[key] = size

    def end(self, key: str) -> None:
        """Nobody is busy with `key` any more; what was reserved and did not become an entry is free again."""
        self._used -= self._busy.pop(key)

    def oldest(self) -> str | None:
        """The entry that goes next, if any may."""
        return next((key for key in self._sizes if key not in self._busy), None)
