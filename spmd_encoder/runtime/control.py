"""Composition root of the elected rank's keeper: what spans replicas. No torch."""

from __future__ import annotations

import secrets
from contextlib import AsyncExitStack
from pathlib import Path

from spmd_encoder.config import Config
from spmd_encoder.dispatcher.control import ControlServer
from spmd_encoder.dispatcher.dispatcher import DPDispatcher
from spmd_encoder.dispatcher.fleet import Fleet
from spmd_encoder.dispatcher.liveness import Limits, Liveness
from spmd_encoder.distributed.layout import Layout
from spmd_encoder.wire.messages import Endpoint, FromScheduler
from spmd_encoder.wire.sockets import RouterSocket, new_context

KEEPER_SILENCE = 3
"""How many stall timeouts a keeper may be silent: it has nothing to compute, but shares a node with those who have."""


async def launch_dp_runtime(
    config: Config, layout: Layout, *, run_dir: Path, host: str, stack: AsyncExitStack
) -> tuple[DPDispatcher, Endpoint]:
    """The dispatcher, listening, and where its peers find it. `stack` undoes it all.

    `host` "": a world of one node, so sockets are files in `run_dir`; else TCP ports of that address.
    """
    token = secrets.token_hex(16)
    context = new_context()
    stack.callback(context.destroy, linger=0)
    work: RouterSocket[FromScheduler] = RouterSocket(
        context, FromScheduler, secret=token, path=None if host else run_dir / "work", host=host
    )
    stack.callback(work.close)

    # The server and the dispatcher need each other; messages flow only after both stand.
    control = ControlServer(
        token,
        layout.world_size,
        lambda message: dispatcher.on_keeper(message),
        lambda rank: dispatcher.on_keeper_lost(rank),
    )
    lifecycle = config.lifecycle
    limits = Limits(
        beat_s=lifecycle.stall_timeout_s,
        start_beat_s=6 * lifecycle.stall_timeout_s,
        load_s=lifecycle.load_timeout_s,
        batch_s=lifecycle.batch_timeout_s,
        keeper_s=KEEPER_SILENCE * lifecycle.stall_timeout_s,
    )
    fleet = Fleet(
        layout,
        control=control,
        work=work,
        liveness=Liveness(limits),
        config_digest=config.digest(),
    )
    dispatcher = DPDispatcher(config, layout, fleet)
    stack.push_async_callback(dispatcher.close)
    dispatcher.start()
    control_address = await control.open(path=None if host else run_dir / "control", host=host)
    return dispatcher, Endpoint(bound=True, work_address=work.address, control_address=control_address, token=token)
