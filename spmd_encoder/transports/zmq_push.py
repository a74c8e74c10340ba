"""Pushes parcels to ZMQ PULL sockets that receivers have bound: one connection per endpoint, kept and watched.

A receiver waits minutes for what a sender believes to have sent: so a peer that cannot be reached, that goes away, or
that takes nothing is an error of every parcel on its way there. A connection is never made anew by itself: the port
may belong to another job by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Generic

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.transports.base import Buffer, Framing, ParcelT, PushEndpoint, Run
from spmd_encoder.transports.push_peer import PeerLostError, PushPeer
from spmd_encoder.transports.push_turns import Farewells, Turns

MAX_PEERS = 256
"""Most endpoints connected at once: each costs this process a descriptor. Others wait for a place."""
_LINGER_S = 1.0
_LOOK_S = 0.05
IDLE_S = 60.0
"""An endpoint that got nothing for this long is let go of."""
STILL_S = 10.0
"""One that took nothing for this long is let go of where its place is needed."""


class ZmqPush(Generic[ParcelT]):
    """A `Transport` to `PushEndpoint`. Belongs to one event loop.

    `timeout_s` bounds each delivery, from the wait for a place to the last byte. `max_peer_bytes` bounds what is on
    its way to one endpoint, so that a receiver that stands still does not hold everybody's memory. `allowed_hosts`
    (`--push-allowed-hosts`) are the only ones that are connected to; empty allows any.
    """

    def __init__(
        self,
        framing: Framing[ParcelT],
        *,
        timeout_s: float,
        max_peer_bytes: int,
        max_peers: int = MAX_PEERS,
        idle_s: float = IDLE_S,
        still_s: float = STILL_S,
        allowed_hosts: Sequence[str] = (),
        run_look_ups: Run = asyncio.to_thread,
    ) -> None:
        self._framing = framing
        self._timeout_s = timeout_s
        self._max_peer_bytes = max_peer_bytes
        self._max_peers = max_peers
        self._idle_s = idle_s
        self._still_s = still_s
        self._run_look_ups = run_look_ups
        self._allowed_hosts = frozenset(map(str.lower, allowed_hosts))
        self._peers: dict[PushEndpoint, PushPeer] = {}  # the one that was asked for last is the last
        self._turns = Turns()
        self._farewells = Farewells(max_peers)
        self._line = asyncio.Lock()
        """Of those who need a place: the first of them looks for one, so that many who wait cost no more than one."""
        self._room = asyncio.Event()
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def num_peers(self) -> int:
        return len(self._peers)

    def allows(self, endpoint: PushEndpoint) -> bool:
        """Whether anything may be sent there."""
        return not self._allowed_hosts or endpoint.host.lower() in self._allowed_hosts

    async def deliver(self, parcel: ParcelT, destination: PushEndpoint) -> None:
        """See `Transport.deliver`. Raises `EncoderError` DELIVERY_FAILED."""
        if not self.allows(destination):
            raise _failed(destination, "its host is none of --push-allowed-hosts")
        peer = None
        try:
            async with asyncio.timeout(self._timeout_s):
                frames = await self._frames(parcel)
                peer = await self._peer(destination)
                # One parcel may always go, however large.
                if peer.pending and peer.pending_bytes + parcel.num_bytes > self._max_peer_bytes:
                    raise _failed(destination, f"it takes nothing of {peer.pending_bytes} bytes that are on their way")
                try:
                    await peer.send(frames, parcel.num_bytes)
                finally:
                    self._room.set()
        except TimeoutError:
            why = f"it took nothing for {self._timeout_s:g} s"
            if peer is not None:
                peer.give_up(why)
            raise _failed(destination, why) from None
        except PeerLostError as error:
            raise _failed(destination, str(error)) from None

    async def close(self) -> None:
        """See `Transport.close`. What is written already still goes its way."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for peer in list(self._peers.values()):
            peer.close("the server is ending")
        self._room.set()
        await self._farewells.close(_LINGER_S)

    async def _frames(self, parcel: ParcelT) -> Sequence[Buffer]:
        if len(parcel.chunks) <= 1:
            return self._framing(parcel)
        return await asyncio.to_thread(self._framing, parcel)  # it joins megabytes

    async def _peer(self, endpoint: PushEndpoint) -> PushPeer:
        """The endpoint's connection, made where there is none, once there is a place for one."""
        if (peer := self._known(endpoint)) is not None:
            return peer
        async with self._line:
            while (peer := self._known(endpoint)) is None and not self._has_place():
                self._room.clear()
                with suppress(TimeoutError):  # nobody tells when a receiver's machine has taken the rest
                    async with asyncio.timeout(_LOOK_S):
                        await self._room.wait()
            if peer is None:
                peer = self._peers[endpoint] = self._new_peer(endpoint)
                self._sweep_later()
            return peer

    def _known(self, endpoint: PushEndpoint) -> PushPeer | None:
        """Raises PeerLostError where no connection is used any more."""
        if self._closed:
            raise PeerLostError("the server is ending")
        peer = self._peers.get(endpoint)
        if peer is None or peer.is_lost:
            return None
        self._peers[endpoint] = self._peers.pop(endpoint)
        return peer

    def _has_place(self) -> bool:
        """Takes one from the oldest that is idle, or from one that stands still."""
        if len(self._peers) < self._max_peers:
            return True
        if (idle := next((peer for peer in self._peers.values() if peer.is_idle), None)) is not None:
            idle.close("its place was needed")
            return True
        # All of them are asked, since each knows only since when it has been asked.
        still_s, stillest = max(((peer.still_s(), peer) for peer in self._peers.values()), key=itemgetter(0))
        if still_s < self._still_s:
            return False
        stillest.close(f"it took nothing for {still_s:.0f} s, and its place was needed")
        return True

    def _new_peer(self, endpoint: PushEndpoint) -> PushPeer:
        return PushPeer(
            endpoint, self._turns, self._farewells, self._lost, self._run_look_ups, patience_s=self._timeout_s
        )

    def _lost(self, peer: PushPeer) -> None:
        if self._peers.get(peer.endpoint) is peer:
            del self._peers[peer.endpoint]
            self._room.set()

    def _sweep_later(self) -> None:
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(self._idle_s / 2, self._sweep_now)

    def _sweep_now(self) -> None:
        """Let go of connections that are lost or were not used for long."""
        self._sweep = None
        oldest = asyncio.get_running_loop().time() - self._idle_s
        for peer in list(self._peers.values()):
            if peer.is_idle and peer.last_used <= oldest:
                peer.close("it was not used for long")
        if self._peers:
            self._sweep_later()


def _failed(endpoint: PushEndpoint, why: str) -> EncoderError:
    return EncoderError(ErrorCode.DELIVERY_FAILED, f"the embeddings cannot be delivered to {endpoint}: {why}")
