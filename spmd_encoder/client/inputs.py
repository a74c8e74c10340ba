"""Which pictures a command line means: files, folders, patterns, URLs."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

_URL = ("http://", "https://")
SUFFIXES = frozenset(
    {
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".webp", ".gif"),
        *(".bmp", ".dib", ".tif", ".tiff", ".avif"),
    }
)


class InputError(Exception):
    """An argument that names no picture; one sentence."""


def pictures(arguments: Sequence[str], *, recursive: bool) -> list[str]:
    """Paths and URLs in the arguments' order (a folder's sorted), each once.

    A file that is named is taken whatever its name; of a folder only what has a picture's suffix, with `recursive`.
    Raises `InputError`.
    """
    return list(dict.fromkeys(found for argument in arguments for found in _expand(argument, recursive)))


def _expand(argument: str, recursive: bool) -> Iterator[str]:
    if argument.lower().startswith(_URL) or Path(argument).is_file():
        yield argument
    elif Path(argument).is_dir():
        if not recursive:
            raise InputError(f"{argument} is a folder; give --recursive to take the pictures in it")
        yield from _walk(argument)
    elif glob.has_magic(argument):
        # What the shell did not expand. `**` goes through folders.
        found = sorted(path for path in glob.glob(argument, recursive=True) if Path(path).is_file())  # noqa: PTH207
        if not found:
            raise InputError(f"no file matches {argument}")
        yield from found
    elif Path(argument).exists():
        yield argument  # a pipe or a device: it fails alone, when its turn comes
    else:
        raise InputError(f"there is no file {argument}")


def _walk(folder: str) -> Iterator[str]:
    """Sorted, and without following links to folders, which may form a circle."""
    empty = True
    for parent, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            if Path(name).suffix.lower() in SUFFIXES:
                empty = False
                yield str(Path(parent) / name)
    if empty:
        raise InputError(f"{folder} holds no file with a picture's suffix ({', '.join(sorted(SUFFIXES))})")


def printable(name: str) -> str:
    """A name for JSON and safetensors: bytes of a path that are no UTF-8 are written as `\\xff`."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
