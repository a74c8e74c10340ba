"""A process that decodes and preprocesses items for a replica's leader, one after another.

It holds no weights and no accelerator, and it is expendable: the kernel is asked to take it first when memory runs out.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import cast

import msgspec
import setproctitle
import torch

from spmd_encoder.api.types import Modality
from spmd_encoder.config import Config
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media import audio, image, video
from spmd_encoder.media.base import FilmInfo, FilmLimits
from spmd_encoder.media.frames import is_packed
from spmd_encoder.media.memory import default_memory_bytes, is_out_of_memory, limit_memory, out_of_memory
from spmd_encoder.media.pixels import Background
from spmd_encoder.models.base import Features, Preprocessor
from spmd_encoder.models.loading import load_preprocessor, modalities_of
from spmd_encoder.observability.logging import Origin, set_up_logging
from spmd_encoder.runtime.features import tensor_bytes
from spmd_encoder.wire.messages import PreparerSpec
from spmd_encoder.wire.preparing import Prepare, PreparedItem, PrepareFailed, PreparerReady
from spmd_encoder.wire.shared_memory import SharedMemory
from spmd_encoder.wire.streams import FrameSocket, send_with_descriptor
from spmd_encoder.worker.allocator import give_back_freed_memory, keep_freed_memory
from spmd_encoder.worker.encoder import specs_of
from spmd_encoder.worker.faults import Faults

log = logging.getLogger(__name__)
_OOM_SCORE = "800"
_IDLE_S = 2.0
_KEPT_BYTES = 64 * 2**20


def run_preparer(spec: PreparerSpec, sock: socket.socket) -> int:
    """Until the leader hangs up, or not even a message finds memory; returns the exit code."""
    config = Config.from_json(spec.config)
    origin = Origin(spec.rank, spec.dp_rank, spec.tp_rank, "preparer", spec.epoch)
    setproctitle.setproctitle(origin.title())
    if config.observability.log_level != "debug":
        _silence_libraries()
    set_up_logging(origin, config.observability.log_level, config.observability.log_format)
    image.set_pixel_limit(config.server.max_image_pixels)
    with contextlib.suppress(OSError):  # no Linux
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    torch.set_num_threads(1)
    preparer = Preparer(load_preprocessor(Path(spec.folder)), Faults.parse(config.faults), config)
    most = config.limits.preparer_memory_bytes
    limit_memory(default_memory_bytes(config, modalities_of(Path(spec.folder))) if most is None else most)
    keep_freed_memory(_KEPT_BYTES)
    wire: FrameSocket[Prepare] = FrameSocket(sock, Prepare)
    shared = SharedMemory.create()
    try:
        send_with_descriptor(sock, PreparerReady(), None if shared is None else shared.descriptor)
        while True:
            if not wire.wait(_IDLE_S):
                give_back_freed_memory()
            preparer.answer(wire, shared)
    except ConnectionError:
        return 0
    except MemoryError:  # outside an item: where the next message begins is not known
        gc.collect()
        log.error(
            "no memory is left for a message (--preparer-memory-bytes): this process ends, another one takes its place"
        )
        return 1


def _silence_libraries() -> None:
    """What decoders say of a stranger's picture is no news, and libtiff's words would have no log line's beginning.

    C libraries write to descriptor 2, which leads nowhere from now on; Python's stderr goes on with a copy of it.
    """
    logging.getLogger("py.warnings").setLevel(logging.ERROR)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2, inheritable=False)


class Preparer:
    """Answers one request after another."""

    def __init__(self, preprocessor: Preprocessor, faults: Faults, config: Config) -> None:
        self._preprocessor = preprocessor
        self._faults = faults
        self._max_pixels = config.server.max_image_pixels
        self._background = cast(Background, config.media.alpha)
        self._max_seconds = config.media.max_audio_seconds
        self._film_limits = FilmLimits(
            max_pixels=config.server.max_image_pixels,
            max_seconds=config.media.max_video_seconds,
            max_chosen=config.media.max_video_frames,
            max_walked=config.media.max_video_frames_decoded,
            max_bytes=config.media.max_video_bytes_decoded,
        )

    def answer(self, wire: FrameSocket[Prepare], shared: SharedMemory | None = None) -> None:
        """The next request. `shared` is the memory that its sender sees too."""
        request = wire.receive()
        buffers: list[memoryview] = []
        reply: PreparedItem | PrepareFailed
        try:
            reply, buffers = self._prepared(wire, request, shared)
        except Exception as error:
            reply = _failed(error, request.digest)
        if isinstance(reply, PrepareFailed):
            # Tracebacks and the frames of decoders may hold each other, and a whole file with them.
            gc.collect()
        elif request.may_share and shared is not None and shared.put(buffers):
            reply, buffers = msgspec.structs.replace(reply, is_shared=True), []
        wire.send(reply, buffers)

    def _prepared(
        self, wire: FrameSocket[Prepare], request: Prepare, shared: SharedMemory | None
    ) -> tuple[PreparedItem, list[memoryview]]:
        size = request.media_bytes
        media = shared.take([size])[0] if shared is not None and request.is_shared else wire.receive_frame(size)
        self._faults.before_preprocess(request.digest)
        return _reply(self._features(request, media))

    def _features(self, request: Prepare, media: bytearray) -> Features:
        preprocessor = self._preprocessor
        match request.modality:
            case Modality.IMAGE:
                return preprocessor.preprocess(image.decode(media, self._max_pixels, self._background))
            case Modality.AUDIO:
                return preprocessor.preprocess_audio(audio.decode(media, preprocessor.sampling_rate, self._max_seconds))
            case Modality.VIDEO:
                choose = partial(preprocessor.choose_frames, options=request.options)
                film = video.decode(
                    media, _all_frames if is_packed(media) else choose, self._film_limits, self._background
                )
                return preprocessor.preprocess_video(film)


def _all_frames(info: FilmInfo) -> Sequence[int]:
    """Of a list of frames, which the caller has sampled."""
    return range(info.num_frames)


def _failed(error: Exception, digest: str) -> PrepareFailed:
    """Whatever a decoder or processor raises is said of its item alone."""
    if isinstance(error, ConnectionError):
        raise error
    if isinstance(error, EncoderError):
        return PrepareFailed(code=error.code, message=error.message)
    if is_out_of_memory(error):
        refused = out_of_memory()
        return PrepareFailed(code=refused.code, message=refused.message)
    log.warning("preparing item %s failed: %s", digest, type(error).__name__, exc_info=error)
    return PrepareFailed(code=ErrorCode.MEDIA_CORRUPT, message=f"cannot be preprocessed ({type(error).__name__})")


def _reply(features: Features) -> tuple[PreparedItem, list[memoryview]]:
    buffers = [tensor_bytes(tensor) for tensor in features.tensors.values()]
    item = PreparedItem(
        num_tokens=features.num_tokens,
        cost=features.cost,
        grid=features.grid,
        modality=features.modality,
        details=features.details,
        tensors=specs_of(features.tensors),
        tensor_bytes=tuple(len(buffer) for buffer in buffers),
    )
    return item, buffers
