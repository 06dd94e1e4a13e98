"""Layout of past and present KV, the inputs and outputs with which an ONNX decoder passes KV."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.families.fields import size_of
from kvboost_edge.models.onnx.file import OnnxModel, OnnxNode, OnnxValue

__all__ = ["LayerPast", "PastLayout", "past_layout"]

_PAST = re.compile(r"past_key_values\.(\d{1,5})\.(key|value)")
_INPUTS = ("input_ids", "attention_mask", "position_ids")
_DTYPES = {"F32": "float32", "F16": "float16"}
_SHARED = "GroupQueryAttention"


class LayerPast(NamedTuple):
    """Names of a layer's KV inputs and outputs (key, then value), and the size of its KV."""

    past: tuple[str, str]
    present: tuple[str, str]
    num_kv_heads: int
    head_dim: int


class PastLayout(NamedTuple):
    """Layout of past and present KV.

    Attributes:
        dtype: dtype of KV, "float32" or "float16".
        inputs: type ("I64" or "I32") of each input other than past KV, by name.
        shared: True if past and present may be the same buffer, which may be longer than its
            content. Otherwise present is past followed by the new tokens.
    """

    layers: tuple[LayerPast, ...]
    dtype: str
    inputs: Mapping[str, str]
    shared: bool


def past_layout(model: OnnxModel, config: Mapping[str, Any]) -> PastLayout:
    """Return the layout of past and present KV in a graph.

    The config gives the head size if the graph does not.

    Raises:
        ModelFormatError: an input, output or operator is not supported; the message names it.
    """
    _refuse_operators(model)
    found: dict[tuple[int, str], OnnxValue] = {}
    others: dict[str, str] = {}
    for name, value in model.inputs.items():
        match = _PAST.fullmatch(name)
        if match is not None:
            found[int(match[1]), match[2]] = value
        elif name in _INPUTS and value.dtype in ("I64", "I32"):
            others[name] = value.dtype
        else:
            raise ModelFormatError(
                f"{model.path}: input {name!r} of type {value.dtype} is not supported"
            )
    if "input_ids" not in others:
        raise ModelFormatError(
            f"{model.path} has no input 'input_ids'; models that do not take token ids are not "
            "supported"
        )
    if not found:
        raise ModelFormatError(
            f"{model.path} has no inputs past_key_values.N.key and .value; export the model with "
            "its KV cache"
        )
    if "logits" not in model.outputs:
        raise ModelFormatError(f"{model.path} has no output 'logits'")
    num_layers = len(found) // 2
    layers = tuple(_layer(model, config, found, index) for index in range(num_layers))
    if len(found) != 2 * num_layers:
        raise ModelFormatError(
            f"{model.path} has {len(found)} past KV inputs, expected two per layer"
        )
    dtypes = {value.dtype for value in found.values()}
    if len(dtypes) != 1 or not dtypes <= set(_DTYPES):
        raise ModelFormatError(
            f"{model.path}: past KV has types {sorted(dtypes)}; supported: F32 or F16"
        )
    return PastLayout(
        layers, _DTYPES[dtypes.pop()], others, _is_shared(model, {v.name for v in found.values()})
    )


def _layer(
    model: OnnxModel,
    config: Mapping[str, Any],
    found: Mapping[tuple[int, str], OnnxValue],
    index: int,
) -> LayerPast:
    heads = size_of(config, "num_attention_heads")
    hidden = size_of(config, "hidden_size")
    head_dim = size_of(config, "head_dim") or (hidden // heads if heads and hidden else 0)
    shapes = set()
    for kind in ("key", "value"):
        value = found.get((index, kind))
        if value is None:
            raise ModelFormatError(f"{model.path} lacks the input 'past_key_values.{index}.{kind}'")
        if f"present.{index}.{kind}" not in model.outputs:
            raise ModelFormatError(f"{model.path} lacks the output 'present.{index}.{kind}'")
        shape = value.shape or ()
        if len(shape) != 4 or not isinstance(shape[1], int) or shape[1] < 1:
            raise ModelFormatError(
                f"{model.path}: input {value.name!r} has shape {shape}, expected [1, heads, past, "
                "dim]"
            )
        shapes.add((shape[1], shape[3] if isinstance(shape[3], int) else head_dim))
    if len(shapes) != 1 or min(shapes)[1] < 1:
        raise ModelFormatError(
            f"{model.path}: KV of layer {index} has heads and dims {sorted(shapes)}, expected "
            "the same for keys and values"
        )
    num_kv_heads, dim = shapes.pop()
    return LayerPast(
        (f"past_key_values.{index}.key", f"past_key_values.{index}.value"),
        (f"present.{index}.key", f"present.{index}.value"),
        num_kv_heads,
        dim,
    )


def _refuse_operators(model: OnnxModel) -> None:
    for node in model.nodes:
        if node.has_graph:
            raise ModelFormatError(
                f"{model.path}: {node} is a conditional part of the graph, so KV could depend on "
                "the length of the sequence; such graphs are not supported"
            )
        if node.op == _SHARED:
            _refuse_cache(model, node)


def _refuse_cache(model: OnnxModel, node: OnnxNode) -> None:
    for name in ("sliding_window_cache", "k_quant_type", "v_quant_type", "kv_cache_bit_width"):
        value = node.attributes.get(name)
        if value not in (None, 0, "", "NONE"):
            raise ModelFormatError(
                f"{model.path}: {node} has {name}={value!r:.20}; only plain KV caches are supported"
            )


def _is_shared(model: OnnxModel, names: set[str]) -> bool:
    readers = {node.op for node in model.nodes if names & set(node.inputs)}
    return readers == {_SHARED}
