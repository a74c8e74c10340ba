"""What is left to import after each family's preload: `python -m tests.harness.preloads CHECKPOINTS`, a fresh process.

It imports what all families have in common once, as a nursery would, and forks a process for each family, which
preloads the rest of it, and then loads and runs the tiny checkpoint in `CHECKPOINTS/<family>`. It prints JSON: for
each family why that is wrong, or "".
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from spmd_encoder.models import registry
from spmd_encoder.models.lean_imports import deferred_compiler, without_training

COMMON = ("torch", "torch.distributed", "transformers.core_model_loading", "transformers.modeling_utils")
"""The dear ones of those that each preload begins with."""


def main() -> None:
    assert "torch" not in sys.modules, "the registry is for processes without torch, too"
    with deferred_compiler(), without_training():
        for module in COMMON:
            import_module(module)
    root = Path(sys.argv[1])
    print(json.dumps({entry.family: ask(entry, root / entry.family) for entry in registry.FAMILIES}))


def ask(entry: registry.FamilyEntry, folder: Path) -> str:
    said = folder / "said"
    if (pid := os.fork()) == 0:
        try:
            run(entry, folder)
            said.write_text("")
        except BaseException:
            said.write_text(traceback.format_exc())
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return said.read_text() if status == 0 else f"it ended with status {status}"


def run(entry: registry.FamilyEntry, folder: Path) -> None:
    registry.preload(entry.model_types[-1])
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a thread was started"
    before = set(sys.modules)
    conversion: Any = import_module("transformers.conversion_mapping")
    conversion._build_checkpoint_conversion_mapping = None  # is there already, and not called again
    encode_all(folder)
    late = sorted(set(sys.modules) - before)
    assert not late, late


def encode_all(folder: Path) -> None:
    """Two items of each kind that the family takes."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from PIL import Image

    from spmd_encoder.api.types import Modality
    from spmd_encoder.media.base import Film, FilmInfo, Sound
    from spmd_encoder.models.base import LoadContext
    from spmd_encoder.models.loading import load_adapter

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    context = LoadContext(dtype=torch.float32, device=torch.device("cpu"), group=dist.group.WORLD)
    adapter = load_adapter(folder, context)
    made = adapter.preprocessor
    info = FilmInfo(num_frames=2, fps=25.0, seconds=0.08, width=64, height=64)
    frames = (np.zeros((64, 64, 3), np.uint8),) * 2
    with torch.inference_mode():
        for modality in adapter.modalities:
            for size in (50, 150):
                match modality:
                    case Modality.IMAGE:
                        item = made.preprocess(Image.new("RGB", (size, 50)))
                    case Modality.AUDIO:
                        samples = np.zeros(100 * size, np.float32)
                        item = made.preprocess_audio(Sound(samples=samples, rate=made.sampling_rate))
                    case Modality.VIDEO:
                        item = made.preprocess_video(Film(frames=frames, times=(0, 0.04), indices=(0, 1), info=info))
                adapter.forward(adapter.pack([item]))


if __name__ == "__main__":
    main()
