"""Everything that is not I/O: what each call sends, when it tries again, what it makes of replies.

A flow is a generator. It yields steps (`Send`, `Pause`, `Load`, ...) and is sent their outcomes; what it returns is the
call's value. `sync` and `aio` are the two drivers that carry the steps out, and close it in the end.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar
from urllib.parse import quote

import msgspec

from spmd_encoder.client.arrays import ArrayKind
from spmd_encoder.client.destinations import Destination, StagedReceipt, ToReceiver, words
from spmd_encoder.client.errors import BadReplyError, ItemError, NoReplyError, NoReplyInTimeError
from spmd_encoder.client.gate import Gate, Turn
from spmd_encoder.client.lookup import Held, digest_of, held_of, lookup_body, lookups
from spmd_encoder.client.media import Modality
from spmd_encoder.client.reply import (
    JSON,
    SAFETENSORS,
    Reply,
    delivered_of,
    failed,
    has_outcomes,
    json_of,
    results_of,
    said,
    staged_of,
)
from spmd_encoder.client.results import Result
from spmd_encoder.client.retry import RETRYABLE_STATUSES, RetryPolicy, retry_after_s
from spmd_encoder.client.sources import Source

OutputKind = Literal["tokens", "pooled"]

log = logging.getLogger(__name__)

_POLL_S = 0.25
# The server is told to be done so much earlier, so that its answer, which says where the time went, still arrives.
_LAST_WORDS_S = 0.5
# A look at readiness that hangs must not use up the whole wait.
_LOOK_S = 5.0
# After these, some 3 s, a person who waits is told for what.
_QUIET_ATTEMPTS = 6


@dataclass(frozen=True, kw_only=True)
class Request:
    """`files`, each with its part's name, go as `multipart/form-data`, `content` as it is."""

    method: str
    path: str
    params: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes | None = None
    files: Sequence[tuple[str, bytes]] = ()


@dataclass(frozen=True)
class Send:
    """Its outcome is a `Reply` or `Broken`. `deadline` is in the clock's seconds."""

    request: Request
    deadline: float

    def timeout(self, left_s: float) -> dict[str, str]:
        """The header that tells the server how long its answer is wanted."""
        if self.request.method != "POST":
            return {}
        wanted_s = left_s - min(_LAST_WORDS_S, left_s / 10)
        return {"x-request-timeout": f"{min(max(0.001, wanted_s), 1e9 - 1):.3f}"}


@dataclass(frozen=True)
class Pause:
    seconds: float


@dataclass(frozen=True)
class Wait:
    """For a turn that was asked for. Its outcome: whether it was given before the deadline, in the clock's seconds."""

    turn: Turn
    deadline: float


@dataclass(frozen=True)
class Load:
    """Its outcome has each picture's bytes or its error. It blocks: not for an event loop."""

    sources: Sequence[Source]

    def run(self) -> list[bytes | ItemError]:
        return [_loaded(source) for source in self.sources]


@dataclass(frozen=True)
class Broken:
    """No whole reply came: the connection could not be made, or where `was_made` it broke.

    `is_late`: time was over. `is_final`: another attempt would end in the same way.
    """

    why: str
    was_made: bool = False
    is_late: bool = False
    is_final: bool = False


@dataclass(frozen=True)
class Digest:
    """Its outcome has each picture's digest, for which files are read one by one. It blocks: not for an event loop."""

    sources: Sequence[Source]

    def run(self) -> list[str]:
        """Raises `ItemError`, and ValueError for a URL."""
        return [digest_of(source) for source in self.sources]


T = TypeVar("T")
Step: TypeAlias = Send | Pause | Wait | Load | Digest
Flow: TypeAlias = Generator[Step, Any, T]
"""What is sent in is each step's outcome."""


@dataclass(frozen=True, kw_only=True)
class Flows:
    """`timeout_s` bounds one request with all its retries, `retries` if given their number; `clock` and `rng` are for
    tests."""

    model: str | None = None
    timeout_s: float = 300.0
    retries: int | None = None
    gate: Gate = field(default_factory=Gate)
    clock: Callable[[], float] = time.monotonic
    rng: random.Random = field(default_factory=random.Random)

    def encode(
        self,
        chunk: Sequence[Source],
        output: OutputKind | None,
        array_kind: ArrayKind,
        to: Destination | None = None,
    ) -> Flow[list[Result]]:
        """One request; a picture that cannot be read fails alone."""
        if not chunk[0].is_here:
            return (
                yield from self._outcomes(_json_request(chunk, self._options(chunk, output, to)), chunk, array_kind, to)
            )
        loaded: list[bytes | ItemError] = yield Load(chunk)
        results = {error.index: failed(error) for error in loaded if isinstance(error, ItemError)}
        files = [
            (source.reading.modality, data)
            for source, data in zip(chunk, loaded, strict=True)
            if isinstance(data, bytes)
        ]
        sent = [source for source in chunk if source.index not in results]
        if files:
            request = _file_request(files, {**self._options(sent, output, to), **chunk[0].reading.options})
            outcomes = yield from self._outcomes(request, sent, array_kind, to)
            results |= {result.index: result for result in outcomes}
        return [results[source.index] for source in chunk]

    def lookup(self, sources: Sequence[Source], output: OutputKind | None) -> Flow[list[Held]]:
        """As many requests as it takes."""
        options = self._options((), output, None)
        found: dict[int, Held] = {}
        for part in lookups(sources):
            digests: list[str] = yield Digest(part)
            content, headers = lookup_body(digests, part[0].reading, options), {"content-type": JSON}
            request = Request(method="POST", path="/v1/lookup", headers=headers, content=content)
            found |= {held.index: held for held in held_of((yield from self._exchange(request)), part, digests)}
        return [found[source.index] for source in sources]

    def fetch(self, staged: StagedReceipt | str, keep: bool, array_kind: ArrayKind) -> Flow[Result]:
        """Read first, then released, so that a reply that broke off can be asked for again."""
        staged_id = staged if isinstance(staged, str) else staged.staged_id
        path = f"/v1/staged/{quote(staged_id, safe='')}"
        headers = {"accept": SAFETENSORS}
        reply = yield from self._exchange(Request(method="GET", path=path, params={"keep": "1"}, headers=headers))
        result = staged_of(reply, staged_id, array_kind)
        if not keep:
            yield from self._exchange(Request(method="DELETE", path=path))
        return result

    def _options(self, sent: Sequence[Source], output: OutputKind | None, to: Destination | None) -> dict[str, object]:
        destination = None if to is None else words(to, [source.index for source in sent])
        options = {"model": self.model, "output": output, "destination": destination}
        return {name: value for name, value in options.items() if value is not None}

    def _outcomes(
        self, request: Request, sent: Sequence[Source], array_kind: ArrayKind, to: Destination | None
    ) -> Flow[list[Result]]:
        # Who wants no second attempt is to hear at once that the server is full.
        with contextlib.nullcontext() if self.retries == 0 else self.gate.turn() as turn:
            reply = yield from self._exchange(request, turn, once=isinstance(to, ToReceiver))
        return results_of(reply, sent, array_kind) if to is None else delivered_of(reply, sent)

    def models(self) -> Flow[list[dict[str, Any]]]:
        reply = yield from self._exchange(Request(method="GET", path="/v1/models"))
        listed = json_of(reply).get("data")
        if not isinstance(listed, list) or not all(isinstance(model, dict) for model in listed):
            raise BadReplyError("the reply has no list of models")
        return listed

    def info(self) -> Flow[dict[str, Any]]:
        reply = yield from self._exchange(Request(method="GET", path="/info"))
        return json_of(reply)

    def ready(self) -> Flow[bool]:
        """One look; a server that does not answer is not ready."""
        why = yield from self._look(self.clock() + _LOOK_S)
        return why is None

    def wait_ready(self, timeout_s: float) -> Flow[None]:
        deadline = self.clock() + timeout_s
        while True:
            why = yield from self._look(min(deadline, self.clock() + _LOOK_S))
            if why is None:
                return
            if self.clock() + _POLL_S >= deadline:
                raise NoReplyInTimeError(f"the server was not ready within {timeout_s:g} s; at last: {why}")
            yield Pause(_POLL_S)

    def _look(self, deadline: float) -> Flow[str | None]:
        """None where the server is ready, else why not."""
        outcome: Reply | Broken = yield Send(Request(method="GET", path="/health/ready"), deadline)
        if isinstance(outcome, Broken):
            return outcome.why
        return None if outcome.status == 200 else f"HTTP {outcome.status}"

    def _exchange(self, request: Request, turn: Turn | None = None, *, once: bool = False) -> Flow[Reply]:
        """The reply, after as many attempts as are allowed: to encode twice does no harm. With `once` a request that
        may have been carried out is not sent again. Each attempt waits for its `turn`, where it has one."""
        policy = RetryPolicy(self.retries, self.clock() + self.timeout_s, self.rng)
        outcome: Reply | Broken | None = None
        while True:
            if turn is not None and not turn.ask() and not (yield Wait(turn, policy.deadline)):
                if outcome is None:
                    why = f"its turn did not come; at last another request had: {turn.why}"
                    raise NoReplyInTimeError(f"{request.path} was not sent within {self.timeout_s:g} s: {why}")
                return self._given_up(request, policy, outcome)
            outcome = yield from self._attempt(request, turn, policy.deadline)
            match outcome:
                case Reply(status=504) if self.clock() + _LAST_WORDS_S >= policy.deadline:
                    why = said(outcome)
                    raise NoReplyInTimeError(f"no result of {request.path} within {self.timeout_s:g} s: {why}")
                case Reply(status=status) if status not in RETRYABLE_STATUSES:
                    return outcome
                case Reply() if once and has_outcomes(outcome):
                    return outcome
                case Reply(headers=headers):
                    pause_s = policy.pause_s(self.clock(), retry_after_s(headers))
                case Broken(is_late=True):
                    raise NoReplyInTimeError(f"no reply to {request.path} within {self.timeout_s:g} s ({outcome.why})")
                case Broken(is_final=True):
                    pause_s = None
                case Broken(was_made=True, why=why) if once:
                    raise NoReplyError(f"no reply to {request.path}, and it is not sent again: {why}; see what arrived")
                case Broken():
                    pause_s = policy.pause_s(self.clock(), None, broke=outcome.was_made)
                    if policy.used == _QUIET_ATTEMPTS and pause_s is not None:
                        left = policy.deadline - self.clock()
                        log.warning("no reply to %s yet (%s); trying for %.0f s more", request.path, outcome.why, left)
            if pause_s is None:
                return self._given_up(request, policy, outcome)
            yield Pause(pause_s)

    def _attempt(self, request: Request, turn: Turn | None, deadline: float) -> Flow[Reply | Broken]:
        outcome: Reply | Broken = yield Send(request, deadline)
        if turn is not None:
            match outcome:
                case Broken(why=why):
                    turn.end(why)
                case Reply(status=status):
                    turn.end(said(outcome) if status in RETRYABLE_STATUSES else None)
        return outcome

    def _given_up(self, request: Request, policy: RetryPolicy, outcome: Reply | Broken) -> Reply:
        """What the last attempt came to."""
        if isinstance(outcome, Reply):
            return outcome
        attempts = f"{policy.used + 1} attempt{'s' if policy.used else ''}"
        raise NoReplyError(f"no reply to {request.path} in {attempts}: {outcome.why}")


def _loaded(source: Source) -> bytes | ItemError:
    try:
        return source.load()
    except ItemError as error:
        return error


def _file_request(files: Sequence[tuple[Modality | None, bytes]], options: Mapping[str, object]) -> Request:
    """One file is the body itself, several are parts; never base64."""
    params = {
        name: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for name, value in options.items()
    }
    headers = {"accept": _accepted(options)}
    if len(files) > 1:
        parts = tuple((modality or "file", data) for modality, data in files)
        return Request(method="POST", path="/v1/encode", params=params, headers=headers, files=parts)
    ((modality, data),) = files
    headers["content-type"] = "application/octet-stream" if modality is None else f"{modality}/*"
    return Request(method="POST", path="/v1/encode", params=params, headers=headers, content=data)


def _json_request(chunk: Sequence[Source], options: Mapping[str, object]) -> Request:
    body = {"items": [_json_item(source) for source in chunk], **options}
    headers = {"accept": _accepted(options), "content-type": JSON}
    return Request(method="POST", path="/v1/encode", headers=headers, content=msgspec.json.encode(body))


def _json_item(source: Source) -> dict[str, object]:
    modality, options = source.reading.modality, source.reading.options
    if source.digest is None:
        return {modality or "image": source.url, **options}
    return {"digest": source.digest, **({} if modality is None else {"modality": modality}), **options}


def _accepted(options: Mapping[str, object]) -> str:
    """What was delivered elsewhere is told in JSON."""
    return JSON if "destination" in options else SAFETENSORS
