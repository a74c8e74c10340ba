"""A real little `EncoderService` whose outcomes a test writes down; no replica, no model, no mock."""

from __future__ import annotations

import asyncio
import base64
import io
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from PIL import Image

from spmd_encoder.api.profiling import ProfileOptions, ProfileOutcome
from spmd_encoder.api.types import (
    Embedding,
    EncodeRequest,
    HeldResult,
    ItemFailure,
    ItemOutcome,
    MediaItem,
    Modality,
    ModelInfo,
    OutputKind,
    ReadyState,
    StageTimes,
)
from spmd_encoder.errors import EncoderError, ErrorCode

READY = ReadyState(ready=True, started=True, draining=False, replicas_ready=2, replicas=2)
STARTING = ReadyState(ready=False, started=False, draining=False, replicas_ready=0, replicas=2)
MODEL = ModelInfo(
    name="fake",
    family="fake",
    model_type="fake",
    dtype="float32",
    outputs=(OutputKind.TOKENS, OutputKind.POOLED),
    default_output=OutputKind.POOLED,
    modalities=(Modality.IMAGE,),
    embedding_dims={OutputKind.TOKENS: 2, OutputKind.POOLED: 2},
    random_weights=True,
)


def size_embedding(item: MediaItem, replica: int = 0) -> Embedding:
    """`[width, height]` of the picture as float32, so that a test sees which item an embedding belongs to."""
    return Embedding(
        modality=item.modality,
        kind=OutputKind.POOLED,
        shape=(2,),
        dtype="float32",
        num_tokens=1,
        digest=item.digest,
        data=struct.pack("<2f", item.width, item.height),
        grid=(1, 1, 1),
        replica=replica,
        times=StageTimes(queue_s=0.001, preprocess_s=0.002, forward_s=0.003),
    )


class FakeService:
    """Programmed by its public fields.

    `refusal` is raised for every request. `answer` makes one item's outcome. While `gate` is not set, `encode`
    waits. `seen` holds the requests that arrived, `cancelled` the ids of those that were cancelled while waiting,
    `refused` the codes of items that front ends answered by themselves.
    `requests_refused` those of whole requests. `held` is what `lookup` knows by key.
    `profiled` holds what profilers were asked, None for a stop; `profile_outcomes` is the answer.
    """

    def __init__(self, *, max_inflight_bytes: int = 2**40) -> None:
        self.refusal: EncoderError | Exception | None = None
        self.answer: Callable[[MediaItem], ItemOutcome] = size_embedding
        self.gate = asyncio.Event()
        self.gate.set()
        self.arrived = asyncio.Event()
        self.seen: list[EncodeRequest] = []
        self.cancelled: list[str] = []
        self.max_inflight_bytes = max_inflight_bytes
        self.refused: list[ErrorCode] = []
        self.requests_refused: list[ErrorCode] = []
        self.held: dict[str, HeldResult] = {}
        self.looked_up: list[tuple[tuple[str, ...], OutputKind | None]] = []
        self.reserved = 0
        self.peak_reserved = 0
        self.state = READY
        self.model: ModelInfo | None = MODEL
        self.profiled: list[ProfileOptions | None] = []
        self.profile_outcomes = [
            ProfileOutcome(rank=rank, dp_rank=rank, tp_rank=0, path=f"/t/{rank}") for rank in (0, 1)
        ]
        self.metrics = b"# HELP fake_up Whether the fake is up\n# TYPE fake_up gauge\nfake_up 1.0\n"

    async def encode(self, request: EncodeRequest) -> Sequence[ItemOutcome]:
        self.seen.append(request)
        self.arrived.set()
        if self.refusal is not None:
            raise self.refusal
        if not self.state.started:
            raise EncoderError(ErrorCode.NOT_READY, "no replica has been up yet", retry_after_s=3)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        return [self.answer(item) for item in request.items]

    def reserve(self, num_bytes: int) -> AbstractContextManager[None]:
        if self.reserved + num_bytes > self.max_inflight_bytes:
            raise EncoderError(ErrorCode.OVERLOADED, "too many bytes in flight (--max-inflight-bytes)")
        return self._reserved(num_bytes)

    def lookup(self, keys: Sequence[str], output: OutputKind | None) -> Sequence[HeldResult | None]:
        self.looked_up.append((tuple(keys), output))
        return [self.held.get(key) for key in keys]

    def item_refused(self, code: ErrorCode) -> None:
        self.refused.append(code)

    def request_refused(self, error: EncoderError) -> EncoderError:
        self.requests_refused.append(error.code)
        return error

    @contextmanager
    def _reserved(self, num_bytes: int) -> Iterator[None]:
        self.reserved += num_bytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        try:
            yield
        finally:
            self.reserved -= num_bytes

    def ready_state(self) -> ReadyState:
        return self.state

    def model_info(self) -> ModelInfo | None:
        return self.model

    def info(self) -> Mapping[str, Any]:
        return {"layout": {"dp_size": 2, "tp_size": 1}, "processes": []}

    def metrics_text(self) -> bytes:
        return self.metrics

    async def profile_start(self, options: ProfileOptions) -> Sequence[ProfileOutcome]:
        return self._profile(options)

    async def profile_stop(self) -> Sequence[ProfileOutcome]:
        return self._profile(None)

    def _profile(self, start: ProfileOptions | None) -> Sequence[ProfileOutcome]:
        self.profiled.append(start)
        if self.refusal is not None:
            raise self.refusal
        return self.profile_outcomes


def failing(error: EncoderError, *, width: int, replica: int | None = 1) -> Callable[[MediaItem], ItemOutcome]:
    """An `answer` that fails pictures of one width and encodes the others."""

    def answer(item: MediaItem) -> ItemOutcome:
        if item.width == width:
            return ItemFailure(error=error, replica=replica)
        return size_embedding(item)

    return answer


class FakeFetcher:
    """A real little `Fetcher` over a table: `files[url]` is what a URL gives.

    While `gate` is not set, `fetch` waits. `peak` is the most fetches that were under way at once, `cancelled` the
    URLs whose fetch was cancelled while waiting.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes | EncoderError] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.arrived = asyncio.Event()
        self.under_way = 0
        self.peak = 0
        self.cancelled: list[str] = []
        self.is_closed = False

    async def fetch(self, url: str, *, reserve: Callable[[int], None]) -> bytes:
        self.under_way += 1
        self.peak = max(self.peak, self.under_way)
        self.arrived.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(url)
            raise
        finally:
            self.under_way -= 1
        found = self.files[url]
        if isinstance(found, EncoderError):
            raise found
        reserve(len(found))
        return found

    async def close(self) -> None:
        self.is_closed = True


def picture_file(width: int, height: int = 9) -> bytes:
    """A PNG file of this size."""
    out = io.BytesIO()
    Image.new("RGB", (width, height), (width % 256, 0, 0)).save(out, "PNG")
    return out.getvalue()


def picture(width: int, height: int = 9) -> str:
    """The same as a data URI."""
    return "data:image/png;base64," + base64.b64encode(picture_file(width, height)).decode()
