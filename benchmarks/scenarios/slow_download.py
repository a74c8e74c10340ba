"""Whether a URL that takes long to download holds up those who bring their pictures."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import Self

import aiohttp

from benchmarks.checkpoints import Tower, model_path
from benchmarks.load_generator import LoadPlan, run_load
from benchmarks.load_generator.requests import unlike
from benchmarks.load_generator.tally import latency_ms, percentile
from benchmarks.pictures import make_pictures
from benchmarks.report import Cell, Check, Plot, Report, Table
from benchmarks.scenario import Options as Common
from benchmarks.scenario import Scenario
from benchmarks.world import World, world

_TARGET = 1.2


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    tower: Tower = "tiny"
    items: int = 3000
    """Fast ones, in each arm."""
    block: int = 250
    clients: int = 4
    download_s: float = 1.0


def run(options: Options) -> Report:
    with world(
        model_path(options.tower), "--cache-bytes", "0", "--allow-private-media-hosts", device=options.device
    ) as served:
        without, beside, downloads = asyncio.run(_arms(served, options))
    ratio = percentile(sorted(beside), 99) / percentile(sorted(without), 99)
    halves = [percentile(sorted(without[start::2]), 99) for start in (0, 1)]
    rows: list[list[Cell]] = [
        [name, len(arm), *latency_ms(arm).values()] for name, arm in (("without", without), ("beside", beside))
    ]
    curves = {
        name: [(float(p), 1e3 * percentile(sorted(arm), p)) for p in (*range(1, 100), 99.5, 99.9)]
        for name, arm in (("without", without), ("beside one slow download", beside))
    }
    return Report(
        checks=[
            Check(name="p99 of fast items, beside over without", measured=ratio, target=_TARGET),
            Check(name="the same of every second one without over the others", measured=halves[1] / halves[0]),
            Check(name="slow downloads", measured=downloads, target=1, at_least=True),
        ],
        tables=[Table("Fast items, milliseconds", ["arm", "items", *latency_ms(without)], rows)],
        plots=[Plot(kind="lines", title="Fast items", x_label="percentile", y_label="ms", series=curves, log_y=True)],
        figures={"blocks_of": options.block, "downloads": downloads},
    )


async def _arms(served: World, options: Options) -> tuple[list[float], list[float], int]:
    """(seconds of fast items without, and beside a slow download; downloads). Blocks take turns: ABBA and so on."""
    plan = LoadPlan(
        pools=[make_pictures([(224, 224)], 16)], clients=options.clients, num_requests=min(options.block, options.items)
    )
    without: list[float] = []
    beside: list[float] = []
    downloads = 0
    await run_load(served.url, plan)
    for number in range(2 * -(-options.items // options.block)):
        slow = number % 4 in (1, 2)
        async with _SlowDownloads(served, options.download_s) if slow else _Nothing() as other:
            tally = await run_load(served.url, plan)
        if tally.errors():
            raise RuntimeError(f"the server refused work: {tally.errors()}")
        downloads += other.downloads
        (beside if slow else without).extend(sample.latency for sample in tally.good())
    return without, beside, downloads


class _Nothing:
    """The arm without."""

    downloads = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


class _SlowDownloads(_Nothing):
    """One item whose URL takes so long is at work all the time, each after the last."""

    def __init__(self, served: World, seconds: float) -> None:
        self._served = served
        self._seconds = seconds
        self._picture = make_pictures([(224, 224)], 1, seed=5)[0]

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._asking = asyncio.create_task(self._ask(self._server.sockets[0].getsockname()[1]))
        while not self.downloads and not self._asking.done():
            await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._asking.cancel()
        self._server.close()
        (outcome,) = await asyncio.gather(self._asking, return_exceptions=True)
        if isinstance(outcome, Exception):
            raise outcome

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            self.downloads += 1
            body = unlike(self._picture, self.downloads)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/jpeg\r\nConnection: close\r\n")
            writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body[: len(body) // 2])
            await asyncio.sleep(self._seconds)
            writer.write(body[len(body) // 2 :])
            writer.close()

    async def _ask(self, port: int) -> None:
        body = json.dumps({"items": [{"image": f"http://127.0.0.1:{port}/slow.jpg"}]})
        url, headers = f"{self._served.url}/v1/encode", {"content-type": "application/json"}
        async with aiohttp.ClientSession() as session:
            while True:
                async with session.post(url, data=body, headers=headers) as reply:
                    if reply.status != 200:
                        raise RuntimeError(f"the slow item was refused: {(await reply.text())[:300]}")
                    await reply.read()


SCENARIO = Scenario(
    name="slow-download",
    about="The p99 of items that clients bring while one item's URL takes a second, over the p99 without it.",
    full=Options(),
    quick=Options(items=200, block=50),
    run=run,
)
