"""Pictures where torchvision is installed: `make torchvision` runs this. Ours stay those of Pillow, to the bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import skimage.data
import torch
from PIL import Image

from spmd_encoder.api.types import Modality
from spmd_encoder.models import registry
from spmd_encoder.models.dinov3_pictures import DINOv3Processor
from spmd_encoder.models.loading import adapter_class, load_preprocessor
from tests.harness.families import OPTIONS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="`make torchvision` runs this with torchvision"
)

TORCHVISION_ONLY = ("dinov3_vit", "dinov3_convnext")
"""Families whose processor transformers has for torchvision alone."""
SIZES = [(112, 112), (300, 120), (61, 90), (451, 300), (20, 30)]


def families() -> list[registry.FamilyEntry]:
    pictures = [one for one in registry.FAMILIES if Modality.IMAGE in adapter_class(one).modalities]
    return [one for one in pictures if one.family not in TORCHVISION_ONLY]


@pytest.mark.parametrize("entry", families(), ids=lambda entry: entry.family)
def test_a_picture_is_prepared_by_pillow(entry: registry.FamilyEntry, tmp_path: Path) -> None:
    import transformers

    adapter_class(entry).tiny_checkpoint(tmp_path, seed=0)
    ours = load_preprocessor(tmp_path)
    auto: Any = transformers.AutoImageProcessor
    pillow, vision = (auto.from_pretrained(tmp_path, backend=backend) for backend in ("pil", "torchvision"))
    assert (pillow.backend, vision.backend) == ("pil", "torchvision")
    photos: Any = skimage.data
    furthest = 0.0
    for size in SIZES:
        picture = Image.fromarray(photos.chelsea()).resize(size)
        got = ours.preprocess(picture).tensors["pixel_values"]
        pixels = [
            processor(images=[picture], return_tensors="pt", **OPTIONS.get(entry.family, {}))["pixel_values"]
            for processor in (pillow, vision)
        ]
        whole, own = pixels[0].flatten(), got.flatten()
        assert torch.equal(own, whole[: len(own)]), size
        assert not whole[len(own) :].any(), size  # padding, which SigLIP 2's preprocessor here leaves out
        if pixels[0].shape == pixels[1].shape:
            furthest = max(furthest, float((pixels[0] - pixels[1]).abs().max()))
    print(f"{entry.family}: torchvision's differ by up to {furthest:.3g}")


@pytest.mark.parametrize("size", [(112, 112), (96, 160)])
def test_dinov3s_processor_without_torchvision_gives_the_same_bits(size: tuple[int, int], tmp_path: Path) -> None:
    from transformers.models.dinov3_vit.image_processing_dinov3_vit import DINOv3ViTImageProcessor

    ours = DINOv3Processor(size=size)
    ours.save_pretrained(tmp_path)
    assert DINOv3Processor.from_folder(tmp_path) == ours
    vision: Any = DINOv3ViTImageProcessor.from_pretrained(tmp_path)
    photos: Any = skimage.data
    for wanted in [*SIZES, (1, 1), (1, 200), (900, 700)]:
        picture = Image.fromarray(photos.chelsea()).resize(wanted)
        made = [processor(images=picture, return_tensors="pt")["pixel_values"] for processor in (ours, vision)]
        assert torch.equal(*made), wanted
