"""What `/openapi.json` says of the routes that read their requests and write their replies by themselves."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from spmd_encoder.frontends.http import schemas
from spmd_encoder.frontends.http.deadline import HEADER, HEADER_PATTERN
from spmd_encoder.frontends.http.form import FILE_NAMES
from spmd_encoder.frontends.http.render import JSON_TYPE
from spmd_encoder.frontends.http.render_tensors import MEDIA_TYPE as SAFETENSORS_TYPE
from spmd_encoder.frontends.http.render_tensors import RESPONSE_KEY

Replies = dict[int | str, dict[str, Any]]

_ERRORS = MappingProxyType(
    {
        400: "malformed request",
        403: "a URL that may not be fetched, or a body that a web page of another origin sent",
        404: "the model that is named is not served here, or no cache holds the result of a digest",
        408: "the body came too slowly",
        413: "a limit is exceeded; the message names it and its flag",
        415: "the media or the body is of a kind that is not read here",
        422: "the media cannot be decoded, or not be fetched",
        429: "too many items wait; see Retry-After",
        500: "a fault of the server",
        502: "the embeddings could not be delivered to where the request wanted them",
        503: "not ready, draining or out of memory for media; see Retry-After",
        504: "the request's time was over",
    }
)
_REPLY_HEADERS = {
    "x-spmd-replica": {
        "description": "the replicas that answered, as in 0,1, or none",
        "required": True,
        "schema": {"type": "string", "pattern": "^(none|[0-9]+(,[0-9]+)*)$"},
    },
    "server-timing": {
        "description": "milliseconds: total, and fetch, queue, preprocess, forward, transfer and delivery where there "
        "were any; of several items the longest of each",
        "schema": {"type": "string", "pattern": "^[a-z]+;dur=[0-9]+[.][0-9]+(, [a-z]+;dur=[0-9]+[.][0-9]+)*$"},
    },
}
_RETRY_AFTER = {"retry-after": {"required": True, "schema": {"type": "integer", "minimum": 1}}}
_REQUEST_ID = {"type": "string", "minLength": 1, "maxLength": 128, "pattern": "^[ -~]+$"}
_HEADERS = [
    {"name": "x-request-id", "in": "header", "schema": _REQUEST_ID},
    {
        "name": HEADER,
        "in": "header",
        "description": "seconds from the request's headers on; never more than the server's own limit",
        "schema": {"type": "string", "pattern": HEADER_PATTERN},
    },
]
_FILE = {"type": "string", "format": "binary"}


RAW_TYPE = "application/octet-stream"


def _inlined(model: type[BaseModel]) -> dict[str, Any]:
    """A request's schema without references: FastAPI collects only models of parameters that it reads itself."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, list):
            return [resolve(entry) for entry in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return resolve(definitions[node["$ref"].rpartition("/")[2]])
        return {key: resolve(value) for key, value in node.items()}

    resolved: dict[str, Any] = resolve(schema)
    return resolved


def _options() -> dict[str, Any]:
    """The schema of each option as text, which is never null."""
    options = _inlined(schemas.EncodeOptions)["properties"]
    return {
        name: {
            "description": schema["description"],
            **next(kind for kind in schema["anyOf"] if kind.get("type") != "null"),
        }
        for name, schema in options.items()
    }


def _query_parameter(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """An object is written as JSON text."""
    how = {"content": {JSON_TYPE: {"schema": schema}}} if "oneOf" in schema else {"schema": schema}
    return {"name": name, "in": "query", **how}


def _form() -> dict[str, Any]:
    files = {name: {"type": "array", "items": _FILE, "minItems": 1} for name in FILE_NAMES}
    return {
        "type": "object",
        "description": "every file part is one item, in order; its filename and declared type are ignored",
        "properties": files | _options(),
        "anyOf": [{"required": [name]} for name in FILE_NAMES],
        "additionalProperties": False,
    }


def _replies(error: Any, ok: dict[str, Any]) -> Replies:
    """The good reply and all errors, each with its headers."""
    replies: Replies = {200: {"headers": _REPLY_HEADERS, **ok}}
    for status, text in _ERRORS.items():
        headers = _REPLY_HEADERS | (_RETRY_AFTER if status in (429, 503) else {})
        replies[status] = {"model": error, "description": text, "headers": headers}
    return replies


_SAFETENSORS = {
    "schema": _FILE
    | {
        "description": 'tensors "0", "1", ... of the good items, by index; the key '
        f"`{RESPONSE_KEY}` of __metadata__ holds the JSON reply without `embedding`"
    }
}
ENCODE_REPLIES = _replies(schemas.ErrorReply | schemas.AllFailedReply, {"content": {SAFETENSORS_TYPE: _SAFETENSORS}})
ENCODE_REQUEST = {
    "parameters": [
        *(_query_parameter(name, schema) for name, schema in _options().items()),
        *_HEADERS,
    ],
    "requestBody": {
        "required": True,
        "content": {
            JSON_TYPE: {"schema": _inlined(schemas.EncodeBody)},
            "multipart/form-data": {
                "schema": _form(),
                "encoding": {"destination": {"contentType": JSON_TYPE}},
            },
            "image/*": {"schema": _FILE},
            "audio/*": {"schema": _FILE},
            "video/*": {"schema": _FILE},
            RAW_TYPE: {"schema": _FILE},
        },
    },
}
STAGED_GET = {
    "parameters": [
        {
            "name": "keep",
            "in": "query",
            "description": "1 leaves it here after it was read",
            "schema": {"type": "integer", "enum": [0, 1]},
        }
    ]
}
_NOT_STAGED: Replies = {
    400: {"model": schemas.ErrorReply, "description": "an unknown query parameter"},
    404: {"model": schemas.ErrorReply, "description": "unknown, fetched, released, or waited for too long"},
}
STAGED_GET_REPLIES: Replies = {
    200: {
        "description": "the rows",
        "content": {
            SAFETENSORS_TYPE: {"schema": _FILE | {"description": "one tensor, `embedding`"}},
            RAW_TYPE: {"schema": _FILE | {"description": "x-spmd-dtype and x-spmd-shape say what it is"}},
        },
    },
    **_NOT_STAGED,
}
STAGED_DELETE_REPLIES: Replies = {204: {"description": "released"}, **_NOT_STAGED}
EMBEDDINGS_REPLIES = _replies(schemas.ErrorReply, {})
EMBEDDINGS_REQUEST = {
    "parameters": _HEADERS,
    "requestBody": {"required": True, "content": {JSON_TYPE: {"schema": _inlined(schemas.EmbeddingsBody)}}},
}
LOOKUP_REPLIES: Replies = {
    status: reply for status, reply in EMBEDDINGS_REPLIES.items() if status not in (422, 429, 502)
}
LOOKUP_REQUEST = {
    "parameters": _HEADERS,
    "requestBody": {"required": True, "content": {JSON_TYPE: {"schema": _inlined(schemas.LookupBody)}}},
}
ANY_ROUTE: Replies = {
    status: {"model": schemas.ErrorReply, "description": text, "headers": _REPLY_HEADERS}
    for status, text in {
        405: "the path has no such method; see Allow",
        421: "the Host header has a name that this server may not be asked by",
        431: "the headers, or a body's trailers, are too large",
    }.items()
}
"""What every route may answer."""
NO_MODEL: Replies = {404: {"model": schemas.ErrorReply, "description": "another model is served"}}
UNAVAILABLE: Replies = {503: {"model": schemas.ErrorReply, "description": "not ready"}}
