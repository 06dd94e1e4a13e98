"""Tiny random checkpoints of the Llama-like families, written with NumPy only, for tests of the
native path.

They need neither torch nor transformers, so these tests also run where torch is unavailable: on
emulated ARM processors. tiny_models.py serves tests that compare with transformers, and all other
families.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, processors

from helpers.text.byte_level import byte_level

VOCAB_SIZE = 300  # 256 bytes, 5 special tokens, and ids without a token
CONTEXT = 512
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<|user|>", "<|assistant|>")
PAD_ID = 256
BOS_ID = 257
EOS_ID = 258

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + "
    "message['content'] + eos_token }}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|assistant|>' }}{% endif %}"
)

COMMON_FIELDS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": PAD_ID,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "tie_word_embeddings": False,
}
_WRITTEN_OUT = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "dtype": "float32",
}
# model_type -> (architecture, biases of queries, keys and values, norms of query and key heads,
# other config fields)
_FAMILIES: dict[str, tuple[str, bool, bool, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", False, False, {}),
    "qwen2": ("Qwen2ForCausalLM", True, False, {}),
    "minicpm": (
        "MiniCPMForCausalLM",
        False,
        False,
        {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16},
    ),
    "qwen3": ("Qwen3ForCausalLM", False, True, {"head_dim": 32}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        False,
        True,
        {
            "head_dim": 32,
            "num_experts": 12,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 96,
            "norm_topk_prob": True,
        },
    ),
}


def save_tiny_checkpoint(
    model_type: str, directory: Path | str, *, seed: int = 0, **overrides: Any
) -> Path:
    """Write a complete model directory (float32 safetensors) and return its path. `overrides` are
    config fields.

    Weights have unit gain, and those of queries and keys more, so that attention is sharp. Norms
    and biases are not neutral.
    """
    directory = Path(directory)
    architecture, has_bias, has_head_norm, extra = _FAMILIES[model_type]
    config = {
        "model_type": model_type,
        "architectures": [architecture],
        **COMMON_FIELDS,
        **_WRITTEN_OUT,
        **extra,
    }
    config |= overrides
    rng = np.random.default_rng(seed)
    tensors = {
        name: _values(rng, name, shape)
        for name, shape in _shapes(config, has_bias, has_head_norm).items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(content, indent=2), encoding="utf-8")
    save_tokenizer(directory)
    return directory


def _shapes(
    config: dict[str, Any], has_bias: bool, has_head_norm: bool
) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]
    wide = config["intermediate_size"]
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    queries = heads * dim
    keys = config["num_key_value_heads"] * dim
    vocab = (config["vocab_size"], hidden)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": vocab,
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = vocab
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (rows, hidden)
            if has_bias:
                shapes[f"{layer}self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{layer}self_attn.o_proj.weight"] = (hidden, queries)
        experts = config.get("num_experts", 0)
        mlps = [f"{layer}mlp."]
        if experts:
            wide = config["moe_intermediate_size"]
            mlps = [f"{layer}mlp.experts.{index}." for index in range(experts)]
            shapes[f"{layer}mlp.gate.weight"] = (experts, hidden)
        for mlp in mlps:
            shapes |= {f"{mlp}{name}_proj.weight": (wide, hidden) for name in ("gate", "up")}
            shapes[f"{mlp}down_proj.weight"] = (hidden, wide)
        shapes |= {
            f"{layer}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")
        }
        if has_head_norm:
            shapes |= {f"{layer}self_attn.{name}_norm.weight": (dim,) for name in ("q", "k")}
    return shapes


def _values(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    noise = rng.standard_normal(shape, dtype=np.float32)
    if "norm" in name:
        # Head norms more than double their input. They make attention sharp in place of the
        # projections.
        return (np.float32(2.0 if "self_attn" in name else 1.0) + np.float32(0.2) * noise).astype(
            np.float32
        )
    if name.endswith("bias"):
        return np.float32(0.3) * noise
    if "embed" in name:
        return noise
    gain = 1.6 if any(part in name for part in ("q_proj", "k_proj")) else 1.0
    return noise * np.float32(gain / shape[-1] ** 0.5)


def save_tokenizer(directory: Path) -> None:
    """Save a byte-level BPE tokenizer without merges. Ids below 256 are bytes, followed by the
    special tokens. Encoding prepends <bos>.
    """
    tokenizer = byte_level()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS_ID)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=2), encoding="utf-8"
    )
