"""The shapes of JSON requests and replies, for `/docs` alone: `readers` and `embeddings` read, the renderers write."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from spmd_encoder.frontends.digests import DIGEST_PATTERN, MAX_DIGESTS
from spmd_encoder.frontends.http.deadline import MAX_DEADLINE_MS
from spmd_encoder.frontends.http.errors import STATUS
from spmd_encoder.frontends.sampling import DEFAULT_FPS, MAX_FPS, MAX_FRAMES, MIN_FPS

Picture = Annotated[
    str,
    Field(
        description="a data URI, or an http, https or file URL that the server fetches where it may",
        examples=["data:image/png;base64,iVBORw0KGgo...", "https://example.org/photo.jpg"],
        json_schema_extra={"format": "uri"},
    ),
]


Fps = Annotated[
    float,
    Field(ge=MIN_FPS, le=MAX_FPS, description="frames per second that a film is sampled at; default: the model's own"),
]
MaxFrames = Annotated[
    int, Field(ge=1, le=MAX_FRAMES, description="most frames of a film that are encoded, within the server's limit")
]
Frames = Annotated[
    list[Annotated[str, Field(json_schema_extra={"format": "uri"})]],
    Field(min_length=1, description="a film's frames as data URIs of pictures of one size"),
]


class Item(BaseModel):
    """A picture."""

    model_config = ConfigDict(extra="forbid")
    image: Picture


class SoundItem(BaseModel):
    """A sound."""

    model_config = ConfigDict(extra="forbid")
    audio: Picture


class FilmItem(BaseModel):
    """A film, sampled here."""

    model_config = ConfigDict(extra="forbid")
    video: Picture
    fps: Fps | None = None
    max_frames: MaxFrames | None = None


class FramesItem(BaseModel):
    """A film that the caller has sampled: all its frames are encoded."""

    model_config = ConfigDict(extra="forbid")
    video: Frames
    fps: Fps | None = Field(None, description=f"the rate that the frames were taken at; default: {DEFAULT_FPS:g}")


Digest = Annotated[str, Field(pattern=DIGEST_PATTERN, min_length=71, max_length=71)]
ModalityName = Literal["image", "audio", "video"]


class HeldItem(BaseModel):
    """What was encoded before, out of a cache: without its bytes, or with NOT_FOUND where no cache holds it."""

    model_config = ConfigDict(extra="forbid")
    digest: Digest
    modality: ModalityName | None = Field(None, description="default: image")


class HeldFilm(BaseModel):
    """The same for a film, sampled as it was then."""

    model_config = ConfigDict(extra="forbid")
    digest: Digest
    modality: Literal["video"]
    fps: Fps | None = None
    max_frames: MaxFrames | None = None


class Inline(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["inline"]


class ToFiles(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["file"]
    mm_hashes: list[Annotated[str, Field(pattern="^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}$")] | None] | None = Field(
        None, description="one per item; null, or none at all, stands for the hex of the item's digest"
    )


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")
    id: str = Field(min_length=1, max_length=128)
    index: int = Field(0, ge=0, lt=2**31)
    count: int = Field(1, ge=1, lt=2**31)


class ToReceiver(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["zmq"]
    endpoint: str = Field(description="of a PULL socket", examples=["tcp://10.0.0.5:41234"], pattern="^tcp://")
    part: Part | None = Field(None, description="comes back in every message")


class Staged(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["staged"]


Destination = Annotated[Inline | ToFiles | ToReceiver | Staged, Field(discriminator="type")]


class EncodeOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    output: Literal["tokens", "pooled"] | None = Field(
        None, description="default: pooled where the model has it, else tokens"
    )
    encoding_format: Literal["base64", "float"] | None = Field(
        None, description="of JSON replies; default: base64. Safetensors replies know no encoding"
    )
    request_id: str | None = Field(
        None, description="1 to 128 printable ASCII characters", min_length=1, max_length=128, pattern="^[ -~]+$"
    )
    model: str | None = Field(None, description="if given, must be the served model's name")
    destination: Destination | None = Field(
        None, description="where the embeddings go, by default into the reply; as text it is JSON"
    )
    fps: Fps | None = Field(None, description="of each film that does not say its own")
    max_frames: MaxFrames | None = Field(None, description="of each film that does not say its own")
    deadline_ms: Annotated[int, Field(ge=1, le=MAX_DEADLINE_MS)] | None = Field(
        None,
        description="how long the answer is wanted, from the request's headers on; never more than the server's limit",
    )


class EncodeBody(EncodeOptions):
    items: list[Item | SoundItem | FilmItem | FramesItem | HeldItem | HeldFilm] = Field(min_length=1)


class ImageUrl(BaseModel):
    model_config = ConfigDict(extra="forbid")
    url: Picture
    detail: str | None = Field(None, description="ignored")


class ImagePart(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["image_url"]
    image_url: ImageUrl


class VideoUrl(BaseModel):
    model_config = ConfigDict(extra="forbid")
    url: str = Field(description="as `video` of an item")


class VideoPart(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["video_url"]
    video_url: VideoUrl


class InputAudio(BaseModel):
    model_config = ConfigDict(extra="forbid")
    data: str = Field(description="base64 of the file")
    format: str | None = Field(None, description="ignored: the file shows it")


class AudioPart(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["input_audio"]
    input_audio: InputAudio


class WholeFilm(BaseModel):
    model_config = ConfigDict(extra="forbid")
    video: str = Field(description="a data URI or URL of a film")


EmbeddingsInput = Picture | Item | SoundItem | WholeFilm | ImagePart | AudioPart | VideoPart


class EmbeddingsBody(BaseModel):
    model_config = ConfigDict(extra="forbid")
    input: EmbeddingsInput | Annotated[list[EmbeddingsInput], Field(min_length=1)] = Field(
        description="one picture, sound or film, or several; as far as the model takes them"
    )
    model: str | None = Field(None, description="if given, must be the served model's name")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="default: float; base64 is of little-endian float32"
    )
    dimensions: int | None = Field(
        None, ge=1, description="if given, must be the model's own: vectors are not shortened"
    )
    user: str | None = Field(None, description="ignored")


class Error(BaseModel):
    message: str
    type: str
    param: str | None = Field(examples=["items[1]"])
    code: str = Field(description="stable", examples=[code.value for code in STATUS])


class ErrorReply(BaseModel):
    error: Error


class Delivered(BaseModel):
    """`mm_hash` and `path` of a file, `endpoint` of a receiver, or `staged_id`."""

    type: Literal["file", "zmq", "staged"]
    num_bytes: int
    mm_hash: str | None = None
    path: str | None = Field(None, description="relative to --embedding-dir")
    endpoint: str | None = None
    staged_id: str | None = Field(None, description="for GET /v1/staged/{staged_id}")


class EncodedItem(BaseModel):
    index: int
    status: Literal["ok"]
    modality: str
    shape: list[int] = Field(description="[tokens, dim] or [dim]")
    dtype: str
    grid: tuple[int, int, int] | None
    num_tokens: int
    digest: str = Field(description="sha256:<hex> of the item's bytes as sent")
    embedding: str | list[Any] | None = Field(
        None,
        description="base64 of little-endian C-order bytes in `dtype`, or nested lists of numbers; "
        "left out where it was delivered elsewhere",
    )
    delivered: Delivered | None = Field(None, description="where it is, for a destination that is not inline")
    details: dict[str, int | float | list[float]] | None = Field(
        None, description="what else a language model must know of a sound or film, as transformers' processors name it"
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


class Vector(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Usage(BaseModel):
    prompt_tokens: int = Field(description="encoder tokens")
    total_tokens: int


class EmbeddingsReply(BaseModel):
    object: Literal["list"]
    data: list[Vector] = Field(description="in request order")
    model: str
    usage: Usage


class LookupBody(BaseModel):
    model_config = ConfigDict(extra="forbid")
    digests: list[Digest] = Field(min_length=1, max_length=MAX_DIGESTS, description="of the items' bytes as sent")
    output: Literal["tokens", "pooled"] | None = Field(None, description="default: as /v1/encode's")
    modality: ModalityName = Field("image", description="of all of them")
    fps: Fps | None = Field(None, description="that films were sampled at")
    max_frames: MaxFrames | None = Field(None, description="that films were sampled with")
    model: str | None = Field(None, description="if given, must be the served model's name")


class LookedUp(BaseModel):
    index: int
    digest: str
    held: bool
    replicas: list[int] = Field(description="that hold the result")
    shape: list[int] | None
    dtype: str | None
    num_tokens: int | None
    grid: tuple[int, int, int] | None


class LookupReply(BaseModel):
    model: str
    output: str
    data: list[LookedUp] = Field(description="in request order")


class Live(BaseModel):
    live: Literal[True]


class Ready(BaseModel):
    ready: bool
    replicas_ready: int
    replicas: int


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="when this server started, in Unix seconds")
    owned_by: str = "spmd_encoder"
    model_type: str
    family: str = Field(description="fallback for a model type without a family of its own")
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
