"""What launchers say in the environment, and what is made of it."""

from __future__ import annotations

import pytest

from spmd_encoder.errors import StartupError
from spmd_encoder.launch_env import LaunchEnv, read_launch_env


def test_nobody_launched_us() -> None:
    assert read_launch_env({}) == LaunchEnv()
    assert read_launch_env({"RANK": "3"}) == LaunchEnv()


def test_torchrun_launched_us() -> None:
    env = read_launch_env(
        {
            "RANK": "5",
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "8",
            "LOCAL_WORLD_SIZE": "4",
            "GROUP_RANK": "1",
            "TORCHELASTIC_RESTART_COUNT": "2",
            "TORCHELASTIC_RUN_ID": "abc",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_ERROR_FILE": "/tmp/e.json",
            "MASTER_ADDR": "node0",
            "MASTER_PORT": "1234",
        }
    )
    assert env == LaunchEnv(
        rank=5,
        local_rank=1,
        world_size=8,
        local_world_size=4,
        node_rank=1,
        restart_count=2,
        run_id="abc",
        master_addr="node0",
        master_port=1234,
        agent_store=True,
        under_torchrun=True,
        error_file="/tmp/e.json",
        shutdown_timeout_s=30.0,
    )


@pytest.mark.parametrize(
    ("variables", "limit_s"),
    [
        ({}, 30),
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"}, 120),
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120", "PET_SHUTDOWN_TIMEOUT": "10"}, 10),
    ],
)
def test_drains_that_torchrun_cuts_off_are_told(variables: dict[str, str], limit_s: int) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    env = read_launch_env(place | {"TORCHELASTIC_RUN_ID": "abc"} | variables)
    assert env.cuts_drain(limit_s - 1) is None
    warning = env.cuts_drain(limit_s)
    assert warning is not None and "--drain-deadline-s" in warning
    assert f"kills its ranks {limit_s} s" in warning and f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={limit_s + 5} " in warning
    assert read_launch_env(place | variables).cuts_drain(1e6) is None, "no torchrun, no limit"


def test_a_plain_launcher_and_a_broken_one() -> None:
    env = read_launch_env({"RANK": "1", "WORLD_SIZE": "2"})
    assert (env.rank, env.world_size, env.under_torchrun, env.agent_store) == (1, 2, False, False)
    assert (env.node_rank, env.local_world_size) == (1, 1), "it says nothing of nodes: every rank is one"
    with pytest.raises(StartupError) as caught:
        read_launch_env({"RANK": "one", "WORLD_SIZE": "2"})
    assert caught.value.exit_code == 2
    assert "'one'" in caught.value.message


STEP = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "10",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),2",
    "SLURM_STEP_NODELIST": "gpu[007-008],big1",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "3",
}


def test_srun_launched_us() -> None:
    assert read_launch_env(STEP) == LaunchEnv(
        rank=5,
        local_rank=1,
        world_size=10,
        local_world_size=4,
        node_rank=1,
        run_id="slurm-123456.3",
        master_addr="gpu007",
        master_port=20000 + 3456,
    )
    last = read_launch_env(STEP | {"SLURM_PROCID": "9", "SLURM_NODEID": "2"})
    assert last.local_world_size == 2
    told = read_launch_env(STEP | {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "777"})
    assert (told.master_addr, told.master_port) == ("10.0.0.9", 777)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("n[3,5-7].x.org", "n3.x.org"), ("n[09-12]", "n09"), ("a-b[1-2],c", "a-b1")],
)
def test_the_first_node_of_a_host_list(nodes: str, first: str) -> None:
    assert read_launch_env(STEP | {"SLURM_STEP_NODELIST": nodes}).master_addr == first


def test_torchrun_inside_a_step_wins() -> None:
    assert read_launch_env(STEP | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}).world_size == 1


def test_a_batch_script_is_no_step() -> None:
    assert read_launch_env({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}) == LaunchEnv()


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "rank 2 in a world of 2"),
        ({"RANK": "-1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "rank -1"),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "2"}, "local rank 3"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "4(y2)"}, "4(y2)"),
        (STEP | {"SLURM_NODEID": "7"}, "node 7"),
    ],
)
def test_places_that_cannot_be(env: dict[str, str], said: str) -> None:
    with pytest.raises(StartupError, match="launcher") as caught:
        read_launch_env(env)
    assert caught.value.exit_code == 2
    assert said in caught.value.message
