"""`torchrun --nproc-per-node N -m spmd_encoder [flags]`, or `python -m spmd_encoder` for a world of one."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from spmd_encoder.config import Config, parse_config, process_environ, validate_layout
from spmd_encoder.distributed.layout import Layout
from spmd_encoder.errors import StartupError
from spmd_encoder.launch_env import LaunchEnv, read_launch_env
from spmd_encoder.media.installed import pyav
from spmd_encoder.observability.logging import Origin, set_up_logging
from spmd_encoder.sglang_flags import take_foreign
from spmd_encoder.worker.faults import Faults

log = logging.getLogger("spmd_encoder")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the rank: 0 clean, 1 start-up failure, 2 usage, 3 port or rendezvous, 4 the world was lost,
    5 the drain's deadline passed, 128 + n ended by a second signal n."""
    # First of all: a launcher that ends during the imports would not be missed later.
    launcher = os.getppid()
    _need_streams()
    env = LaunchEnv()
    try:
        # Until the keeper's loop takes over there is nothing to drain.
        for sig in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sig, _end_early)
        env = read_launch_env(process_environ())
        own, notes = take_foreign(sys.argv[1:] if argv is None else argv, process_environ())
        config, check = parse_config(own)
        Faults.parse(config.faults)  # or every worker would find the mistake
        layout = Layout(*validate_layout(config, env.world_size))
        warning = env.cuts_drain(config.lifecycle.drain_deadline_s)
        if check:
            for note in (*notes, *filter(None, [warning])):
                print(note, file=sys.stderr)
            sizes = {"dp_size": layout.dp_size, "tp_size": layout.tp_size}
            print(json.dumps({**sizes, **config.flat(), "pyav": pyav()}, indent=2))
            return 0
        if env.under_torchrun and _is_orphan(launcher):
            raise StartupError("torchrun has ended before this rank began", exit_code=4)
        return _run(config, env, layout, launcher, notes, warning)
    except StartupError as error:
        print(f"spmd_encoder rank {env.rank}: {error.message}", file=sys.stderr, flush=True)
        _tell_torchrun(env, error)
        return error.exit_code


def _end_early(signum: int, frame: FrameType | None) -> NoReturn:
    sys.exit(0)


def _need_streams() -> None:
    """Whoever closed our streams wants no words, but every library expects to have somewhere to say them, and no
    socket may come to be number 0, 1 or 2."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one, as all before are taken
            os.set_inheritable(null, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, "w" if fd else "r"))


def _is_orphan(launcher: int) -> bool:
    """Whether init has taken the launcher's place already. In a container torchrun itself may be process 1."""
    if launcher != 1:
        return False
    try:
        command = Path("/proc/1/cmdline").read_bytes()
    except OSError:
        return False
    return b"python" not in command and b"torchrun" not in command


def _run(
    config: Config, env: LaunchEnv, layout: Layout, launcher: int, notes: Sequence[str], warning: str | None
) -> int:
    # Imported here, so that a signal during these imports finds its handler, and `--help` does without them.
    import asyncio

    import setproctitle

    from spmd_encoder.keeper.descriptors import raise_limit
    from spmd_encoder.keeper.keeper import Keeper
    from spmd_encoder.keeper.run_dir import RunDir, sweep

    dp_rank, tp_rank = layout.coordinates(env.rank)
    origin = Origin(env.rank, dp_rank, tp_rank, "keeper")
    setproctitle.setproctitle(origin.title())
    set_up_logging(origin, config.observability.log_level, config.observability.log_format)
    log.debug("restart %d of run %s", env.restart_count, env.run_id or "(none)")
    if env.local_rank == 0:
        for note in notes:
            log.info("%s", note)
        if warning is not None:
            log.warning("%s", warning)
        sweep()
    raise_limit()
    run_dir = RunDir(env, launcher)

    async def live() -> int:
        return await Keeper(config, env, layout, run_dir, _node_address(env), launcher).run()

    try:
        code = asyncio.run(live())
    finally:
        run_dir.close()
    log.info("rank %d ends with exit code %d", env.rank, code)
    return code


def _node_address(env: LaunchEnv) -> str:
    """This node's address for the other nodes; "" in a world of one node."""
    if not env.spans_nodes:
        return ""
    master = _route_to(env.master_addr, env.master_port)
    if master.startswith("127.") and not env.master_addr.startswith(("127.", "localhost", "::1")):
        # The rendezvous host's own name often means loopback to itself: ask the routing table instead.
        return _route_to("192.0.2.1", 9) or master
    return master or "127.0.0.1"


def _route_to(host: str, port: int) -> str:
    """The local address that packets to `host` would leave from (a UDP connect sends none)."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port or 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _tell_torchrun(env: LaunchEnv, error: StartupError) -> None:
    """torchrun shows the message of this file as the root cause in its report."""
    if env.error_file:
        path = Path(env.error_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"message": error.message, "timestamp": str(int(time.time()))}))


if __name__ == "__main__":
    sys.exit(main())
