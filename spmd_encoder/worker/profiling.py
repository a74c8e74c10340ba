"""One rank's profiler: torch's, around the forwards of its compute thread.

Whatever fails here is an answer and no exception, which would cost the worker.
"""

from __future__ import annotations

import gzip
import logging
import shutil
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from spmd_encoder.api.profiling import ProfileActivity, ProfileOptions, ProfileOutcome
from spmd_encoder.errors import EncoderError, ErrorCode

log = logging.getLogger(__name__)


@dataclass
class _Recording:
    profiler: profile
    path: Path
    forwards_left: int


class Profiler:
    """Its methods are called on the compute thread: torch records the thread that starts it.

    `who` names the rank in answers. `folder` is `--profile-dir`, the only place that a request may name.
    """

    def __init__(self, who: ProfileOutcome, device: torch.device, folder: str | None) -> None:
        self._who = who
        self._device = device
        self._folder = Path(folder) if folder else None
        self._recording: _Recording | None = None
        self._ended: Future[ProfileOutcome] | None = None  # of a recording that ended by itself

    def obey(self, start: ProfileOptions | None) -> Future[ProfileOutcome]:
        """Start, or stop where `start` is None. The answer to the latter is there once the trace is written."""
        try:
            if start is None:
                return self._stop()
            return self._answer(path=str(self._start(start)))
        except Exception as error:
            return self._failed(error)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around one forward: counts it, and ends the recording after the last that it is to have."""
        recording = self._recording
        if recording is None:
            yield
            return
        with record_function("encoder_forward"):
            yield
        recording.forwards_left -= 1
        if not recording.forwards_left:
            self._ended = self._finish(recording)

    def _start(self, options: ProfileOptions) -> Path:
        if self._recording is not None:
            raise EncoderError(ErrorCode.INVALID_REQUEST, "profiling runs already")
        activities = self._activities(options)
        if options.num_steps is not None and not 0 < options.num_steps <= options.limit():
            raise EncoderError(ErrorCode.INVALID_REQUEST, f"num_steps must be 1 to {options.limit()}")
        folder = self._output_dir(options)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # that it cannot be written is said now, and not after the recording
            pass
        who = self._who
        path = folder / f"{options.name}-rank{who.rank}-dp{who.dp_rank}-tp{who.tp_rank}.trace.json.gz"
        profiler = profile(
            activities=activities,
            with_stack=options.with_stack,
            record_shapes=options.record_shapes,
            profile_memory=ProfileActivity.MEM in options.activities,
        )
        profiler.start()
        self._ended = None
        self._recording = _Recording(profiler, path, options.num_steps or options.limit())
        return path

    def _activities(self, options: ProfileOptions) -> list[ProfilerActivity]:
        has_gpu = self._device.type == "cuda"
        if ProfileActivity.GPU in options.activities and not has_gpu:
            raise EncoderError(ErrorCode.INVALID_REQUEST, f"activity GPU: this rank runs on {self._device.type}")
        with_gpu = has_gpu if not options.activities else ProfileActivity.GPU in options.activities
        # torch tells of allocations as events of the CPU.
        with_cpu = not options.activities or {ProfileActivity.CPU, ProfileActivity.MEM} & set(options.activities)
        chosen = [ProfilerActivity.CPU] if with_cpu else []
        return [*chosen, ProfilerActivity.CUDA] if with_gpu else chosen

    def _output_dir(self, options: ProfileOptions) -> Path:
        if self._folder is None:
            if options.output_dir is not None:
                raise EncoderError(
                    ErrorCode.INVALID_REQUEST,
                    "output_dir is only taken by a server with --profile-dir, the folder that it must be inside",
                )
            return Path(tempfile.gettempdir()) / f"encoder-profile-{options.name}"
        folder = (self._folder / (options.output_dir or "")).resolve()
        if not folder.is_relative_to(self._folder.resolve()):
            raise EncoderError(ErrorCode.INVALID_REQUEST, f"output_dir must be inside --profile-dir {self._folder}")
        return folder

    def _stop(self) -> Future[ProfileOutcome]:
        if self._recording is not None:
            return self._finish(self._recording)
        if self._ended is None:
            raise EncoderError(ErrorCode.INVALID_REQUEST, "profiling does not run")
        ended, self._ended = self._ended, None
        return ended

    def _finish(self, recording: _Recording) -> Future[ProfileOutcome]:
        self._recording = None
        try:
            recording.profiler.stop()
        except Exception as error:
            return self._failed(error)
        written: Future[ProfileOutcome] = Future()
        written.set_running_or_notify_cancel()  # nobody can cancel it any more
        # A daemon: a disk that hangs must not keep the process from ending.
        threading.Thread(target=self._write, args=(recording, written), name="profile-write", daemon=True).start()
        return written

    def _write(self, recording: _Recording, written: Future[ProfileOutcome]) -> None:
        try:
            _write_trace(recording.profiler, recording.path)
        except Exception as error:
            written.set_result(self._failed(error).result())
        else:
            log.info("the trace is written: %s", recording.path)
            written.set_result(replace(self._who, path=str(recording.path)))

    def _failed(self, error: Exception) -> Future[ProfileOutcome]:
        if isinstance(error, EncoderError):
            return self._answer(code=error.code, message=error.message)
        log.warning("profiling failed: %s: %s", type(error).__name__, error)
        return self._answer(code=ErrorCode.INTERNAL, message=f"{type(error).__name__}: {error}")

    def _answer(self, *, path: str = "", code: ErrorCode | None = None, message: str = "") -> Future[ProfileOutcome]:
        answer: Future[ProfileOutcome] = Future()
        answer.set_result(replace(self._who, path=path, code=code, message=message))
        return answer


def _write_trace(profiler: profile, path: Path) -> None:
    """Whole, or not at all: the file gets its name last."""
    with tempfile.TemporaryDirectory(prefix=".profile-", dir=path.parent) as folder:
        plain, packed = Path(folder) / "trace.json", Path(folder) / "trace.json.gz"
        profiler.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=5) as target:
            shutil.copyfileobj(source, target, 2**20)
        packed.replace(path)
