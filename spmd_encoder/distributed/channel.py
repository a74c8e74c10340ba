"""Orders from a leader to its TP group: numbered, over a socket, so that nobody waits for work in a collective.

(A follower that idles in a broadcast past the group's timeout would kill the group.) A group of one is a channel
with no follower.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from spmd_encoder.wire.codec import WireError
from spmd_encoder.wire.orders import FollowerHello, FromFollower, Order, ProfileDone
from spmd_encoder.wire.sockets import Context, DealerSocket, RouterSocket


class LeaderChannel:
    """Bound by TP-rank 0. `orders` must be sent in number order from the loop thread."""

    def __init__(self, context: Context, followers: set[int], token: str, *, path: Path | None, host: str) -> None:
        union: Any = FromFollower
        self._socket: RouterSocket[FromFollower] = RouterSocket(context, union, secret=token, path=path, host=host)
        self.followers = frozenset(followers)
        self._names: dict[int, bytes] = {}

    @property
    def address(self) -> str:
        return self._socket.address

    async def wait_for_followers(self, timeout_s: float) -> None:
        """Until every follower has said hello. Raises TimeoutError naming those that have not."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._names.keys() != self.followers:
                    await self._admit()
        except TimeoutError:
            missing = sorted(self.followers - self._names.keys())
            raise TimeoutError(f"TP ranks {missing} did not join their leader within {timeout_s:.0f} s") from None

    async def _admit(self) -> None:
        try:
            peer, hello, _ = await self._socket.receive()
        except WireError:
            return
        if isinstance(hello, FollowerHello) and hello.tp_rank in self.followers:
            self._names[hello.tp_rank] = peer

    async def receive(self) -> tuple[int, ProfileDone]:
        """A follower's TP rank and its next answer. Whatever else comes is dropped."""
        while True:
            try:
                peer, answer, _ = await self._socket.receive()
            except WireError:
                continue
            for tp_rank, name in self._names.items():
                if name == peer and isinstance(answer, ProfileDone):
                    return tp_rank, answer

    def send(self, order: Order) -> None:
        for name in self._names.values():
            self._socket.send(name, order)

    def close(self) -> None:
        self._socket.close()


class FollowerChannel:
    """A follower's end: yields orders in number order, and takes answers back."""

    def __init__(self, context: Context, *, address: str, tp_rank: int, token: str) -> None:
        union: Any = Order
        self._socket: DealerSocket[Order] = DealerSocket(
            context, union, secret=token, name=b"tp%d" % tp_rank, address=address
        )
        self._socket.send(FollowerHello(tp_rank=tp_rank))
        self._next = 0

    async def receive(self) -> Order:
        """Raises WireError when an order was lost or came twice: this rank can then not stay in step."""
        order, _ = await self._socket.receive()
        if order.order != self._next:
            raise WireError(f"order {order.order} came where {self._next} was due")
        self._next += 1
        return order

    def send(self, answer: ProfileDone) -> None:
        self._socket.send(answer)

    def close(self) -> None:
        self._socket.close()
