"""Hosts the rendezvous store in a process of its own, where no torchrun agent does (`python -m`, plain `srun`)."""

from __future__ import annotations

import time
from typing import NoReturn

import setproctitle
import torch.distributed as dist

from spmd_encoder.wire.messages import StoreReady, StoreSpec
from spmd_encoder.wire.streams import Pipe


def host_store(spec: StoreSpec, pipe: Pipe) -> NoReturn:
    """Serve until killed. Port 0 takes any free one; the real one is told through `pipe`."""
    setproctitle.setproctitle("spmd_encoder store")
    store = dist.TCPStore(spec.host, spec.port, is_master=True, wait_for_workers=False)
    pipe.send(StoreReady(port=store.port))
    while True:
        time.sleep(3600)
