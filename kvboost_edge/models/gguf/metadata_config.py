"""Conversion of GGUF metadata to a config in transformers' format.

Unknown metadata keys are refused with an error that names them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.config.json_readers import GenerationDefaults, generation_defaults
from kvboost_edge.models.families.gguf_keys import Keys
from kvboost_edge.models.families.gguf_names import GgufArchitecture
from kvboost_edge.models.gguf.blocks import dequantize
from kvboost_edge.models.gguf.file import GgufHeader
from kvboost_edge.models.gguf.source import (
    LONG_FACTORS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    architecture_of,
    is_mtp_file,
)
from kvboost_edge.models.weights.file_bytes import read_bytes

__all__ = ["TOKENS", "gguf_config", "gguf_generation"]

TOKENS = "tokenizer.ggml.tokens"
"""Metadata key that contains the vocabulary."""

_SUPPRESSED = "tokenizer.ggml.suppress_tokens"
_SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
}
_ROPE_KEYS = {
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}
_COMMON_KEYS = _ROPE_KEYS | {
    "vocab_size",
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "tensor_data_layout",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.causal",
    "expert_count",
    "expert_used_count",
    "pooling_type",
}
# Prefixes of keys for image and audio parts.
_OTHER_KEYS = ("vision.", "audio.", "mm.")
# Keys that only some architectures use, with the values that have no effect in the others.
_NEUTRAL = {
    "attention.sliding_window": 0,
    "rope.scaling.attn_factor": 1.0,
    "logit_scale": 1.0,
    "expert_gating_func": 1,  # softmax, which all other families use
}
_FACTORS = (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS)
# Tokens that end an answer in some chat format. A file may declare only one of them.
_ENDINGS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<turn|>",
    "<|tool_response>",
    "<|return|>",
    "<|call|>",
)
# If a vocabulary has these tokens (gpt-oss), "<|end|>" ends a message but not the answer.
_TURN_ENDINGS = {"<|return|>", "<|call|>"}
_MESSAGE_ENDING = "<|end|>"
# Token that asks the caller for the result of a tool. Gemma 4's files mark it as visible text.
_SEEN_ENDINGS = ("<|tool_response>",)
_CONTROL = 3
_USER_DEFINED = 4


def gguf_config(header: GgufHeader, vocabulary: Sequence[str]) -> dict[str, Any]:
    """Return the config of a GGUF file for `describe_model`.

    Args:
        header: header of the file.
        vocabulary: tokens of the file; may be empty.

    Raises:
        ModelFormatError: a key is missing, unknown, or contradicts another key or the tensors.
    """
    architecture = architecture_of(header)
    keys = Keys(header)
    _refuse_unknown(keys, architecture)
    heads = keys.size("attention.head_count")
    hidden = keys.size("embedding_length")
    head_dim = keys.optional_size("attention.key_length") or _head_dim(keys, hidden, heads)
    keys.check_values("", head_dim)
    kv_heads = _kv_heads(keys, architecture)
    eps = keys.number("attention.layer_norm_rms_epsilon")
    if eps is None and architecture.alone:
        eps = keys.number("attention.layer_norm_epsilon")
    if eps is None:
        raise ModelFormatError(
            f"{header.path} lacks the key {keys.name('attention.layer_norm_rms_epsilon')!r}"
        )
    tensors = header.tensors
    first = keys.first_block()
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "vocab_size": _vocab_size(header, keys, hidden),
        "hidden_size": hidden,
        "intermediate_size": keys.sizes("feed_forward_length")[0]
        if architecture.by_layer
        else _mlp_width(keys, architecture),
        "num_hidden_layers": keys.layers(),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "head_dim": head_dim,
        "max_position_embeddings": keys.size("context_length"),
        "rms_norm_eps": eps,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": f"{first}attn_q.bias" in tensors,
        "attention_output_bias": f"{first}attn_output.bias" in tensors,
        "mlp_bias": f"{first}ffn_up.bias" in tensors,
        **_token_ids(header, vocabulary),
    }
    if config["num_attention_heads"] % config["num_key_value_heads"]:
        raise keys.error(
            "attention.head_count",
            heads,
            f"is not a multiple of {config['num_key_value_heads']} KV heads",
        )
    if not architecture.alone:
        config.update(_rope(header, keys, head_dim))
    if architecture.config is not None:
        config.update(architecture.config(keys, config))
    if architecture.bidirectional:
        config["use_bidirectional_attention"] = True
    return config


def _kv_heads(keys: Keys, architecture: GgufArchitecture) -> int | None:
    """Return the number of KV heads.

    If layers differ, it is the number of the first layer with attention.
    """
    name = "attention.head_count_kv"
    if architecture.by_layer:
        return keys.sizes(name)[0]
    if not architecture.no_keys or not isinstance(
        keys.header.values.get(keys.name(name)), np.ndarray
    ):
        return keys.optional_size(name)
    heads = keys.sizes(name, 0)
    if len({*heads, 0}) != 2:
        raise keys.error(
            name,
            heads,
            "must be the same number for all layers with attention, and 0 for the others",
        )
    return max(heads)


def _mlp_width(keys: Keys, architecture: GgufArchitecture) -> int:
    """Return the width of the MLPs.

    If the key is missing in the file of a mixture, it is the width of the shared expert.
    """
    if architecture.alone:
        return max(keys.sizes("feed_forward_length", 0)) or 1  # any width; no layer has an MLP
    if architecture.experts and keys.name("feed_forward_length") not in keys.header.values:
        return keys.size("expert_shared_feed_forward_length")
    return keys.size("feed_forward_length")


def gguf_generation(
    header: GgufHeader, config: Mapping[str, Any], tokenizer_eos: int | None = None
) -> GenerationDefaults:
    """Return the special token ids and the sampling values of a GGUF file.

    Raises:
        ModelFormatError: the list of suppressed tokens is invalid.
    """
    found = header.values.get(_SUPPRESSED)
    if found is not None and (not isinstance(found, np.ndarray) or found.dtype.kind not in "iu"):
        raise ModelFormatError(
            f"{header.path}: {_SUPPRESSED}={found!r:.200} must be a list of token ids"
        )
    fields = {} if found is None else {"suppress_tokens": found.tolist()}
    # `penalty_repeat` is ignored because it covers the last 64 tokens, but repetition_penalty all
    # of them.
    for key, name in _SAMPLING_KEYS.items():
        if key in header.values:
            fields[name] = header.values[key]
    return generation_defaults(config, fields, tokenizer_eos=tokenizer_eos, path=header.path)


def _token_ids(header: GgufHeader, vocabulary: Sequence[str]) -> dict[str, Any]:
    """Return bos_token_id, pad_token_id and a list of all end tokens, as far as the file has them.

    An id outside the vocabulary raises ModelFormatError.
    """
    found: dict[str, Any] = {}
    for name, key in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        value = _token_id(header, key)
        if value is not None:
            found[name] = value
    endings = {
        value for key in ("eos", "eot", "eom") if (value := _token_id(header, key)) is not None
    }
    types = header.values.get("tokenizer.ggml.token_type")
    kinds = types.tolist() if isinstance(types, np.ndarray) else []
    in_messages = set(vocabulary) >= _TURN_ENDINGS
    for index, (token, kind) in enumerate(zip(vocabulary, kinds, strict=False)):
        if in_messages and token == _MESSAGE_ENDING:
            continue
        if (token in _ENDINGS and kind == _CONTROL) or (
            token in _SEEN_ENDINGS and kind == _USER_DEFINED
        ):
            endings.add(index)
    if endings:
        found["eos_token_id"] = sorted(endings)
    return found


def _token_id(header: GgufHeader, key: str) -> int | None:
    name = f"tokenizer.ggml.{key}_token_id"
    value = header.value(name, int)
    embedding = header.tensors.get("token_embd.weight")
    if value is None or embedding is None:
        return None
    if not 0 <= value < embedding.shape[0]:
        # llama.cpp's converters write 2**32 - 1 for "none".
        if value == (1 << 32) - 1:
            return None
        raise ModelFormatError(
            f"{header.path}: {name}={value} is outside the vocabulary of {embedding.shape[0]}"
        )
    return int(value)


def _refuse_unknown(keys: Keys, architecture: GgufArchitecture) -> None:
    known = _COMMON_KEYS | architecture.keys
    for key in sorted(keys.header.values):
        inner = key.removeprefix(f"{keys.prefix}.")
        if inner == key or inner in known or inner.startswith(_OTHER_KEYS):
            continue
        if not _is_neutral(inner, keys.header.values[key]):
            raise ModelFormatError(
                f"{keys.header.path}: key {key!r} is not supported for this architecture, and "
                "ignoring it would change the results"
            )
    if not architecture.experts and keys.header.values.get(keys.name("expert_count")) not in (
        None,
        0,
    ):
        raise keys.error(
            "expert_count",
            keys.header.values[keys.name("expert_count")],
            "is not supported for this architecture, which has no experts",
        )
    causal = keys.header.value(keys.name("attention.causal"), bool)
    if causal is architecture.bidirectional:
        wanted = (
            "contradicts the architecture, which has bidirectional attention"
            if causal
            else ("is not supported: the model cannot generate text")
        )
        raise keys.error("attention.causal", causal, wanted)


def _is_neutral(key: str, value: Any) -> bool:
    return key in _NEUTRAL and not isinstance(value, (bool, np.ndarray)) and value == _NEUTRAL[key]


def _head_dim(keys: Keys, hidden: int, heads: int) -> int:
    if hidden % heads:
        raise keys.error(
            "embedding_length", hidden, f"is not a multiple of attention.head_count={heads}"
        )
    return hidden // heads


def _vocab_size(header: GgufHeader, keys: Keys, hidden: int) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None and is_mtp_file(header):
        return keys.optional_size("vocab_size") or _count_tokens(header) or 1
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFormatError(
            f"{header.path}: tensor 'token_embd.weight' must exist and have two dimensions"
        )
    rows, columns = embedding.shape
    if columns != hidden:
        raise keys.error(
            "embedding_length", hidden, f"but tensor 'token_embd.weight' has {columns} columns"
        )
    given = keys.optional_size("vocab_size")
    if given not in (None, rows):
        raise keys.error("vocab_size", given, f"but tensor 'token_embd.weight' has {rows} rows")
    count = _count_tokens(header)
    if count > rows:
        raise ModelFormatError(
            f"{header.path}: {TOKENS} has {count} tokens, but tensor 'token_embd.weight' has "
            f"{rows} rows"
        )
    return rows


def _count_tokens(header: GgufHeader) -> int:
    return header.length(TOKENS) if header.has_strings(TOKENS) else 0


def _rope(header: GgufHeader, keys: Keys, head_dim: int) -> dict[str, Any]:
    """Return `rope_parameters`, including the rotated part of each head."""
    settings: dict[str, Any] = {"rope_theta": keys.number("rope.freq_base") or 10000.0}
    rotated = keys.optional_size("rope.dimension_count", 0) or head_dim
    if rotated > head_dim or rotated % 2:
        raise keys.error(
            "rope.dimension_count", rotated, f"must be an even number up to head_dim={head_dim}"
        )
    settings["partial_rotary_factor"] = rotated / head_dim
    kind = keys.header.value(keys.name("rope.scaling.type"), str) or "none"
    linear = keys.number("rope.scale_linear")
    factors, short, long = (_rope_factors(header, name, rotated // 2) for name in _FACTORS)
    if kind == "none" and linear not in (None, 1.0):
        kind = "linear"
    if factors is not None:
        if kind != "none":
            raise keys.error("rope.scaling.type", kind, f"contradicts the tensor {ROPE_FACTORS!r}")
        settings |= {"rope_type": "factors", "factors": factors}
    elif short is not None and long is not None:
        if kind not in ("none", "longrope"):
            raise keys.error("rope.scaling.type", kind, f"contradicts the tensor {SHORT_FACTORS!r}")
        settings |= {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            **_longrope(keys),
        }
    elif short is not None or long is not None:
        missing = LONG_FACTORS if long is None else SHORT_FACTORS
        raise ModelFormatError(
            f"{keys.header.path} lacks tensor {missing!r}, which RoPE of type longrope needs"
        )
    elif kind == "linear":
        settings |= {
            "rope_type": "linear",
            "factor": keys.number("rope.scaling.factor") or linear or 1.0,
        }
    elif kind == "yarn":
        settings |= _yarn(keys)
    elif kind != "none":
        raise keys.error(
            "rope.scaling.type",
            kind,
            "is not supported (supported: none, linear, yarn, longrope with tensors)",
        )
    return {"rope_parameters": settings}


def _longrope(keys: Keys) -> dict[str, Any]:
    """Return the settings of longrope.

    Some converters write the original length and the factor of cosines and sines. If the original
    length is missing, it is the context length, as in llama.cpp. If the factor is missing, it is
    computed from the two lengths.
    """
    old = keys.optional_size("rope.scaling.original_context_length") or keys.size("context_length")
    found: dict[str, Any] = {"original_max_position_embeddings": old}
    factor = keys.number("rope.scaling.attn_factor")
    return found if factor is None else {**found, "attention_factor": factor}


def _yarn(keys: Keys) -> dict[str, Any]:
    factor = keys.number("rope.scaling.factor")
    old = keys.optional_size("rope.scaling.original_context_length")
    # Converters copy the factor from the config, where it may equal YaRN's default (as in OLMo 3).
    usual = 1 + 0.1 * math.log(factor) if factor is not None and factor > 1 else 1.0
    for key, allowed in (("yarn_ext_factor", 1.0), ("yarn_attn_factor", usual)):
        value = keys.number(f"rope.scaling.{key}", -math.inf)
        if value is not None and value != 1.0 and abs(value - allowed) > 1e-6:
            raise keys.error(
                f"rope.scaling.{key}", value, f"is not supported (supported: 1 and {allowed:g})"
            )
    if factor is None or old is None:
        missing = (
            "rope.scaling.factor" if factor is None else "rope.scaling.original_context_length"
        )
        raise ModelFormatError(
            f"{keys.header.path} lacks the key {keys.name(missing)!r}, which RoPE of type yarn "
            "needs"
        )
    settings: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": old,
    }
    for key in ("beta_fast", "beta_slow"):
        value = keys.number(f"rope.scaling.yarn_{key}")
        if value is not None:
            settings[key] = value
    return settings


def _rope_factors(header: GgufHeader, name: str, count: int) -> list[float] | None:
    """Return stored divisors of RoPE frequencies (as in Llama 3); None without the tensor."""
    tensor = header.tensors.get(name)
    if tensor is None:
        return None
    if tensor.shape != (count,) or tensor.type != "F32":
        raise ModelFormatError(
            f"{header.path}: tensor {name!r} is {tensor.type} {tensor.shape}, expected F32 "
            f"({count},)"
        )
    data = read_bytes(header.path_of(tensor), tensor.start, tensor.stop)
    values = dequantize("F32", data.reshape(1, -1))[0]
    if not (np.isfinite(values) & (values > 0)).all():
        raise ModelFormatError(
            f"{header.path}: tensor {name!r} holds values that are not positive numbers"
        )
    return [float(value) for value in values]
