"""What strangers send: bytes at random, and valid frames that were changed a little (hypothesis strategies)."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

MARK = b"FUZZ-7f3a91"
"""In what strangers send, so that a test can look for it where it must not be."""


@st.composite
def mutated(draw: st.DrawFn, valid: Sequence[bytes]) -> bytes:
    """One of `valid` after some edits: bytes changed, a stretch cut out, doubled, or put in."""
    data = bytearray(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 64)))
        match draw(st.sampled_from(("change", "cut", "double", "insert", "truncate"))):
            case "change":
                data[start:end] = draw(st.binary(min_size=end - start, max_size=end - start))
            case "cut":
                del data[start:end]
            case "double":
                data[end:end] = data[start:end] * draw(st.integers(1, 50))
            case "insert":
                data[start:start] = draw(st.sampled_from((b"\xff" * 8, bytes(8), MARK, b"\x7f\xff\xff\xff")))
            case _:
                del data[start:]
    return bytes(data)


def noise(valid: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """At random, `valid` as it is or changed, or long."""
    long = st.integers(1, 8).map(lambda count: MARK * (1000 * count))
    return st.one_of(st.binary(max_size=2000), mutated(valid), st.sampled_from(valid), long)
