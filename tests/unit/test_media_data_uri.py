"""Data URIs: what is accepted, and that nothing but EncoderError ever comes out."""

import base64
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.data_uri import parse_data_uri

DATA = bytes(range(256))
B64 = base64.b64encode(DATA).decode()


@pytest.mark.parametrize(
    "header",
    [
        "data:image/png;base64",
        "data:;base64",
        "DATA:image/png;BASE64",
        "data:image/jpeg;charset=utf-8;base64",
        "data:image/jpeg;charset=utf-8;name=x.jpg;base64",
        "data:image/jpeg; name=x ;base64",
        "data:image/jpeg;base64;name=x",
    ],
)
def test_base64_with_any_header(header: str) -> None:
    assert parse_data_uri(f"{header},{B64}").data == DATA


def test_escapes() -> None:
    assert parse_data_uri(f"data:image/png,{quote(DATA)}").data == DATA
    assert parse_data_uri(f"data:;base64,{quote(B64, safe='')}").data == DATA
    assert parse_data_uri("data:image/png;x=y,abc%00").data == b"abc\0"
    assert parse_data_uri("data:image/png,abc").media_type == "image/png"


def test_pieces_are_joined() -> None:
    data = bytes(5 * 2**20 + 1)
    assert parse_data_uri("data:;base64," + base64.b64encode(data).decode()).data == data


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("", "empty"),
        ("data:,", "no data"),
        ("data:image/png;base64,", "no data"),
        ("data:image/png;base64", "no comma"),
        ("data:" + "x" * 5000 + ",", "no comma"),
        (B64, "prefix"),
        ("/9j/4AAQSkZJRg==", "prefix"),
        ("/etc/hostname", "path alone is not read"),
        ("s3://bucket/x.png", "send a data URI, or an http, https or file URL"),
        ("FTP://example.org/x.png", "of a kind that is not read"),
        ("data:;base64,not!!!base64", "outside the base64 alphabet"),
        ("data:;base64,AA AA", "white space"),
        ("data:;base64,AA\nAA", "white space"),
        ("data:;base64,-_-_", "URL-safe"),
        ("data:;base64,AAA", "padding"),
        ("data:;base64,A", "padding"),
        ("data:;base64,AA=", "padding"),
        ("data:;base64,AA=A", "padding before its end"),
        ("data:;base64,====", "padding"),
        ("data:;base64,AAAA====", "padding"),
        ("data:;base64,ÄÖÜA", "ASCII"),
        ("data:image/png,%zz", "hexadecimal"),
        ("data:image/png,abc%", "hexadecimal"),
    ],
)
def test_refused_with_the_reason(uri: str, says: str) -> None:
    with pytest.raises(EncoderError, match=says) as caught:
        parse_data_uri(uri)
    assert caught.value.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize("uri", [f"data:;base64,{B64}", f"data:,{quote(DATA)}"])
def test_limit_is_exact_and_named(uri: str) -> None:
    assert parse_data_uri(uri, max_bytes=256).data == DATA
    with pytest.raises(EncoderError, match=r"limit of 255 \(--max-image-bytes\)") as caught:
        parse_data_uri(uri, max_bytes=255)
    assert caught.value.code is ErrorCode.TOO_LARGE


@given(st.binary(min_size=1))
def test_round_trip(data: bytes) -> None:
    encoded = base64.b64encode(data).decode()
    assert parse_data_uri(f"data:image/png;base64,{encoded}", max_bytes=len(data)).data == data
    assert parse_data_uri(f"data:,{quote(data)}", max_bytes=len(data)).data == data


PARTS = st.sampled_from(
    ["data:", "DATA:", ";", ",", "base64", ";base64,", "=", "%", "%41", "AAAA", "http://", "\0", "é"]
)
ANYTHING = st.text(st.characters(codec=None)) | st.lists(PARTS | st.text(max_size=4), max_size=12).map("".join)


@given(ANYTHING)
def test_nothing_but_encoder_errors(uri: str) -> None:
    for text in (uri, "data:" + uri, "data:;base64," + uri):
        try:
            assert parse_data_uri(text, max_bytes=16).data
        except EncoderError as error:
            assert error.code in (ErrorCode.INVALID_REQUEST, ErrorCode.TOO_LARGE)
