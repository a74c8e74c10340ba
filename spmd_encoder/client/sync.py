"""`Client`: the blocking driver, with threads for many pictures."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future
from typing import Any, Self, TypeVar

import httpx
from numpy.typing import NDArray

from spmd_encoder.client.arrays import ArrayKind, check_kind
from spmd_encoder.client.base import ClientBase
from spmd_encoder.client.chunks import chunked
from spmd_encoder.client.destinations import Destination, StagedReceipt, check_hashes
from spmd_encoder.client.flows import Broken, Digest, Flow, Load, OutputKind, Pause, Send, Wait
from spmd_encoder.client.lanes import Lanes
from spmd_encoder.client.lookup import Held
from spmd_encoder.client.reply import Reply
from spmd_encoder.client.results import Result, all_good, stack
from spmd_encoder.client.sources import MediaLike, reject_single, source_of
from spmd_encoder.client.transport import Collector, broken, request_arguments

T = TypeVar("T")


class Client(ClientBase):
    """The blocking client; threads may share it.

    It survives a fork: every process makes connections of its own at its first call. Close it, or use it in `with`.
    """

    def _open(self) -> None:
        transport = Lanes(self._arguments["verify"])
        self._http, self._pid = httpx.Client(**self._arguments, transport=transport), os.getpid()

    def encode(
        self,
        images: Iterable[MediaLike],
        *,
        output: OutputKind | None = None,
        as_: ArrayKind = "numpy",
        destination: Destination | None = None,
        raise_on_error: bool = True,
    ) -> list[Result]:
        """One `Result` per picture, in order; `result.embedding` is `[num_tokens, dim]` or `[dim]`.

        `output`: `"tokens"` or `"pooled"`, by default the model's. `destination`: where the embeddings go instead;
        each `result.delivered` then says where its embedding is. Where pictures fail, the others are still
        encoded; then `ItemsFailedError` is raised, which has all results, or with `raise_on_error=False` the
        results are returned, the bad ones with `error`. Raises another `EncoderClientError` where a request as a
        whole fails.
        """
        reject_single(images)
        results = list(self.encode_iter(images, output=output, as_=as_, destination=destination))
        return all_good(results) if raise_on_error else results

    def encode_iter(
        self,
        images: Iterable[MediaLike],
        *,
        output: OutputKind | None = None,
        as_: ArrayKind = "numpy",
        destination: Destination | None = None,
    ) -> Generator[Result, None, None]:
        """Results in order, as they come; a bad picture's has `error`.

        `images` may be a generator of any length: it is read, and files are opened, no further ahead than
        `concurrency` requests. Requests that run when the iteration is left early end by themselves, and keep no
        process from ending. Raises `EncoderClientError` where a request as a whole fails.
        """
        reject_single(images)
        check_hashes(destination, images)
        check_kind(as_)
        return self._results(images, output, as_, destination)

    def embed(self, images: Iterable[MediaLike]) -> NDArray[Any]:
        """Pooled vectors as one array `[n, dim]` in the model's dtype (bfloat16 as float32).

        Raises as `encode` does. For no picture it is `[0, 0]`, since the server was not asked.
        """
        return stack(self.encode(images, output="pooled"))

    def lookup(self, images: Iterable[MediaLike], *, output: OutputKind | None = None) -> list[Held]:
        """One `Held` per picture or digest, in order: whether the server holds its result. Only digests are sent.

        A picture that is held may be encoded by its digest alone (`encode([held.digest])`); where it was dropped
        meanwhile that fails with NOT_FOUND, and the picture itself is to be sent. Raises `ItemError` for a file that
        cannot be read, ValueError for a URL, `EncoderClientError` where the request fails.
        """
        reject_single(images)
        sources = [source_of(image, index) for index, image in enumerate(images)]
        return self._run(self._flows.lookup(sources, output))

    def fetch(self, staged: StagedReceipt | str, *, keep: bool = False, as_: ArrayKind = "numpy") -> Result:
        """What an earlier call has staged: by the `delivered` of its result, or by the `staged_id` that this has.

        The server forgets it then, unless `keep`. Raises `RefusedError` NOT_FOUND where nothing is there any more.
        """
        check_kind(as_)
        return self._run(self._flows.fetch(staged, keep, as_))

    def models(self) -> list[dict[str, Any]]:
        """`/v1/models`: name, dtype, outputs, dimension."""
        return self._run(self._flows.models())

    def info(self) -> dict[str, Any]:
        """`/info`: version, layout, replicas, processes, configuration."""
        return self._run(self._flows.info())

    def ready(self) -> bool:
        """Whether the server takes requests now; False too where it does not answer."""
        return self._run(self._flows.ready())

    def wait_ready(self, timeout_s: float = 600.0) -> None:
        """Return when the server takes requests. Raises `NoReplyInTimeError`."""
        self._run(self._flows.wait_ready(timeout_s))

    def close(self) -> None:
        if self._pid == os.getpid():
            self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _results(
        self, images: Iterable[MediaLike], output: OutputKind | None, as_: ArrayKind, to: Destination | None
    ) -> Generator[Result, None, None]:
        window: deque[Future[list[Result]]] = deque()
        for chunk in chunked(images, self._limits):
            if len(window) == self._concurrency:
                yield from window.popleft().result()
            window.append(self._begin(self._flows.encode(chunk, output, as_, to)))
        while window:
            yield from window.popleft().result()

    def _begin(self, flow: Flow[T]) -> Future[T]:
        """In a thread of its own that does not keep the process from ending, as an executor's would."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(self._run(flow))
            except BaseException as error:  # handed to whoever asks for the result
                future.set_exception(error)

        threading.Thread(target=run, name="encode", daemon=True).start()
        return future

    def _run(self, flow: Flow[T]) -> T:
        outcome: object = None
        with contextlib.closing(flow):
            while True:
                try:
                    step = flow.send(outcome)
                except StopIteration as end:
                    result: T = end.value
                    return result
                match step:
                    case Send():
                        outcome = self._send(step)
                    case Wait():
                        outcome = self._wait(step)
                    case Pause():
                        outcome = None
                        time.sleep(step.seconds)
                    case Load() | Digest():
                        outcome = step.run()

    def _wait(self, step: Wait) -> bool:
        given = threading.Event()
        step.turn.wake = given.set
        if not step.turn.is_given:
            given.wait(max(0.0, step.deadline - time.monotonic()))
        return step.turn.is_given

    def _send(self, step: Send) -> Reply | Broken:
        try:
            with self._connections().stream(**request_arguments(step)) as response:
                body = Collector(response, step.deadline)
                for piece in response.iter_raw():
                    body.add(piece)
                return body.reply()
        except (httpx.TransportError, TimeoutError) as error:
            return broken(error, step)

    def _connections(self) -> httpx.Client:
        if self._pid != os.getpid():
            # A parent's connections are left as they are: two processes that read one socket get each other's replies.
            self._open()
        return self._http
