"""The scheduler's engine on a leader: processes that decode and preprocess, the TP group for the forward."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_encoder.api.types import OutputKind
from spmd_encoder.errors import EncoderError, ErrorCode, StartupError
from spmd_encoder.media.pool import PreparerPool
from spmd_encoder.models.base import FamilyAdapter, Features, TowerOutput
from spmd_encoder.models.own_code import ModelFailedError, failing, is_own
from spmd_encoder.runtime.features import features_of, tensor_bytes
from spmd_encoder.scheduler.output import EngineOutput
from spmd_encoder.scheduler.scheduler import BatchResult, Prepared
from spmd_encoder.wire.messages import Job
from spmd_encoder.wire.preparing import Prepare
from spmd_encoder.worker.encoder import ForwardResult, pinned
from spmd_encoder.worker.faults import Faults
from spmd_encoder.worker.worker import LeaderWorker

log = logging.getLogger(__name__)

# Batches up to this size are packed on the loop, which takes a millisecond at most: while the tower waits, a change of
# threads costs more.
_INLINE_BYTES = 2 * 2**20


@dataclass(frozen=True)
class PreparedItem:
    features: Features
    key: Hashable

    @property
    def cost(self) -> int:
        return self.features.cost


class TowerEngine:
    """Implements `scheduler.Engine`. `pins`: batches are packed into pinned memory, for a GPU."""

    def __init__(
        self, adapter: FamilyAdapter, worker: LeaderWorker, pool: PreparerPool, faults: Faults, *, pins: bool
    ) -> None:
        self._adapter = adapter
        self._worker = worker
        self._pool = pool
        self._faults = faults
        self._pins = pins

    async def prepare(self, job: Job, media: memoryview) -> PreparedItem:
        if job.modality not in self._adapter.modalities:
            raise EncoderError(
                ErrorCode.MEDIA_UNSUPPORTED,
                f"this model takes no {job.modality} items; it takes: {', '.join(self._adapter.modalities)}",
            )
        if (why := self._adapter.preprocessor.not_served().get(job.modality)) is not None:
            raise EncoderError(ErrorCode.MEDIA_UNSUPPORTED, f"this model takes no {job.modality} items: {why}")
        if job.output is not None and job.output not in self._adapter.outputs:
            raise EncoderError(
                ErrorCode.INVALID_REQUEST,
                f"this model has no {job.output} output; it has: {', '.join(self._adapter.outputs)}",
            )
        request = Prepare(digest=job.digest, modality=job.modality, media_bytes=len(media), options=job.options)
        features = features_of(await self._pool.run(request, media))
        return PreparedItem(features, self._adapter.batch_key(features))

    async def run(self, jobs: Sequence[Job], items: Sequence[Prepared]) -> BatchResult:
        """A batch that the model's own code fails for is run again item by item, so that only those fail that it fails
        for when they are alone."""
        features = [item.features for item in items if isinstance(item, PreparedItem)]
        try:
            return await self._run(jobs, features)
        except ModelFailedError as error:
            if len(jobs) == 1:
                return BatchResult([_not_taken(jobs[0], error)], 0.0)
            log.debug("a batch of %d items is run again item by item: %s", len(jobs), error, exc_info=True)
        alone = [await self.run([job], [item]) for job, item in zip(jobs, items, strict=True)]
        return BatchResult([result.outcomes[0] for result in alone], sum(result.forward_s for result in alone))

    async def _run(self, jobs: Sequence[Job], features: Sequence[Features]) -> BatchResult:
        shares = self._worker.shares([item.cost for item in features])
        tensors = await self._packed(features, shares)

        def before() -> None:
            self._faults.before_forward(job.digest for job in jobs)

        def after(result: ForwardResult) -> BatchResult:
            outcomes = [
                finish(job.output or self._adapter.default_output, item, output)
                for job, item, output in zip(jobs, features, _in_order(result.outputs, shares), strict=True)
            ]
            return BatchResult(outcomes, result.forward_s)

        return await self._worker.execute(tensors, before=before, after=after)

    async def _packed(
        self, features: Sequence[Features], shares: Sequence[Sequence[int]]
    ) -> Sequence[Mapping[str, Tensor]]:
        """Raises ModelFailedError: no rank has heard of the batch yet."""
        size = sum(tensor.nbytes for item in features for tensor in item.tensors.values())
        try:
            if size <= _INLINE_BYTES and not self._pins:
                return self._pack(features, shares)
            return await asyncio.to_thread(self._pack, features, shares)
        except Exception as error:
            if not is_own(error):
                raise
            raise ModelFailedError(failing(error)) from error

    def _pack(self, features: Sequence[Features], shares: Sequence[Sequence[int]]) -> list[dict[str, Tensor]]:
        """The tensors of each shard."""
        packed = [self._adapter.pack([features[i] for i in share]) if share else {} for share in shares]
        return [pinned(tensors) for tensors in packed] if self._pins else packed

    async def try_out(self, features: Sequence[Features], flag: str) -> None:
        """A batch of the warm-up, whose size `flag` bounds. Raises StartupError where it shows that the model cannot be
        served like this, and ModelFailedError where its own code fails for these items and may take others."""
        shares = self._worker.shares([item.cost for item in features])
        tensors = await self._packed(features, shares)
        kind = self._adapter.default_output

        def after(result: ForwardResult) -> list[EngineOutput | EncoderError]:
            outputs = _in_order(result.outputs, shares)
            return [finish(kind, item, output) for item, output in zip(features, outputs, strict=True)]

        outcomes = await self._worker.execute(tensors, before=lambda: None, after=after, trial_flag=flag)
        for outcome in outcomes:
            if isinstance(outcome, EncoderError):
                raise StartupError(
                    f"in the warm-up {outcome.message}: its weights are broken, or --dtype is too narrow for them; "
                    "download it again, or give another --dtype"
                )


def _not_taken(job: Job, error: ModelFailedError) -> EncoderError:
    log.warning("item %s cannot be encoded: %s", job.digest, error, exc_info=error.__cause__)
    kind = type(error.__cause__ or error).__name__
    return EncoderError(ErrorCode.MEDIA_CORRUPT, f"cannot be encoded: the model's own code fails for it ({kind})")


def _in_order(outputs: Sequence[TowerOutput], shares: Sequence[Sequence[int]]) -> list[TowerOutput]:
    """What came shard after shard, by item."""
    by_item = dict(zip((index for share in shares for index in share), outputs, strict=True))
    return [by_item[index] for index in range(len(outputs))]


def _is_finite(tensor: Tensor) -> bool:
    """Whether all its values are: where one is not a number, neither extreme is. One pass over them, where
    `torch.isfinite` makes three tensors of their size, which takes thirty times as long for a large item."""
    return not tensor.numel() or all(math.isfinite(extreme.item()) for extreme in torch.aminmax(tensor))


def finish(kind: OutputKind, features: Features, output: TowerOutput) -> EngineOutput | EncoderError:
    """Check an item's output against what was promised, and bring it into its wire form."""
    rows = output.tokens.shape[0]
    if rows != features.num_tokens:
        return EncoderError(ErrorCode.INTERNAL, f"the model gave {rows} rows where {features.num_tokens} were promised")
    tensor = output.pooled if kind is OutputKind.POOLED and output.pooled is not None else output.tokens
    if not _is_finite(tensor):
        return EncoderError(ErrorCode.NON_FINITE, "the model gave values that are not finite for this item")
    return EngineOutput(
        kind=kind,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        num_tokens=features.num_tokens,
        grid=features.grid,
        details=features.details,
        data=tensor_bytes(tensor),
    )
