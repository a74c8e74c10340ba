"""How long a world takes until it is live and ready, what its processes cost in memory (PSS), and what `--help` takes.

    python -m benchmarks.startup --nproc 8 [--model-path demo:qwen2.5-vl-tiny] [--repeat 3] [-- server flags]

Prints one JSON object. Linux only: it reads /proc. PSS shares a page among the processes that map it, so that sums
are what the machine really holds.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

from benchmarks.circumstances import circumstances as circumstances
from benchmarks.processes import memory_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=8)
    parser.add_argument("--model-path", default="demo:qwen2.5-vl-tiny")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("flags", nargs="*", help="further flags of the server, after --")
    args = parser.parse_args()
    runs = [run(args.nproc, args.model_path, args.flags) for _ in range(args.repeat)]
    told = {"nproc": args.nproc, "model": args.model_path, **summary(runs), "command_line": command_line()}
    print(json.dumps({**circumstances("benchmarks.startup"), **told}, indent=2))


def command_line(repeat: int = 9) -> dict[str, float]:
    """`--help` beside an interpreter that does nothing, and beside the import of torch, in turns; medians."""
    commands = {"help": ["-m", "spmd_encoder", "--help"], "python": ["-c", "pass"], "torch": ["-c", "import torch"]}
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(repeat):
        for name, command in commands.items():
            began = time.monotonic()
            subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL, check=True)
            seconds[name].append(time.monotonic() - began)
    took = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "help_s": round(took["help"], 3),
        "help_over_python": round(took["help"] / took["python"], 2),
        "help_over_import_torch": round(took["help"] / took["torch"], 3),
    }


def run(nproc: int, model_path: str, flags: list[str]) -> dict[str, Any]:
    """One start and one end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(nproc), "-m", "spmd_encoder"]
    command += ["--port", str(port), "--model-path", model_path, "--log-level", "warning", *flags]
    began = time.monotonic()
    launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        live_s = wait(f"http://127.0.0.1:{port}/health/live", launcher) - began
        ready_s = wait(f"http://127.0.0.1:{port}/health/ready", launcher) - began
        time.sleep(1.0)  # workers tell of their preparers a moment later
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/info") as reply:
            info = json.load(reply)
        processes = info["processes"]
        memory: dict[str, list[int]] = {}
        for process in processes:
            memory.setdefault(process["role"], []).append(memory_of(process["pid"])["Pss"])
        memory["launcher"] = [memory_of(launcher.pid)["Pss"]]
    finally:
        ending = time.monotonic()
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(60)
    phases = info["replicas"][0]["start_s"]
    took = {"live_s": live_s, "ready_s": ready_s, "end_s": time.monotonic() - ending}
    return {**took, "phases": phases, "memory": memory}


def wait(url: str, launcher: subprocess.Popen[bytes], timeout_s: float = 180.0) -> float:
    """When `url` first answered 200."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and launcher.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return time.monotonic()
        except (urllib.error.URLError, OSError):
            time.sleep(0.02)
    raise RuntimeError(f"{url} did not answer 200 within {timeout_s} s")


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    roles = runs[0]["memory"]
    mib = {role: round(statistics.median(sum(r["memory"][role]) for r in runs) / 2**20, 1) for role in roles}
    each = {
        role: round(statistics.median(statistics.mean(r["memory"][role]) for r in runs) / 2**20, 1) for role in roles
    }
    return {
        **{key: [round(r[key], 2) for r in runs] for key in ("live_s", "ready_s", "end_s")},
        "first_replica_phases_s": {
            name: round(statistics.median(r["phases"][name] for r in runs), 3) for name in runs[0]["phases"]
        },
        "pss_mib_by_role": mib,
        "pss_mib_per_process": each,
        "pss_mib_total_without_launcher": round(sum(v for k, v in mib.items() if k != "launcher"), 1),
    }


if __name__ == "__main__":
    main()
