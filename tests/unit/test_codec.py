"""The codec as its callers meet it; `tests/property/test_codec.py` tries everything else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from spmd_encoder.wire.codec import Codec, WireError
from spmd_encoder.wire.messages import Cancel, Encode, ToScheduler


def test_messages_are_tagged_maps_of_plain_values() -> None:
    frame = Codec[Any](ToScheduler).encode(Cancel(job_ids=(1, 2)))
    assert msgspec.msgpack.decode(frame) == {"type": "Cancel", "job_ids": [1, 2]}


def test_the_error_quotes_nothing() -> None:
    """A stranger's frame comes as far as this, and the error goes into the log."""
    secret = "x" * 70_000
    cancel = {"type": "Cancel", "job_ids": []}
    for value in ({"type": secret}, cancel | {secret: 1}, cancel | {"job_ids": secret}):
        with pytest.raises(WireError) as caught:
            Codec[Any](ToScheduler).decode(msgspec.msgpack.encode(value))
        assert isinstance(caught.value, ValueError)
        assert "xx" not in str(caught.value) and len(str(caught.value)) < 100


def test_deep_nesting_is_an_ordinary_error() -> None:
    with pytest.raises(WireError):
        Codec[Any](ToScheduler).decode(b"\x82\xa1x" + b"\x91" * 50_000 + b"\x90\xa4type\xa6Cancel")


def test_an_empty_encode_is_a_message() -> None:
    codec = Codec[Any](ToScheduler)
    assert codec.decode(codec.encode(Encode(jobs=()))) == Encode(jobs=())
