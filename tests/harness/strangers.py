"""Whoever reaches a world's sockets without belonging to it: where these are, and connections to them."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from spmd_encoder.distributed.groups import connect_store
from tests.harness.world import World


@dataclass(frozen=True)
class Place:
    """A listening socket: a file, or a port of this machine."""

    name: str
    address: Path | int

    def connect(self) -> socket.socket:
        is_file = isinstance(self.address, Path)
        sock = socket.socket(socket.AF_UNIX if is_file else socket.AF_INET)
        sock.connect(str(self.address) if is_file else ("127.0.0.1", self.address))
        sock.settimeout(30)
        return sock

    def say(self, *pieces: bytes) -> None:
        """And hang up. Who is hung up on meanwhile does not mind."""
        with self.connect() as sock, contextlib.suppress(OSError):
            for piece in pieces:
                sock.sendall(piece)


@dataclass(frozen=True)
class Inside:
    """What a world of several nodes keeps from strangers, read out of its rendezvous store, which knows no secrets."""

    token: str
    work: Place
    control: Place
    orders: Place
    nurseries: tuple[Place, ...]

    @classmethod
    def of(cls, world: World) -> Inside:
        folders = sorted(world.tmp.glob("spmd_encoder-*"))
        port = re.fullmatch(r"spmd_encoder-\d+-\d+-\d+-(\d+)-\d+-\d+", folders[0].name)
        assert port is not None
        store = connect_store("127.0.0.1", int(port[1]), timeout_s=10)
        name, _ = json.loads(store.get("current"))
        record = json.loads(store.get(f"verdict/{name}"))["world"]
        addresses = {
            "work": record["work_address"],
            "control": record["control_address"],
            "orders": store.get(f"start/{name}/replica/0/epoch/0/orders"),
        }
        work, control, orders = (Place(kind, int(said.rpartition(":")[2])) for kind, said in addresses.items())
        nurseries = tuple(Place("nursery", folder / "nursery") for folder in folders)
        return cls(record["token"], work, control, orders, nurseries)


def other_ports(world: World, known: Sequence[Place]) -> list[Place]:
    """What else the world's processes listen on: torch's own sockets between ranks. Not the launchers'."""
    found = set()
    for seen in world.seen:
        if seen.name.startswith("spmd_encoder"):
            with contextlib.suppress(psutil.NoSuchProcess):
                connections = psutil.Process(seen.pid).net_connections("tcp")
                found |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
    return [Place("torch", port) for port in sorted(found - {place.address for place in known})]


@contextlib.contextmanager
def crowd(place: Place, count: int, said: bytes) -> Iterator[list[socket.socket]]:
    """So many connections at once, each of which says the same and then nothing."""
    with contextlib.ExitStack() as stack:
        crowd = []
        for _ in range(count):
            sock = stack.enter_context(place.connect())
            with contextlib.suppress(OSError):
                sock.sendall(said)
            crowd.append(sock)
        yield crowd
