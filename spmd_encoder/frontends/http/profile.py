"""`/start_profile` and `/stop_profile` as SGLang has them: options in JSON, a text with a line per rank back."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import PurePath
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from spmd_encoder.api.profiling import ProfileActivity, ProfileOptions, ProfileOutcome
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.http.backend import Backend
from spmd_encoder.frontends.http.body import body_chunks, read_body
from spmd_encoder.frontends.http.content import BodyKind, body_kind, check_same_origin
from spmd_encoder.frontends.http.errors import HttpError
from spmd_encoder.frontends.sglang.refusal import STATUS, RefusalError

_MAX_BODY_BYTES = 64 * 1024
_MAX_DIR_CHARS = 1024
_PREFIX = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")


class _Body(msgspec.Struct):
    """SGLang's options. Its others say which stages of a language model to record, and are ignored."""

    output_dir: str | None = None
    num_steps: int | None = None
    activities: list[str] | None = None
    with_stack: bool | None = None
    record_shapes: bool | None = None
    profile_prefix: str | None = None


def profile_routes(backend: Backend) -> APIRouter:
    router = APIRouter(include_in_schema=False)

    async def start(request: Request) -> Response:
        try:
            options = read_options(await _read(request, backend))
            outcomes = await backend.service.profile_start(options)
        except (EncoderError, RefusalError, HttpError) as error:
            return _refused(error)
        return _reply("Start profiling", options.name, outcomes)

    async def stop(request: Request) -> Response:
        try:
            check_same_origin(request)
            outcomes = await backend.service.profile_stop()
        except (EncoderError, HttpError) as error:
            return _refused(error)
        return _reply("Stop profiling", "", outcomes)

    for path, handle in {"/start_profile": start, "/stop_profile": stop}.items():
        router.add_api_route(path, handle, methods=["GET", "POST"])
    return router


async def _read(request: Request, backend: Backend) -> bytearray:
    # Also without a body, which any page could have a browser ask for.
    check_same_origin(request)
    with ExitStack() as held:
        chunks = body_chunks(request, backend.account(held), max_bytes=_MAX_BODY_BYTES, timeouts=backend.timeouts)
        try:
            body = await read_body(chunks)
        except EncoderError as error:
            if error.code is not ErrorCode.TOO_LARGE:
                raise
            # That limit is no flag's.
            raise RefusalError(413, f"the body has more than {_MAX_BODY_BYTES} bytes") from None
    if body:
        body_kind(request, BodyKind.JSON)
    return body


def read_options(body: bytes | bytearray) -> ProfileOptions:
    """The options in a body, which may be empty. Raises `RefusalError`."""
    try:
        fields: Any = msgspec.json.decode(body, type=_Body | None) if body else None
    except (msgspec.DecodeError, RecursionError) as error:
        raise RefusalError(422, f"the body is not an object of profiling options: {error}") from None
    fields = fields or _Body()
    prefix, folder = fields.profile_prefix, fields.output_dir
    if prefix and not _PREFIX.fullmatch(prefix):
        raise RefusalError(400, "profile_prefix is up to 64 letters, digits and . _ -, and begins with no . or -")
    if folder is not None and not (0 < len(folder) <= _MAX_DIR_CHARS and folder.isprintable()):
        raise RefusalError(400, f"output_dir is 1 to {_MAX_DIR_CHARS} printable characters")
    # Two profiles never share a file, whatever their prefix; and nobody can guess it beforehand.
    profile_id = f"{int(time.time())}-{secrets.token_hex(4)}"
    options = ProfileOptions(
        name=f"{prefix}-{profile_id}" if prefix else profile_id,
        output_dir=folder,
        num_steps=fields.num_steps,
        activities=_activities(fields.activities),
        with_stack=bool(fields.with_stack),
        record_shapes=bool(fields.record_shapes),
    )
    if options.num_steps is not None and not 0 < options.num_steps <= options.limit():
        with_stack = " with stacks" if options.with_stack else ""
        raise RefusalError(400, f"num_steps counts forwards; it is 1 to {options.limit()}{with_stack}")
    return options


def _activities(given: list[str] | None) -> tuple[ProfileActivity, ...]:
    if given is None:
        return ()
    try:
        activities = tuple(dict.fromkeys(ProfileActivity(name.upper()) for name in given))
    except ValueError:
        activities = ()
    if not activities:
        raise RefusalError(400, f"activities is a list of some of {', '.join(ProfileActivity)}, or left out")
    return activities


def _reply(what: str, profile_id: str, outcomes: Sequence[ProfileOutcome]) -> Response:
    """The highest status of any rank, as SGLang's, and a line for each."""
    failed = [STATUS[outcome.code] for outcome in outcomes if outcome.code is not None]
    folders = dict.fromkeys(str(PurePath(outcome.path).parent) for outcome in outcomes if outcome.path)
    head = what if not failed else f"{what} failed on {len(failed)} of {len(outcomes)} ranks"
    if folders:
        head += f" output_dir={','.join(folders)}"
    if profile_id:
        head += f" profile_id={profile_id}"
    return PlainTextResponse("\n".join([head, *map(_line, outcomes), ""]), max(failed, default=200))


def _line(outcome: ProfileOutcome) -> str:
    said = outcome.path if outcome.code is None else f"failed: {outcome.message}"
    return f"rank {outcome.rank} (dp {outcome.dp_rank}, tp {outcome.tp_rank}): {said}"


def _refused(error: EncoderError | RefusalError | HttpError) -> Response:
    if isinstance(error, EncoderError):
        error = RefusalError.of(error)
    headers = {"connection": "close"} if isinstance(error, HttpError) and error.close else None
    return PlainTextResponse(f"{error.message}\n", error.status, headers)
