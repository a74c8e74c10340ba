"""Qwen3.5, dense and with experts: the tower of Qwen3-VL without its deepstack levels."""

from __future__ import annotations

from types import MappingProxyType
from typing import ClassVar

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForConditionalGeneration

from spmd_encoder.models.qwen3_vl import Qwen3VLAdapter

_LANGUAGE = {
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}


class Qwen35Adapter(Qwen3VLAdapter):
    """`tokens` `[t * h * w / merge**2, out_hidden_size]`, equal to `get_image_features` of the whole model."""

    model_types = ("qwen3_5",)
    family = "qwen3_5"
    model_class: ClassVar[type[PreTrainedModel]] = Qwen3_5ForConditionalGeneration
    config_class: ClassVar[type[PreTrainedConfig]] = Qwen3_5Config
    tiny_language = MappingProxyType(_LANGUAGE)
    tiny_levels = MappingProxyType({})


class Qwen35MoeAdapter(Qwen35Adapter):
    """As the dense model's."""

    model_types = ("qwen3_5_moe",)
    family = "qwen3_5_moe"
    model_class = Qwen3_5MoeForConditionalGeneration
    config_class = Qwen3_5MoeConfig
    tiny_language = MappingProxyType(
        {
            **_LANGUAGE,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        }
    )
