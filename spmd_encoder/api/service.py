"""What a front end holds: the encoder as a service, with no word of ranks, sockets or tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from spmd_encoder.api.profiling import ProfileOptions, ProfileOutcome
from spmd_encoder.api.types import EncodeRequest, HeldResult, ItemOutcome, ModelInfo, OutputKind, ReadyState
from spmd_encoder.errors import EncoderError, ErrorCode


class EncoderService(Protocol):
    """Implemented by `dispatcher.DPDispatcher`; by a fake in the front ends' contract tests."""

    async def encode(self, request: EncodeRequest) -> Sequence[ItemOutcome]:
        """One outcome per item, in order.

        Raises `EncoderError` where the request as a whole is refused before any work is done: QUEUE_FULL,
        NOT_READY, DRAINING. Cancelling the awaiting task cancels the items: none of them starts a forward
        after that.
        """
        ...

    def reserve(self, num_bytes: int) -> AbstractContextManager[None]:
        """Account `num_bytes` of media as in flight while the context is open.

        Raises `EncoderError` OVERLOADED when `--max-inflight-bytes` would be exceeded. A front end reserves a
        body's bytes as they come (not what its sender announces), until its reply is done.
        """
        ...

    def item_refused(self, code: ErrorCode) -> None:
        """Count an item that the front end itself answers with an error, beside those that `encode` answers."""
        ...

    def request_refused(self, error: EncoderError) -> EncoderError:
        """Count a request that the front end itself refuses, before it is read, beside those that `encode` refuses.
        The error comes back with when to try again."""
        ...

    def lookup(self, keys: Sequence[str], output: OutputKind | None) -> Sequence[HeldResult | None]:
        """What caches hold for each of the items with these keys (`api.types.item_key`); None where there is nothing.

        `output` None is the model's default. What is held now may be gone a moment later.
        """
        ...

    def ready_state(self) -> ReadyState: ...

    def model_info(self) -> ModelInfo | None:
        """None until the first replica said hello."""
        ...

    def info(self) -> Mapping[str, Any]:
        """JSON-ready facts for people: layout, model, replicas, processes, versions."""
        ...

    def metrics_text(self) -> bytes:
        """Prometheus text exposition of everything that the runtime measures."""
        ...

    async def profile_start(self, options: ProfileOptions) -> Sequence[ProfileOutcome]:
        """Have every rank's profiler record; one outcome per rank of the world, in order.

        A rank that fails is an outcome with a `code`, and the others record. Raises `EncoderError` NOT_READY, DRAINING.
        """
        ...

    async def profile_stop(self) -> Sequence[ProfileOutcome]:
        """End what `profile_start` began, and wait until the traces are written; one outcome per rank, in order."""
        ...
