"""What `/info` says of the world that does not change while it serves."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

from spmd_encoder import __version__
from spmd_encoder.config import Config
from spmd_encoder.distributed.layout import Layout


def describe_software(versions: Mapping[str, str]) -> dict[str, Any]:
    """`versions` are those of the libraries that workers use, as keepers told."""
    return {"version": __version__, "versions": {"python": platform.python_version(), **versions}}


def describe_world(config: Config, layout: Layout) -> dict[str, Any]:
    return {
        "layout": {"world_size": layout.world_size, "dp_size": layout.dp_size, "tp_size": layout.tp_size},
        "config": {key: value for key, value in config.flat().items() if key != "faults"},
    }
