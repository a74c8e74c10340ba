"""A world of the server that a scenario starts, asks and ends."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.processes import Server, cpu_spent_s
from spmd_encoder.client import Client

_START_S = 300.0
_END_S = 60.0
_HEARTBEAT_S = 0.5
_PREFIX = "spmd_encoder_"


@dataclass(frozen=True)
class World:
    """One that is ready. CPU and memory are those of its own processes, whatever else the machine does."""

    url: str
    server: Server
    ranks: int

    def info(self) -> dict[str, Any]:
        with Client(self.url) as client:
            return client.info()

    def metric(self, name: str) -> float:
        """The sum of a metric's samples over all labels, without `spmd_encoder_`."""
        return sum(value for _, value in self._samples(name))

    def batches(self) -> collections.Counter[int]:
        """Forwards so far by their number of items, of all replicas, without probes."""
        found: collections.Counter[int] = collections.Counter()
        for labels, value in self._samples("scheduler_batches_of_size_total"):
            found[int(labels["items"])] += round(value)
        return found

    def settle(self) -> None:
        """Waits until what replicas count, which comes with heartbeats, tells of all that is over."""
        time.sleep(2 * _HEARTBEAT_S)

    @contextlib.contextmanager
    def spending(self) -> Iterator[dict[str, float]]:
        """CPU seconds by role of what happens in the block, there after it."""
        spent: dict[str, float] = {}
        before = self.server.cpu_s()
        yield spent
        spent.update(cpu_spent_s(before, self.server.cpu_s()))

    def _samples(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as reply:
            text = reply.read().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == _PREFIX + name:
                    yield sample.labels, sample.value


@contextlib.contextmanager
def world(
    model_path: str, *flags: str, dp: int = 1, tp: int = 1, device: str = "cpu", threads: int = 1
) -> Iterator[World]:
    """Starts `dp * tp` ranks under torchrun, each with `threads` compute threads, and drains them after the block.

    Raises RuntimeError, and writes the log's end to stderr, where it does not get ready.
    """
    ranks = dp * tp
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "-m", "spmd_encoder"]
    command += ["--port", str(port), "--model-path", model_path, "--device", device, "--tp-size", str(tp)]
    command += ["--log-level", "warning", *flags]
    with tempfile.TemporaryFile() as log:
        with only_cores(ranks * threads):
            launcher = subprocess.Popen(command, stdout=log, stderr=log, env=one_thread_env(), start_new_session=True)
        try:
            with Client(url) as client:
                _wait_ready(client, launcher)
                started = World(url, Server.of(client.info()["processes"]), ranks)
            _spread(started.server)
            yield started
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read()[-4000:].decode(errors="replace"))
            raise
        finally:
            launcher.send_signal(signal.SIGTERM)
            try:
                launcher.wait(_END_S)
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def one_thread_env() -> dict[str, str]:
    """This process's environment, with libraries that start threads of their own told not to."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@contextlib.contextmanager
def only_cores(count: int) -> Iterator[None]:
    """What is started in the block may use so many of our cores, and so takes that many threads for its share."""
    ours = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(ours)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, ours)


def _spread(server: Server) -> None:
    """Lets all threads of a world run on all of our cores, now that it has counted its own."""
    ours = os.sched_getaffinity(0)
    for _, process in server.members():
        for thread in process.threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, ours)


def _wait_ready(client: Client, launcher: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _START_S
    while not client.ready():
        if launcher.poll() is not None:
            raise RuntimeError(f"the world ended with exit code {launcher.returncode} before it was ready")
        if time.monotonic() > end:
            raise RuntimeError(f"the world was not ready within {_START_S:g} s")
        time.sleep(0.1)
