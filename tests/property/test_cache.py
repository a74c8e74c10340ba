"""The cache of results against the plain rule: the least recently used go until the rest fits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spmd_encoder.api.types import OutputKind
from spmd_encoder.scheduler.cache import Key, ResultCache
from spmd_encoder.scheduler.output import EngineOutput

steps = st.lists(st.tuples(st.booleans(), st.integers(0, 6), st.integers(0, 12)), max_size=60)


def output(size: int) -> EngineOutput:
    data = memoryview(bytes([size]) * size)
    return EngineOutput(kind=OutputKind.TOKENS, shape=(size,), dtype="uint8", num_tokens=1, grid=None, data=data)


@given(steps, st.integers(0, 30))
def test_least_recently_used_first(steps: list[tuple[bool, int, int]], limit: int) -> None:
    cache = ResultCache(limit)
    model: dict[Key, int] = {}
    told: list[Key] = []
    for is_put, name, size in steps:
        key = (f"sha256:{name}", "tokens")
        if is_put:
            cache.put(key, output(size))
            if size <= limit and key not in model and limit:
                model[key] = size
                while sum(model.values()) > limit:
                    oldest = next(iter(model))
                    del model[oldest]
                    told.append(oldest)
        else:
            found = cache.get(key)
            assert (found is not None) == (key in model)
            if found is not None:
                assert found.data.nbytes == model[key]
                model[key] = model.pop(key)
        assert cache.bytes == sum(model.values()) <= limit
        assert len(cache) == len(model)
    assert cache.take_evicted() == tuple(key for key in dict.fromkeys(told) if key not in model)
    assert cache.take_evicted() == ()
    assert cache.evictions == len(told)


def test_it_keeps_a_copy_and_not_its_batch() -> None:
    batch = bytearray(b"abcdef")
    cache = ResultCache(100)
    one = EngineOutput(
        kind=OutputKind.TOKENS, shape=(2,), dtype="uint8", num_tokens=1, grid=None, data=memoryview(batch)[2:4]
    )
    cache.put(("x", ""), one)
    batch[:] = b"......"
    found = cache.get(("x", ""))
    assert found is not None
    assert bytes(found.data) == b"cd"
