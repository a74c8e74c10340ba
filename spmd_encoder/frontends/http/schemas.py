"""The shapes of requests and replies for `/docs`. Requests are read by `parse`, replies written by `render`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from spmd_encoder.frontends.http.errors import STATUS


class Item(BaseModel):
    model_config = ConfigDict(extra="forbid")
    image: str = Field(description="a data URI", examples=["data:image/png;base64,iVBORw0KGgo..."])


class EncodeBody(BaseModel):
    model_config = ConfigDict(extra="forbid")
    items: list[Item] = Field(min_length=1)
    output: Literal["tokens", "pooled"] | None = Field(
        None, description="default: pooled where the model has it, else tokens"
    )
    encoding_format: Literal["base64", "float"] = "base64"
    request_id: str | None = Field(None, description="1 to 128 printable ASCII characters", max_length=128)
    model: str | None = Field(None, description="if given, must be the served model's name")


class Error(BaseModel):
    message: str
    type: str
    param: str | None = Field(examples=["items[1]"])
    code: str = Field(description="stable", examples=[code.value for code in STATUS])


class ErrorReply(BaseModel):
    error: Error


class EncodedItem(BaseModel):
    index: int
    status: Literal["ok"]
    modality: str
    shape: list[int] = Field(description="[tokens, dim] or [dim]")
    dtype: str
    grid: tuple[int, int, int] | None
    num_tokens: int
    digest: str = Field(description="sha256:<hex> of the item's bytes as sent")
    embedding: str | list[Any] = Field(
        description="base64 of little-endian C-order bytes in `dtype`, or nested lists of numbers"
    )


class FailedItem(BaseModel):
    index: int
    status: Literal["error"]
    error: Error


class EncodeReply(BaseModel):
    id: str
    model: str
    data: list[EncodedItem | FailedItem] = Field(description="in request order")


class AllFailedReply(EncodeReply):
    error: Error = Field(description="the first item's, whose status the reply has")


class Ready(BaseModel):
    ready: bool
    replicas_ready: int
    replicas: int


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="when this server started, in Unix seconds")
    owned_by: str = "spmd_encoder"
    random_weights: bool
    dtype: str
    outputs: list[str]
    default_output: str
    embedding_dim: int = Field(description="of the default output")
    embedding_dims: dict[str, int] = Field(description="of each output")
    modalities: list[str]
    revision: str | None


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


_MEANING = {
    400: "malformed request",
    404: "the model that is named is not served here",
    408: "the body came too slowly",
    413: "a limit is exceeded; the message names it and its flag",
    415: "the media or the body is of a kind that is not read here",
    422: "the media cannot be decoded",
    429: "too many items wait; see Retry-After",
    500: "a fault of the server",
    503: "not ready, draining or out of memory for media; see Retry-After",
    504: "the request's time was over",
}
ENCODE_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply | AllFailedReply, "description": text} for status, text in _MEANING.items()
}
UNAVAILABLE: dict[int | str, dict[str, Any]] = {503: {"model": ErrorReply, "description": "not ready"}}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI request body of a route that reads its body by itself."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    # Inlined, because FastAPI collects only the models of parameters that it reads.
    definitions = schema.pop("$defs", {})
    schema["properties"]["items"]["items"] = definitions["Item"]
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
