"""Fault injection for drills and tests: makes a worker fail on a chosen input.

`SPMD_ENCODER_FAULTS` holds `<action>@<digest>` entries, comma separated; the digest is an item's
`sha256:<hex>`; the action is `kill` (SIGKILL to the worker before the forward), `raise` (an exception in the
forward), `hang` (the compute thread never returns), `slow` (one more second before the forward), `decode-kill`
(SIGKILL to the process that decodes) or `decode-hang` (which then never answers).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from spmd_encoder.errors import StartupError

ACTIONS = ("kill", "raise", "hang", "slow", "decode-kill", "decode-hang")


@dataclass(frozen=True)
class Faults:
    by_digest: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> Faults:
        entries: dict[str, str] = {}
        for entry in filter(None, text.split(",")):
            action, _, digest = entry.partition("@")
            if action not in ACTIONS or not digest.startswith("sha256:"):
                raise StartupError(f"SPMD_ENCODER_FAULTS: {entry!r} is not <action>@sha256:<hex>", exit_code=2)
            entries[digest] = action
        return cls(entries)

    def before_preprocess(self, digest: str) -> None:
        match self.by_digest.get(digest):
            case "decode-kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "decode-hang":
                _hang()
            case _:
                pass

    def before_forward(self, digests: Iterable[str]) -> None:
        for digest in digests:
            match self.by_digest.get(digest):
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "raise":
                    raise RuntimeError("injected fault")
                case "hang":
                    _hang()
                case "slow":
                    time.sleep(1.0)
                case _:
                    pass


def _hang() -> NoReturn:
    while True:
        time.sleep(3600)
