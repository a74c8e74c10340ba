"""The comparison with SGLang's server: what it works out of samples, and its client against a server that is told what
to answer. Nothing is measured here."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import zmq

from benchmarks.head_to_head_load import closed_loop, rows_of
from benchmarks.head_to_head_report import Compared, Pair, Sample, Setting, report
from benchmarks.pictures import make_pictures

PICTURES = make_pictures([(28, 28)], 2)


@contextmanager
def encoder(frames: Callable[[str], list[bytes]], status: int = 200) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Its port and what it was asked. It sends `frames` of the request's id, as an encoder does, before it answers."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append(body)
            with zmq.Context() as context, context.socket(zmq.PUSH) as push:
                push.connect(f"tcp://{body['prefill_host']}:{body['embedding_port']}")
                push.send_multipart(frames(body["req_id"]))
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield server.server_port, asked
        finally:
            server.shutdown()
            serving.join()


def rows(name: str) -> list[bytes]:
    return [f"a head with {name} in it".encode(), b"\0\0\x80\x3f"]


def test_a_loop_asks_until_its_time_is_over_and_never_twice_for_the_same() -> None:
    with encoder(rows) as (port, asked):
        load = closed_loop(port, PICTURES, itertools.count(), 3, 0.2)
    assert load.requests == len(asked) >= 3
    assert load.elapsed_s >= max(load.latency_s)
    for field in ("req_id", "mm_items"):
        assert len({str(body[field]) for body in asked}) == len(asked)


def test_rows_are_read_as_values() -> None:
    with encoder(rows) as (port, _):
        assert [values.tolist() for values in rows_of(port, PICTURES)] == [[1.0], [1.0]]


@pytest.mark.parametrize(
    ("frames", "status", "says"),
    [
        (rows, 503, "503"),
        (lambda name: rows(name)[:1], 200, "1 frames"),
        (lambda name: rows("another"), 200, "not rows-0's rows"),
    ],
)
def test_what_is_no_answer_is_not_counted(frames: Callable[[str], list[bytes]], status: int, says: str) -> None:
    with encoder(frames, status) as (port, _), pytest.raises(RuntimeError, match=re.escape(says)):
        rows_of(port, PICTURES[:1])


def pair(ours: float, sglang: float) -> Pair:
    return Pair(Sample(ours, 1 / ours, 2.0), Sample(sglang, 1 / sglang, 4.0))


def test_the_median_is_of_the_ratios() -> None:
    found = Compared.of([pair(10, 2), pair(4, 4), pair(9, 3)], lambda sample: sample.per_s)
    assert (found.ours, found.sglang, found.ratio) == (9, 3, 3)
    assert found.ratios == [5, 1, 3]


def setting(**changes: Any) -> Setting:
    both: dict[str, Any] = {"pss": {"ours": 1, "sglang": 2}, "end_s": {"ours": 1.0, "sglang": 1.0}}
    left: dict[str, Any] = {"left": {"ours": [], "sglang": ["python"]}}
    return Setting(**{"load": "mid", "dp": 2, "target": 3.0, "pairs": {8: [pair(9, 3)]}, **both, **left, **changes})


def test_all_targets_of_one_that_is_ahead_are_met() -> None:
    checks = report([setting()]).checks
    assert [check.met for check in checks] == [True, None, True, True, True, True, True]


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({"target": 3.1}, "requests/s"),
        ({"rows_differ": 0.1}, "rows differ by"),
        ({"pss": {"ours": 3, "sglang": 2}}, "PSS after load"),
        ({"left": {"ours": ["python"], "sglang": []}}, "outlive SIGTERM"),
        ({"pairs": {8: [Pair(Sample(9, 0.1, 5.0), Sample(3, 0.2, 4.0))]}}, "CPU per request"),
        ({"pairs": {8: [Pair(Sample(9, 0.3, 3.0), Sample(3, 0.2, 4.0))]}}, "p50"),
    ],
)
def test_what_is_not_ahead_is_said(changes: dict[str, Any], missed: str) -> None:
    (check,) = [check for check in report([setting(**changes)]).checks if check.met is False]
    assert missed in check.name
