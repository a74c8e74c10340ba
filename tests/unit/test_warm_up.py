"""The warm-up: which batches it has, how far it goes, and what it finds."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.distributed import DistBackendError

from spmd_encoder.api.cost import AudioCost, CostTable, VideoCost
from spmd_encoder.api.profiling import ProfileOutcome
from spmd_encoder.api.types import ItemOptions, Modality
from spmd_encoder.distributed.channel import FollowerChannel, LeaderChannel
from spmd_encoder.errors import StartupError
from spmd_encoder.media.base import Film, FilmInfo, Sound
from spmd_encoder.models.base import Features, Preprocessor
from spmd_encoder.models.loading import load_preprocessor
from spmd_encoder.models.own_code import ModelFailedError
from spmd_encoder.runtime.phases import Phases
from spmd_encoder.runtime.warm_up import (
    Bounds,
    Trial,
    WarmUp,
    features_for,
    large_trials,
    ordinary_trial,
    small_trials,
    warm_up,
)
from spmd_encoder.wire.messages import TensorSpec
from spmd_encoder.wire.orders import RunBatch
from spmd_encoder.wire.sockets import new_context
from spmd_encoder.worker.compute import ComputeThread
from spmd_encoder.worker.encoder import ForwardResult, MMEncoder
from spmd_encoder.worker.profiling import Profiler
from spmd_encoder.worker.trial import trial
from spmd_encoder.worker.worker import FollowerWorker
from tests.harness.fallback_families import STRANGERS

QWEN = CostTable(patch=14, merge=2, min_pixels=56 * 56, max_pixels=28 * 28 * 16384)
FIXED = CostTable(patch=14, fixed_tokens=576)
SOUND = CostTable(audio=AudioCost(tokens_per_s=50, min_s=30, max_s=30))
BOUNDS = Bounds(max_items=8, max_tokens=16384, max_pixels=100_000_000)
FILMS = CostTable(video=VideoCost(fps=2, min_frames=4, max_frames=16, frames_per_step=2, tokens_per_step=10))
IMAGE, AUDIO, VIDEO = (Modality.IMAGE,), (Modality.AUDIO,), (Modality.VIDEO,)
HERE = Path("/checkpoint")

tables = st.one_of(
    st.builds(
        CostTable,
        patch=st.integers(4, 32),
        merge=st.integers(1, 4),
        min_pixels=st.integers(0, 200_000),
        max_pixels=st.one_of(st.just(0), st.integers(200_000, 20_000_000)),
    ),
    st.builds(CostTable, patch=st.just(14), fixed_tokens=st.integers(1, 5000)),
)
bounds = st.builds(
    Bounds,
    max_items=st.integers(1, 64),
    max_tokens=st.integers(1, 200_000),
    max_pixels=st.integers(100, 200_000_000),
)


@given(table=tables, limits=bounds)
def test_batches_grow_and_keep_the_limits(table: CostTable, limits: Bounds) -> None:
    trials = large_trials(table, IMAGE, limits)
    assert [t.cost for t in trials] == sorted({t.cost for t in trials})
    for one in trials:
        assert one.cost == one.count * table.image_tokens(*one.size)
        assert one.count <= limits.max_items
        assert one.size[0] * one.size[1] <= max(limits.max_pixels, 224 * 224)
        assert one.cost <= limits.max_tokens or (one.count == 1 and one.flag == "--max-image-pixels")


def test_the_largest_batch_and_the_largest_picture_are_among_them() -> None:
    *_, batch, picture = large_trials(QWEN, IMAGE, BOUNDS)
    assert 0.95 * 16384 <= batch.cost <= 16384
    assert (picture.cost, picture.count, picture.flag) == (4 * 16384, 1, "--max-image-pixels")
    assert picture.cost >= max(QWEN.image_tokens(*size) for size in ((10_000, 10_000), (500, 99_000), (4000, 3900)))
    *_, items = large_trials(FIXED, IMAGE, BOUNDS)
    assert (items.count, items.cost) == (8, 8 * 576)
    assert [(t.count, t.seconds) for t in large_trials(SOUND, AUDIO, BOUNDS)] == [(1, 30.0), (4, 30.0), (8, 30.0)]
    unbounded = CostTable(audio=AudioCost(tokens_per_s=13, max_s=1800))
    assert [t.seconds for t in large_trials(unbounded, AUDIO, BOUNDS)] == [30.0] * 3


def test_a_tiny_item_and_a_very_long_picture_come_first() -> None:
    tiny, long = small_trials(QWEN, IMAGE)
    assert tiny.size == (1, 1)
    assert max(long.size) == 200 * min(long.size)
    assert [t.modality for t in small_trials(SOUND, AUDIO)] == [Modality.AUDIO]


@pytest.mark.parametrize("family", ["qwen_tiny", "dinov2_tiny"])
def test_items_cost_what_was_thought(family: str, request: pytest.FixtureRequest) -> None:
    preprocessor = load_preprocessor(request.getfixturevalue(family))
    table = preprocessor.cost_table()
    limits = Bounds(max_items=4, max_tokens=2048, max_pixels=1_000_000)
    tiny, long = small_trials(table, IMAGE)
    assert len(features_for(preprocessor, long)) == 1
    for one in [tiny, *large_trials(table, IMAGE, limits)]:
        items = features_for(preprocessor, one)
        assert len(items) == one.count
        assert sum(item.cost for item in items) == pytest.approx(one.cost, rel=0.25)


class Picky(Preprocessor):
    """Takes sounds, but no pictures."""

    sampling_rate = 100

    def cost_table(self) -> CostTable:
        return SOUND

    def preprocess_audio(self, sound: Sound) -> Features:
        return Features(tensors={"samples": torch.from_numpy(sound.samples)}, num_tokens=1, cost=1)


class Replica:
    """A clock, and a tower that takes `per_token` seconds of it, and `first` more the first time."""

    def __init__(self, per_token: float, first: float = 0.0) -> None:
        self.now = 100.0
        self.per_token, self.first = per_token, first
        self.costs: list[int] = []
        self.flags: list[str] = []

    async def run(self, items: Sequence[Features], flag: str) -> None:
        cost = sum(item.num_tokens for item in items)
        self.now += cost * self.per_token + (0.0 if self.costs else self.first)
        self.costs.append(cost)
        self.flags.append(flag)

    async def warm_up(self, large: Sequence[Trial], seconds: float) -> WarmUp:
        small = small_trials(SOUND, AUDIO)
        return await warm_up(self.run, Picky(), small, large, folder=HERE, seconds=seconds, clock=lambda: self.now)


def sounds(*counts: int) -> list[Trial]:
    return [Trial(modality=Modality.AUDIO, cost=1500 * count, count=count, seconds=1.0) for count in counts]


async def test_what_takes_too_long_is_left_out() -> None:
    replica = Replica(per_token=0.1)
    done = await replica.warm_up(sounds(1, 4, 16, 64), seconds=3.0)
    assert replica.costs == [1, 1, 1, 4], "16 would take eight times as long as 4"
    assert done.left_out is not None
    assert done.left_out.count == 16
    assert (done.batches, done.cost) == (4, 6000)
    assert "of up to 6000 tokens" in str(done)
    assert "24000 would take too long" in str(done)


async def test_a_slow_first_run_is_no_measure() -> None:
    replica = Replica(per_token=1e-6, first=60.0)
    done = await replica.warm_up(sounds(1, 4, 16, 64), seconds=1.0)
    assert replica.costs == [1, 1, 1, 4, 16, 64]
    assert done.left_out is None
    assert set(replica.flags) == {"--max-batch-tokens"}


async def test_no_time_means_the_small_ones_only() -> None:
    replica = Replica(per_token=1e-9)
    await replica.warm_up([], seconds=0.0)
    assert replica.costs == [1, 1]


async def test_what_the_family_does_not_take_is_left_out() -> None:
    small = [*small_trials(QWEN, IMAGE), *small_trials(SOUND, AUDIO)]
    replica = Replica(per_token=0.1)
    done = await warm_up(replica.run, Picky(), small, [], folder=HERE, seconds=1.0, clock=lambda: replica.now)
    assert (done.batches, replica.costs) == (1, [1])


class Filmed(Picky):
    """Takes films alone."""

    def choose_frames(self, info: FilmInfo, options: ItemOptions) -> Sequence[int]:
        return range(0, info.num_frames, 4)[:16]

    def preprocess_video(self, film: Film) -> Features:
        assert len(film.frames) == len(film.times) == len(film.indices)
        cost = 5 * len(film.frames)
        size = (film.info.width, film.info.height)
        assert film.frames[0].shape == (*reversed(size), 3)
        return Features(tensors={}, num_tokens=cost, cost=cost, modality=Modality.VIDEO, details={"width": size[0]})


def test_films_are_tried_where_no_pictures_are_taken() -> None:
    tiny, plain = small_trials(FILMS, VIDEO)
    assert (tiny.size, plain.size) == ((1, 1), (224, 224))
    assert tiny.modality is plain.modality is Modality.VIDEO
    for one in (tiny, plain, *large_trials(FILMS, VIDEO, BOUNDS)):
        items = features_for(Filmed(), one)
        assert len(items) == one.count
        assert items[0].details["width"] == one.size[0]
        assert one.cost >= sum(item.cost for item in items) > 0
    assert [one.count for one in large_trials(FILMS, VIDEO, BOUNDS)] == [1, 4, 8]
    assert small_trials(FILMS, (*IMAGE, *VIDEO)) == small_trials(FILMS, IMAGE)
    assert small_trials(QWEN, VIDEO) == []


def test_films_of_a_real_model_cost_what_was_thought(tmp_path: Path) -> None:
    next(one for one in STRANGERS if one.name == "xclip").write(tmp_path)
    preprocessor = load_preprocessor(tmp_path)
    table = preprocessor.cost_table()
    limits = Bounds(max_items=2, max_tokens=2048, max_pixels=1_000_000)
    trials = [*small_trials(table, VIDEO), *large_trials(table, VIDEO, limits)]
    assert [one.count for one in trials] == [1, 1, 1, 2]
    for one in trials:
        items = features_for(preprocessor, one)
        assert sum(item.cost for item in items) == pytest.approx(one.cost, rel=0.25)
        assert items[0].modality is Modality.VIDEO


async def test_films_that_a_model_cannot_take_end_the_start() -> None:
    async def run(items: Sequence[Features], flag: str) -> None:
        assert items[0].modality is Modality.VIDEO
        raise StartupError("its weights are broken")

    with pytest.raises(StartupError, match="weights are broken"):
        await warm_up(run, Filmed(), small_trials(FILMS, VIDEO), [], folder=HERE, seconds=1.0)


async def test_where_nothing_at_all_is_taken_the_start_ends_with_the_last_reason() -> None:
    replica = Replica(per_token=0.1)
    large = large_trials(QWEN, IMAGE, BOUNDS)
    small = small_trials(QWEN, IMAGE)
    with pytest.raises(StartupError, match=r"^/checkpoint: .* takes nothing .*\(this model takes no image items\)"):
        await warm_up(replica.run, Picky(), small, large, folder=HERE, seconds=1e-9, clock=lambda: replica.now)
    mixed = [*large, *sounds(1)]
    done = await warm_up(replica.run, Picky(), small, mixed, folder=HERE, seconds=9.0, clock=lambda: replica.now)
    assert done.batches == 1, "other items are taken"


async def test_small_trials_alone_tell_nothing_of_what_is_taken() -> None:
    """All that a replica that is formed anew runs."""
    small = small_trials(QWEN, IMAGE)
    done = await warm_up(Replica(per_token=0.1).run, Picky(), small, [], folder=HERE, seconds=1.0)
    assert (done.batches, done.left_out) == (0, None)
    assert str(done).startswith("nothing that this model takes was tried")


class Failing(Replica):
    """One whose model's own code fails for pictures of some widths."""

    def __init__(self, *widths: int) -> None:
        super().__init__(per_token=1e-6)
        self.widths = widths

    async def run(self, items: Sequence[Features], flag: str) -> None:
        if items[0].details.get("width") in self.widths:
            raise ModelFailedError("the code of Model fails (ZeroDivisionError: by zero)")
        await super().run(items, flag)


class Plain(Picky):
    """Takes pictures too."""

    def preprocess(self, image: Image.Image) -> Features:
        return Features(tensors={}, num_tokens=1, cost=1, details={"width": image.width})


@pytest.mark.parametrize(("widths", "batches"), [((1,), 1), ((1400,), 2), ((1, 1400), 1)])
async def test_a_model_that_fails_for_odd_pictures_alone_is_served(
    widths: tuple[int, ...], batches: int, caplog: pytest.LogCaptureFixture
) -> None:
    replica, small = Failing(*widths), small_trials(QWEN, IMAGE)
    ordinary = ordinary_trial(QWEN, IMAGE)
    done = await warm_up(replica.run, Plain(), small, [], ordinary=ordinary, folder=HERE, seconds=1.0)
    assert done.batches == batches
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.endswith("cannot be encoded: the code of Model fails (ZeroDivisionError: by zero)")


@pytest.mark.parametrize("more", [[], sounds(1)], ids=["alone", "beside sounds"])
async def test_a_model_that_fails_for_an_ordinary_picture_ends_the_start(more: list[Trial]) -> None:
    replica, small = Failing(1, 1400, 224), [*small_trials(QWEN, IMAGE), *more]
    ordinary = ordinary_trial(QWEN, IMAGE)
    with pytest.raises(
        StartupError, match=r"^/checkpoint: the code of Model fails \(Zero.* config.json or the processor"
    ):
        await warm_up(replica.run, Plain(), small, more, ordinary=ordinary, folder=HERE, seconds=1.0)
    assert ordinary_trial(SOUND, AUDIO) is None


async def test_settings_that_break_the_processor_end_the_start() -> None:
    class Broken(Picky):
        def preprocess_audio(self, sound: Sound) -> Features:
            return Features(tensors={}, num_tokens=1 // 0, cost=1)

    small = small_trials(SOUND, AUDIO)
    with pytest.raises(StartupError, match=r"/checkpoint: .* cannot be used \(ZeroDivisionError"):
        await warm_up(Replica(per_token=0.1).run, Broken(), small, [], folder=HERE, seconds=1.0)


async def test_what_a_batch_shows_reaches_the_caller() -> None:
    async def run(items: Sequence[Features], flag: str) -> None:
        raise StartupError(f"lower {flag}")

    with pytest.raises(StartupError, match="lower --max-batch-tokens"):
        await warm_up(run, Picky(), small_trials(SOUND, AUDIO), [], folder=HERE, seconds=1.0)


def out_of_memory() -> None:
    torch.empty(2**60, dtype=torch.uint8)


def test_memory_that_runs_out_names_the_flag_to_lower() -> None:
    with pytest.raises(StartupError, match=r"memory ran out.*--max-batch-tokens allows"), trial("--max-batch-tokens"):
        out_of_memory()
    for error in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory")):
        with pytest.raises(StartupError, match="--max-image-pixels"), trial("--max-image-pixels"):
            raise error


def test_an_ordinary_batch_and_other_errors_are_left_alone() -> None:
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"), trial(""):
        out_of_memory()
    for error in (DistBackendError("a peer has gone"), ModelFailedError("x"), OSError("disk")):
        with pytest.raises(type(error)), trial("--max-batch-tokens"):
            raise error
    with pytest.raises(ZeroDivisionError), trial(""):
        raise ZeroDivisionError


def test_what_the_models_own_code_finds_wrong_ends_the_start() -> None:
    with pytest.raises(StartupError, match=r"the model fails \(RuntimeError: a shape\) .* config.json"), trial("--x"):
        raise RuntimeError("a shape\nthat does not fit")


def test_phases_follow_one_another_without_gaps() -> None:
    now = iter([1.5, 4.0, 4.25])
    phases = Phases(1.0, clock=lambda: next(now))
    for name in ("imports", "load", "warm_up"):
        phases.done(name)
    assert phases.seconds == {"imports": 0.5, "load": 2.5, "warm_up": 0.25}
    assert str(phases) == "imports 0.50 s, load 2.50 s, warm_up 0.25 s"
    assert list(phases.seconds) == ["imports", "load", "warm_up"]


class Full(MMEncoder):
    """A rank that has no memory left."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def run(
        self, specs: Sequence[Sequence[TensorSpec]], tensors: Sequence[Mapping[str, torch.Tensor]] | None
    ) -> ForwardResult:
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("flag", "error"), [("--max-batch-tokens", StartupError), ("", torch.OutOfMemoryError)], ids=["warm-up", "serving"]
)
async def test_a_follower_tells_a_warm_up_from_serving(tmp_path: Path, flag: str, error: type[Exception]) -> None:
    async with AsyncExitStack() as stack:
        contexts = [new_context(), new_context()]
        for context in contexts:
            stack.callback(context.destroy, linger=0)
        compute = ComputeThread()
        stack.callback(compute.close)
        leader = LeaderChannel(contexts[0], {1}, "secret", path=tmp_path / "o", host="")
        stack.callback(leader.close)
        end = FollowerChannel(contexts[1], address=leader.address, tp_rank=1, token="secret")
        stack.callback(end.close)
        await leader.wait_for_followers(5)
        profiler = Profiler(ProfileOutcome(rank=1, dp_rank=0, tp_rank=1), torch.device("cpu"), None)
        follower = FollowerWorker(Full(), compute, end, profiler)
        leader.send(RunBatch(order=0, shards=((),), trial=flag))
        with pytest.raises(error, match="memory"):
            await asyncio.wait_for(follower.follow(), 30)
