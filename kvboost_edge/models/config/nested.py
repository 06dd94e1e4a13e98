"""Configs of composite models, which contain the config of a language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.families.family import Wrapper
from kvboost_edge.models.families.registry import WRAPPERS

__all__ = ["is_nested", "text_config"]


# Keys that may appear in both configs, with equal values.
_SHARED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "hidden_act",
    "sliding_window",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "quantization_config",
)


def is_nested(config: Mapping[str, Any]) -> bool:
    """Return whether the config is of a composite model whose language model is known."""
    return config.get("model_type") in WRAPPERS


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the language model: its `text_config` if there is one, else the config.

    For a known composite model, the result also has defaults that the files omit and values of the
    outer config.

    Raises:
        ModelFormatError: the inner config is missing or contradicts the outer one.
    """
    inner = config.get("text_config")
    outer = str(config.get("model_type"))
    wrapper = WRAPPERS.get(outer)
    if wrapper is None:
        return inner if isinstance(inner, Mapping) else config
    if not isinstance(inner, Mapping):
        what = (
            "lacks the key 'text_config'"
            if inner is None
            else f"has text_config={inner!r:.60}, not an object"
        )
        raise ModelFormatError(
            f"the config of model_type={outer!r} {what}, which describes its language model"
        )
    text = inner.get("model_type") or wrapper.texts[0]
    if text not in wrapper.texts:
        raise ModelFormatError(
            f"the text_config of model_type={outer!r} has model_type={text!r}; supported: "
            f"{', '.join(wrapper.texts)}"
        )
    for key in _SHARED:
        both = (config.get(key), inner.get(key))
        if None not in both and both[0] != both[1]:
            raise ModelFormatError(
                f"the config gives {key}={both[0]!r:.60}, but its text_config gives {both[1]!r:.60}"
            )
    merged = {**wrapper.defaults, **inner, "model_type": text}
    merged["tie_word_embeddings"] = _tied(config, inner, wrapper)
    if config.get("quantization_config"):
        merged["quantization_config"] = config["quantization_config"]
    return merged


def _tied(config: Mapping[str, Any], inner: Mapping[str, Any], wrapper: Wrapper) -> Any:
    """Return `tie_word_embeddings`.

    The outer config takes precedence, because the head belongs to the whole model.
    """
    said = (
        part["tie_word_embeddings"]
        for part in (config, inner)
        if part.get("tie_word_embeddings") is not None
    )
    return next(said, wrapper.tied)
