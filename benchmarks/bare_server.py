"""A FastAPI route that reads a body and answers so many bytes, in a process of its own: what HTTP alone costs here."""

from __future__ import annotations

import argparse
import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI, Request, Response

from benchmarks.processes import process_cpu_s
from benchmarks.world import one_thread_env


@dataclass(frozen=True)
class BareServer:
    url: str
    pid: int

    def cpu_s(self) -> float:
        return process_cpu_s(self.pid)


@contextlib.contextmanager
def bare_server(reply_bytes: int) -> Iterator[BareServer]:
    command = [sys.executable, "-m", "benchmarks.bare_server", "--reply-bytes", str(reply_bytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=one_thread_env()) as process:
        try:
            assert process.stdout is not None
            yield BareServer(process.stdout.readline().strip(), process.pid)
        finally:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reply-bytes", type=int, required=True)
    reply = bytes(parser.parse_args().reply_bytes)
    app = FastAPI()

    @app.post("/v1/encode")
    async def encode(request: Request) -> Response:
        await request.body()
        return Response(reply, media_type="application/octet-stream")

    with socket.create_server(("127.0.0.1", 0)) as sock:
        print(f"http://127.0.0.1:{sock.getsockname()[1]}", flush=True)
        config = uvicorn.Config(app, loop="asyncio", http="httptools", log_level="error", access_log=False)
        uvicorn.Server(config).run(sockets=[sock])


if __name__ == "__main__":
    main()
