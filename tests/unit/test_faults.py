"""The text of fault injection, and what each fault does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from spmd_encoder.errors import StartupError
from spmd_encoder.worker.faults import ACTIONS, Faults


def test_every_action_is_read() -> None:
    text = ",".join(f"{action}@sha256:{number}" for number, action in enumerate(ACTIONS))
    assert Faults.parse(text).by_digest == {f"sha256:{n}": action for n, action in enumerate(ACTIONS)}


def test_nothing_is_no_fault() -> None:
    for text in ("", ","):
        faults = Faults.parse(text)
        assert faults.by_digest == {}
        faults.before_forward(["sha256:1"])
        faults.before_preprocess("sha256:1")


@pytest.mark.parametrize(
    "text", ["kill", "kill@", "@sha256:1", "explode@sha256:1", "kill@md5:1", "kill@sha256:1,boo", "kill @sha256:1"]
)
def test_bad_text_is_a_usage_error(text: str) -> None:
    with pytest.raises(StartupError) as caught:
        Faults.parse(text)
    assert caught.value.exit_code == 2
    assert "SPMD_ENCODER_FAULTS" in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("more", [["--check"], []])
def test_it_is_said_before_anything_starts(more: list[str]) -> None:
    command = [sys.executable, "-m", "spmd_encoder", "--port", "0", *more]
    environ = {**os.environ, "SPMD_ENCODER_FAULTS": "nonsense"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("spmd_encoder rank 0: SPMD_ENCODER_FAULTS: 'nonsense' is not ")


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: calls.append((pid, number)))
    return calls


def test_kill_strikes_before_the_forward_only(killed: list[tuple[int, int]]) -> None:
    faults = Faults.parse("kill@sha256:bad")
    faults.before_preprocess("sha256:bad")
    faults.before_forward(["sha256:good", "sha256:other"])
    assert killed == []
    faults.before_forward(["sha256:good", "sha256:bad"])
    assert killed == [(os.getpid(), signal.SIGKILL)]


def test_decode_kill_strikes_before_the_preprocessing_only(killed: list[tuple[int, int]]) -> None:
    faults = Faults.parse("decode-kill@sha256:bad")
    faults.before_forward(["sha256:bad"])
    faults.before_preprocess("sha256:good")
    assert killed == []
    faults.before_preprocess("sha256:bad")
    assert killed == [(os.getpid(), signal.SIGKILL)]


def test_raise() -> None:
    faults = Faults.parse("raise@sha256:bad")
    faults.before_preprocess("sha256:bad")
    faults.before_forward(["sha256:good"])
    with pytest.raises(RuntimeError, match="injected"):
        faults.before_forward(["sha256:good", "sha256:bad"])


def test_slow_and_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    Faults.parse("slow@sha256:bad").before_forward(["sha256:bad"])
    assert slept == [1.0]
    monkeypatch.undo()

    hang = Faults.parse("hang@sha256:bad")
    thread = threading.Thread(target=hang.before_forward, args=(["sha256:bad"],), daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
