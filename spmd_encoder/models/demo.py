"""Demo models that need no hub: `demo:dinov2-small` (real weights) and `demo:qwen2.5-vl-tiny` (random ones).

Each is made once per cache, under a lock, and moved into place whole. `python -m spmd_encoder.models.demo NAME`
makes one; this module imports torch only while it makes `qwen2.5-vl-tiny`.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from spmd_encoder.config import cache_dir
from spmd_encoder.errors import StartupError

PREFIX = "demo:"
MARKER = "spmd_encoder_demo.json"


@dataclass(frozen=True)
class Demo:
    """`recipe` is raised when the made files change, so that old ones in a cache are not taken."""

    name: str
    recipe: int
    random_weights: bool


DEMOS = (Demo("dinov2-small", 1, False), Demo("qwen2.5-vl-tiny", 1, True))


def names() -> tuple[str, ...]:
    """All demo models, as `--model-path` takes them."""
    return tuple(PREFIX + demo.name for demo in DEMOS)


def cached_folder(name: str, cache: Path) -> Path | None:
    """The folder of a demo model in `cache`, or None where it is not made yet. `name` with or without `demo:`.

    Raises StartupError for an unknown name.
    """
    folder = _folder(_find(name), cache)
    return folder if (folder / MARKER).exists() else None


def is_random(model_path: str | Path) -> bool:
    """Whether the weights of this model path or checkpoint folder are known to be random."""
    if str(model_path).startswith(PREFIX):
        return _find(str(model_path)).random_weights
    try:
        return bool(json.loads((Path(model_path) / MARKER).read_bytes())["random_weights"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def prepare(name: str, cache: Path) -> Path:
    """The folder of a demo model; a missing one is made in a process of its own, so that torch stays out of this one.

    Blocks. Progress goes to stderr, one line per stage. Raises StartupError with that process's last line.
    """
    demo = _find(name)
    if (folder := cached_folder(name, cache)) is not None:
        return folder
    command = [sys.executable, "-m", "spmd_encoder.models.demo", demo.name, "--cache", str(cache)]
    last = ""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            # One line is held back: of a failure the last one is the reason, which the caller shows.
            if last:
                print(last, file=sys.stderr, flush=True)
            last = line.rstrip() or last
    folder = cached_folder(name, cache)
    if process.returncode == 0 and folder is not None:
        print(last, file=sys.stderr, flush=True)
        return folder
    raise StartupError(last or f"the demo model {demo.name} could not be made (exit code {process.returncode})")


def ensure(name: str, cache: Path) -> Path:
    """`prepare` in this process (it imports torch for a random model). Safe to call at the same time on one node."""
    demo = _find(name)
    folder = _folder(demo, cache)
    with _locked(folder):
        if (folder / MARKER).exists():
            return folder
        with _scratch(folder) as scratch:
            made = scratch / "model"
            made.mkdir()
            if demo.random_weights:
                _make_random(made)
            else:
                from spmd_encoder.models.demo_dinov2 import make

                make(made, scratch, _say)
            marker = {"name": demo.name, "recipe": demo.recipe, "random_weights": demo.random_weights}
            (made / MARKER).write_text(json.dumps(marker) + "\n")
            if folder.exists():  # without a marker: a copy that was interrupted
                shutil.rmtree(folder)
            made.rename(folder)
    _say(f"{demo.name} is ready in {folder}")
    return folder


def _make_random(made: Path) -> None:
    from spmd_encoder.models.qwen2_5_vl import Qwen25VLAdapter

    _say("making a tiny Qwen2.5-VL with random weights")
    Qwen25VLAdapter.tiny_checkpoint(made, seed=0)


def _find(name: str) -> Demo:
    for demo in DEMOS:
        if name.removeprefix(PREFIX) == demo.name:
            return demo
    raise StartupError(f"there is no demo model {name!r}; there are: {', '.join(names())}", exit_code=2)


def _folder(demo: Demo, cache: Path) -> Path:
    return cache / "demo" / f"{demo.name}-r{demo.recipe}"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One maker per folder; the others wait. The kernel frees the lock of a process that dies."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = (folder.parent / f"{folder.name}.lock").open("a")
    except OSError as error:
        raise StartupError(
            f"the cache folder {folder.parent} cannot be written ({error.strerror}); set XDG_CACHE_HOME to one that can"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for another process that makes {folder.name}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` (so that a rename suffices) that is gone afterwards. Call it under the lock."""
    prefix = f".{folder.name}."
    for stale in folder.parent.glob(f"{prefix}*"):  # of a maker that was killed
        shutil.rmtree(stale, ignore_errors=True)
    try:
        with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent, ignore_cleanup_errors=True) as scratch:
            yield Path(scratch)
    except OSError as error:
        raise StartupError(f"the demo model could not be written to {folder.parent} ({error})") from None


def _say(line: str) -> None:
    print(f"demo model: {line}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Make one demo model and print its folder. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m spmd_encoder.models.demo", description="Make a demo model.")
    parser.add_argument("name", help=", ".join(demo.name for demo in DEMOS))
    parser.add_argument("--cache", type=Path, default=None, help="cache folder (default: ~/.cache/spmd_encoder)")
    given = parser.parse_args(argv)
    try:
        print(ensure(given.name, given.cache or cache_dir()))
    except StartupError as error:
        print(error.message, file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
