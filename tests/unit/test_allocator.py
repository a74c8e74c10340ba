"""What is freed stays with the process while it works, for every thread, and goes back when it is idle."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library's memory")

# Three pieces of 20 MiB, ten times, in a thread: what a forward does. Prints (page faults, MiB more at the end).
SCRIPT = """
import asyncio, resource, sys
import numpy as np
from spmd_encoder.worker.allocator import keep_freed_memory
from spmd_encoder.worker.compute import ComputeThread

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

def work():
    for _ in range(10):
        pieces = [np.ones(20 * 2**18, np.float32) for _ in range(3)]

async def main():
    compute = ComputeThread()
    await compute.submit(lambda: None)
    before = resident()
    await compute.submit(work)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    await compute.submit(work)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    kept = resident() - before
    for _ in range(300):
        await asyncio.sleep(0.1)
        if resident() - before < 10:
            break
    print(faults, round(kept), round(resident() - before))
    compute.close()

if sys.argv[1] == "keep":
    keep_freed_memory()
asyncio.run(main())
"""


def measured(how: str) -> list[int]:
    done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, timeout=120, check=True)
    return [int(number) for number in done.stdout.split()]


def test_what_is_freed_is_used_again_and_given_back_when_idle() -> None:
    faults, kept_mib, idle_mib = measured("keep")
    assert faults < 1000
    assert kept_mib >= 50
    assert idle_mib < 10


def test_without_it_the_system_hands_the_same_pages_out_again_and_again() -> None:
    """Should this fail, a new C library keeps memory by itself, and `worker.allocator` may go."""
    faults, _, _ = measured("leave")
    assert faults > 4000
