"""A process notices that it was stopped, and not that it was merely a little late."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

SCRIPT = """
import time
from spmd_encoder.api.stillness import Stillness
stillness = Stillness(0.05)
print("ready", flush=True)
end = time.monotonic() + 30
while time.monotonic() < end:
    time.sleep(0.05)
    if gap := stillness.gap_s():
        print(gap, flush=True)
"""


def test_a_stop_is_noticed_with_its_length() -> None:
    began = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(2.0)
        os.kill(process.pid, signal.SIGCONT)
        # On a busy machine there may be others, and shorter ones.
        gap_s = next(gap for gap in map(float, process.stdout) if gap >= 2.0)
        assert gap_s <= time.monotonic() - began
        process.kill()
