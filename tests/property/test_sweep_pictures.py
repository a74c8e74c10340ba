"""Pictures of any size, in every family that takes them: rows as promised at the price that was asked, or a reason.

`make sweep` runs all of it, the rest of the tests a part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmd_encoder.api.types import Modality
from spmd_encoder.models import registry
from spmd_encoder.models.base import Features, LoadContext
from spmd_encoder.models.loading import adapter_class, load_adapter
from spmd_encoder.models.picture import MAX_ASPECT_RATIO
from tests.harness.examples import examples
from tests.harness.families import OPTIONS, WholeModel
from tests.harness.samples import forwards
from tests.harness.sweeps import (
    LONG,
    SMALL,
    SOME_SMALL,
    Size,
    check_rows,
    features_or_refusal,
    large,
    marked,
    of_each_shape,
)
from tests.harness.sweeps import picture as picture_of

TOLERANCE = 1e-6
FAMILIES = [entry for entry in registry.FAMILIES if Modality.IMAGE in adapter_class(entry).modalities]


class Case:
    def __init__(self, entry: registry.FamilyEntry, folder: Path, context: LoadContext) -> None:
        adapter_class(entry).tiny_checkpoint(folder, seed=3)
        self.adapter = load_adapter(folder, context)
        self.whole = WholeModel(entry.family, folder)
        self._table = self.adapter.cost_table()
        self._processor = getattr(self.adapter.preprocessor, "processor", None)
        self._options = OPTIONS.get(entry.family, {})

    def features(self, sizes: Iterable[Size]) -> Iterator[Features]:
        """Of all that are taken, which are those that are not too long."""
        for width, height in sizes:
            made = features_or_refusal(
                lambda size=(width, height): self.adapter.preprocess(picture_of(*size)), f"{width} x {height} pixels"
            )
            is_long = max(width, height) > MAX_ASPECT_RATIO * min(width, height)
            assert (made is None) == is_long, (width, height)
            if made is not None:
                self._check_price(width, height, made)
                yield made

    def _check_price(self, width: int, height: int, made: Features) -> None:
        price = self._table.image_tokens(width, height)
        assert made.cost <= price <= 2 * made.cost, (width, height, price, made.cost)
        if hasattr(self._processor, "get_number_of_image_patches"):
            said = self._processor.get_number_of_image_patches(height, width, self._options)
            assert made.grid is not None
            tiles = said[0] if isinstance(said, tuple) else said
            assert tiles in (made.grid[0], made.cost), (width, height, said, made.grid)

    def compare(self, sizes: Iterable[Size]) -> None:
        """With what transformers' whole model gives."""
        for size in sizes:
            (out,) = forwards(self.adapter, [self.adapter.preprocess(picture_of(*size))])
            tokens, pooled = self.whole.encode(picture_of(*size))
            for got, want in ((out.tokens, tokens), (out.pooled, pooled)):
                assert (got is None) == (want is None)
                if got is not None and want is not None:
                    assert got.shape == want.shape, size
                    assert float((got - want).abs().max() / want.abs().max()) <= TOLERANCE, size


@pytest.fixture(scope="module", params=marked(FAMILIES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, context: LoadContext) -> Case:
    entry: registry.FamilyEntry = request.param
    return Case(entry, tmp_path_factory.mktemp(entry.family), context)


def test_sizes_about_those_of_patches(case: Case) -> None:
    check_rows(case.adapter, of_each_shape(case.features(SOME_SMALL)))
    case.compare(SOME_SMALL[5::16])


def test_long_and_large_sizes(case: Case) -> None:
    sizes = [*LONG[1:13:2], *LONG[13:], *large(2, seed=1, most=600)]
    check_rows(case.adapter, of_each_shape(case.features(sizes)), at_once=4)
    case.compare([(200, 1), (20, 1500), (333, 500)])


@pytest.mark.hypothesis
def test_any_size(case: Case) -> None:
    sides = st.integers(1, 300)

    @examples(10)
    @given(st.lists(st.tuples(sides, sides), min_size=1, max_size=4))
    def check(sizes: list[Size]) -> None:
        check_rows(case.adapter, list(case.features(sizes)))

    check()


@pytest.mark.sweep
def test_every_small_size(case: Case) -> None:
    check_rows(case.adapter, of_each_shape(case.features(SMALL)))
    case.compare(SMALL[7::163])


@pytest.mark.sweep
def test_many_large_sizes(case: Case) -> None:
    sizes = [*LONG, *large(40, seed=2)]
    # Attention to one of more patches takes seconds.
    check_rows(case.adapter, (made for made in case.features(sizes) if made.cost <= 4000), at_once=1)
    case.compare(large(3, seed=3, most=700))


@pytest.mark.sweep
def test_rows_of_small_sizes_do_not_depend_on_their_company(case: Case) -> None:
    features = list(case.features(SMALL[3::61]))
    together = forwards(case.adapter, features)
    for item, out in zip(features, together, strict=True):
        (alone,) = forwards(case.adapter, [item])
        assert float((out.tokens - alone.tokens).abs().max() / alone.tokens.abs().max()) <= TOLERANCE, item.grid
        assert torch.equal(alone.tokens, forwards(case.adapter, [item])[0].tokens)
