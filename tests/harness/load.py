"""Steady load on a world from threads, every answer kept and checked."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from tests.harness.world import World, data_uri, off_by, vector


@dataclass(frozen=True)
class Answer:
    """`wrong`: why it is not the right answer, "" where it is."""

    began: float
    ended: float
    replica: str
    wrong: str


class Load:
    """`clients` closed-loop threads send `pictures` one by one and compare with `expected`."""

    def __init__(
        self, world: World, pictures: list[bytes], expected: list[np.ndarray[Any, Any]], clients: int = 6
    ) -> None:
        self._world = world
        self._pictures = pictures
        self._expected = expected
        self._stop = threading.Event()
        self.answers: list[Answer] = []
        self._threads = [threading.Thread(target=self._client, args=(i,), daemon=True) for i in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _client(self, index: int) -> None:
        turn = index
        with httpx.Client(base_url=self._world.url, timeout=60) as http:
            while not self._stop.is_set():
                which = turn % len(self._pictures)
                turn += 1
                began = time.monotonic()
                replica, wrong = "", ""
                try:
                    reply = http.post("/v1/encode", json={"items": [{"image": data_uri(self._pictures[which])}]})
                    replica = reply.headers.get("x-spmd-replica", "")
                    if reply.status_code != 200:
                        wrong = f"{reply.status_code} {reply.text[:200]}"
                    else:
                        got = vector(reply.json()["data"][0])
                        if (error := off_by(got, self._expected[which])) > 1e-5:
                            wrong = f"off by {error}"
                except (httpx.TransportError, AssertionError) as error:
                    wrong = repr(error)
                self.answers.append(Answer(began, time.monotonic(), replica, wrong))

    def wrong(self) -> list[str]:
        return [answer.wrong for answer in self.answers if answer.wrong]

    def worst_gap(self, replica: str, since: float, until: float) -> float:
        """Longest time between two answers of a replica."""
        ends = sorted(a.ended for a in list(self.answers) if a.replica == replica and since <= a.ended <= until)
        points = [since, *ends, until]
        return max(b - a for a, b in itertools.pairwise(points))
