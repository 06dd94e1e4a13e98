"""Families that differ from Llama only in flags, or that only the torch runner supports."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvboost_edge.models.families.family import Family, ModelType
from kvboost_edge.models.families.gguf_names import MATRICES, GgufArchitecture

__all__ = ["GGUF", "MODEL_TYPES"]

MODEL_TYPES: Mapping[str, ModelType] = MappingProxyType(
    {
        "glm4": ModelType(
            "GLM-4, partial rotary, norms before and after the blocks",
            Family(
                norms="both",
                biased=True,
                output_bias=False,
                mlp=("mlp.gate_up_proj", "mlp.down_proj"),
                head_dim=128,
                eps=1.5625e-7,
                paired_rope=True,
                partial=0.5,
                norm_names=(
                    "input_layernorm",
                    "post_self_attn_layernorm",
                    "post_attention_layernorm",
                    "post_mlp_layernorm",
                ),
            ),
            gguf=True,
        ),
        "stablelm": ModelType("StableLM, partial rotary"),
        "starcoder2": ModelType("StarCoder2, sliding window, biases"),
        "gpt_neox": ModelType("GPT-NeoX, parallel residual, partial rotary"),
        "apertus": ModelType("normalized queries and keys", tested=False),
        "arcee": ModelType("Llama's attention", tested=False),
        "cohere": ModelType("scaled logits", tested=False),
        "cohere2": ModelType("local and global layers", tested=False),
        "glm": ModelType("partial rotary", tested=False),
        "gpt2": ModelType("learned positions", tested=False),
        "gpt_bigcode": ModelType("learned positions, one key-value head", tested=False),
        "helium": ModelType("Llama's attention", tested=False),
        "ministral": ModelType("local and global layers", tested=False),
        "phi": ModelType("parallel residual, partial rotary", tested=False),
        "seed_oss": ModelType("Llama's attention", tested=False),
        "vaultgemma": ModelType("local and global layers", tested=False),
    }
)
GGUF: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "glm4": GgufArchitecture(
            "glm4",
            {
                **{name: to for name, to in MATRICES.items() if not name.startswith("ffn")},
                "ffn_up": "mlp.gate_up_proj",
                "ffn_down": "mlp.down_proj",
                "attn_norm": "input_layernorm",
                "post_attention_norm": "post_self_attn_layernorm",
                "ffn_norm": "post_attention_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
            },
        )
    }
)
