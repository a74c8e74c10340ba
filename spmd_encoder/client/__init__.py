"""The client: `Client` and `AsyncClient`. It imports nothing of the server, and torch only where it is asked for."""

from spmd_encoder.client.aio import AsyncClient
from spmd_encoder.client.chunks import ChunkLimits
from spmd_encoder.client.destinations import (
    Destination,
    FileReceipt,
    PushReceipt,
    Receipt,
    Staged,
    StagedReceipt,
    ToFiles,
    ToReceiver,
)
from spmd_encoder.client.errors import (
    BadReplyError,
    BusyError,
    EncoderClientError,
    ItemError,
    ItemsFailedError,
    NoReplyError,
    NoReplyInTimeError,
    RefusedError,
)
from spmd_encoder.client.lookup import Held
from spmd_encoder.client.media import Audio, Video
from spmd_encoder.client.reply import read_embedding_file
from spmd_encoder.client.results import Result
from spmd_encoder.client.sync import Client

__all__ = [
    "AsyncClient",
    "Audio",
    "BadReplyError",
    "BusyError",
    "ChunkLimits",
    "Client",
    "Destination",
    "EncoderClientError",
    "FileReceipt",
    "Held",
    "ItemError",
    "ItemsFailedError",
    "NoReplyError",
    "NoReplyInTimeError",
    "PushReceipt",
    "Receipt",
    "RefusedError",
    "Result",
    "Staged",
    "StagedReceipt",
    "ToFiles",
    "ToReceiver",
    "Video",
    "read_embedding_file",
]
