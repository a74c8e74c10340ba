"""Log lines: one per event, fit for a terminal, and not at a stranger's will."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Iterator

import pytest
import zmq
from zmq.auth.base import Authenticator

from spmd_encoder.observability.logging import Origin, SparseLog, set_up_logging

ORIGIN = Origin(3, 1, 1, "worker", 2)


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    yield root
    logging.captureWarnings(False)
    root.handlers[:], level = before
    root.setLevel(level)


def said(root: logging.Logger, log_format: str, message: str, *args: object) -> str:
    set_up_logging(ORIGIN, "info", log_format)
    out = io.StringIO()
    (handler,) = root.handlers
    assert isinstance(handler, logging.StreamHandler)
    handler.setStream(out)
    logging.getLogger("x").warning(message, *args)
    return out.getvalue()


def test_a_line_says_where_it_comes_from(root: logging.Logger) -> None:
    assert "WARNING rank=3 dp=1 tp=1 worker epoch=2 hello" in said(root, "text", "hello")
    line = json.loads(said(root, "json", "hello"))
    assert (line["rank"], line["dp"], line["tp"], line["role"], line["epoch"]) == (3, 1, 1, "worker", 2)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_text_breaks_the_line_or_steers_the_terminal(root: logging.Logger, log_format: str) -> None:
    evil = "a\r\nb\x1b[2Jc\x07d\x9be\u2028f"
    line = said(root, log_format, "%s", evil)
    assert line.endswith("\n")
    assert line[:-1].isprintable(), line


def test_warnings_are_log_lines(root: logging.Logger) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        said(root, "text", "hello")
        (handler,) = root.handlers
        assert isinstance(handler, logging.StreamHandler)
        warnings.warn("look here", stacklevel=1)
    line = handler.stream.getvalue().splitlines()[1]
    assert "WARNING rank=3" in line and "UserWarning: look here" in line


def test_what_a_stranger_can_cause_is_said_rarely(caplog: pytest.LogCaptureFixture) -> None:
    sparse = SparseLog(logging.getLogger("sparse"), every_s=1e9)
    for number in range(1000):
        sparse.warning("refused %d", number)
    assert [record.getMessage() for record in caplog.records] == ["refused 0"]
    quick = SparseLog(logging.getLogger("quick"), every_s=0.0)
    quick.warning("one")
    quick.warning("two")
    assert [record.getMessage() for record in caplog.records][1:] == ["one", "two"]


def test_the_worlds_secret_is_in_no_log(root: logging.Logger) -> None:
    """pyzmq's judge of secrets says them at the level debug."""
    set_up_logging(ORIGIN, "debug", "text")
    (handler,) = root.handlers
    assert isinstance(handler, logging.StreamHandler)
    out = io.StringIO()
    handler.setStream(out)
    judge = Authenticator(zmq.Context.instance(), log=logging.getLogger("zmq.auth"))
    judge.configure_plain(passwords={"member": "secret"})
    assert judge._authenticate_plain("", "member", "secret") == (True, b"")
    assert out.getvalue() == ""
