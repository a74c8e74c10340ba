"""What the server adds to one item's own time, with one client."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.checkpoints import Tower, model_path
from benchmarks.connection import Connection
from benchmarks.load_generator.tally import latency_ms, percentile
from benchmarks.pictures import make_pictures
from benchmarks.raw import raw_processes
from benchmarks.report import Cell, Check, Plot, Report, Table
from benchmarks.scenario import Options as Common
from benchmarks.scenario import Scenario
from benchmarks.world import world

_TARGET_MS = 2.0
_WARM_UP = 30


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    tower: Tower = "tiny"
    pairs: int = 2000
    side: int = 224
    pictures: int = 64


def run(options: Options) -> Report:
    """Each pair is one item served and the same item raw, in changing order, nothing else of ours at work."""
    pictures = make_pictures([(options.side, options.side)], options.pictures)
    path = model_path(options.tower)
    server, client, raw_s = [], [], []
    with (
        raw_processes(path, pictures, device=options.device) as raw,
        world(path, "--cache-bytes", "0", device=options.device) as served,
        Connection(served.url) as connection,
    ):
        for pair in range(-_WARM_UP, options.pairs):
            which = pair % len(pictures)
            if pair % 2:
                own = raw.first("singles", items=[which])["wall_s"][0]
            reply = connection.encode(pictures[which])
            if not pair % 2:
                own = raw.first("singles", items=[which])["wall_s"][0]
            if pair >= 0:
                server.append(reply.server_s)
                client.append(reply.seconds)
                raw_s.append(own)
    added = [a - b for a, b in zip(server, raw_s, strict=True)]
    added_at_client = [a - b for a, b in zip(client, raw_s, strict=True)]
    named = {"raw": raw_s, "server": server, "client": client, "server - raw": added, "client - raw": added_at_client}
    rows: list[Sequence[Cell]] = [
        [name, *(1e3 * percentile(sorted(values), p) for p in (10, 50, 90, 99))] for name, values in named.items()
    ]
    curves = {
        name: [(1e3 * percentile(sorted(values), p), float(p)) for p in range(1, 100)]
        for name, values in (("by the server's clock", added), ("by the client's clock", added_at_client))
    }
    return Report(
        checks=[
            Check(name="added, p50, by the server's own clock", measured=_ms(added), target=_TARGET_MS, unit="ms"),
            Check(name="added, p50, by the client's clock", measured=_ms(added_at_client), unit="ms"),
        ],
        tables=[Table("Milliseconds", ["", "p10", "p50", "p90", "p99"], rows)],
        plots=[Plot(kind="lines", title="Added latency", x_label="ms", y_label="% of pairs", series=curves)],
        figures={"pairs": options.pairs, **{name: latency_ms(values) for name, values in named.items()}},
    )


def _ms(seconds: list[float]) -> float:
    return 1e3 * statistics.median(seconds)


SCENARIO = Scenario(
    name="added-latency",
    about="One client: the server's time for an item less the same item's decode, preprocess and forward without one.",
    full=Options(),
    quick=Options(pairs=60),
    run=run,
)
