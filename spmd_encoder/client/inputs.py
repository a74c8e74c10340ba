"""Which items a command line means: files, folders, patterns, URLs."""

from __future__ import annotations

import glob
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from spmd_encoder.client.media import SUFFIXES, Modality

_URL = ("http://", "https://")


class InputError(Exception):
    """An argument that names no item; one sentence."""


def named_items(arguments: Sequence[str], taken: Collection[Modality] | None) -> list[str]:
    """Paths and URLs in the arguments' order (a folder's sorted), each once.

    A file that is named is taken whatever its name; of a folder only what has the suffix of a modality in `taken`,
    which is None where folders are not to be looked into. Raises `InputError`.
    """
    return list(dict.fromkeys(found for argument in arguments for found in _expand(argument, taken)))


def _expand(argument: str, taken: Collection[Modality] | None) -> Iterator[str]:
    if argument.lower().startswith(_URL) or Path(argument).is_file():
        yield argument
    elif Path(argument).is_dir():
        if taken is None:
            raise InputError(f"{argument} is a folder; give --recursive to take the files in it")
        yield from _walk(argument, frozenset().union(*(SUFFIXES[modality] for modality in taken)))
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


def _walk(folder: str, suffixes: frozenset[str]) -> Iterator[str]:
    """Sorted, and without following links to folders, which may form a circle."""
    empty = True
    for parent, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            if Path(name).suffix.lower() in suffixes:
                empty = False
                yield str(Path(parent) / name)
    if empty:
        raise InputError(f"{folder} holds no file with a suffix that the model takes ({', '.join(sorted(suffixes))})")


def printable(name: str) -> str:
    """A name for JSON and safetensors: bytes of a path that are no UTF-8 are written as `\\xff`."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
