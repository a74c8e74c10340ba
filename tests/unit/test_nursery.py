"""The nursery's socket: callers that say nothing, or what it does not know, hold up nobody. No torch, no world."""

from __future__ import annotations

import array
import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from spmd_encoder.config import Config
from spmd_encoder.keeper.nursery import MAX_CALLERS
from spmd_encoder.keeper.nursery_name import PING, PONG

pytestmark = pytest.mark.timeout(60)

SERVE = """
import socket, sys
from spmd_encoder.keeper.nursery import Nursery
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen(128)
print("ready", flush=True)
Nursery(listener).serve()
"""


class Served:
    def __init__(self, path: Path, process: subprocess.Popen[bytes]) -> None:
        self.path = path
        self.process = process

    def call(self, said: bytes = b"", fds: int = 0) -> socket.socket:
        caller = socket.socket(socket.AF_UNIX)
        caller.settimeout(30)
        caller.connect(str(self.path))
        if said:
            null = os.open(os.devnull, os.O_RDONLY)
            passed = array.array("i", [null] * fds)
            caller.sendmsg([said], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)] if fds else [])
            os.close(null)
        return caller

    def good_path(self) -> None:
        with self.call(PING) as caller:
            assert caller.recv(16) == PONG

    def open_files(self) -> int:
        return psutil.Process(self.process.pid).num_fds()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    path = tmp_path / "nursery"
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == b"ready\n"
    yield Served(path, process)
    process.stdin.close()
    assert process.wait(30) == 0
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()


def test_silent_callers_hold_up_nobody_and_the_oldest_go(served: Served) -> None:
    served.good_path()
    idle = served.open_files()
    with contextlib.ExitStack() as stack:
        callers = [stack.enter_context(served.call()) for _ in range(MAX_CALLERS + 20)]
        served.good_path()
        assert [caller.recv(1) for caller in callers[:20]] == [b""] * 20
        assert served.open_files() <= idle + MAX_CALLERS
    wait_for_open_files(served, idle)
    served.good_path()


@pytest.mark.parametrize("said", [b"x", b"for", b"forkk", b"fork", PING[:-1], b"\0" * 1000, b"\xff" * 64])
@pytest.mark.parametrize("fds", [0, 1])
def test_what_it_does_not_know_is_hung_up_on(served: Served, said: bytes, fds: int) -> None:
    served.good_path()
    idle = served.open_files()
    with served.call(said, fds) as caller, contextlib.suppress(ConnectionResetError):
        assert caller.recv(16) == b""
    wait_for_open_files(served, idle)
    served.good_path()


def test_a_child_whose_caller_says_half_a_specification_ends_with_its_caller(served: Served) -> None:
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    with ours, theirs, socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(30)
        caller.connect(str(served.path))
        socket.send_fds(caller, [b"fork"], [write, theirs.fileno()])
        child = psutil.Process(int(caller.recv(32)))
        ours.send(b"\0\0\1\0half")
        served.good_path()
        assert child.is_running()
        caller.shutdown(socket.SHUT_WR)
        assert caller.recv(32) == b"-9\n"
    os.close(read)
    os.close(write)
    served.good_path()


def wait_for_open_files(served: Served, wanted: int) -> None:
    end = time.monotonic() + 10
    while served.open_files() > wanted and time.monotonic() < end:
        time.sleep(0.01)
    assert served.open_files() <= wanted


def test_a_library_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    """As torchvision beside a PyTorch that it was not built for."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "transformers.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    config = dataclasses.replace(Config(), model=dataclasses.replace(Config().model, model_path="demo:qwen2.5-vl-tiny"))
    said, say = os.pipe()
    command = [sys.executable, "-m", "spmd_encoder.keeper.nursery", str(tmp_path), str(os.getpid()), "0", str(say)]
    done = subprocess.run(
        [*command, config.to_json()],
        env={**os.environ, "PYTHONPATH": str(broken)},
        pass_fds=[say],
        stdin=subprocess.PIPE,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(say)
    with os.fdopen(said) as pipe:
        answer = json.loads(pipe.readline())
    assert done.returncode == answer["exit_code"] == 4
    assert "RuntimeError: operator torchvision::nms does not exist" in answer["error"]
    assert "Traceback" in done.stderr
