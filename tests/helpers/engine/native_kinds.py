"""Tiny models of the native runner by kind and weight format, for tests that run the same checks on
many of them.

If the variable TEST_MODELS is set, the models come from this folder, which tests/arm64/models.py
writes, and torch is not needed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from helpers.engine.native_bench import Machine
from helpers.models.gpt_oss_files import save_gpt_oss
from helpers.models.tiny_checkpoints import save_tiny_checkpoint
from kvboost_edge.kvcache.recurrent.snapshots import StateSizes

PROVIDED = os.environ.get("TEST_MODELS")
STATES = StateSizes(24, num_draft_rows=31)
# Weight format -> the packed formats that some matrix of a model then has. Formats in capitals are
# those of GGUF files. Those that become one of the others in memory are left out: Q4_0, Q4_1, Q8_0
# and IQ4_NL.
FORMATS = {
    "f32": {"f32"},
    "bf16": {"bf16"},
    "int8": {"int8"},
    "int4": {"int4"},
    "int4-asym": {"int4-asym"},
    "Q4_K": {"q4k"},
    "Q5_K": {"q5k"},
    "Q6_K": {"q6k"},
    "K_MIX": {"q2k", "q3k", "q4k", "q5k", "q6k"},
    "Q5_MIX": {"int5", "int5-asym"},
    "MXFP4": {"int4t"},
    "LOW_MIX": {"int1-g128", "int2-g64", "int2-g256", "nvfp4"},
    "GRID_MIX": {"iq1s", "iq1m", "iq2xxs", "iq2xs", "iq2s", "iq3xxs", "iq3s"},
}
_WIDE = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256}


class Kind(NamedTuple):
    """A tiny model and its config.

    Attributes:
        family: family of tiny_models, or of tiny_checkpoints, which need no torch.
        fields: fields of its config.
        in_blocks: additional fields for GGUF files.
        wide: additional fields for GGUF files with rows in blocks of 256.
    """

    family: str
    fields: Mapping[str, Any] = {}
    in_blocks: Mapping[str, Any] = {}
    wide: Mapping[str, Any] = {}
    states: bool = False


def _hybrid(family: str, wide: Mapping[str, Any], **in_blocks: Any) -> Kind:
    return Kind(family, {}, in_blocks, {"hidden_size": 256, **wide}, states=True)


_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 12,
    "top_k_experts": 3,
    "moe_intermediate_size": 64,
}
_QWEN3 = {"hidden_size": 64, "intermediate_size": 96}
_DELTA = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "intermediate_size": 256}
_SPACE = {"shared_intermediate_size": 256, "mamba_n_heads": 8, "mamba_d_head": 64}
KINDS: dict[str, Kind] = {
    # Sizes that are not multiples of 16 or 32, more than one chunk of elementwise work, and one
    # tile more than fits.
    "qwen2": Kind(
        "qwen2",
        {"hidden_size": 80, "intermediate_size": 1096, "num_hidden_layers": 2},
        {"hidden_size": 96, "intermediate_size": 1056},
        {"hidden_size": 256, "intermediate_size": 1280},
    ),
    "qwen3": Kind(
        "qwen3", {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}, _QWEN3, _WIDE
    ),
    "qwen3_moe": Kind(
        "qwen3_moe",
        {"hidden_size": 80, "num_hidden_layers": 2},
        {"hidden_size": 64},
        {**_WIDE, "num_experts": 6, "num_experts_per_tok": 2},
    ),
    "gpt_oss": Kind("gpt_oss", {"num_hidden_layers": 2}, {}, _WIDE),
    "gemma4": Kind("gemma4", {}, {}, _WIDE),
    "gemma4-wide": Kind("gemma4-wide", {}, {}, _WIDE),
    # Layers of both kinds have one shape, so their open blocks could be confused.
    "gemma4-alike": Kind("gemma4", {"global_head_dim": 32}, {}, _WIDE),
    "gemma4-experts": Kind("gemma4", _EXPERTS, {}, _WIDE),
    "gemma4-moe": Kind("gemma4-moe", {}, {}, _WIDE),
    "lfm2": _hybrid("lfm2", {"block_auto_adjust_ff_dim": False, "intermediate_size": 256}),
    "lfm2-plain": _hybrid("lfm2-plain", {"intermediate_size": 256}),
    "lfm2_moe": _hybrid("lfm2_moe", _WIDE, routed_scaling_factor=1.0),
    "qwen3_5_text": _hybrid("qwen3_5_text", _DELTA, linear_key_head_dim=32),
    "qwen3_5_text-even": _hybrid("qwen3_5_text-even", _DELTA),
    "qwen3_5_moe_text": _hybrid(
        "qwen3_5_moe_text",
        {**_DELTA, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256},
        linear_key_head_dim=32,
    ),
    "granitemoehybrid-h": _hybrid("granitemoehybrid-h", _SPACE),
    "granitemoehybrid-groups": _hybrid("granitemoehybrid-groups", _SPACE, mamba_conv_bias=True),
    "granitemoehybrid-experts": _hybrid(
        "granitemoehybrid-experts", {**_SPACE, "intermediate_size": 256}
    ),
    "nemotron_h": _hybrid(
        "nemotron_h", {"intermediate_size": 256, "mamba_head_dim": 64, "head_dim": 64}
    ),
    "nemotron_h-moe": _hybrid(
        "nemotron_h-moe",
        {
            "intermediate_size": 256,
            "moe_intermediate_size": 256,
            "mamba_head_dim": 64,
            "head_dim": 64,
        },
        layers_block_type=["full_attention", "moe", "linear_attention", "linear_attention"],
        use_conv_bias=True,
    ),
    "falcon_h1": _hybrid(
        "falcon_h1", {"intermediate_size": 256, "mamba_d_ssm": 256, "mamba_d_head": 64}
    ),
}


def packages_for(kind: str, weights: str) -> list[str]:
    """Return the packages that making the model takes, beside those of the engine."""
    by_numpy = PROVIDED or kind in ("qwen2", "qwen3", "qwen3_moe", "gpt_oss")
    found = [] if by_numpy else ["torch"]
    return [*found, "gguf"] if _is_file(kind, weights) else found


def directory_of(kind: str, weights: str, folder: Path) -> Path:
    """Write the model's directory into `folder` if it does not exist yet, and return it."""
    made = KINDS[kind]
    is_file = weights.isupper()
    wide = is_file and ("K" in weights or weights in ("LOW_MIX", "GRID_MIX"))
    if (kind, weights) == ("gpt_oss", "MXFP4"):
        return _saved("gpt_oss", folder / f"{kind}-mxfp4", {**made.fields, "mxfp4": True})
    fields = {**made.fields, **(made.in_blocks if is_file else {}), **(made.wide if wide else {})}
    name = "wide" if wide else "in-blocks" if is_file else "plain"
    return _saved(made.family, folder / f"{kind}-{name}", fields)


def machine_of(kind: str, weights: str, folder: Path, states: StateSizes = STATES) -> Machine:
    """Return the runners of a model, which is written into `folder` if it does not exist yet."""
    path = directory_of(kind, weights, folder)
    if _is_file(kind, weights):
        from helpers.gguf.writer import write_gguf

        path = write_gguf(
            path, folder / f"{kind}-{weights}.gguf", kind=_MIXES.get(weights, weights)
        )
    if weights.isupper():
        weights = "auto"
    return Machine(path, weights, states if KINDS[kind].states else None)


def _is_file(kind: str, weights: str) -> bool:
    return weights.isupper() and (kind, weights) != ("gpt_oss", "MXFP4")


def _saved(family: str, directory: Path, fields: Mapping[str, Any]) -> Path:
    if PROVIDED:
        return Path(PROVIDED) / directory.name
    if (directory / "config.json").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    if family == "gpt_oss":
        return save_gpt_oss(directory, **fields)
    if family in ("qwen2", "qwen3", "qwen3_moe"):
        return save_tiny_checkpoint(family, directory, **fields)
    from helpers.models.tiny_models import save_tiny_model

    return save_tiny_model(family, directory, **fields)


def _k_mix(name: str) -> str:
    """Return the type of a tensor in a mixture like llama.cpp's: queries, keys and values, or one
    of them, have more bits than the rest, and the matrices of MLPs have fewer.
    """
    kinds = {"attn_qkv": "Q5_K", "attn_q.": "Q5_K", "attn_v": "Q6_K", "token_embd": "Q6_K"}
    kinds |= {"ffn_gate": "Q2_K", "ffn_up": "Q2_K", "ffn_down": "Q3_K"}
    return next((kind for part, kind in kinds.items() if part in name), "Q4_K")


def _q5_mix(name: str) -> str:
    """Mix Q5_0 and Q5_1 in different matrices."""
    return "Q5_1" if "down" in name or "attn_output" in name else "Q5_0"


def _low_mix(name: str) -> str:
    """Mix 1-bit, 2-bit, ternary and NVFP4 weights in different matrices."""
    if name.startswith("token_embd") or "attn_output" in name:
        return "NVFP4"
    if "ffn" not in name:
        return "TQ2_0"
    return "Q2_0" if "down" in name else "Q1_0"


def _grid_mix(name: str) -> str:
    """Mix lattice types, with more bits for the embedding, values and down projections, and fewer
    for queries and keys.
    """
    kinds = {"token_embd": "IQ3_S", "attn_v": "IQ3_XXS", "attn_qkv": "IQ3_XXS"}
    kinds |= {"attn_k.": "IQ1_S", "attn_q.": "IQ1_M"}
    kinds |= {"ffn_gate": "IQ2_XS", "ffn_up": "IQ2_XS", "down": "IQ2_S"}
    return next((kind for part, kind in kinds.items() if part in name), "IQ2_XXS")


_MIXES = {"K_MIX": _k_mix, "Q5_MIX": _q5_mix, "LOW_MIX": _low_mix, "GRID_MIX": _grid_mix}
