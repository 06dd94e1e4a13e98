"""Config of an ONNX model in transformers' format, and its comparison with the graph.

A directory from onnxruntime-genai does not contain config.json. In this case, ids and the context
length come from genai_config.json, and sizes, norms, scales and RoPE from the graph. An existing
config.json is used if it describes the same computation as the graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.config.json_readers import read_config
from kvboost_edge.models.config.spec import ModelSpec
from kvboost_edge.models.families.fields import MAX_LAYERS, integer_of
from kvboost_edge.models.families.registry import FAMILIES, MODEL_TYPES
from kvboost_edge.models.onnx.decoder import Decoder, DecoderLayer
from kvboost_edge.models.onnx.folder import GENAI_CONFIG, OnnxFolder
from kvboost_edge.models.onnx.rope_tables import rope_difference, rope_settings

__all__ = ["check_spec", "onnx_config", "outer_config"]

# Model type in genai_config.json -> model_type in transformers, where the two differ.
_TYPES = {"gemma3": "gemma3_text", "mistral3": "mistral"}
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_SIZES = {
    "head_size": "head_dim",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "num_hidden_layers": "num_hidden_layers",
}
_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
_CLOSE = 1e-5
_CLOSE_FACTOR = 1e-3
"""Tolerance for the embedding factor, which exporters round to two digits or to bfloat16."""


def outer_config(folder: OnnxFolder) -> dict[str, Any]:
    """Return the config from config.json or genai_config.json, without reading the graph."""
    if folder.has_config:
        return read_config(folder.root)
    path = folder.root / GENAI_CONFIG
    model = (folder.genai or {}).get("model")
    decoder = model.get("decoder") if isinstance(model, Mapping) else None
    if not isinstance(model, Mapping) or not isinstance(decoder, Mapping):
        raise ModelFormatError(f"{path} lacks the object model.decoder")
    kind = model.get("type")
    if not isinstance(kind, str) or not kind:
        raise ModelFormatError(f"{path} lacks the key model.type")
    found: dict[str, Any] = {"model_type": _TYPES.get(kind, kind)}
    found |= {name: integer_of(decoder, key, 1, path) for key, name in _SIZES.items()}
    if found["num_hidden_layers"] > MAX_LAYERS:
        raise ModelFormatError(
            f"{path}: num_hidden_layers={found['num_hidden_layers']} exceeds the limit of "
            f"{MAX_LAYERS}"
        )
    found["vocab_size"] = integer_of(model, "vocab_size", 1, path)
    found["max_position_embeddings"] = integer_of(model, "context_length", 1, path)
    found |= {name: model[name] for name in _IDS if model.get(name) is not None}
    return found


def onnx_config(folder: OnnxFolder, decoder: Decoder) -> dict[str, Any]:
    """Return the config of a recognized decoder.

    The graph decides whether the head is tied to the embedding.
    """
    config = outer_config(folder)
    if "text_config" in config:
        raise ModelFormatError(
            f"{folder.root}: the graph is only one part of a composite model, which is not "
            "supported"
        )
    config["tie_word_embeddings"] = decoder.head is None
    return config if folder.has_config else {**config, **_of_graph(config, decoder)}


def _of_graph(config: Mapping[str, Any], decoder: Decoder) -> dict[str, Any]:
    """Return the entries of config.json that can be derived from the graph."""
    layer = decoder.layers[0]
    kind = config["model_type"]
    if layer.activation not in _ACTIVATIONS:
        raise ModelFormatError(
            f"activation {layer.activation} is not supported by the native runner"
        )
    found: dict[str, Any] = {
        "intermediate_size": _rows(layer, "mlp.gate_proj"),
        "rms_norm_eps": _plain(layer.eps[0]),
        "hidden_act": _ACTIVATIONS[layer.activation],
        "hidden_activation": _ACTIVATIONS[layer.activation],
        "attention_bias": "self_attn.q_proj.bias" in layer.vectors,
        "attention_output_bias": "self_attn.o_proj.bias" in layer.vectors,
        "mlp_bias": "mlp.up_proj.bias" in layer.vectors,
        **_windows(decoder),
        **_ropes(config, decoder),
    }
    family = FAMILIES.get(kind)
    if family is not None and family.query_scalar:
        found |= {
            "query_pre_attn_scalar": _plain(1 / layer.scale**2) if layer.scale else layer.head_dim
        }
        found |= {"attn_logit_softcapping": _plain(layer.softcap) or None}
        found |= {"final_logit_softcapping": _plain(decoder.logit_cap) or None}
    if family is not None and family.multipliers and MODEL_TYPES[kind].onnx:
        found |= {
            "attention_multiplier": _plain(layer.scale or 1 / math.sqrt(layer.head_dim)),
            "embedding_multiplier": _plain(decoder.embedding_factor),
            "residual_multiplier": _plain(layer.residual_factor),
            "logits_scaling": _plain(1 / decoder.logit_factor),
        }
    return found


def _windows(decoder: Decoder) -> dict[str, Any]:
    windows = {layer.window for layer in decoder.layers} - {0}
    if len(windows) > 1:
        raise ModelFormatError(
            f"layers with different windows ({sorted(windows)[:5]}) are not supported"
        )
    kinds = ["sliding_attention" if layer.window else "full_attention" for layer in decoder.layers]
    window = next(iter(windows), None)
    return {
        "sliding_window": window,
        "layer_types": kinds,
        "use_sliding_window": window is not None,
    }


def _ropes(config: Mapping[str, Any], decoder: Decoder) -> dict[str, Any]:
    length = int(config["max_position_embeddings"])
    tables = {layer.rope: layer for layer in reversed(decoder.layers)}
    found = {rope: rope_settings(rope, layer.head_dim, length) for rope, layer in tables.items()}
    if config["model_type"] != "gemma3_text":
        if len(found) > 1:
            raise ModelFormatError(
                f"model_type={config['model_type']!r} needs the same RoPE in all layers, but the "
                f"graph has {len(found)} kinds"
            )
        return {"rope_parameters": next(iter(found.values()))}
    local = next((found[layer.rope] for layer in decoder.layers if layer.window), None)
    full = next((found[layer.rope] for layer in decoder.layers if not layer.window), local)
    return {"rope_parameters": {"full_attention": full, "sliding_attention": local or full}}


def check_spec(spec: ModelSpec, decoder: Decoder) -> None:
    """Raise ModelFormatError if the native runner's computation differs from the graph.

    The message gives the first difference.
    """
    for what, ours, theirs, close in _facts(spec, decoder):
        equal = (
            math.isclose(ours, theirs, rel_tol=close, abs_tol=1e-12)
            if isinstance(ours, float)
            else ours == theirs
        )
        if not equal:
            raise ModelFormatError(
                f"the config gives {what}={ours!r:.60}, but the graph computes {theirs!r:.60}"
            )
    for index, layer in enumerate(decoder.layers):
        rope = spec.layers[index].rope
        if rope < 0:
            raise ModelFormatError(
                f"the config gives no RoPE for layer {index}, but the graph rotates its queries"
            )
        problem = rope_difference(layer.rope, spec.ropes[rope], spec.max_context)
        if problem:
            raise ModelFormatError(
                f"the RoPE of layer {index} differs from the config's: {problem}"
            )


def _facts(spec: ModelSpec, decoder: Decoder) -> Iterator[tuple[str, Any, Any, float]]:
    """Yield (name, config's value, graph's value, tolerance) for everything except RoPE."""
    yield "num_hidden_layers", len(spec.layers), len(decoder.layers), 0
    yield "vocab_size", spec.vocab_size, decoder.embedding.shape[0], 0
    yield "hidden_size", spec.hidden_size, decoder.embedding.shape[1], 0
    yield (
        "the factor of embeddings",
        float(spec.embedding_factor),
        decoder.embedding_factor,
        _CLOSE_FACTOR,
    )
    yield "the factor of logits", float(spec.logit_factor), decoder.logit_factor, _CLOSE
    yield "the cap of logits", float(spec.logit_cap), decoder.logit_cap, _CLOSE
    yield "rms_norm_eps", float(spec.eps), decoder.norm.eps, _CLOSE
    for index, layer in enumerate(decoder.layers):
        name = f" of layer {index}"
        yield f"num_attention_heads{name}", spec.num_heads, layer.num_heads, 0
        yield f"num_key_value_heads{name}", spec.num_kv_heads, layer.num_kv_heads, 0
        yield f"head_dim{name}", spec.head_dim, layer.head_dim, 0
        yield f"intermediate_size{name}", spec.intermediate_size, _rows(layer, "mlp.gate_proj"), 0
        scale = layer.scale or 1 / math.sqrt(layer.head_dim)
        yield f"the scale of attention{name}", float(spec.softmax_scale), scale, _CLOSE
        yield f"the softcap{name}", float(spec.softcap), layer.softcap, _CLOSE
        yield f"the window{name}", spec.layers[index].window, layer.window, 0
        yield f"the activation{name}", spec.activation, layer.activation, 0
        yield (
            f"the factor of the residual{name}",
            float(spec.residual_factor),
            layer.residual_factor,
            _CLOSE,
        )
        yield (
            f"norms after the blocks{name}",
            spec.family.norms == "both",
            layer.has_outer_norms,
            0,
        )
        for eps in layer.eps:
            yield f"rms_norm_eps{name}", float(spec.eps), eps, _CLOSE


def _rows(layer: DecoderLayer, name: str) -> int:
    part = layer.weights[name]
    return part.stop - part.start


def _plain(value: float) -> float:
    """Return the shortest decimal that rounds to this float32: 1e-06, not 9.999999974752427e-07."""
    return float(str(np.float32(value)))
