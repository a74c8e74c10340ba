"""Films of any size and number of frames, in every family that takes them: rows as promised, or a reason.

`make sweep` runs all of it, the rest of the tests a part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_encoder.api.types import ItemOptions, MediaItem, Modality
from spmd_encoder.media.base import FilmInfo
from spmd_encoder.models import registry
from spmd_encoder.models.base import FamilyAdapter, Features, LoadContext
from spmd_encoder.models.loading import adapter_class, load_adapter
from spmd_encoder.models.picture import MAX_ASPECT_RATIO
from tests.harness.examples import examples
from tests.harness.sweeps import LONG, SMALL, check_rows, features_or_refusal, film, large, marked, of_each_shape

FAMILIES = [entry for entry in registry.FAMILIES if Modality.VIDEO in adapter_class(entry).modalities]
Shape = tuple[int, int, int]
"""(frames, width, height)."""
COUNTS = (1, 2, 3, 5)
SIZES = ((1, 1), (2, 3), (3, 1), (27, 29), (64, 64), (200, 1), (2, 400), (120, 90))
FRAME_RATES = (0.001, 0.1, 1.0, 23.976, 60.0, 1000.0)
OPTIONS = (
    *(ItemOptions(), ItemOptions(fps=0.01), ItemOptions(fps=1e6), ItemOptions(max_frames=1)),
    *(ItemOptions(max_frames=2), ItemOptions(max_frames=3, fps=7.7), ItemOptions(max_frames=10**6, fps=0.3)),
)


@pytest.fixture(scope="module", params=marked(FAMILIES))
def adapter(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, context: LoadContext
) -> FamilyAdapter:
    entry: registry.FamilyEntry = request.param
    folder = tmp_path_factory.mktemp(entry.family)
    adapter_class(entry).tiny_checkpoint(folder, seed=3)
    return load_adapter(folder, context)


def features(adapter: FamilyAdapter, shapes: Iterable[Shape]) -> Iterator[Features]:
    """Of all that are taken, which are those that are not too long."""
    table = adapter.cost_table()
    for count, width, height in shapes:
        one = film(count, width, height)
        made = features_or_refusal(
            lambda one=one: adapter.preprocessor.preprocess_video(one), f"frames of {width} x {height} pixels"
        )
        is_long = max(width, height) > MAX_ASPECT_RATIO * min(width, height)
        assert (made is None) == is_long, (width, height)
        if made is not None:
            item = MediaItem(
                modality=Modality.VIDEO, data=b"", digest="", width=width, height=height, seconds=9.0, frames=count
            )
            assert made.cost <= table.tokens(item) <= 4 * made.cost, (count, width, height, table.tokens(item))
            assert made.details["num_frames"] == count
            yield made


def check_choice(adapter: FamilyAdapter, info: FilmInfo, options: ItemOptions) -> None:
    """Frames of the film, as few as the request says, and as many layers as were paid for, or fewer."""
    chosen = list(adapter.preprocessor.choose_frames(info, options))
    assert chosen, (info, options)
    assert chosen == sorted(chosen)
    assert chosen[0] >= 0
    assert chosen[-1] < info.num_frames
    assert len(chosen) <= (options.max_frames or math.inf), (info, options)
    cost = adapter.cost_table().video
    assert cost is not None
    paid = cost.frames(info.seconds, options)
    assert math.ceil(len(chosen) / cost.frames_per_step) <= math.ceil(paid / cost.frames_per_step), (info, options)


def test_numbers_of_frames_and_sizes(adapter: FamilyAdapter) -> None:
    shapes = [(count, *size) for count in COUNTS for size in SIZES]
    check_rows(adapter, of_each_shape(features(adapter, shapes)), at_once=4)


def test_long_and_large_frames(adapter: FamilyAdapter) -> None:
    shapes = [(2, *size) for size in (*LONG[3:6], *LONG[10:14])]
    check_rows(adapter, of_each_shape(features(adapter, [*shapes, (1, 700, 500), (40, 30, 20)])), at_once=2)


def test_frames_of_any_film(adapter: FamilyAdapter) -> None:
    for num_frames in (1, 2, 3, 4, 5, 9, 33, 100, 3001, 10**5):
        for fps in FRAME_RATES:
            info = FilmInfo(num_frames=num_frames, fps=fps, seconds=num_frames / fps, width=64, height=48)
            for options in OPTIONS:
                check_choice(adapter, info, options)


@pytest.mark.hypothesis
def test_any_frames_of_any_film(adapter: FamilyAdapter) -> None:
    rates = st.floats(0.001, 1000)
    options = st.builds(ItemOptions, fps=st.none() | rates, max_frames=st.none() | st.integers(1, 5000))

    @examples(100)
    @given(st.integers(1, 10**6), rates, options)
    def check(num_frames: int, fps: float, options: ItemOptions) -> None:
        info = FilmInfo(num_frames=num_frames, fps=fps, seconds=num_frames / fps, width=64, height=48)
        check_choice(adapter, info, options)

    check()


@pytest.mark.sweep
def test_every_small_size(adapter: FamilyAdapter) -> None:
    shapes = [(1 + index % 3, *size) for index, size in enumerate(SMALL)]
    check_rows(adapter, of_each_shape(features(adapter, shapes)), at_once=8)


@pytest.mark.sweep
def test_many_large_sizes_and_long_films(adapter: FamilyAdapter) -> None:
    shapes = [(1 + index % 5, *size) for index, size in enumerate([*LONG, *large(12, seed=4, most=900)])]
    many = [(99, 40, 30), (128, 16, 16), (301, 9, 8)]
    check_rows(adapter, features(adapter, [*shapes, *many]), at_once=1)
