"""A model whose own code fails for an item costs that item alone; a process or a peer that fails costs the worker."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Dinov2Config, Dinov2Model

from spmd_encoder.api.profiling import ProfileOutcome
from spmd_encoder.api.types import Modality, OutputKind
from spmd_encoder.distributed.channel import FollowerChannel, LeaderChannel
from spmd_encoder.errors import EncoderError, ErrorCode, StartupError
from spmd_encoder.media.pool import PreparerPool
from spmd_encoder.models.base import FamilyAdapter, Features, LoadContext, TowerOutput
from spmd_encoder.models.own_code import ModelFailedError, came_of_a_collective, failing, is_own
from spmd_encoder.runtime.compute import first_leaf
from spmd_encoder.runtime.engine import PreparedItem, TowerEngine
from spmd_encoder.scheduler.output import EngineOutput
from spmd_encoder.wire.messages import Job
from spmd_encoder.wire.sockets import new_context
from spmd_encoder.worker.compute import ComputeThread
from spmd_encoder.worker.encoder import MMEncoder
from spmd_encoder.worker.faults import Faults
from spmd_encoder.worker.profiling import Profiler
from spmd_encoder.worker.spread import SpreadWeights
from spmd_encoder.worker.worker import LeaderWorker

CPU = torch.device("cpu")


def raised(call: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def test_errors_of_code_that_does_not_suit_its_input() -> None:
    for call in (
        lambda: 1 % 0,
        lambda: torch.zeros(2, 3) @ torch.zeros(2, 3),
        lambda: torch.zeros(4).reshape(3),
        lambda: torch.zeros(4)[5],
        lambda: torch.cat([torch.zeros(2, 3), torch.zeros(3, 2)]),
        lambda: [][0],
        lambda: torch.nn.Linear(3, 4)(torch.zeros(2, 5)),
    ):
        assert is_own(raised(call))


def test_errors_after_which_the_process_is_not_to_be_trusted() -> None:
    assert not is_own(raised(lambda: torch.empty(2**60, dtype=torch.uint8))), "memory, as torch tells it on a CPU"
    for error in (
        *(MemoryError(), SystemError(), OSError("disk"), ConnectionResetError(), KeyboardInterrupt(), SystemExit()),
        *(torch.OutOfMemoryError("x"), torch.AcceleratorError("x"), dist.DistNetworkError("x")),
        *(RuntimeError(f"{name} error: x") for name in ("CUDA", "cuDNN", "cuFFT", "HIP", "CUBLAS_STATUS_EXECUTION")),
        *(StartupError("x"), ModelFailedError("x")),
    ):
        assert not is_own(error), error
    wrapped = ValueError("while reading")
    wrapped.__cause__ = MemoryError()
    assert not is_own(wrapped)
    circular = ValueError("a")
    circular.__context__ = KeyError("b")
    circular.__context__.__context__ = circular
    assert is_own(circular)


def test_what_comes_out_of_a_collective_may_be_a_peers_end(context: LoadContext) -> None:
    for call in (
        lambda: dist.broadcast(torch.zeros(1), src=7, group=context.group),
        lambda: dist.all_reduce(torch.zeros(1, dtype=torch.complex64), op=dist.ReduceOp.MAX, group=context.group),
    ):
        error = raised(call)
        assert came_of_a_collective(error) and not is_own(error), error


def test_a_peer_that_died_is_no_fault_of_the_model(tmp_path: Path) -> None:
    """A plain RuntimeError of gloo's, in a collective of the forward: the rank that is left is started again."""
    code = (
        "import os, sys, torch, torch.distributed as dist\n"
        "from spmd_encoder.distributed.collectives import sum_over\n"
        "from spmd_encoder.models.own_code import is_own\n"
        "rank = int(sys.argv[1])\n"
        "dist.init_process_group('gloo', store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)\n"
        "sum_over(dist.group.WORLD, torch.zeros(4))\n"
        "if rank: os._exit(0)\n"
        "try:\n"
        "    while True: sum_over(dist.group.WORLD, torch.zeros(4))\n"
        "except RuntimeError as error: print(type(error) is RuntimeError, is_own(error))\n"
    )
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE)
        for rank in (0, 1)
    ]
    said = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert said[0].split() == [b"True", b"False"]


def test_the_class_and_the_error_are_told_in_one_line() -> None:
    model = Dinov2Model(Dinov2Config(hidden_size=12, num_hidden_layers=1, num_attention_heads=3, image_size=28))
    said = failing(raised(lambda: model(torch.zeros(1, 4, 28, 28))))
    assert said.startswith("the code of Dinov2") and "(ValueError: Make sure that the channel" in said
    assert "\n" not in said
    assert failing(ValueError()) == "the code of the model fails (ValueError)"
    assert len(failing(ValueError("x" * 10**6))) < 400


def test_what_a_group_of_tasks_raised_is_told_and_not_the_group() -> None:
    async def life() -> None:
        async with asyncio.TaskGroup() as outer:
            outer.create_task(inner())

    async def inner() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            group.create_task(asyncio.sleep(60))

    async def fail() -> None:
        raise ValueError("why it ended")

    leaf = first_leaf(raised(lambda: asyncio.run(life())))
    assert isinstance(leaf, ValueError) and str(leaf) == "why it ended"
    assert leaf.__traceback__ is not None
    plain = KeyError("x")
    assert first_leaf(plain) is plain


# -- in a worker


class Divider(FamilyAdapter):
    """Gives a row of 1 / x for each x, and fails in its own way for some, as does a batch that holds one of them."""

    embedding_dims: Mapping[OutputKind, int] = {OutputKind.TOKENS: 1}

    def __init__(self) -> None:
        self.batches: list[list[float]] = []

    def batch_key(self, features: Features) -> Hashable:
        return None

    def pack(self, items: Sequence[Features]) -> dict[str, Tensor]:
        values = [item.tensors["x"] for item in items]
        if any(value.numel() > 1 for value in values):
            raise IndexError("too many values")
        return {"x": torch.cat(values)}

    def forward(self, batch: Mapping[str, Tensor]) -> list[TowerOutput]:
        self.batches.append(batch["x"].tolist())
        if float("inf") in self.batches[-1]:
            raise MemoryError
        return [TowerOutput(tokens=torch.tensor([[1 / x]])) for x in self.batches[-1]]

    @classmethod
    def load(cls, folder: Path, context: LoadContext) -> Any:
        raise NotImplementedError

    load_preprocessor = load  # type: ignore[assignment]

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        raise NotImplementedError


async def no_process() -> Any:
    await asyncio.Event().wait()


@asynccontextmanager
async def engine_of(
    folder: Path, context: LoadContext, followers: int = 0
) -> AsyncIterator[tuple[TowerEngine, Divider]]:
    adapter = Divider()
    async with AsyncExitStack() as stack:
        contexts = [new_context() for _ in range(1 + followers)]
        for one in contexts:
            stack.callback(one.destroy, linger=0)
        channel = LeaderChannel(contexts[0], set(range(1, 1 + followers)), "secret", path=folder / "o", host="")
        stack.callback(channel.close)
        for tp_rank in range(1, 1 + followers):
            end = FollowerChannel(contexts[tp_rank], address=channel.address, tp_rank=tp_rank, token="secret")
            stack.callback(end.close)
        await channel.wait_for_followers(5)
        compute = ComputeThread()
        stack.callback(compute.close)
        pool = PreparerPool(no_process, 1, timeout_s=1.0)
        stack.push_async_callback(pool.close)
        profiler = Profiler(ProfileOutcome(rank=0, dp_rank=0, tp_rank=0), CPU, None)
        worker = LeaderWorker(MMEncoder(adapter, SpreadWeights(context.group), CPU), compute, channel, profiler)
        yield TowerEngine(adapter, worker, pool, Faults.parse("raise@sha256:13"), pins=False), adapter


def batch(*values: float | list[float]) -> tuple[list[Job], list[PreparedItem]]:
    jobs = [
        Job(
            job_id=index,
            request_id="r",
            modality=Modality.IMAGE,
            output=None,
            digest=f"sha256:{value}",
            cost_tokens=1,
            budget_s=9.0,
        )
        for index, value in enumerate(values)
    ]
    tensors = [torch.tensor(value if isinstance(value, list) else [value], dtype=torch.float32) for value in values]
    return jobs, [PreparedItem(Features(tensors={"x": x}, num_tokens=1, cost=1), None) for x in tensors]


@pytest.mark.parametrize(("bad", "kind"), [(0.0, "ZeroDivisionError"), ([1.0, 2.0], "IndexError")])
async def test_an_item_that_the_model_fails_for_fails_alone(
    bad: Any, kind: str, tmp_path: Path, context: LoadContext, caplog: pytest.LogCaptureFixture
) -> None:
    async with engine_of(tmp_path, context) as (engine, adapter):
        first, second, third = (await engine.run(*batch(2.0, bad, 4.0))).outcomes
        assert isinstance(first, EngineOutput) and isinstance(third, EngineOutput)
        assert [torch.frombuffer(bytearray(one.data), dtype=torch.float32).item() for one in (first, third)] == [
            0.5,
            0.25,
        ]
        assert isinstance(second, EncoderError) and second.code is ErrorCode.MEDIA_CORRUPT
        assert second.message == f"cannot be encoded: the model's own code fails for it ({kind})"
        assert sum(kind in record.getMessage() for record in caplog.records if record.levelname == "WARNING") == 1
        (again,) = (await engine.run(*batch(5.0))).outcomes
        assert isinstance(again, EngineOutput), "the worker lives on"
    assert all(len(one) == 1 for one in adapter.batches[-3:])


async def test_a_warm_up_is_told_of_it(tmp_path: Path, context: LoadContext) -> None:
    async with engine_of(tmp_path, context) as (engine, _):
        _, items = batch(0.0)
        with pytest.raises(ModelFailedError, match=r"the model fails \(ZeroDivisionError: float division by zero\)"):
            await engine.try_out([item.features for item in items], "--max-batch-tokens")


@pytest.mark.parametrize(("value", "error"), [(float("inf"), MemoryError), (13, RuntimeError)])
async def test_what_the_process_may_not_survive_ends_the_worker(
    value: float, error: type[Exception], tmp_path: Path, context: LoadContext
) -> None:
    """An injected fault too: it stands for what takes a worker with it."""
    async with engine_of(tmp_path, context) as (engine, _):
        with pytest.raises(error):
            await engine.run(*batch(2.0, value))


async def test_with_followers_nobody_knows_who_is_in_step(tmp_path: Path, context: LoadContext) -> None:
    async with engine_of(tmp_path, context, followers=1) as (engine, adapter):
        with pytest.raises(ZeroDivisionError):
            await engine.run(*batch(2.0, 0.0))
        assert adapter.batches == [[2.0, 0.0]]
        (outcome,) = (await engine.run(*batch([1.0, 2.0]))).outcomes
        assert isinstance(outcome, EncoderError), "no follower had heard of what cannot be packed"
