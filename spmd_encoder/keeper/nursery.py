"""The nursery: one per node, a process that has imported everything and forks workers for the node's keepers.

`python -m spmd_encoder.keeper.nursery RUN_DIR PARENT RANK ANSWER_FD CONFIG`. It touches no accelerator and
starts no thread, so that a fork is safe. A keeper connects to `RUN_DIR/nursery`, passes two descriptors (the child's
output, the child's end of a socket pair) and reads two lines: the pid, later the exit status. The keeper's hang-up
(or its half-close) kills the child. A caller that sends `ping` reads `pong`.

It ignores SIGTERM and SIGINT: only keepers end it, by ending themselves.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import random
import selectors
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import NoReturn

from spmd_encoder.config import Config, cache_dir
from spmd_encoder.errors import StartupError
from spmd_encoder.keeper.child import run_child
from spmd_encoder.keeper.fate import die_with_parent
from spmd_encoder.keeper.nursery_name import PING, PONG, SOCKET_NAME
from spmd_encoder.keeper.signals import ignore_signals
from spmd_encoder.observability.logging import Origin, set_up_logging

log = logging.getLogger(__name__)
_UCRED = struct.Struct("3i")
MAX_CALLERS = 64
"""Callers that have not said what they want; with one more the oldest is closed, since a keeper says it at once."""
_SEND_S = 0.5


class Nursery:
    """A single-threaded loop over the listener, the keepers' connections and the ends of children."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._callers: dict[socket.socket, None] = {}  # in the order of their coming
        self._children: dict[int, socket.socket] = {}
        self._pids: dict[socket.socket, int] = {}
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> NoReturn:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_r, selectors.EVENT_READ)
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is sys.stdin:
                    self._end()
                elif key.fileobj == self._wake_r:
                    os.read(self._wake_r, 4096)
                elif isinstance(key.fileobj, socket.socket):
                    self._readable(key.fileobj)
            self._reap()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            log.warning("a caller could not be accepted: %s", error)
            return
        if not _same_user(connection):
            connection.close()
            return
        connection.setblocking(False)
        self._callers[connection] = None
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._callers) > MAX_CALLERS:
            oldest = next(iter(self._callers))
            self._forget_caller(oldest)
            oldest.close()

    def _readable(self, connection: socket.socket) -> None:
        if connection in self._callers:
            self._heard(connection)
        elif connection in self._pids:  # else it was closed a moment ago
            self._hung_up(connection)

    def _forget_caller(self, connection: socket.socket) -> None:
        del self._callers[connection]
        self._selector.unregister(connection)

    def _heard(self, connection: socket.socket) -> None:
        """It has said what it wants, or has gone."""
        self._forget_caller(connection)
        try:
            message, fds, _, _ = socket.recv_fds(connection, 64, 2)
        except OSError:
            connection.close()
            return
        connection.settimeout(_SEND_S)
        try:
            self._fork(connection, message, fds)
        except OSError as error:
            # No process to be had, or a caller that has gone already: nobody else's child is concerned.
            log.warning("a fork failed: %s", error)
            connection.close()
        for fd in fds:
            os.close(fd)

    def _fork(self, connection: socket.socket, message: bytes, fds: list[int]) -> None:
        if message == PING:
            connection.sendall(PONG)
            connection.close()
        elif message != b"fork" or len(fds) != 2 or len(list(Path("/proc/self/task").iterdir())) != 1:
            # More than one thread: a fork could copy a lock that nobody will ever release.
            connection.close()
        elif (pid := os.fork()) == 0:
            self._become_child(connection, *fds)
        else:
            self._children[pid] = connection
            self._pids[connection] = pid
            self._selector.register(connection, selectors.EVENT_READ)
            with contextlib.suppress(OSError):
                # A caller that has gone shows as a hang-up next, which ends this child.
                connection.sendall(b"%d\n" % pid)

    def _become_child(self, connection: socket.socket, output: int, pipe: int) -> NoReturn:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            parent = os.getppid()
            die_with_parent(parent)
            self._selector.close()
            for sock in (self._listener, connection, *self._callers, *self._children.values()):
                sock.close()
            os.close(self._wake_r)
            os.close(self._wake_w)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            random.seed()
            code = run_child(socket.socket(fileno=pipe))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _end(self) -> NoReturn:
        """Our keeper has closed our input: it is over. Children are reaped here, since init may not do it."""
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        while self._children:
            self._reap()
            time.sleep(0.005)
        os._exit(0)

    def _hung_up(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        if (pid := self._pids.pop(connection, None)) is not None:
            os.kill(pid, signal.SIGKILL)  # ours and not reaped yet, so the pid cannot be another's

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            connection = self._children.pop(pid)
            if self._pids.pop(connection, None) is not None:
                self._selector.unregister(connection)
            with contextlib.suppress(OSError):
                connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
            connection.close()


def _same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return bool(_UCRED.unpack(credentials)[1] == os.getuid())


def _answer(fd: int, said: dict[str, object]) -> None:
    with os.fdopen(fd, "wb") as pipe:
        pipe.write(json.dumps(said).encode() + b"\n")


def main() -> NoReturn:
    """Says through ANSWER_FD, in one JSON line, how the start went; then serves until it is killed."""
    run_dir, parent, rank, answer_fd, config_json = sys.argv[1:6]
    die_with_parent(int(parent))
    ignore_signals()
    config = Config.from_json(config_json)
    origin = Origin(int(rank), 0, 0, "nursery")
    importlib.import_module("setproctitle").setproctitle(origin.title())
    set_up_logging(origin, config.observability.log_level, config.observability.log_format)
    gc.disable()  # what is imported stays: to look for garbage on the way takes a sixth of the time, and finds none
    try:
        checkpoint = importlib.import_module("spmd_encoder.models.checkpoint")
        folder = checkpoint.resolve_checkpoint(config.model.model_path, config.model.revision, cache_dir())
        importlib.import_module("spmd_encoder.models.registry").preload(checkpoint.read_model_type(folder))
        importlib.import_module("spmd_encoder.runtime.compute")
        importlib.import_module("spmd_encoder.runtime.preparer")
    except StartupError as error:
        _answer(int(answer_fd), {"error": error.message, "exit_code": error.exit_code})
        sys.exit(error.exit_code)
    except Exception as error:  # of a library that cannot be imported here, and will not be the next time
        logging.getLogger(__name__).error("its imports failed", exc_info=error)
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:300]}"
        _answer(int(answer_fd), {"error": f"what the model needs cannot be imported ({reason})", "exit_code": 4})
        sys.exit(4)
    gc.enable()
    gc.collect()
    importlib.import_module("spmd_encoder.worker.allocator").give_back_freed_memory()  # or every child inherits it
    gc.freeze()  # so that a collection in a child does not touch, and thereby copy, every inherited page
    path = Path(run_dir) / SOCKET_NAME
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(128)
    _answer(int(answer_fd), {"ready": True})
    Nursery(listener).serve()


if __name__ == "__main__":
    main()
