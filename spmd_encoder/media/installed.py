"""Which optional library for sounds and films is installed, told without loading it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

INSTALL = "pip install 'spmd-encoder[media]'"


def pyav() -> str:
    """Its version, or what to do where there is none."""
    try:
        return version("av")
    except PackageNotFoundError:
        return f"not installed: {INSTALL}"
