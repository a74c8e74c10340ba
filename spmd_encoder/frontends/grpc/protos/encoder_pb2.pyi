from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Modality(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODALITY_UNSPECIFIED: _ClassVar[Modality]
    MODALITY_IMAGE: _ClassVar[Modality]
    MODALITY_AUDIO: _ClassVar[Modality]
    MODALITY_VIDEO: _ClassVar[Modality]

class Output(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTPUT_UNSPECIFIED: _ClassVar[Output]
    OUTPUT_POOLED: _ClassVar[Output]
    OUTPUT_TOKENS: _ClassVar[Output]
MODALITY_UNSPECIFIED: Modality
MODALITY_IMAGE: Modality
MODALITY_AUDIO: Modality
MODALITY_VIDEO: Modality
OUTPUT_UNSPECIFIED: Output
OUTPUT_POOLED: Output
OUTPUT_TOKENS: Output

class Item(_message.Message):
    __slots__ = ("modality", "data", "url", "digest", "frames", "fps", "max_frames")
    MODALITY_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    FPS_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAMES_FIELD_NUMBER: _ClassVar[int]
    modality: Modality
    data: bytes
    url: str
    digest: str
    frames: Frames
    fps: float
    max_frames: int
    def __init__(self, modality: _Optional[_Union[Modality, str]] = ..., data: _Optional[bytes] = ..., url: _Optional[str] = ..., digest: _Optional[str] = ..., frames: _Optional[_Union[Frames, _Mapping]] = ..., fps: _Optional[float] = ..., max_frames: _Optional[int] = ...) -> None: ...

class Frames(_message.Message):
    __slots__ = ("files",)
    FILES_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, files: _Optional[_Iterable[bytes]] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("digests", "output", "model", "modality", "fps", "max_frames")
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODALITY_FIELD_NUMBER: _ClassVar[int]
    FPS_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAMES_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[str]
    output: Output
    model: str
    modality: Modality
    fps: float
    max_frames: int
    def __init__(self, digests: _Optional[_Iterable[str]] = ..., output: _Optional[_Union[Output, str]] = ..., model: _Optional[str] = ..., modality: _Optional[_Union[Modality, str]] = ..., fps: _Optional[float] = ..., max_frames: _Optional[int] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("model", "output", "results")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    model: str
    output: Output
    results: _containers.RepeatedCompositeFieldContainer[LookedUp]
    def __init__(self, model: _Optional[str] = ..., output: _Optional[_Union[Output, str]] = ..., results: _Optional[_Iterable[_Union[LookedUp, _Mapping]]] = ...) -> None: ...

class LookedUp(_message.Message):
    __slots__ = ("digest", "held", "replicas", "shape", "dtype", "num_tokens", "grid")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRID_FIELD_NUMBER: _ClassVar[int]
    digest: str
    held: bool
    replicas: _containers.RepeatedScalarFieldContainer[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    num_tokens: int
    grid: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, digest: _Optional[str] = ..., held: _Optional[bool] = ..., replicas: _Optional[_Iterable[int]] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., num_tokens: _Optional[int] = ..., grid: _Optional[_Iterable[int]] = ...) -> None: ...

class EncodeRequest(_message.Message):
    __slots__ = ("items", "output", "request_id", "model", "destination")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Item]
    output: Output
    request_id: str
    model: str
    destination: Destination
    def __init__(self, items: _Optional[_Iterable[_Union[Item, _Mapping]]] = ..., output: _Optional[_Union[Output, str]] = ..., request_id: _Optional[str] = ..., model: _Optional[str] = ..., destination: _Optional[_Union[Destination, _Mapping]] = ...) -> None: ...

class Destination(_message.Message):
    __slots__ = ("inline", "file", "zmq", "staged")
    INLINE_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    ZMQ_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    inline: Inline
    file: ToFiles
    zmq: ToReceiver
    staged: Staged
    def __init__(self, inline: _Optional[_Union[Inline, _Mapping]] = ..., file: _Optional[_Union[ToFiles, _Mapping]] = ..., zmq: _Optional[_Union[ToReceiver, _Mapping]] = ..., staged: _Optional[_Union[Staged, _Mapping]] = ...) -> None: ...

class Inline(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ToFiles(_message.Message):
    __slots__ = ("mm_hashes",)
    MM_HASHES_FIELD_NUMBER: _ClassVar[int]
    mm_hashes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, mm_hashes: _Optional[_Iterable[str]] = ...) -> None: ...

class ToReceiver(_message.Message):
    __slots__ = ("endpoint", "part")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    part: Part
    def __init__(self, endpoint: _Optional[str] = ..., part: _Optional[_Union[Part, _Mapping]] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("id", "index", "count")
    ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    id: str
    index: int
    count: int
    def __init__(self, id: _Optional[str] = ..., index: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class Staged(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EncodeResponse(_message.Message):
    __slots__ = ("request_id", "model", "results")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    results: _containers.RepeatedCompositeFieldContainer[ItemResult]
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., results: _Optional[_Iterable[_Union[ItemResult, _Mapping]]] = ...) -> None: ...

class ItemResult(_message.Message):
    __slots__ = ("embedding", "error")
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    embedding: Embedding
    error: Error
    def __init__(self, embedding: _Optional[_Union[Embedding, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class Embedding(_message.Message):
    __slots__ = ("modality", "output", "shape", "dtype", "data", "grid", "num_tokens", "digest", "cached", "delivered", "details")
    MODALITY_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    GRID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    modality: Modality
    output: Output
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    data: bytes
    grid: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: int
    digest: str
    cached: bool
    delivered: Delivered
    details: _struct_pb2.Struct
    def __init__(self, modality: _Optional[_Union[Modality, str]] = ..., output: _Optional[_Union[Output, str]] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., data: _Optional[bytes] = ..., grid: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[int] = ..., digest: _Optional[str] = ..., cached: _Optional[bool] = ..., delivered: _Optional[_Union[Delivered, _Mapping]] = ..., details: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class Delivered(_message.Message):
    __slots__ = ("num_bytes", "file", "zmq", "staged")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    ZMQ_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    file: FileReceipt
    zmq: ReceiverReceipt
    staged: StagedReceipt
    def __init__(self, num_bytes: _Optional[int] = ..., file: _Optional[_Union[FileReceipt, _Mapping]] = ..., zmq: _Optional[_Union[ReceiverReceipt, _Mapping]] = ..., staged: _Optional[_Union[StagedReceipt, _Mapping]] = ...) -> None: ...

class FileReceipt(_message.Message):
    __slots__ = ("mm_hash", "path")
    MM_HASH_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    mm_hash: str
    path: str
    def __init__(self, mm_hash: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class ReceiverReceipt(_message.Message):
    __slots__ = ("endpoint",)
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    def __init__(self, endpoint: _Optional[str] = ...) -> None: ...

class StagedReceipt(_message.Message):
    __slots__ = ("staged_id",)
    STAGED_ID_FIELD_NUMBER: _ClassVar[int]
    staged_id: str
    def __init__(self, staged_id: _Optional[str] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "param")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    param: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., param: _Optional[str] = ...) -> None: ...

class ModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("id", "dtype", "outputs", "default_output", "embedding_dims", "modalities", "random_weights", "revision")
    class EmbeddingDimsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_DIMS_FIELD_NUMBER: _ClassVar[int]
    MODALITIES_FIELD_NUMBER: _ClassVar[int]
    RANDOM_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    id: str
    dtype: str
    outputs: _containers.RepeatedScalarFieldContainer[Output]
    default_output: Output
    embedding_dims: _containers.ScalarMap[str, int]
    modalities: _containers.RepeatedScalarFieldContainer[Modality]
    random_weights: bool
    revision: str
    def __init__(self, id: _Optional[str] = ..., dtype: _Optional[str] = ..., outputs: _Optional[_Iterable[_Union[Output, str]]] = ..., default_output: _Optional[_Union[Output, str]] = ..., embedding_dims: _Optional[_Mapping[str, int]] = ..., modalities: _Optional[_Iterable[_Union[Modality, str]]] = ..., random_weights: _Optional[bool] = ..., revision: _Optional[str] = ...) -> None: ...

class InfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InfoResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: _struct_pb2.Struct
    def __init__(self, info: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...
