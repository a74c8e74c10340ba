"""Embeddings that wait to be fetched: within bytes, within time, and gone when they are released."""

from __future__ import annotations

import asyncio

import pytest

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.transports.budget import StagedBytes
from spmd_encoder.transports.staged import Shelf
from tests.harness.parcels import embedding, failed_item, item

pytestmark = pytest.mark.timeout(20)


async def test_it_is_kept_until_released() -> None:
    budget = StagedBytes(2**20)
    shelf = Shelf(budget, keep_s=1000)
    ids = [shelf.new_id() for _ in range(3)]
    for place, staged_id in enumerate(ids):
        await shelf.deliver(item(embedding(100, 100, place)), staged_id)
    assert budget.used == 3 * 40_000
    with shelf.reading(ids[1]) as rows:
        assert bytes(rows.data) == bytes([1]) * 40_000
    assert shelf.release(ids[1])
    assert not shelf.release(ids[1])
    assert budget.used == 2 * 40_000
    with pytest.raises(KeyError), shelf.reading(ids[1]):
        pass
    await shelf.close()
    assert (len(shelf), budget.used) == (0, 0)


async def test_who_reads_it_has_it_to_the_end_and_it_counts_until_then() -> None:
    budget = StagedBytes(2**20)
    shelf = Shelf(budget, keep_s=1000)
    await shelf.deliver(item(embedding(100, 100)), "a")
    with shelf.reading("a") as first, shelf.reading("a") as second:
        shelf.release("a")
        assert first is second
        assert budget.used == 40_000
    assert budget.used == 0


async def test_too_much_is_refused_and_small_ones_count_for_what_they_take() -> None:
    budget = StagedBytes(10_000)
    shelf = Shelf(budget, keep_s=1000)
    for staged_id in ("a", "b"):
        await shelf.deliver(item(embedding(1, 1)), staged_id)
    with pytest.raises(EncoderError, match="--max-staged-bytes") as caught:
        await shelf.deliver(item(embedding(1, 1)), "c")
    assert caught.value.code is ErrorCode.OVERLOADED
    shelf.release("a")
    await shelf.deliver(item(embedding(1, 1)), "c")
    await shelf.close()


async def test_nobody_waits_for_ever() -> None:
    budget = StagedBytes(2**20)
    shelf = Shelf(budget, keep_s=0.05)
    await shelf.deliver(item(), "a")
    while len(shelf):
        await asyncio.sleep(0.01)
    assert budget.used == 0


async def test_a_failed_item_is_nothing_to_keep() -> None:
    shelf = Shelf(StagedBytes(2**20), keep_s=1000)
    await shelf.deliver(failed_item(), "a")
    assert len(shelf) == 0


def test_ids_cannot_be_guessed() -> None:
    ids = {Shelf.new_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert {len(staged_id) for staged_id in ids} == {32}
