"""Checks that the tensors of a checkpoint match its config in width, rows and number of layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.config.nested import text_config
from kvboost_edge.models.config.spec import Describe, describe_model, heads_by_layer
from kvboost_edge.models.families.fields import integer_of, size_of
from kvboost_edge.models.families.registry import FAMILIES
from kvboost_edge.models.weights.modalities import is_other_part

__all__ = ["check_shapes"]

Shapes = Mapping[str, tuple[Path, tuple[int, ...]]]

_EMBEDDING = re.compile(
    r"(^|\.)(embed_tokens|embeddings|embed_in|wte|word_embeddings|tok_embeddings)\.weight$"
)
_HEAD = re.compile(r"^(language_model\.)?(lm_head|embed_out|output)\.weight$")
_LAYER = re.compile(r"(^|\.)(?:layers|h|blocks)\.(\d+)\.")
_ATTENTION = re.compile(r"(^|\.)layers\.(\d+)\.self_attn\.([qkvo])_proj\.weight$")


def check_shapes(
    shapes: Shapes,
    config: Mapping[str, Any],
    model: Path,
    said_by: str = "config.json",
    *,
    describe: Describe = describe_model,
) -> None:
    """Compare the shapes of tensors with the config. Tensors of vision and audio parts are ignored.

    Args:
        shapes: file and shape of each tensor, by name.
        config: object in config.json.
        model: directory or file of the model, for messages.
        said_by: origin of the config, for messages.
        describe: function that returns the spec of a config.

    Raises:
        ModelFormatError: a shape does not match; the message names the file, tensor and key.
    """
    inner = text_config(config)
    own = {name: found for name, found in shapes.items() if not is_other_part(name)}
    _check_vocabulary(own, inner, model, said_by)
    _check_layers(own, inner, model, said_by)
    _check_attention(own, inner, said_by, describe)


def _check_vocabulary(shapes: Shapes, config: Mapping[str, Any], model: Path, said_by: str) -> None:
    vocab = size_of(config, "vocab_size")
    hidden = size_of(config, "hidden_size")
    embeddings = [name for name in shapes if _EMBEDDING.search(name)]
    if not embeddings:
        raise ModelFormatError(
            f"{model}: no file contains the token embedding; these are not the weights of a decoder"
        )
    for name in (*embeddings, *(name for name in shapes if _HEAD.search(name))):
        path, shape = shapes[name]
        if len(shape) != 2:
            raise ModelFormatError(
                f"{path}: tensor {name!r} has shape {shape}, expected two dimensions"
            )
        if vocab is not None and shape[0] != vocab:
            raise ModelFormatError(
                f"{path}: tensor {name!r} has {shape[0]} rows, but {said_by} gives "
                f"vocab_size={vocab}"
            )
        # In some families, embeddings are narrower than the hidden size.
        if hidden is not None and shape[1] != hidden and "word_embed_proj_dim" not in config:
            raise ModelFormatError(
                f"{path}: tensor {name!r} has {shape[1]} columns, but {said_by} gives "
                f"hidden_size={hidden}"
            )


def _check_layers(shapes: Shapes, config: Mapping[str, Any], model: Path, said_by: str) -> None:
    expected = size_of(config, "num_hidden_layers")
    found = {int(match[2]): name for name in shapes if (match := _LAYER.search(name))}
    if expected is None or not found:
        return
    missing = next((layer for layer in range(expected) if layer not in found), None)
    if missing is not None:
        raise ModelFormatError(
            f"{model}: layer {missing} has no tensors, but {said_by} gives "
            f"num_hidden_layers={expected}"
        )
    last = max(found)
    extra = 0  # layers for multi-token prediction, which follow the others
    if config.get("num_nextn_predict_layers") is not None:
        extra = integer_of(config, "num_nextn_predict_layers", 0, model)
    if last >= expected + extra:
        raise ModelFormatError(
            f"{shapes[found[last]][0]}: tensor {found[last]!r} belongs to layer {last}, but "
            f"{said_by} gives num_hidden_layers={expected}"
        )


def _check_attention(
    shapes: Shapes, config: Mapping[str, Any], said_by: str, describe: Describe
) -> None:
    hidden = size_of(config, "hidden_size")
    heads = size_of(config, "num_attention_heads")
    if hidden is None or heads is None:
        return
    of_all = (
        size_of(config, "head_dim") or hidden // heads,
        size_of(config, "num_key_value_heads") or heads,
    )
    by_layer = heads_by_layer(config, describe)
    family = FAMILIES.get(str(config.get("model_type")))
    gated = family is not None and family.output_gate
    for name, (path, shape) in shapes.items():
        match = _ATTENTION.search(name)
        if match is None:
            continue
        head_dim, kv_heads = by_layer[int(match[2])] if by_layer else of_all
        if match[3] == "o":
            expected = (hidden, heads * head_dim)
            key = "num_attention_heads"
        elif match[3] == "q":
            expected = (heads * head_dim * (2 if gated else 1), hidden)
            key = "num_attention_heads"
        else:
            expected = (kv_heads * head_dim, hidden)
            key = "num_key_value_heads"
        if shape != expected:
            raise ModelFormatError(
                f"{path}: tensor {name!r} has shape {shape}, but {said_by} gives {expected} ({key} "
                f"x head_dim={head_dim}, hidden_size={hidden})"
            )
