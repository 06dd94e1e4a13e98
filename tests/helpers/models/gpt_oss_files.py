"""Tiny random gpt-oss directories, written with NumPy only. All experts of a layer are in one
tensor, as floats or MXFP4.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer

from helpers.models.tiny_checkpoints import BOS_ID, COMMON_FIELDS, EOS_ID, PAD_ID, save_tokenizer

# With 16 channels its upper bound is 3.5, so that a wrong rounding to whole numbers shows.
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 128,
}
SIZES: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": 24,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "rope_parameters": ROPE,
}


def save_gpt_oss(
    directory: Path,
    *,
    mxfp4: bool = False,
    seed: int = 0,
    markers: Sequence[str] = (),
    template: str = "",
    **overrides: Any,
) -> Path:
    """Write a complete directory. Gates are large enough that some are clipped.

    Args:
        mxfp4: store the experts as blocks and scales.
        markers: special tokens added to the tokenizer; the last two end an answer.
        template: chat template.
    """
    directory.mkdir(exist_ok=True)
    config = {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        **COMMON_FIELDS,
        **SIZES,
        **overrides,
    }
    config = {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "dtype": "float32",
        **config,
    }
    if mxfp4:
        config["quantization_config"] = {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["lm_head"],
        }
    tensors = _tensors(np.random.default_rng(seed), config, mxfp4=mxfp4)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    save_tokenizer(directory)
    if markers:
        _add_markers(directory, markers, template)
    return directory


def _add_markers(directory: Path, markers: Sequence[str], template: str) -> None:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in markers]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    path = directory / "generation_config.json"
    ends = [EOS_ID, *(tokenizer.token_to_id(text) for text in markers[-2:])]
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ends}))


def random_blocks(rng: np.random.Generator, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Return blocks uint8 [*shape, 16] and scales uint8 [*shape] of weights with a magnitude of
    about 1 / 2.
    """
    blocks = rng.integers(0, 256, (*shape, 16), dtype=np.uint8)
    return blocks, rng.integers(121, 126, shape, dtype=np.uint8)


def _tensors(
    rng: np.random.Generator, config: dict[str, Any], *, mxfp4: bool
) -> dict[str, np.ndarray]:
    hidden = config["hidden_size"]
    width = config["intermediate_size"]
    experts = config["num_local_experts"]
    heads = config["num_attention_heads"]
    dim = config["head_dim"]
    vocab = config["vocab_size"]
    queries = heads * dim
    keys = config["num_key_value_heads"] * dim

    def noise(gain: float, *shape: int) -> np.ndarray:
        return (gain * rng.standard_normal(shape)).astype(np.float32)

    found = {
        "model.embed_tokens.weight": noise(1, vocab, hidden),
        "lm_head.weight": noise(hidden**-0.5, vocab, hidden),
    }
    found["model.norm.weight"] = 1 + noise(0.2, hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        for name in ("input", "post_attention"):
            found[f"{layer}{name}_layernorm.weight"] = 1 + noise(0.2, hidden)
        for name, rows, gain in (("q", queries, 1.6), ("k", keys, 1.6), ("v", keys, 1.0)):
            found[f"{layer}self_attn.{name}_proj.weight"] = noise(gain * hidden**-0.5, rows, hidden)
            found[f"{layer}self_attn.{name}_proj.bias"] = noise(0.3, rows)
        found[f"{layer}self_attn.o_proj.weight"] = noise(queries**-0.5, hidden, queries)
        found[f"{layer}self_attn.o_proj.bias"] = noise(0.3, hidden)
        found[f"{layer}self_attn.sinks"] = noise(1.0, heads)
        found[f"{layer}mlp.router.weight"] = noise(hidden**-0.5, experts, hidden)
        found[f"{layer}mlp.router.bias"] = noise(0.3, experts)
        for name, rows, inputs in (
            ("gate_up_proj", 2 * width, hidden),
            ("down_proj", hidden, width),
        ):
            whole = f"{layer}mlp.experts.{name}"
            if mxfp4:
                found[f"{whole}_blocks"], found[f"{whole}_scales"] = random_blocks(
                    rng, experts, rows, inputs // 32
                )
            else:
                found[whole] = noise(4 * inputs**-0.5, experts, inputs, rows)
            found[f"{whole}_bias"] = noise(1.0, experts, rows)
    return found
