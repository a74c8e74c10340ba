"""The node's private folder for sockets: shared by the keepers of one launch, removed by the last of them.

Its name is made of what all ranks of a node know without talking: the launcher's process, the rendezvous' port, the
node and the restart count. Every keeper holds a shared lock on it, so that a folder that nobody holds is known to be
left over.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from spmd_encoder.errors import StartupError
from spmd_encoder.launch_env import LaunchEnv

_GRACE_S = 60.0
_LONGEST_NAME = "orders-99999-99999"
_MAX_SOCKET_PATH = 107
"""Bytes of `sun_path` (unix(7)) without the closing zero."""


class RunDir:
    """Mode 0700, owned by this user."""

    def __init__(self, env: LaunchEnv, launcher: int) -> None:
        """Raises StartupError where it cannot be had, or its name would be too long for the sockets in it."""
        owner = launcher if env.has_launcher else os.getpid()
        name = f"{owner}-{_start_time(owner)}-{env.master_port}-{env.node_rank}-{env.restart_count}"
        self.path = Path(tempfile.gettempdir()) / f"{_prefix()}{name}"
        if len(os.fsencode(self.path / _LONGEST_NAME)) > _MAX_SOCKET_PATH:
            raise StartupError(
                f"the temporary folder {tempfile.gettempdir()} has too long a name for sockets in it: set TMPDIR to a "
                "shorter one"
            )
        self.path.mkdir(mode=0o700, exist_ok=True)
        stat = self.path.stat()
        if stat.st_uid != os.getuid() or stat.st_mode & 0o077:
            raise StartupError(f"{self.path} is not a private folder of this user; remove it")
        self._lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def close(self) -> None:
        """Remove the folder unless another keeper still holds it."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.path, ignore_errors=True)
        except OSError:
            pass
        os.close(self._lock)


def sweep() -> None:
    """Remove folders that killed launches left behind."""
    for path in Path(tempfile.gettempdir()).glob(_prefix() + "*"):
        try:
            if path.stat().st_uid != os.getuid() or time.time() - path.stat().st_mtime < _GRACE_S:
                continue
            lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except OSError:
            pass
        finally:
            os.close(lock)


def _prefix() -> str:
    return f"spmd_encoder-{os.getuid()}-"


def _start_time(pid: int) -> str:
    try:
        # Field 22 of stat, counted after the command name, which may hold blanks.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return "0"
