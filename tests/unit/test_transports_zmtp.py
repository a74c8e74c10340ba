"""ZMTP as a PUSH socket speaks it, without sockets: what is heard in any pieces, and what is said."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_encoder.transports.zmtp import HELLO, NotAPullerError, PullPeer, command, message
from tests.harness import zmtp

GREETING = zmtp.greeting(b"NULL", minor=1)
READY = zmtp.ready(b"READY", b"PULL")


def heard(data: bytes, cuts: list[int] | None = None) -> PullPeer:
    peer = PullPeer()
    start = 0
    for cut in [*sorted(cut for cut in cuts or [] if cut < len(data)), len(data)]:
        peer.feed(data[start:cut])
        start = cut
    return peer


def parsed(data: bytes) -> list[bytes]:
    """The frames of one message, read as RFC 37 has them."""
    frames: list[bytes] = []
    more = True
    while more:
        flags = data[0]
        assert flags in (0, 1, 2, 3)
        size = data[1] if not flags & 2 else struct.unpack(">Q", data[1:9])[0]
        start = 2 if not flags & 2 else 9
        frames.append(data[start : start + size])
        assert len(frames[-1]) == size
        data, more = data[start + size :], bool(flags & 1)
    assert not data
    return frames


@given(st.lists(st.binary(max_size=600), min_size=1, max_size=5))
def test_a_message_has_its_frames(frames: list[bytes]) -> None:
    assert parsed(b"".join(message(frames))) == frames


def test_frames_are_not_copied() -> None:
    rows = bytearray(1000)
    head, piece = message([memoryview(rows)])
    rows[0] = 7
    assert piece[0] == 7
    assert bytes(head) == b"\x02" + (1000).to_bytes(8, "big")


def test_rows_of_any_format_are_counted_in_bytes() -> None:
    assert parsed(b"".join(message([memoryview(bytes(16)).cast("f")]))) == [bytes(16)]


@given(st.lists(st.integers(0, 200), max_size=8))
def test_a_handshake_in_any_pieces(cuts: list[int]) -> None:
    assert heard(GREETING + READY, cuts).is_ready


@pytest.mark.parametrize("cut", range(64 + len(READY)))
def test_half_a_handshake_is_none(cut: int) -> None:
    assert not heard((GREETING + READY)[:cut]).is_ready


def test_names_of_properties_are_equal_in_any_case() -> None:
    assert heard(GREETING + READY.replace(b"Socket-Type", b"sOCKET-tYPE")).is_ready


def test_we_say_what_a_push_socket_says() -> None:
    assert HELLO[:64] == GREETING
    assert b"\x0bSocket-Type\x00\x00\x00\x04PUSH" in HELLO[64:]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak ZMQ"),
        (b"\xff" + bytes(8) + b"\x7e", "does not speak ZMQ"),
        (b"\xff" + bytes(8) + b"\x7f\x01", "older than 4.0"),
        (zmtp.greeting(b"PLAIN"), "security mechanism"),
        (GREETING + zmtp.ready(b"READY", b"PUB"), "no PULL socket"),
        (GREETING + zmtp.frame(b"\x05READY", zmtp.COMMAND), "no PULL socket"),
        (GREETING + zmtp.frame(b"\x05READY\x20abc", zmtp.COMMAND), "does not speak ZMQ"),
        (GREETING + zmtp.frame(b"\x05READY\x01a\xff\xff\xff\xff", zmtp.COMMAND), "does not speak ZMQ"),
        (GREETING + zmtp.frame(b"\x05ERROR\x03bad", zmtp.COMMAND), "refuses"),
        (GREETING + zmtp.frame(b"\x05HELLO", zmtp.COMMAND), "does not speak ZMQ"),
        (GREETING + zmtp.frame(b"", zmtp.COMMAND), "does not speak ZMQ"),
        (GREETING + zmtp.frame(b"hello"), "sends messages"),
        (GREETING + zmtp.head(2**40, zmtp.COMMAND), "more than 4096"),
        (GREETING + READY + zmtp.frame(b"hello"), "sends messages"),
        (GREETING + READY + zmtp.frame(b"\x09SUBSCRIBEx", zmtp.COMMAND), "a command that"),
        (GREETING + READY + zmtp.frame(b"\x04PING\0\0" + bytes(17), zmtp.COMMAND), "a command that"),
    ],
)
def test_who_is_no_receiver_is_told_why(said: bytes, why: str) -> None:
    with pytest.raises(NotAPullerError, match=why):
        heard(said)


def test_a_ping_is_answered_once_with_its_context() -> None:
    peer = heard(GREETING + READY + zmtp.frame(b"\x04PING\x00\x10ctx", zmtp.COMMAND))
    assert peer.take_pong() == command(b"PONG", b"ctx") == zmtp.frame(b"\x04PONGctx", zmtp.COMMAND)
    assert peer.take_pong() is None


def test_pings_that_nobody_answers_yet_are_one() -> None:
    peer = heard(GREETING + READY + zmtp.frame(b"\x04PING\0\0a", zmtp.COMMAND) * 1000)
    assert peer.take_pong() == command(b"PONG", b"a")
    assert peer.take_pong() is None


@given(st.binary(max_size=300), st.booleans())
def test_whatever_comes_is_a_fault_or_waits(noise: bytes, greeted: bool) -> None:
    with contextlib.suppress(NotAPullerError):
        heard((GREETING + READY if greeted else b"") + noise)
