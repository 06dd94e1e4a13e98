"""Tiny random transformers models for tests, one per supported family.

`build_tiny_model("gemma2")` returns a seeded float32 model whose weights are scaled up so that
attention is sharp: a wrong mask, position, window or scale changes the logits by far more than
rounding does. `save_tiny_model` writes a complete model directory: weights, config, generation
config, and a byte-level tokenizer with a chat template. It builds a model once and copies its files
from then on, without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helpers.models.built import copy_of
from helpers.models.gpt_oss_files import SIZES as GPT_OSS
from helpers.models.hybrid_models import HYBRID_NESTED, HYBRIDS
from helpers.models.tiny_checkpoints import (
    BOS_ID,
    COMMON_FIELDS,
    EOS_ID,
    PAD_ID,
    VOCAB_SIZE,
    save_tokenizer,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


_LOCAL_GLOBAL = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]

# Layers 5 and 6 attend to the KV of layer 3, and layer 7 to that of layer 4. Each shares the KV of
# the last layer of its kind.
_GEMMA4 = {
    "model_type": "gemma4_text",
    "head_dim": 32,
    "global_head_dim": 64,
    "num_hidden_layers": 8,
    "sliding_window": 24,
    "layer_types": ["full_attention" if i in (2, 4, 7) else "sliding_attention" for i in range(8)],
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1000.0,
            "partial_rotary_factor": 0.25,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
    "tie_word_embeddings": True,
}

_OF_TABLE = ("model_type", "hidden_size_per_layer_input", "vocab_size_per_layer_input")

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-llama3rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama-yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "mistral": {"sliding_window": 24, "head_dim": 16},
    "qwen2": {},
    "bitnet": {},
    "qwen3": {"head_dim": 32},
    "gemma": {"head_dim": 32, "num_key_value_heads": 1},
    "gemma2": {
        "head_dim": 32,
        "num_hidden_layers": 4,
        "sliding_window": 24,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0,
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 32,
        "num_hidden_layers": 4,
        "sliding_window": 24,
        "query_pre_attn_scalar": 24,
        "layer_types": _LOCAL_GLOBAL,
        "tie_word_embeddings": True,
    },
    "gemma4": _GEMMA4,
    "gemma4-wide": {
        **_GEMMA4,
        "layer_types": _LOCAL_GLOBAL[::-1] + _LOCAL_GLOBAL[:3],
        "num_hidden_layers": 7,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "final_logit_softcapping": 8.0,
    },
    "gemma4-moe": {
        **_GEMMA4,
        "layer_types": _LOCAL_GLOBAL[:3],
        "num_hidden_layers": 3,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 12,
        "top_k_experts": 3,
        "moe_intermediate_size": 64,
    },
    "phi3": {"num_key_value_heads": 4, "sliding_window": 40},
    "olmo2": {},
    "olmo3": {
        "num_hidden_layers": 4,
        "sliding_window": 24,
        "layer_types": _LOCAL_GLOBAL,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
    },
    "exaone4": {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "sliding_window": 24,
        "layer_types": _LOCAL_GLOBAL,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    },
    "ernie4_5": {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
    "glm4": {
        "head_dim": 16,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 100.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.4,
    },
    "granitemoehybrid": {
        "layer_types": ["attention"] * 3,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 96,
        "position_embedding_type": "rope",
        "mamba_n_heads": 8,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.4,
    },
    "granitemoehybrid-nope": {
        "layer_types": ["attention"] * 3,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 96,
        "mamba_n_heads": 8,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.4,
    },
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]},
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "olmoe": {"num_experts": 12, "num_experts_per_tok": 3},
    "ernie4_5_moe": {
        "moe_num_experts": 12,
        "moe_k": 3,
        "moe_intermediate_size": 64,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
        "moe_layer_interval": 1,
    },
    "glm4_moe": {
        "head_dim": 32,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 100.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "granitemoe": {
        "num_local_experts": 12,
        "num_experts_per_tok": 3,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.4,
    },
    "gpt_oss": GPT_OSS,
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 128,
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
    },
    "granite_swa": {
        "num_hidden_layers": 4,
        "sliding_window": 24,
        "layer_types": _LOCAL_GLOBAL,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.4,
    },
    "ministral3": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "hunyuan_v1_dense": {
        "head_dim": 16,
        # With 16 channels this alpha gives a base that float32 represents exactly, as GGUF
        # requires.
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 1000.0,
            "alpha": 128.0,
            "factor": 1.0,
        },
    },
    "stablelm": {
        "use_qkv_bias": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000.0,
            "partial_rotary_factor": 0.25,
        },
    },
    "starcoder2": {"sliding_window": 24},
    "gpt_neox": {"num_key_value_heads": None, "hidden_act": "gelu"},
}


# Models with a vision part: type of the language model, its fields, and the fields of the vision
# part. Only the native runner runs them.
NESTED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": (
        "qwen3_vl_text",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
        },
        {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [0],
        },
    ),
    "gemma3": (
        "gemma3_text",
        {name: value for name, value in FAMILIES["gemma3"].items() if name != "model_type"},
        {
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 16,
        },
    ),
    "gemma4": (
        "gemma4_text",
        {name: value for name, value in _GEMMA4.items() if name != "model_type"},
        {
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "position_embedding_size": 16,
        },
    ),
    "gemma4-moe": (
        "gemma4_text",
        {name: value for name, value in FAMILIES["gemma4-moe"].items() if name != "model_type"},
        {
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "position_embedding_size": 16,
        },
    ),
    "gemma4_unified": (
        "gemma4_unified_text",
        {name: value for name, value in FAMILIES["gemma4-wide"].items() if name not in _OF_TABLE},
        {"mm_embed_dim": 32, "patch_size": 4, "mm_posemb_size": 16},
    ),
    "mistral3": (
        "mistral",
        {"sliding_window": 24, "head_dim": 16},
        {
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 16,
        },
    ),
    "mistral3-ministral3": (
        "ministral3",
        FAMILIES["ministral3"],
        {
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 16,
        },
    ),
}


def build_nested_model(model_type: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Build a model of several parts as `build_tiny_model` does.

    Args:
        model_type: a key of NESTED.
        overrides: fields of the language model's config.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    text_type, fields, vision = {**NESTED, **HYBRID_NESTED}[model_type]
    model_type = model_type.partition("-")[0]
    fields = {"model_type": text_type, **COMMON_FIELDS, **fields, **overrides}
    tied = fields["tie_word_embeddings"]
    config = AutoConfig.for_model(
        model_type, text_config=fields, vision_config=vision, tie_word_embeddings=tied
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        sharpen(model, torch.Generator().manual_seed(seed))
    return model.eval()


def build_tiny_model(model_type: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Build a seeded float32 model in eval mode.

    Args:
        model_type: a key of FAMILIES or any model type of transformers.
        overrides: config fields.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {
        "model_type": model_type,
        **COMMON_FIELDS,
        **{**FAMILIES, **HYBRIDS}.get(model_type, {}),
        **overrides,
    }
    hf_type = fields.pop("model_type").partition("-")[0]
    fields = {
        name: value for name, value in fields.items() if value is not None or name in overrides
    }
    config = AutoConfig.for_model(hf_type, **fields)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        sharpen(model, torch.Generator().manual_seed(seed))
    return model.eval()


_HEAD_NORMS = (
    "q_norm.weight",
    "k_norm.weight",
    "query_layernorm.weight",
    "key_layernorm.weight",
    "q_layernorm.weight",
    "k_layernorm.weight",
)


def sharpen(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Scale the weights to unit gain, and those of queries and keys to about twice that. Move norms
    and biases away from their neutral values.
    """
    import torch

    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            weight.add_(0.2 * noise)
            if name.endswith(_HEAD_NORMS):
                weight.add_(1.0)
            if name.endswith("q_norm.weight") and "gemma4" in model.config.model_type:
                weight.mul_(weight.shape[0] ** -0.5)  # its scores are not divided by sqrt(head_dim)
        elif name.endswith("A_log"):
            weight.copy_(noise - 2.5)  # the state lasts for about twenty tokens
        elif name.endswith("router.scale"):
            weight.copy_(noise * weight.shape[0] ** 0.5)  # is divided by the same factor later
        elif name.endswith("per_expert_scale"):
            weight.copy_(1.0 + 0.3 * noise)
        elif weight.dim() == 1:
            weight.copy_((1.0 if name.endswith("sinks") else 0.3) * noise)
        elif name.endswith("proj_bias"):
            weight.copy_(noise)
        elif model.config.model_type == "gpt_oss" and "experts" in name:
            weight.copy_(
                4 * noise / weight.shape[1] ** 0.5
            )  # so that gates are clipped; columns are outputs
        elif "embed" in name:
            weight.copy_(noise if not model.config.tie_word_embeddings else 0.1 * noise)
        else:
            gain = (
                1.6
                if any(part in name for part in ("q_proj", "k_proj", "qkv", "query_key_value"))
                else 1.0
            )
            weight.copy_(gain * noise / weight.shape[-1] ** 0.5)
    for name, number in model.named_buffers():
        if name.endswith("layer_scalar"):
            number.copy_(0.7 + 0.6 * torch.rand(1, generator=generator))
        if name.endswith(("expert_bias", "correction_bias")):
            number.copy_(0.3 * torch.randn(number.shape, generator=generator))


def save_tiny_model(
    model_type: str, directory: Path | str, *, seed: int = 0, **overrides: Any
) -> Path:
    """Write a complete model directory (safetensors) and return its path."""
    return _save(build_tiny_model, Path(directory), model_type, seed, overrides)


def save_nested_model(
    model_type: str, directory: Path | str, *, seed: int = 0, **overrides: Any
) -> Path:
    """Write a model directory as `save_tiny_model` does, for a model that `build_nested_model`
    makes.
    """
    return _save(build_nested_model, Path(directory), model_type, seed, overrides)


def _save(
    build: Callable[..., PreTrainedModel],
    directory: Path,
    model_type: str,
    seed: int,
    overrides: dict[str, Any],
) -> Path:
    def save(folder: Path) -> None:
        from transformers import GenerationConfig

        model = build(model_type, seed=seed, **overrides)
        model.generation_config = GenerationConfig(
            bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID
        )
        model.save_pretrained(folder)
        save_tokenizer(folder)

    return copy_of(directory, save, build.__name__, model_type, seed, overrides)
