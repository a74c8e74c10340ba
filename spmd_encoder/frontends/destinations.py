"""Where a request's embeddings go besides into its reply: files, a receiver's socket, or a place here to be fetched.

The words are the request's own (`"destination": {"type": ...}`), whatever the protocol that carries them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar, assert_never

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge

from spmd_encoder.api.types import Embedding, ItemFailure, ItemOutcome, OutputKind
from spmd_encoder.config import Config
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.base import item_name
from spmd_encoder.transports.base import ItemParcel, PartLabel, PushEndpoint, Transport
from spmd_encoder.transports.files import FILE_NAME, is_key
from spmd_encoder.transports.registry import Resources, load_files, load_item_push, load_shelf

log = logging.getLogger(__name__)

T = TypeVar("T")


class Inline(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="inline"):
    """Into the reply."""


class ToFiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="file"):
    """A file per item, named by `mm_hashes` (one per item, null for its digest's hex), or all by their digests."""

    mm_hashes: list[str | None] | None = None


class ToReceiver(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="zmq"):
    """A message per item to the PULL socket at `endpoint` (`tcp://host:port`); each carries `part`."""

    endpoint: str
    part: PartLabel | None = None


class Staged(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="staged"):
    """Kept here until somebody fetches them."""


Elsewhere = ToFiles | ToReceiver | Staged
Destination = Inline | Elsewhere


class FileReceipt(msgspec.Struct, frozen=True, tag="file"):
    """`path` is relative to `--embedding-dir`."""

    mm_hash: str
    path: str
    num_bytes: int


class PushReceipt(msgspec.Struct, frozen=True, tag="zmq"):
    endpoint: str
    num_bytes: int


class StagedReceipt(msgspec.Struct, frozen=True, tag="staged"):
    staged_id: str
    num_bytes: int


Receipt = FileReceipt | PushReceipt | StagedReceipt


@dataclass(frozen=True)
class Delivered:
    """An item's outcome, a failure where it could not be delivered; `receipt` says where it is."""

    outcome: ItemOutcome
    receipt: Receipt | None = None


class Destinations:
    """Owns the transports. Belongs to one event loop."""

    def __init__(self, config: Config, resources: Resources, registry: CollectorRegistry) -> None:
        self._budget = resources.budget
        self._files = load_files(config, resources) if config.destinations.embedding_dir is not None else None
        self._push = load_item_push(config, resources)
        self.shelf = load_shelf(config, resources)
        self._counter = Counter(
            "spmd_encoder_deliveries",
            "Embeddings that were to go elsewhere than into a reply, by outcome",
            ["outcome"],
            registry=registry,
        )
        staged = Gauge(
            "spmd_encoder_staged_bytes", "Embeddings that wait for receivers or are on their way", registry=registry
        )
        staged.set_function(lambda: self._budget.used)
        self._tasks: set[asyncio.Task[list[Delivered]]] = set()

    def check(self, to: Elsewhere, num_items: int, output: OutputKind | None) -> OutputKind | None:
        """The output that is meant, before anything is encoded.

        Raises `EncoderError`: INVALID_REQUEST where this cannot be a destination, OVERLOADED where too much waits.
        """
        match to:
            case ToFiles(mm_hashes):
                if self._files is None:
                    raise _invalid("this server writes no files; it was started without --embedding-dir")
                if output is OutputKind.POOLED:
                    raise _invalid("a file holds one row per token; leave `output` out, or say tokens", "output")
                _check_hashes(mm_hashes, num_items)
                return OutputKind.TOKENS
            case ToReceiver(endpoint):
                if not self._push.allows(_endpoint(endpoint)):
                    raise _invalid("the endpoint's host is none of --push-allowed-hosts", "destination.endpoint")
            case Staged():
                pass
            case _:
                assert_never(to)
        self._budget.check_room()
        return output

    async def deliver(self, to: Elsewhere, outcomes: Sequence[ItemOutcome], request_id: str) -> list[Delivered]:
        """What became of each item, in order. A delivery that has begun goes on where the caller is cancelled.

        Raises `EncoderError` OVERLOADED where the items are more than may be on their way.
        """
        part = to.part if isinstance(to, ToReceiver) else None
        parcels = [
            ItemParcel(request_id=request_id, index=index, num_items=len(outcomes), outcome=outcome, part=part)
            for index, outcome in enumerate(outcomes)
        ]
        task = asyncio.create_task(self._deliver(to, parcels))
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return await asyncio.shield(task)

    async def drain(self) -> None:
        """Return when nothing is on its way."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def close(self) -> None:
        """What is under way fails. May be called again."""
        for transport in (self._files, self._push, self.shelf):
            if transport is not None:
                await transport.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _deliver(self, to: Elsewhere, parcels: Sequence[ItemParcel]) -> list[Delivered]:
        match to:
            case Staged():
                return [await self._stage(parcel) for parcel in parcels]
            case ToFiles(mm_hashes):
                with self._budget.hold(_size(parcels)):
                    hashes = mm_hashes or [None] * len(parcels)
                    return await asyncio.gather(*map(self._write, parcels, hashes))
            case ToReceiver(endpoint):
                with self._budget.hold(_size(parcels)):
                    return await self._send(parcels, endpoint)
            case _:
                assert_never(to)

    async def _stage(self, parcel: ItemParcel) -> Delivered:
        staged_id = self.shelf.new_id()
        error = await self._try(self.shelf, parcel, staged_id)
        return _delivered(parcel, error, StagedReceipt(staged_id, parcel.num_bytes))

    async def _write(self, parcel: ItemParcel, mm_hash: str | None) -> Delivered:
        if not isinstance(parcel.outcome, Embedding):
            return Delivered(parcel.outcome)
        assert self._files is not None
        key = mm_hash or parcel.outcome.digest.rpartition(":")[2]
        error = await self._try(self._files, parcel, key)
        return _delivered(parcel, error, FileReceipt(key, f"{key}/{FILE_NAME}", parcel.num_bytes))

    async def _send(self, parcels: Sequence[ItemParcel], text: str) -> list[Delivered]:
        """One after another, so that they arrive in order, failures too; once one is lost nothing more is sent."""
        endpoint, done = _endpoint(text), list[Delivered]()
        lost: EncoderError | None = None
        for parcel in parcels:
            if lost is None:
                lost = await self._try(self._push, parcel, endpoint)
            done.append(_delivered(parcel, lost, PushReceipt(text, parcel.num_bytes)))
        return done

    async def _try(self, transport: Transport[ItemParcel, T], parcel: ItemParcel, to: T) -> EncoderError | None:
        """Why it could not be delivered."""
        error = None
        try:
            await transport.deliver(parcel, to)
        except EncoderError as failure:
            error = failure
        if isinstance(parcel.outcome, Embedding):
            self._counter.labels("ok" if error is None else "failed").inc()
        return error

    def _done(self, task: asyncio.Task[list[Delivered]]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("a delivery ends: %s", error)  # also where nobody waits for it any more


def _delivered(parcel: ItemParcel, error: EncoderError | None, receipt: Receipt) -> Delivered:
    if not isinstance(parcel.outcome, Embedding):
        return Delivered(parcel.outcome)
    if error is None:
        return Delivered(parcel.outcome, receipt)
    return Delivered(ItemFailure(error=error.at(item_name(parcel.index)), replica=parcel.outcome.replica))


def _size(parcels: Sequence[ItemParcel]) -> int:
    return sum(parcel.num_bytes for parcel in parcels)


def _check_hashes(mm_hashes: list[str | None] | None, num_items: int) -> None:
    if mm_hashes is None:
        return
    if len(mm_hashes) != num_items:
        raise _invalid(f"{len(mm_hashes)} hashes were given for {num_items} items", "destination.mm_hashes")
    for index, mm_hash in enumerate(mm_hashes):
        if mm_hash is not None and not is_key(mm_hash):
            raise _invalid(
                "an mm_hash is 1 to 128 of the characters A-Z a-z 0-9 _ . - and does not begin with a dot",
                f"destination.mm_hashes[{index}]",
            )


def _endpoint(text: str) -> PushEndpoint:
    try:
        return PushEndpoint.parse(text)
    except EncoderError as error:
        raise error.at("destination.endpoint") from None


def _invalid(message: str, param: str = "destination") -> EncoderError:
    return EncoderError(ErrorCode.INVALID_REQUEST, message, param=param)
