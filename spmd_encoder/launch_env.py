"""This rank's place in the world, as its launcher gave it: torchrun, a plain Slurm step, or nobody (a world of one)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from spmd_encoder.errors import StartupError

_DEFAULT_PORT = 29500


@dataclass(frozen=True, kw_only=True)
class LaunchEnv:
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    restart_count: int = 0
    run_id: str = ""
    master_addr: str = ""
    master_port: int = 0
    agent_store: bool = False
    under_torchrun: bool = False
    error_file: str | None = None
    shutdown_timeout_s: float | None = None
    """How long torchrun lets its ranks live after a signal, as far as variables tell: not by its flag."""

    @property
    def spans_nodes(self) -> bool:
        """Whether other nodes take part, so that addresses must be reachable from there."""
        return self.world_size != self.local_world_size  # layout-branch: ipc or tcp

    def cuts_drain(self, deadline_s: float) -> str | None:
        """What to tell whoever wants drains of up to `deadline_s`, where torchrun kills its ranks before that."""
        limit_s = self.shutdown_timeout_s
        if limit_s is None or deadline_s < limit_s:
            return None
        return (
            f"torchrun kills its ranks {limit_s:g} s after a signal, before the {deadline_s:g} s of --drain-deadline-s "
            f"are over, unless it was given --shutdown-timeout; TORCH_ELASTIC_SHUTDOWN_TIMEOUT={deadline_s + 5:.0f} in "
            "its environment says the same"
        )

    @property
    def has_launcher(self) -> bool:
        """Whether one parent process started all ranks of this node."""
        return self.under_torchrun or self.world_size > 1  # layout-branch: whose pid names the node


def read_launch_env(env: Mapping[str, str]) -> LaunchEnv:
    """Raises StartupError (exit code 2) where the launcher's variables make no sense."""
    try:
        if "RANK" in env and "WORLD_SIZE" in env:
            place = _of_torchrun(env)
        elif "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env:
            place = _of_slurm(env)
        else:
            return LaunchEnv()
    except ValueError as error:
        raise StartupError(f"the launcher's environment is not usable: {error}", exit_code=2) from None
    for name, value, size in (
        ("rank", place.rank, place.world_size),
        ("local rank", place.local_rank, place.local_world_size),
    ):
        if not 0 <= value < size:
            raise StartupError(f"the launcher gave {name} {value} in a world of {size}", exit_code=2)
    return place


def _of_torchrun(env: Mapping[str, str]) -> LaunchEnv:
    """As `torchrun` sets it (torch.distributed.elastic), or any launcher that speaks the same variables.

    One that says nothing of nodes makes every rank a node of its own.
    """
    rank = int(env["RANK"])
    under_torchrun = "TORCHELASTIC_RUN_ID" in env
    # Those of its flag and of its launcher's configuration, in their order of precedence (torch.distributed.run).
    shutdown = env.get("PET_SHUTDOWN_TIMEOUT") or env.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or "30"
    return LaunchEnv(
        rank=rank,
        local_rank=int(env.get("LOCAL_RANK", "0")),
        world_size=int(env["WORLD_SIZE"]),
        local_world_size=int(env.get("LOCAL_WORLD_SIZE", "1")),
        node_rank=int(env.get("GROUP_RANK", "0" if "LOCAL_RANK" in env else rank)),
        restart_count=int(env.get("TORCHELASTIC_RESTART_COUNT", "0")),
        run_id=env.get("TORCHELASTIC_RUN_ID", ""),
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=int(env.get("MASTER_PORT", str(_DEFAULT_PORT))),
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        under_torchrun=under_torchrun,
        error_file=env.get("TORCHELASTIC_ERROR_FILE"),
        shutdown_timeout_s=float(shutdown) if under_torchrun else None,
    )


def _of_slurm(env: Mapping[str, str]) -> LaunchEnv:
    """As `srun` sets it for a step's tasks (srun(1), OUTPUT ENVIRONMENT VARIABLES).

    The variables of the step, not of the job: a batch script has those of the job and is no task of a step.
    """
    node = int(env.get("SLURM_NODEID", "0"))
    job = env.get("SLURM_JOB_ID", "0")
    port = env.get("MASTER_PORT") or str(20000 + int(job) % 20000)
    return LaunchEnv(
        rank=int(env["SLURM_PROCID"]),
        local_rank=int(env.get("SLURM_LOCALID", "0")),
        world_size=int(env["SLURM_STEP_NUM_TASKS"]),
        local_world_size=_tasks_of_node(env.get("SLURM_STEP_TASKS_PER_NODE", "1"), node),
        node_rank=node,
        run_id=f"slurm-{job}.{env.get('SLURM_STEP_ID', '0')}",
        master_addr=env.get("MASTER_ADDR") or _first_host(env.get("SLURM_STEP_NODELIST", "127.0.0.1")),
        master_port=int(port),
    )


def _tasks_of_node(text: str, node: int) -> int:
    """Slurm's run-length form: `4(x2),3` is 4, 4, 3."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={text!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    if node >= len(counts):
        raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={text!r} says nothing of node {node}")
    return counts[node]


def _first_host(text: str) -> str:
    """The first name of a Slurm host list: `n[07-09,12],m1` begins with n07."""
    match = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\]([^\[,]*))?", text)
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST={text!r}")
    return match[1] + (match[2] or "") + (match[3] or "")
