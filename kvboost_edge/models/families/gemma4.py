"""Gemma 4: two head sizes, shared KV, per-layer embeddings, and experts in parallel with MLPs.

Sliding and full layers have heads of different sizes. The last layers may share KV: each uses the
KV of the last layer of the same type that computes KV, and its MLP may be wider.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.families.family import Family, ModelType, Wrapper
from kvboost_edge.models.families.fields import integer_of, size_of
from kvboost_edge.models.families.gguf_keys import Keys
from kvboost_edge.models.families.gguf_names import (
    BOTH_NORMS,
    EXPERT_KEYS,
    HEAD_NORMS,
    MATRICES,
    WINDOW,
    GgufArchitecture,
)
from kvboost_edge.models.families.layers import LayerShape, PerLayerInput
from kvboost_edge.models.families.moe import (
    ExpertNames,
    Experts,
    experts_of,
    flag_of,
    gguf_experts,
)
from kvboost_edge.models.families.mtp import POST_PROJECTION, PROJECTION
from kvboost_edge.models.families.windows import all_but_every

__all__ = ["ASSISTANTS", "GGUF", "MODEL_TYPES"]

Config = Mapping[str, Any]

_FULL = "full_attention"
_SLIDING = "sliding_attention"
_FULL_EVERY = 6  # every n-th layer has full attention, without layer_types
_ROPES = {
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
_SIZES = {
    "sliding_window": 512,
    "head_dim": 256,
    "num_key_value_heads": 4,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "num_kv_shared_layers": 0,
}
_UNIFIED = {
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}  # defaults in which gemma4_unified_text differs
_OWN = ("head_dim", "num_key_value_heads")


def _complete(config: Config) -> Config:
    """Return the config with transformers' defaults.

    Raises:
        ModelFormatError: the last layer has a window.
    """
    layers = size_of(config, "num_hidden_layers") or 0
    kinds = config.get("layer_types")
    if not kinds:
        kinds = [
            _SLIDING if (i + 1) % _FULL_EVERY and i + 1 < layers else _FULL for i in range(layers)
        ]
    elif isinstance(kinds, (list, tuple)) and kinds[-1] != _FULL:
        raise ModelFormatError(
            f"the last entry of layer_types must be {_FULL!r} for Gemma 4, not {kinds[-1]!r:.60}"
        )
    sizes = {**_SIZES, **(_UNIFIED if config.get("model_type") == "gemma4_unified_text" else {})}
    filled = {key: value for key, value in sizes.items() if config.get(key) is None}
    return {
        **config,
        **filled,
        "layer_types": kinds,
        "rope_parameters": config.get("rope_parameters") or _ROPES,
    }


def _shapes(config: Config, windows: Sequence[int]) -> Sequence[LayerShape]:
    """Return the shape of each layer.

    Args:
        config: completed config.
        windows: window of each layer, 0 for full attention.
    """
    own = _own_sizes(config, windows)
    inner, heads = (
        size_of(config, key) or 0 for key in ("intermediate_size", "num_attention_heads")
    )
    shared = integer_of(config, "num_kv_shared_layers", 0)
    first = len(windows) - shared
    if first < 1:
        raise ModelFormatError(
            f"num_kv_shared_layers={shared} must be less than the number of layers, {len(windows)}"
        )
    wider = 2 if config.get("use_double_wide_mlp") else 1
    same = bool(config.get("attention_k_eq_v"))
    shapes: list[LayerShape] = []
    for index, window in enumerate(windows):
        dim, kv_heads = own[index]
        if heads % kv_heads:
            raise ModelFormatError(
                f"num_attention_heads={heads} is not a multiple of the {kv_heads} KV heads of "
                f"layer {index}"
            )
        if index < first:
            shapes.append(
                LayerShape(dim, kv_heads, inner, index, has_values=not (same and window == 0))
            )
            continue
        giver = next((i for i in reversed(range(first)) if (windows[i] > 0) == (window > 0)), None)
        if giver is None:
            kind = _SLIDING if window else _FULL
            raise ModelFormatError(
                f"layer {index} ({kind}) needs the KV of an earlier layer "
                f"(num_kv_shared_layers={shared}), but none of the first {first} layers has the "
                "same type"
            )
        if own[giver] != own[index]:
            raise ModelFormatError(
                f"layer {index} shares the KV of layer {giver}, but {_OWN} differ: {own[index]} "
                f"and {own[giver]}"
            )
        shapes.append(LayerShape(dim, kv_heads, wider * inner, giver, owns_kv=False))
    return shapes


def _per_layer_input(config: Config, vocab_size: int) -> PerLayerInput | None:
    """Return the per-layer embedding of a completed config, or None if it is not used."""
    width = integer_of(config, "hidden_size_per_layer_input", 0)
    if not width:
        return None
    rows = integer_of(config, "vocab_size_per_layer_input", 1)
    if rows < vocab_size:
        raise ModelFormatError(
            f"vocab_size_per_layer_input={rows} is less than vocab_size={vocab_size}; every token "
            "needs a row"
        )
    return PerLayerInput(rows, width)


def _own_sizes(config: Config, windows: Sequence[int]) -> list[tuple[int, int]]:
    """Return (head_dim, KV heads) of each layer.

    They come from `per_layer_config`, or from the config keys for full layers.
    """
    plain = {key: size_of(config, key) or 0 for key in _OWN}
    given = config.get("per_layer_config")
    if given is None:
        kv_heads = (
            size_of(config, "num_global_key_value_heads")
            if config.get("attention_k_eq_v")
            else None
        )
        full = {"head_dim": size_of(config, "global_head_dim") or 512}
        full["num_key_value_heads"] = kv_heads or plain["num_key_value_heads"]
        return [_pair(plain if window else full) for window in windows]
    if not isinstance(given, Mapping):
        raise ModelFormatError(f"per_layer_config={given!r:.200} must be an object")
    sizes = [dict(plain) for _ in windows]
    for key, changes in given.items():
        index = int(key) if str(key).isdecimal() else -1
        if (
            not 0 <= index < len(windows)
            or not isinstance(changes, Mapping)
            or set(changes) - set(_OWN)
        ):
            raise ModelFormatError(
                f"per_layer_config={{{key!r:.60}: {changes!r:.200}}} must map a layer index from 0 "
                f"to {len(windows) - 1} to an object with keys of {_OWN}"
            )
        sizes[index].update(
            {name: size_of(changes, name, f"per_layer_config {key}") or 0 for name in changes}
        )
    return [_pair(one) for one in sizes]


def _pair(sizes: Mapping[str, int]) -> tuple[int, int]:
    return sizes["head_dim"], sizes["num_key_value_heads"]


def _experts(config: Config, layers: int) -> Experts | None:
    """Return the mixture of experts in parallel with the MLP, or None without `enable_moe_block`.

    Routing weights are the softmax of all logits, divided by the sum over the selected experts and
    multiplied by a scalar per expert. The router has its own norm.
    """
    if not flag_of(config, "enable_moe_block", False):
        return None
    after = "post_feedforward_layernorm"
    names = ExpertNames(
        "router.proj",
        "experts.",
        scales=("router.scale", "router.per_expert_scale"),
        norms=(f"{after}_1", "pre_feedforward_layernorm_2", f"{after}_2"),
    )
    keys = ("num_experts", "top_k_experts", "moe_intermediate_size")
    return experts_of(
        config, keys, (None, None, None), [True] * layers, renorm="add", names=names, beside=True
    )


_FAMILY = Family(
    norms="both",
    tied=True,
    head_norm="head",
    head_dim=256,
    scaled_embedding=True,
    activation="gelu_pytorch_tanh",
    value_norm=True,
    layer_scalar=True,
    scale=1.0,
    capped=True,
    local_rope=True,
    theta=1e6,
    windows=all_but_every(6),
    shapes=_shapes,
    per_layer=_per_layer_input,
    complete=_complete,
    experts=_experts,
    unless=(("use_bidirectional_attention", (None, False, "vision")),),
)
MODEL_TYPES: Mapping[str, ModelType] = MappingProxyType(
    {
        "gemma4_text": ModelType(
            "Gemma 4, heads that differ by kind of layer, shared KV, per-layer embeddings, "
            "experts in parallel with MLPs",
            _FAMILY,
            gguf=True,
        ),
        "gemma4_unified_text": ModelType(
            "Gemma 4 without per-layer embeddings", _FAMILY, torch=False
        ),
        "gemma4": ModelType(
            "Gemma 4 (vision and audio model), text only",
            wrapper=Wrapper(("gemma4_text",), tied=True),
            torch=False,
        ),
        "gemma4_unified": ModelType(
            "Gemma 4 without per-layer embeddings (vision and audio model), text only",
            wrapper=Wrapper(("gemma4_unified_text",), tied=True),
            torch=False,
        ),
    }
)

ASSISTANTS: Mapping[str, str] = MappingProxyType(
    {
        "gemma4_assistant": "gemma4_text",
        "gemma4_unified_assistant": "gemma4_unified_text",
    }
)

_TABLE = "per_layer_token_embd.weight"
_STILL = 1e30  # divisor of frequencies that are not rotated


def _gguf_config(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return config entries read from a GGUF file.

    Raises:
        ModelFormatError: keys contradict each other or the tensors.
    """
    sliding = _sliding_layers(keys)
    shared = keys.optional_size("attention.shared_kv_layers", 0) or 0
    first = len(sliding) - shared
    if first < 1:
        raise keys.error(
            "attention.shared_kv_layers",
            shared,
            f"must be less than the number of layers, {len(sliding)}",
        )
    return {
        **_attention(keys, config, sliding),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": _is_double_wide(keys, first),
        "final_logit_softcapping": keys.number("final_logit_softcapping"),
        **_kv_heads(keys, sliding, first),
        **_second_embedding(keys, config["vocab_size"], len(sliding)),
        **_mixture(keys),
    }


def _assistant_config(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return config entries of an assistant, see `_gguf_config`."""
    sliding = _sliding_layers(keys)
    by_kind = _heads_by_kind(keys, sliding)
    heads = {kind: next(iter(found)) for kind, found in by_kind.items() if found}
    layers = {
        **config,
        **_attention(keys, config, sliding),
        "model_type": ASSISTANTS["gemma4_assistant"],
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,  # else layers of both kinds have the same number of KV heads
        "num_key_value_heads": heads.get(True, heads.get(False)),
        "num_global_key_value_heads": heads.get(False),
    }
    return {"backbone_hidden_size": keys.size("embedding_length_out"), "text_config": layers}


def _sliding_layers(keys: Keys) -> Sequence[bool]:
    """Return which layers are sliding."""
    pattern = "attention.sliding_window_pattern"
    sliding = keys.sliding(pattern)
    if sliding is None:
        raise keys.error(
            pattern,
            keys.header.values.get(keys.name(pattern)),
            "must be true (sliding) or false for each layer",
        )
    return sliding


def _attention(keys: Keys, config: dict[str, Any], sliding: Sequence[bool]) -> dict[str, Any]:
    """Return config entries of both kinds of attention layers."""
    full = keys.size("attention.key_length")
    local = keys.size("attention.key_length_swa")
    keys.check_values("_swa", local)
    for suffix, dim in (("", full), ("_swa", local)):
        rotated = keys.optional_size(f"rope.dimension_count{suffix}")
        if rotated not in (None, dim):
            raise keys.error(
                f"rope.dimension_count{suffix}", rotated, f"must equal the key head size, {dim}"
            )
    return {
        "layer_types": ["sliding_attention" if local else "full_attention" for local in sliding],
        "sliding_window": keys.size("attention.sliding_window"),
        "head_dim": local,
        "global_head_dim": full,
        "rope_parameters": _gguf_ropes(keys, config["rope_parameters"], full),
    }


def _mixture(keys: Keys) -> dict[str, Any]:
    """Return config entries of the experts in parallel with each MLP; {} without experts."""
    if not keys.optional_size("expert_count", 0):
        return {}
    width = keys.size("expert_feed_forward_length")
    return {
        "enable_moe_block": True,
        **gguf_experts(keys, used="top_k_experts"),
        "moe_intermediate_size": width,
    }


def _is_double_wide(keys: Keys, first: int) -> bool:
    """Return whether layers that share KV, from layer `first` on, have MLPs of twice the usual
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
            f"must be the same for the first {first} layers, and the same or twice as large for "
            "the others",
        )
    return sharing == {2 * widths[0]}


def _kv_heads(keys: Keys, sliding: Sequence[bool], first: int) -> dict[str, Any]:
    """Return the KV heads by layer type, and whether full layers use keys as values."""
    key = "attention.head_count_kv"
    heads = keys.sizes(key)
    by_kind = _heads_by_kind(keys, sliding)
    without = [
        index for index in range(first) if f"blk.{index}.attn_v.weight" not in keys.header.tensors
    ]
    is_shared = bool(without)
    if is_shared and without != [index for index in range(first) if not sliding[index]]:
        raise ModelFormatError(
            f"{keys.header.path} lacks the tensor 'blk.{without[0]}.attn_v.weight'; only "
            "full-attention layers may omit values, and then all of them must"
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
            key,
            heads,
            "differs between layers, which is supported only for full layers without values",
        )
    return config


def _heads_by_kind(keys: Keys, sliding: Sequence[bool]) -> Mapping[bool, set[int]]:
    """Return the number of KV heads of sliding layers (True) and of the others (False)."""
    key = "attention.head_count_kv"
    heads = keys.sizes(key)
    by_kind = {
        kind: {count for count, own in zip(heads, sliding, strict=True) if own is kind}
        for kind in (True, False)
    }
    if any(len(counts) > 1 for counts in by_kind.values()):
        raise keys.error(key, heads, "must be one number for sliding layers and one for the others")
    return by_kind


def _second_embedding(keys: Keys, vocab_size: int, layers: int) -> dict[str, Any]:
    """Return the width (0 without one) and vocabulary size of the per-layer embedding."""
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


def _gguf_ropes(keys: Keys, full: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Return the RoPE settings of sliding and full layers.

    In a GGUF file, frequencies of full layers that are not rotated have the divisor 1e30.
    """
    factors = full.get("factors")
    if factors is None:
        raise ModelFormatError(
            f"{keys.header.path} lacks the tensor 'rope_freqs.weight', which Gemma 4 needs"
        )
    turning = sum(factor == 1.0 for factor in factors)
    if list(factors) != [1.0] * turning + [factors[-1]] * (len(factors) - turning) or (
        turning < len(factors) and factors[-1] < 0.99 * _STILL
    ):
        raise ModelFormatError(
            f"{keys.header.path}: tensor 'rope_freqs.weight' must be ones followed by {_STILL:g}; "
            "it contains other numbers"
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


_LAYER_NAMES = {
    **MATRICES,
    **BOTH_NORMS,
    **HEAD_NORMS,
    "layer_output_scale": "layer_scalar",
}
_KEYS = WINDOW | {
    "final_logit_softcapping",
    "rope.freq_base_swa",
    "rope.dimension_count_swa",
    "attention.key_length_swa",
    "attention.value_length_swa",
    "attention.shared_kv_layers",
    "embedding_length_per_layer_input",
}

GGUF: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "gemma4": GgufArchitecture(
            "gemma4_text",
            {
                **_LAYER_NAMES,
                "inp_gate": "per_layer_input_gate",
                "proj": "per_layer_projection",
                "post_norm": "post_per_layer_input_norm",
                "ffn_gate_inp": "router.proj",
                "ffn_gate_inp.scale": "router.scale",
                "ffn_gate_up_exps": "experts.gate_up_proj",
                "ffn_gate_exps": "experts.gate_proj",
                "ffn_up_exps": "experts.up_proj",
                "ffn_down_exps": "experts.down_proj",
                "ffn_down_exps.scale": "router.per_expert_scale",
                "post_ffw_norm_1": "post_feedforward_layernorm_1",
                "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
                "post_ffw_norm_2": "post_feedforward_layernorm_2",
            },
            outer={
                "per_layer_token_embd": "model.embed_tokens_per_layer",
                "per_layer_model_proj": "model.per_layer_model_projection",
                "per_layer_proj_norm": "model.per_layer_projection_norm",
            },
            keys=EXPERT_KEYS | _KEYS,
            experts=True,
            by_layer=True,
            config=_gguf_config,
        ),
        "gemma4-assistant": GgufArchitecture(
            "gemma4_assistant",
            _LAYER_NAMES,
            outer={
                "token_embd": "lm_head",
                "nextn.pre_projection": PROJECTION,
                "nextn.post_projection": POST_PROJECTION,
            },
            keys=_KEYS | {"embedding_length_out", "nextn_predict_layers"},
            unused=("masked_embd_centroids.weight", "masked_embd_ordering"),
            by_layer=True,
            config=_assistant_config,
        ),
    }
)
