"""The right answers: transformers' whole model, in this process."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image


class QwenReference:
    """Qwen2.5-VL as transformers runs it, with the language model and all."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        models: Any = transformers  # its classes are only partly typed
        self._model = models.Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self._processor = models.AutoImageProcessor.from_pretrained(folder, backend="pil")

    def tokens(self, picture: bytes) -> np.ndarray[Any, Any]:
        image = Image.open(io.BytesIO(picture)).convert("RGB")
        inputs = self._processor(images=image, return_tensors="pt")
        with torch.inference_mode():
            return np.asarray(self._model.get_image_features(**inputs).pooler_output[0])
