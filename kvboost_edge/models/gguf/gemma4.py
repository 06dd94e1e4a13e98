"""What the metadata of a Gemma 4 file says beyond that of other models: sizes by layer, two kinds
of heads, a second embedding, keys and values that layers share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.families.gguf_keys import Keys
from kvboost_edge.models.gguf.experts import experts

__all__ = ["gemma4"]

_TABLE = "per_layer_token_embd.weight"
_STILL = 1e30  # the divisor of a frequency that does not turn


def gemma4(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Fields of transformers' config, of one that has those all models have. ModelFormatError where
    keys contradict one another or the tensors.
    """
    pattern = "attention.sliding_window_pattern"
    sliding = keys.sliding(pattern)
    if sliding is None:
        raise keys.error(
            pattern,
            keys.header.values.get(keys.name(pattern)),
            "must say of each layer whether it slides",
        )
    shared = keys.optional_size("attention.shared_kv_layers", 0) or 0
    first = len(sliding) - shared
    if first < 1:
        raise keys.error(
            "attention.shared_kv_layers",
            shared,
            f"leaves none of {len(sliding)} layers with own keys",
        )
    full = keys.size("attention.key_length")
    local = keys.size("attention.key_length_swa")
    keys.check_values("_swa", local)
    for suffix, dim in (("", full), ("_swa", local)):
        rotated = keys.optional_size(f"rope.dimension_count{suffix}")
        if rotated not in (None, dim):
            raise keys.error(
                f"rope.dimension_count{suffix}", rotated, f"must be the length of keys, {dim}"
            )
    return {
        "layer_types": ["sliding_attention" if local else "full_attention" for local in sliding],
        "sliding_window": keys.size("attention.sliding_window"),
        "head_dim": local,
        "global_head_dim": full,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": _is_double_wide(keys, first),
        "final_logit_softcapping": keys.number("final_logit_softcapping"),
        "rope_parameters": _ropes(keys, config["rope_parameters"], full),
        **_kv_heads(keys, sliding, first),
        **_second_embedding(keys, config["vocab_size"], len(sliding)),
        **_mixture(keys),
    }


def _mixture(keys: Keys) -> dict[str, Any]:
    """Experts beside the MLP of every layer, where the file has them."""
    if not keys.optional_size("expert_count", 0):
        return {}
    width = keys.size("expert_feed_forward_length")
    return {
        "enable_moe_block": True,
        **experts(keys, used="top_k_experts"),
        "moe_intermediate_size": width,
    }


def _is_double_wide(keys: Keys, first: int) -> bool:
    """Whether the layers from `first` on, which share keys and values, have MLPs of twice the
    width.
    """
    key = "feed_forward_length"
    widths = keys.sizes(key)
    own = set(widths[:first])
    sharing = set(widths[first:])
    if len(own) > 1 or len(sharing) > 1 or sharing - {widths[0], 2 * widths[0]}:
        raise keys.error(
            key,
            widths,
            f"must be one width for the first {first} layers, and that or its double behind",
        )
    return sharing == {2 * widths[0]}


def _kv_heads(keys: Keys, sliding: Sequence[bool], first: int) -> dict[str, Any]:
    """Key heads of both kinds of layers, and whether full ones have their keys for values."""
    key = "attention.head_count_kv"
    heads = keys.sizes(key)
    by_kind = {
        kind: {count for count, own in zip(heads, sliding, strict=True) if own is kind}
        for kind in (True, False)
    }
    if any(len(counts) > 1 for counts in by_kind.values()):
        raise keys.error(
            key, heads, "must be one number for layers that slide and one for the others"
        )
    without = [
        index for index in range(first) if f"blk.{index}.attn_v.weight" not in keys.header.tensors
    ]
    is_shared = bool(without)
    if is_shared and without != [index for index in range(first) if not sliding[index]]:
        raise ModelFormatError(
            f"{keys.header.path} lacks the tensor 'blk.{without[0]}.attn_v.weight': keys are "
            "values in all layers that do not slide, or in none"
        )
    counts = {kind: next(iter(found)) for kind, found in by_kind.items() if found}
    config: dict[str, Any] = {
        "attention_k_eq_v": is_shared,
        "num_key_value_heads": counts.get(True, heads[0]),
    }
    if is_shared:
        config["num_global_key_value_heads"] = counts[False]
    elif len(set(heads)) > 1:
        raise keys.error(
            key, heads, "differs between layers, which is known only where keys are values"
        )
    return config


def _second_embedding(keys: Keys, vocab_size: int, layers: int) -> dict[str, Any]:
    """The embedding of each layer: its width, 0 where there is none, and its tokens."""
    key = "embedding_length_per_layer_input"
    width = keys.optional_size(key, 0) or 0
    table = keys.header.tensors.get(_TABLE)
    if width and table is None:
        raise ModelFormatError(
            f"{keys.header.path} lacks the tensor {_TABLE!r}, which {keys.name(key)}={width} needs"
        )
    if table is None:
        return {"hidden_size_per_layer_input": 0}
    if not width or table.shape != (vocab_size, layers * width):
        raise keys.error(
            key,
            width,
            f"contradicts the tensor {_TABLE!r} of shape {table.shape}: {layers} layers, "
            f"vocabulary of {vocab_size}",
        )
    return {"hidden_size_per_layer_input": width, "vocab_size_per_layer_input": vocab_size}


def _ropes(keys: Keys, full: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """The ropes of both kinds. A file says which of a full layer's frequencies turn by dividing the
    others by 1e30.
    """
    factors = full.get("factors")
    if factors is None:
        raise ModelFormatError(
            f"{keys.header.path} lacks the tensor 'rope_freqs.weight', or scales the rope besides"
        )
    turning = sum(factor == 1.0 for factor in factors)
    if list(factors) != [1.0] * turning + [factors[-1]] * (len(factors) - turning) or (
        turning < len(factors) and factors[-1] < 0.99 * _STILL
    ):
        raise ModelFormatError(
            f"{keys.header.path}: tensor 'rope_freqs.weight' must be ones, then {_STILL:g}; it "
            "holds other numbers"
        )
    theta = keys.number("rope.freq_base_swa")
    return {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": full["rope_theta"],
            "partial_rotary_factor": 2 * turning / head_dim,
        },
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": 10000.0 if theta is None else theta,
        },
    }
