"""Qwen3-VL with a mixture-of-experts language model: the tower of Qwen3-VL."""

from __future__ import annotations

from types import MappingProxyType

from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration

from spmd_encoder.models.qwen3_vl import Qwen3VLAdapter


class Qwen3VLMoeAdapter(Qwen3VLAdapter):
    """As Qwen3-VL's."""

    model_types = ("qwen3_vl_moe",)
    family = "qwen3_vl_moe"
    model_class = Qwen3VLMoeForConditionalGeneration
    config_class = Qwen3VLMoeConfig
    tiny_language = MappingProxyType(
        {"head_dim": 12, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    )
