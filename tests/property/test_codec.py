"""Every message survives the wire; nothing else gets through it, and nothing but WireError comes of it."""

from __future__ import annotations

import contextlib
import dataclasses
import types
import typing
from enum import Enum
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spmd_encoder.wire import messages, orders, preparing, writing
from spmd_encoder.wire.codec import Codec, WireError
from spmd_encoder.wire.messages import Cancel, Message, StoreSpec
from spmd_encoder.wire.orders import FollowerHello
from tests.harness.examples import examples

DIRECTIONS: dict[str, Any] = {**vars(messages), **vars(orders), **vars(preparing), **vars(writing)}
UNIONS: dict[str, tuple[Any, ...]] = {
    name: typing.get_args(union) or (union,)
    for name in (
        "ToScheduler",
        "FromScheduler",
        "ToKeeper",
        "FromKeeper",
        "Order",
        "ChildSpec",
        "FromWorker",
        "ToWorker",
        "FromFollower",
        "Prepare",
        "FromPreparer",
        "ToWriter",
        "FromWriter",
    )
    for union in [DIRECTIONS[name]]
}
EVERY = [(name, kind) for name, kinds in UNIONS.items() for kind in kinds]
integers = st.integers(-(2**63), 2**64 - 1)
floats = st.floats(allow_nan=False)


def strategy(hint: Any) -> st.SearchStrategy[Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, types.UnionType) or origin is typing.Union:
        return st.one_of([strategy(arg) for arg in args])
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return st.lists(strategy(args[0]), max_size=3).map(tuple)
        return st.tuples(*[strategy(arg) for arg in args])
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is list:
        return st.lists(strategy(args[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(strategy(args[0]), strategy(args[1]), max_size=3)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(list(hint))
    if isinstance(hint, type) and (issubclass(hint, msgspec.Struct) or dataclasses.is_dataclass(hint)):
        hints = typing.get_type_hints(hint)
        names = [f.name for f in dataclasses.fields(hint)] if dataclasses.is_dataclass(hint) else hint.__struct_fields__
        return st.builds(hint, **{name: strategy(hints[name]) for name in names})
    plain = {int: integers, float: floats, str: st.text(max_size=20), bool: st.booleans(), type(None): st.none()}
    return plain[hint]


def test_the_table_of_unions_is_whole() -> None:
    listed = {kind for _, kind in EVERY}
    defined = {
        value
        for value in DIRECTIONS.values()
        if isinstance(value, type) and issubclass(value, Message) and value is not Message
    }
    assert listed == defined


@pytest.mark.parametrize(("union", "kind"), EVERY, ids=[f"{union}-{kind.__name__}" for union, kind in EVERY])
@examples(15)
@given(data=st.data())
def test_every_message_survives_and_only_in_its_direction(union: str, kind: Any, data: st.DataObject) -> None:
    message = data.draw(strategy(kind))
    frame = Codec[Any](DIRECTIONS[union]).encode(message)
    assert Codec[Any](DIRECTIONS[union]).decode(frame) == message
    assert Codec[Any](DIRECTIONS[union]).decode(memoryview(bytearray(frame))) == message
    for other, kinds in UNIONS.items():
        if kind not in kinds:
            with pytest.raises(WireError):
                Codec[Any](DIRECTIONS[other]).decode(frame)


DEEP = b"\x82\xa1x" + b"\x91" * 20_000 + b"\x90" + b"\xa4type\xa6Cancel"


@examples(300)
@given(union=st.sampled_from(sorted(UNIONS)), frame=st.binary(max_size=200))
@example(union="ToScheduler", frame=DEEP)
@example(union="ToScheduler", frame=b"\x81\xa4type\xa2\xff\xfe")
@example(union="ToScheduler", frame=b"\xdd\xff\xff\xff\xff")
def test_noise_raises_only_wire_error(union: str, frame: bytes) -> None:
    with pytest.raises(WireError):
        Codec[Any](DIRECTIONS[union]).decode(frame)


@examples(200)
@given(data=st.data())
def test_a_damaged_message_is_a_message_or_a_wire_error(data: st.DataObject) -> None:
    union, kind = data.draw(st.sampled_from(EVERY))
    codec = Codec[Any](DIRECTIONS[union])
    frame = bytearray(codec.encode(data.draw(strategy(kind))))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = frame[: data.draw(st.integers(0, len(frame)))]
    for damaged in (frame, cut):
        with contextlib.suppress(WireError):
            assert isinstance(codec.decode(damaged), UNIONS[union])


@pytest.mark.parametrize(
    "raw",
    [
        {"type": "Cancel", "job_ids": [1], "more": 1},
        {"type": "Cancel"},
        {"type": "Cancel", "job_ids": ["1"]},
        {"type": "Cancel", "job_ids": [1.5]},
        {"type": "Cancel", "job_ids": None},
        {"type": "Nothing", "job_ids": [1]},
        {"job_ids": [1]},
        [],
        "Cancel",
        None,
    ],
)
def test_what_almost_fits_does_not(raw: Any) -> None:
    with pytest.raises(WireError):
        Codec[Any](messages.ToScheduler).decode(msgspec.msgpack.encode(raw))


def test_trailing_bytes_are_no_message() -> None:
    codec = Codec[Any](messages.ToScheduler)
    with pytest.raises(WireError):
        codec.decode(codec.encode(Cancel(job_ids=(1,))) + b"\x00")


def test_one_kind_alone_is_a_direction_too() -> None:
    codec = Codec[FollowerHello](FollowerHello)
    with pytest.raises(WireError):
        codec.decode(codec.encode(StoreSpec(host="h", port=1)))
