"""Runs in a virtual environment with SGLang: its encoder server as it is, beside a CPU build of torch.

    TORCHVISION_SITE=FOLDER PYTHONPATH=REPOSITORY python benchmarks/head_to_head_sglang.py SGLANG'S FLAGS

Nothing of SGLang is changed or replaced. It is started by this file and not by `-m sglang.launch_server`, since its
workers import the file that their parent was started with, and they need the same.
"""

from __future__ import annotations

import runpy

import tests.compat.torchvision_site  # noqa: F401, before anything of SGLang asks for torchvision

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
