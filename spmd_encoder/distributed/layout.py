"""Where every rank stands: a pure (dp, tp) grid in which 1 is an ordinary size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """`rank = dp_rank * tp_size + tp_rank`; the ranks of one replica are neighbours."""

    dp_size: int
    tp_size: int

    @property
    def world_size(self) -> int:
        return self.dp_size * self.tp_size

    @property
    def replicas(self) -> range:
        return range(self.dp_size)

    def coordinates(self, rank: int) -> tuple[int, int]:
        """(dp_rank, tp_rank) of a rank. Raises ValueError for a rank outside the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        return divmod(rank, self.tp_size)

    def ranks_of(self, replica: int) -> range:
        return range(replica * self.tp_size, (replica + 1) * self.tp_size)

    def leader_of(self, replica: int) -> int:
        return replica * self.tp_size

    def is_leader(self, rank: int) -> bool:
        return rank % self.tp_size == 0

    def followers_of(self, replica: int) -> Sequence[int]:
        return self.ranks_of(replica)[1:]

    def lowest_leader(self, ranks: Sequence[int]) -> int | None:
        """The one rank of a node that may host the front end, or None where the node has no leader."""
        return min((rank for rank in ranks if self.is_leader(rank)), default=None)
