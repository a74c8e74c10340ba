"""What each request of a load holds: drawn from a seed, pure."""

from __future__ import annotations

import collections
import itertools
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    """One picture: the `serial`-th new one, of the pool `kind`. `again`: it was sent before."""

    kind: int
    serial: int
    again: bool = False


@dataclass(frozen=True)
class Turn:
    """One request: its items, or where `chaos` is not None the number of the bad thing that happens instead."""

    items: tuple[Item, ...] = ()
    chaos: int | None = None


def turns(
    *,
    shares: Sequence[float],
    items_per_request: int = 1,
    reuse: float = 0.0,
    window: int = 256,
    chaos: float = 0.0,
    num_chaos: int = 1,
    seed: int = 0,
) -> Iterator[Turn]:
    """Requests without end. Equal arguments give equal ones.

    An item repeats one of the last `window` new items with probability `reuse`, each alike; otherwise it is new, of a
    kind drawn by `shares`. A request is bad with probability `chaos`; the bad things come in turn.
    """
    rng = random.Random(seed)
    serials = itertools.count()
    recent: collections.deque[Item] = collections.deque(maxlen=window)
    bad = itertools.cycle(range(num_chaos))

    def item() -> Item:
        if recent and rng.random() < reuse:
            old = rng.choice(recent)
            return Item(old.kind, old.serial, again=True)
        new = Item(rng.choices(range(len(shares)), shares)[0], next(serials))
        recent.append(new)
        return new

    while True:
        if rng.random() < chaos:
            yield Turn(chaos=next(bad))
        else:
            yield Turn(tuple(item() for _ in range(items_per_request)))


def parse_sizes(text: str) -> tuple[list[tuple[int, int]], list[float]]:
    """`224x224:0.8,1024x768:0.2` as (width, height) pairs and their shares; a share that is left out is 1.

    Raises ValueError.
    """
    sizes, shares = [], []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)x(\d+)(?::(\d+(?:\.\d+)?))?\s*", part)
        if found is None:
            raise ValueError(f"sizes look like 224x224:0.8,1024x768:0.2, not {text!r}")
        sizes.append((int(found[1]), int(found[2])))
        shares.append(float(found[3] or 1))
    if not sum(shares):
        raise ValueError("at least one size needs a share above 0")
    return sizes, shares
