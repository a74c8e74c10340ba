"""Results that a replica keeps: the least recently used go first when their bytes are too many. Pure.

The key is the item's (`api.types.item_key`) and the wanted output. All else that a result depends on (checkpoint,
dtype, the server's own decoder options) is the same for the life of the process that holds it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace

from spmd_encoder.scheduler.output import EngineOutput

Key = tuple[str, str]


@dataclass
class ResultCache:
    """At most `max_bytes` of embeddings; 0 holds none. `evicted` gathers keys until somebody takes them."""

    max_bytes: int
    bytes: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    evicted: list[Key] = field(default_factory=list)
    _entries: OrderedDict[Key, EngineOutput] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> EngineOutput | None:
        if not self.max_bytes:
            return None
        if (found := self._entries.get(key)) is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return found

    def put(self, key: Key, output: EngineOutput) -> None:
        """Keep a copy: the output may be a view of its whole batch. One that alone is too large is not kept."""
        size = output.data.nbytes
        if size > self.max_bytes or not self.max_bytes or key in self._entries:
            return
        self._entries[key] = replace(output, data=memoryview(bytes(output.data)))
        self.bytes += size
        while self.bytes > self.max_bytes:
            dropped, old = self._entries.popitem(last=False)
            self.bytes -= old.data.nbytes
            self.evictions += 1
            self.evicted.append(dropped)

    def take_evicted(self) -> tuple[Key, ...]:
        """What was dropped since it was last asked, and has not come back meanwhile."""
        taken, self.evicted = self.evicted, []
        return tuple(key for key in dict.fromkeys(taken) if key not in self._entries)
