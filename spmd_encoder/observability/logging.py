"""Log lines that say where they come from: rank, dp, tp and role on every one."""

from __future__ import annotations

import faulthandler
import json
import logging
import signal
import sys
import time
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Origin:
    """The process that logs. `role`: keeper, worker, preparer, nursery."""

    rank: int
    dp_rank: int
    tp_rank: int
    role: str
    epoch: int | None = None

    def title(self) -> str:
        """The process title, as `ps` shows it."""
        if self.role == "nursery":
            return "spmd_encoder nursery"
        epoch = "" if self.epoch is None else f" epoch={self.epoch}"
        return f"spmd_encoder {self.role} rank={self.rank} dp={self.dp_rank} tp={self.tp_rank}{epoch}"


_ESCAPES = MappingProxyType(
    {code: repr(chr(code))[1:-1] for code in (*range(32), *range(127, 160), 0x2028, 0x2029) if code != ord("\t")}
)


class SparseLog:
    """Warnings that a stranger can cause: at most one in `every_s`, with the number of those left out."""

    def __init__(self, log: logging.Logger, every_s: float = 5.0) -> None:
        self._log = log
        self._every_s = every_s
        self._next = 0.0
        self._left_out = 0

    def warning(self, text: str, *args: object) -> None:
        now = time.monotonic()
        if now < self._next:
            self._left_out += 1
            return
        more = f" (and {self._left_out} more like it)" if self._left_out else ""
        self._log.warning(text + more, *args)
        self._next, self._left_out = now + self._every_s, 0


class _TextFormatter(logging.Formatter):
    def __init__(self, origin: Origin) -> None:
        where = f"rank={origin.rank} dp={origin.dp_rank} tp={origin.tp_rank} {origin.role}"
        if origin.epoch is not None:
            where += f" epoch={origin.epoch}"
        super().__init__(f"%(asctime)s.%(msecs)03d %(levelname)s {where} %(message)s", "%Y-%m-%dT%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        # One event, one line: a multi-line message would come apart between ranks. No control characters either:
        # what a client or a file said must not steer the terminal of whoever reads the log.
        return super().format(record).translate(_ESCAPES)


class _JsonFormatter(logging.Formatter):
    def __init__(self, origin: Origin) -> None:
        super().__init__()
        self._origin = origin

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname,
            "rank": self._origin.rank,
            "dp": self._origin.dp_rank,
            "tp": self._origin.tp_rank,
            "role": self._origin.role,
            "epoch": self._origin.epoch,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_logging(origin: Origin, level: str, log_format: str) -> None:
    """Log to stderr with the origin on each line, Python's warnings too; SIGUSR1 dumps all stacks there."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(origin) if log_format == "json" else _TextFormatter(origin))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    # zmq.auth would show the world's secret at the level debug.
    for noisy in ("httpx", "urllib3", "filelock", "asyncio", "PIL", "uvicorn", "zmq.auth"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
