"""The load generator beside a server whose processes it measures: on another machine, or ending in the middle."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.load_generator.__main__ import main
from tests.harness.fake_server import fake_server
from tests.harness.fake_service import FakeService

# Says that it is a server's keeper, and is killed by its thirtieth request.
MORTAL = """
import os, signal, sys
from tests.harness.fake_server import fake_server
from tests.harness.fake_service import FakeService

class Mortal(FakeService):
    def info(self):
        return {"processes": [{"pid": os.getpid(), "role": "keeper"}]}

    async def encode(self, request):
        if len(self.seen) == 30:
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().encode(request)

with fake_server(Mortal()) as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


class Elsewhere(FakeService):
    def __init__(self, processes: list[dict[str, Any]]) -> None:
        super().__init__()
        self.processes = processes

    def info(self) -> dict[str, Any]:
        return {"processes": self.processes}


def called(monkeypatch: pytest.MonkeyPatch, url: str, *more: str) -> int:
    monkeypatch.setattr("sys.argv", ["load_generator", url, "--processes", "--no-progress", "--sizes", "32x24", *more])
    return main()


@pytest.mark.parametrize("loop", [["--clients", "4"], ["--rate", "100"]], ids=["closed", "open"])
def test_a_server_that_dies_in_the_middle_is_a_report_of_errors(
    loop: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", MORTAL]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        code = called(monkeypatch, url, "--requests", "80", "--chaos", "0.2", "--seed", "1", *loop)
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert code == 1 and report["server_ended"] and "has ended meanwhile" in captured.err
    assert "its processes are gone" in captured.err.splitlines()[-1]
    assert report["requests"] == 80 > report["answered"] >= report["ok"] > 0
    assert "ClientConnectorError" in report["errors"]
    assert report["ok"] + sum(report["errors"].values()) + sum(sum(n.values()) for n in report["chaos"].values()) == 80
    assert "server_pss_mib_by_role" not in report


@pytest.mark.parametrize(
    ("processes", "says"),
    [([], "names no processes"), ([{"pid": 2**22 + 1, "role": "keeper"}], "not on this machine")],
)
def test_a_server_on_another_machine_is_a_sentence(
    processes: list[dict[str, Any]], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_server(Elsewhere(processes)) as server:
        assert called(monkeypatch, server.url) == 2
    assert says in capsys.readouterr().err
