"""Roll call: all ranks agree on a fresh name for this start of the world, and on who hosts the front end.

Keys of an earlier start may still be in the store (torchrun keeps its store over restarts), so nothing is read
that is not tied to the tokens of living members. Protocol, over any key-value store:

1. every member writes `member/<rank>`: its token and its facts (configuration, front-end endpoint);
2. rank 0 publishes `current`: a start name and the tokens it saw, and rewrites it while tokens change;
3. a member that finds its own token in `current` acknowledges; when all have, rank 0 judges the facts, writes
   `verdict/<name>`, and every member reads it;
4. after the collective part of the start, every rank closes `outcome/<name>` with "done" by compare-and-set. A member
   that was started anew in between closes it with "abort" instead, which sends everybody back to 1.

A token is `<keeper id>/<attempt>`: the keeper's id tells a worker that was started anew within this start of the
world from one that belongs to another.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from spmd_encoder.errors import StartupError
from spmd_encoder.wire.messages import Endpoint, WorldRecord

POLL_S = 0.01
DONE, ABORT = "done", "abort"


class Store(Protocol):
    """What the roll call needs of torch's stores; `get` of a missing key is "" here (see `groups.TorchStore`)."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> str: ...

    def compare_set(self, key: str, desired: str) -> str:
        """Set the key if it is missing; return its value afterwards."""
        ...


@dataclass(frozen=True)
class Facts:
    """What a member says of itself. `config` is `Config.to_json()`."""

    config: str
    endpoint: Endpoint | None = None

    def to_dict(self) -> dict[str, Any]:
        endpoint = msgspec.structs.asdict(self.endpoint) if self.endpoint else None
        return {"config": self.config, "endpoint": endpoint}


@dataclass(frozen=True)
class Start:
    """The outcome of a roll call. `formed`: this start is over already, the world serves without this worker."""

    world: WorldRecord
    formed: bool


def roll_call(
    store: Store,
    *,
    rank: int,
    world_size: int,
    keeper_id: str,
    attempt: int,
    facts: Facts,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Start:
    """Blocks until all `world_size` ranks have answered. Raises StartupError (exit code 3) after `timeout_s`,
    or the verdict's own where the ranks do not fit together."""
    token = f"{keeper_id}/{attempt}"
    store.set(f"member/{rank}", json.dumps({"token": token, "facts": facts.to_dict()}))
    chair = _Chair(store, world_size) if rank == 0 else None
    deadline = clock() + timeout_s
    while clock() < deadline:
        current = json.loads(store.get("current") or "null")
        if current is not None:
            name, tokens = current
            mine = tokens[rank] if rank < len(tokens) else ""
            if mine == token:
                store.set(f"ack/{name}/{rank}", token)
                if verdict := store.get(f"verdict/{name}"):
                    return Start(_judged(verdict), formed=False)
            elif (
                # An earlier worker of this very rank took part in that start.
                mine.split("/")[0] == keeper_id
                and (verdict := store.get(f"verdict/{name}"))
                and store.compare_set(f"outcome/{name}", ABORT) == DONE
            ):
                return Start(_judged(verdict), formed=True)
        if chair is not None:
            chair.preside()
        sleep(POLL_S)
    raise StartupError(
        f"no answer to the roll call within {timeout_s:.0f} s; silent ranks: {_silent(store, rank, world_size, token)}",
        exit_code=3,
    )


def _silent(store: Store, rank: int, world_size: int, token: str) -> list[int]:
    """Who has not answered. A rank's key alone proves nothing: it may stem from an earlier start."""
    name, tokens = json.loads(store.get("current") or '["", []]')
    if rank < len(tokens) and tokens[rank] == token:
        return [r for r, said in enumerate(tokens) if store.get(f"ack/{name}/{r}") != said]
    return [r for r in range(world_size) if not store.get(f"member/{r}")] or [0]


class _Chair:
    """Rank 0's part."""

    def __init__(self, store: Store, world_size: int) -> None:
        self._store = store
        self._world_size = world_size
        self._name = uuid.uuid4().hex[:12]
        self._published: list[str] = []

    def preside(self) -> None:
        raw = [self._store.get(f"member/{rank}") for rank in range(self._world_size)]
        if not all(raw):
            return
        members = [json.loads(text) for text in raw]
        tokens = [member["token"] for member in members]
        if tokens != self._published:
            self._published = tokens
            self._store.set("current", json.dumps([self._name, tokens]))
        acks = [self._store.get(f"ack/{self._name}/{rank}") for rank in range(self._world_size)]
        if acks == tokens:
            verdict = judge(self._name, [_facts(member["facts"]) for member in members])
            self._store.compare_set(f"verdict/{self._name}", json.dumps(verdict))


def _facts(raw: dict[str, Any]) -> Facts:
    endpoint = raw["endpoint"]
    return Facts(config=raw["config"], endpoint=Endpoint(**endpoint) if endpoint else None)


def judge(name: str, facts: Sequence[Facts]) -> dict[str, Any]:
    """Compare configurations and elect: the lowest rank that bound the port wins. Pure."""
    reference = json.loads(facts[0].config)
    for rank, fact in enumerate(facts):
        other = json.loads(fact.config)
        for key in sorted(reference.keys() | other.keys()):
            if reference.get(key) != other.get(key):
                flag = "--" + key.replace("_", "-")
                return {
                    "error": f"the ranks disagree on {flag}: rank 0 has {reference.get(key)!r}, "
                    f"rank {rank} has {other.get(key)!r}; start all ranks with the same flags",
                    "exit_code": 2,
                }
    for rank, fact in enumerate(facts):
        if fact.endpoint is not None and fact.endpoint.bound:
            won = fact.endpoint
            return {
                "world": {
                    "start_name": name,
                    "elected_rank": rank,
                    "work_address": won.work_address,
                    "control_address": won.control_address,
                    "token": won.token,
                }
            }
    return {"error": "no rank could bind the front end's port", "exit_code": 3}


def _judged(verdict: str) -> WorldRecord:
    said = json.loads(verdict)
    if "error" in said:
        raise StartupError(said["error"], exit_code=said["exit_code"])
    return WorldRecord(**said["world"])


def close_start(store: Store, name: str) -> bool:
    """Every rank calls this after the collective part; True where the start stands, False where it was aborted."""
    return store.compare_set(f"outcome/{name}", DONE) == DONE


def was_aborted(store: Store, name: str) -> bool:
    return store.get(f"outcome/{name}") == ABORT
