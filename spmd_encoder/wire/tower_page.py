"""What is in a worker's tower, in a file that the worker and its keeper map.

It is told for every batch and asked for once, when the worker is dead: a page costs no message and wakes nobody, and
what was written there outlives the writer's SIGKILL.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

_MAX_JOBS = 2**14
"""Of a batch; those beyond are not told."""


def tower_page_path(run_dir: Path, rank: int) -> Path:
    return run_dir / f"tower-{rank}"


class TowerPage:
    """Two lists of job ids, and which of them stands: whoever is killed while writing leaves the other as it was."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """Takes over the descriptor of the file at `path`."""
        self._path = path
        try:
            self._memory = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        self._words = memoryview(self._memory).cast("Q")

    @classmethod
    def create(cls, path: Path, max_jobs: int) -> TowerPage:
        """An empty one, for batches of so many jobs; another one at `path` is replaced. Raises OSError."""
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Not a file with holes: to write where the disk has no room left would end the writer.
            os.posix_fallocate(descriptor, 0, 8 * (1 + 2 * (1 + min(max_jobs, _MAX_JOBS))))
        except OSError:
            os.close(descriptor)
            raise
        return cls(path, descriptor)

    @classmethod
    def open(cls, path: Path) -> TowerPage:
        """Raises OSError."""
        return cls(path, os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def for_next_writer(self) -> TowerPage:
        """This one, empty; or an empty one in its place where the file has gone, and it is closed: old files of a
        folder for temporary ones are removed, and this one is as old as its server. Raises OSError."""
        self.write(())
        if self._path.exists():
            return self
        another = TowerPage.create(self._path, len(self._words) // 2 - 1)
        self.close()
        return another

    def write(self, job_ids: Sequence[int]) -> None:
        """These are in the tower from now on, and no others."""
        words, half = self._words, len(self._words) // 2
        other = 1 - words[0]
        start = 1 + other * half
        job_ids = job_ids[: half - 1]
        words[start] = len(job_ids)
        for place, job_id in enumerate(job_ids, start + 1):
            words[place] = job_id
        words[0] = other

    def read(self) -> tuple[int, ...]:
        """What was written last. Of a writer that lives it may be neither the last nor the one before."""
        start = 1 + self._words[0] * (len(self._words) // 2)
        return tuple(self._words[start + 1 : start + 1 + self._words[start]])

    def close(self) -> None:
        """May be called again."""
        self._words.release()
        self._memory.close()
