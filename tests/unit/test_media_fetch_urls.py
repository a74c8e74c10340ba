"""How http and https URLs are read."""

from __future__ import annotations

import pytest

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.urls import WebUrl, parse_web_url


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://a.example", WebUrl("http", "a.example", 80, "/")),
        ("HTTPS://A.Example:443/x/../y?q=1#frag", WebUrl("https", "a.example", 443, "/x/../y?q=1")),
        ("http://a.example.:8080/?", WebUrl("http", "a.example", 8080, "/")),
        ("http://a_b.example:/%20%zz?a=%26&b=ü", WebUrl("http", "a_b.example", 80, "/%20%zz?a=%26&b=%C3%BC")),
        ("http://bücher.example/ß", WebUrl("http", "xn--bcher-kva.example", 80, "/%C3%9F")),
        ("http://192.0.2.1:81/", WebUrl("http", "192.0.2.1", 81, "/")),
        ("https://[2001:DB8:0::1]:444/", WebUrl("https", "2001:db8::1", 444, "/")),
        ('http://a.example/<x>"{y}|^`', WebUrl("http", "a.example", 80, "/%3Cx%3E%22%7By%7D%7C%5E%60")),
        ("http://1.a/", WebUrl("http", "1.a", 80, "/")),
    ],
)
def test_read(text: str, url: WebUrl) -> None:
    assert parse_web_url(text) == url


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("http://", "no host"),
        ("http:///x", "no host"),
        ("http://:80/", "host is missing"),
        ("http://user@a.example/", "user name"),
        ("http://user:secret@a.example/", "user name"),
        ("http://a.example:0/", "port"),
        ("http://a.example:65536/", "port"),
        ("http://a.example:80a/", "malformed"),
        ("http://a.example:١/", "malformed"),
        ("http://a.example\\b/", "backslash"),
        ("http://a.example/a\\b", "backslash"),
        ("http://a.example/a b", "a space"),
        ("http://a.example/\x7f", "control character"),
        ("http://a.example/\u202e", "control character"),
        ("http://a.example/" + "x" * 9000, "more than 8192 characters"),
        ("http://" + "a." * 130 + "example/", "too long"),
        ("http://" + "a" * 64 + ".example/", "malformed"),
        ("http://a..example/", "malformed"),
        ("http://a!b.example/", "malformed"),
        ("http://a%2eb/", "malformed"),
        ("http://\u2100.example/", "malformed"),
        ("http://a\u200bb.example/", "control character"),
        ("http://☃.example/", "international"),
        ("http://127.1/", "four decimal numbers"),
        ("http://a.0x1/", "four decimal numbers"),
        ("http://[::1/", "malformed"),
        ("http://[1:2]/", "malformed"),
        ("http://[::1%25lo]/", "malformed"),
    ],
)
def test_refused(text: str, says: str) -> None:
    with pytest.raises(EncoderError, match=says) as caught:
        parse_web_url(text)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert "secret" not in caught.value.message


def test_other_schemes() -> None:
    for text in ("ftp://a.example/", "a.example/x", "//a.example/x", "", "javascript:alert(1)"):
        with pytest.raises(EncoderError) as caught:
            parse_web_url(text)
        assert caught.value.code is ErrorCode.FETCH_FORBIDDEN


@pytest.mark.parametrize(
    ("location", "url"),
    [
        ("/x?y", WebUrl("https", "a.example", 8443, "/x?y")),
        ("z", WebUrl("https", "a.example", 8443, "/dir/z")),
        ("../z", WebUrl("https", "a.example", 8443, "/z")),
        ("?q", WebUrl("https", "a.example", 8443, "/dir/file?q")),
        ("//b.example/z", WebUrl("https", "b.example", 443, "/z")),
        ("http://b.example", WebUrl("http", "b.example", 80, "/")),
    ],
)
def test_redirects(location: str, url: WebUrl) -> None:
    assert parse_web_url("https://a.example:8443/dir/file?old").join(location) == url


@pytest.mark.parametrize("location", ["https:x", "https:", "http:/x", "//u@b.example/", "/a b", "/a\tb", "//[::1/"])
def test_redirects_that_lead_nowhere(location: str) -> None:
    with pytest.raises(EncoderError):
        parse_web_url("https://a.example/dir/file").join(location)
