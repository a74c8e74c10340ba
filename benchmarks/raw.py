"""Starts and asks processes that run a tower without a server (`benchmarks.raw_tower`). Imports no torch."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.world import one_thread_env


@dataclass(frozen=True)
class RawProcesses:
    """So many equal processes, each with one compute thread."""

    processes: Sequence[subprocess.Popen[str]]

    def ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """Has all of them do it at the same time; their answers. Raises RuntimeError where one ended."""
        for process in self.processes:
            _write(process, {"do": do, **arguments})
        return [_read(process) for process in self.processes]

    def first(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Has one do it while the others wait."""
        _write(self.processes[0], {"do": do, **arguments})
        return _read(self.processes[0])

    def rate(self, do: str, *, batch: int, items: int) -> float:
        """Items per second of all together, each with `items` of them, until the last is done."""
        answers = self.ask(do, batch=batch, items=items)
        return items * len(answers) / max(float(answer["wall_s"]) for answer in answers)

    def best_batch(self, sizes: Sequence[int]) -> int:
        """The batch size with the least CPU time per item, of forwards alone."""
        self.first("forwards", batch=sizes[0], items=sizes[0])
        items = max(sizes)
        spent: dict[int, float] = {b: self.first("forwards", batch=b, items=items)["cpu_s"] for b in sizes}
        return min(sizes, key=lambda size: spent[size])


@contextlib.contextmanager
def raw_processes(
    model_path: str, pictures: Sequence[bytes], *, count: int = 1, device: str = "cpu"
) -> Iterator[RawProcesses]:
    with tempfile.TemporaryDirectory() as folder:
        for index, picture in enumerate(pictures):
            (Path(folder) / f"{index:06}").write_bytes(picture)
        command = [sys.executable, "-m", "benchmarks.raw_tower", "--model-path", model_path, "--threads", "1"]
        command += ["--device", device, "--pictures", folder]
        processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=one_thread_env())
            for _ in range(count)
        ]
        try:
            for process in processes:
                _read(process)
            yield RawProcesses(processes)
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def _write(process: subprocess.Popen[str], question: dict[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(question) + "\n")
    process.stdin.flush()


def _read(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the process of the raw tower ended with exit code {process.wait()}")
    answer: dict[str, Any] = json.loads(line)
    return answer
