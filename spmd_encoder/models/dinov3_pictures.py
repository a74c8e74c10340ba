"""What DINOv3's image processor does, without torchvision, which transformers' own class needs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from PIL import Image
from torch import Tensor

from spmd_encoder.errors import StartupError

_CLASS = "DINOv3ViTImageProcessor"
_BILINEAR = 2
_MEAN = (0.485, 0.456, 0.406)
_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class DINOv3Processor:
    """As transformers' `DINOv3ViTImageProcessor`: to [0, 1], to `size` (height, width) in floating point, normalised.

    The resizing is `interpolate` with antialiasing, which is what torchvision calls.
    """

    size: tuple[int, int] = (224, 224)
    rescale_factor: float = 1 / 255
    image_mean: tuple[float, ...] = _MEAN
    image_std: tuple[float, ...] = _STD

    @classmethod
    def from_folder(cls, folder: Path) -> DINOv3Processor:
        """By the checkpoint's settings. Raises StartupError where there are none, or they ask for something else."""
        said = _settings(folder)
        for name, only in (
            ("do_resize", True),
            ("do_rescale", True),
            ("do_normalize", True),
            ("do_center_crop", False),
        ):
            if bool(said.get(name, only)) is not only:
                raise StartupError(f"{folder}: {_CLASS} with {name} = {said[name]} is not supported here")
        if said.get("resample", _BILINEAR) != _BILINEAR:
            raise StartupError(f"{folder}: {_CLASS} with resample = {said['resample']} is not supported here")
        size = said.get("size", {"height": 224, "width": 224})
        try:
            return cls(
                size=(int(size["height"]), int(size["width"])),
                rescale_factor=float(said.get("rescale_factor", 1 / 255)),
                image_mean=tuple(map(float, said.get("image_mean", _MEAN))),
                image_std=tuple(map(float, said.get("image_std", _STD))),
            )
        except (KeyError, TypeError, ValueError):
            raise StartupError(f"{folder}: the settings of {_CLASS} cannot be read; download them again") from None

    def __call__(self, *, images: Image.Image | Sequence[Image.Image], return_tensors: str = "pt") -> dict[str, Tensor]:
        """`pixel_values` `[pictures, 3, height, width]` float32, of one or several RGB pictures."""
        pictures = [images] if isinstance(images, Image.Image) else images
        return {"pixel_values": torch.stack([self._one(picture) for picture in pictures])}

    def _one(self, image: Image.Image) -> Tensor:
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous() * self.rescale_factor
        if pixels.shape[1:] != self.size:
            pixels = F.interpolate(
                pixels[None], size=self.size, mode="bilinear", align_corners=False, antialias=True
            ).squeeze(0)
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.image_mean, self.image_std))
        return pixels.sub_(mean).div_(std)

    def save_pretrained(self, folder: Path) -> None:
        """Its settings as transformers writes them."""
        height, width = self.size
        settings = asdict(self) | {"image_processor_type": _CLASS, "size": {"height": height, "width": width}}
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def _settings(folder: Path) -> dict[str, Any]:
    """Without what is null."""
    for name, key in (("processor_config.json", "image_processor"), ("preprocessor_config.json", None)):
        if not (folder / name).is_file():
            continue
        try:
            said = json.loads((folder / name).read_text(encoding="utf-8"))
            found = said.get(key) if key else said
            if found is not None:
                return {name: value for name, value in found.items() if value is not None}
        except (ValueError, AttributeError):
            raise StartupError(f"{folder / name} is not a JSON object; download it again") from None
    raise StartupError(f"{folder}: the settings of {_CLASS} are missing (preprocessor_config.json); download them")
