"""Arguments that make no sense are refused before anything is sent, and a process that has had enough ends."""

from __future__ import annotations

import math
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spmd_encoder.client import AsyncClient, Client
from spmd_encoder.client.reply import read_embedding_file

pytestmark = pytest.mark.timeout(60)
NOBODY = "http://127.0.0.1:9"


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"timeout_s": 0}, "timeout_s must be"),
        ({"timeout_s": math.inf}, "timeout_s must be"),
        ({"timeout_s": math.nan}, "timeout_s must be"),
        ({"timeout_s": 1e12}, "timeout_s must be"),
        ({"timeout_s": "5"}, "timeout_s must be"),
        ({"retries": -1}, "retries must be"),
        ({"retries": 1.5}, "retries must be"),
        ({"concurrency": 0}, "concurrency must be"),
        ({"concurrency": 2.5}, "concurrency must be"),
        ({"headers": {"x-key": "ü€"}}, "headers must be"),
        ({"headers": {"x-key": 5}}, "headers must be"),
        ({"url": "http://127.0.0.1:96446"}, "port from 1 to 65535"),
        ({"url": "http://127.0.0.1:0"}, "port from 1 to 65535"),
        ({"url": "127.0.0.1:30000"}, "must look like"),
    ],
)
def test_nonsense_is_refused_at_once(kind: type[Client | AsyncClient], arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        kind(**arguments)
    assert "ü" not in str(caught.value), "it may be a key"


def test_kinds_of_arrays_are_checked_before_anything_is_sent() -> None:
    kind: Any = "np"
    with Client(NOBODY) as client:
        for call in (client.encode, client.encode_iter):
            with pytest.raises(ValueError, match="as_ must be one of numpy, torch"):
                call([b"x"], as_=kind)
        with pytest.raises(ValueError, match="as_ must be"):
            client.fetch("staged", as_=kind)
    with pytest.raises(ValueError, match="as_ must be"):
        AsyncClient(NOBODY).encode_iter([b"x"], as_=kind)
    with pytest.raises(ValueError, match="as_ must be"):
        read_embedding_file("/nowhere", kind)


WAITS = """
import sys
from spmd_encoder.client import Client
client = Client(sys.argv[1], timeout_s=3600.0)
print("asking", flush=True)
client.encode([b"x"])
"""


def test_an_interrupted_process_does_not_wait_for_the_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        process = subprocess.Popen(
            [sys.executable, "-c", WAITS, url],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            try:
                connection, _ = silent.accept()
                with connection:
                    assert connection.recv(1)
                    process.send_signal(signal.SIGINT)
                    _, said = process.communicate(timeout=40)
            finally:
                process.kill()
    assert "KeyboardInterrupt" in said
    assert process.returncode in (-signal.SIGINT, 130)
