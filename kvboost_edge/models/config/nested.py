"""Configs of models of several parts: the language model's is nested inside, and must not
contradict what is around.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvboost_edge.errors import ModelFormatError

__all__ = ["WRAPPERS", "Wrapper", "is_nested", "text_config"]


@dataclasses.dataclass(frozen=True, slots=True)
class Wrapper:
    """What a model of several parts has inside.

    texts     model types its language model can have, first the one where the config does not say
    tied      tie_word_embeddings where neither config says it
    defaults  what its files leave out of the language model's config
    """

    texts: tuple[str, ...]
    tied: bool
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)


# Gemma's files name only what differs from these.
_GEMMA3 = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
}
WRAPPERS: Mapping[str, Wrapper] = MappingProxyType(
    {
        "gemma3": Wrapper(("gemma3_text",), tied=True, defaults=_GEMMA3),
        "gemma4": Wrapper(("gemma4_text",), tied=True),
        "gemma4_unified": Wrapper(("gemma4_unified_text",), tied=True),
        "mistral3": Wrapper(("mistral", "ministral3"), tied=True),
        "lfm2_vl": Wrapper(("lfm2",), tied=True),
        "qwen3_5": Wrapper(("qwen3_5_text",), tied=False),
        "qwen3_5_moe": Wrapper(("qwen3_5_moe_text",), tied=False),
        "qwen3_vl": Wrapper(("qwen3_vl_text",), tied=False),
    }
)
"""Model types of several parts whose language model is known, by model_type of the whole."""

# What both configs may say, but only alike.
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
    """Whether the config is one of several parts whose language model is known."""
    return config.get("model_type") in WRAPPERS


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of the config that describes the language model: the config itself, or its
    'text_config', for a known wrapper with what the files leave out and what stands around it.
    ModelFormatError where the two contradict.
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
            f"the text_config of model_type={outer!r} has model_type={text!r}; known are "
            f"{', '.join(wrapper.texts)}"
        )
    for key in _SHARED:
        both = (config.get(key), inner.get(key))
        if None not in both and both[0] != both[1]:
            raise ModelFormatError(
                f"the config says {key}={both[0]!r:.60}, but its text_config {key}={both[1]!r:.60}"
            )
    merged = {**wrapper.defaults, **inner, "model_type": text}
    merged["tie_word_embeddings"] = _tied(config, inner, wrapper)
    if config.get("quantization_config"):
        merged["quantization_config"] = config["quantization_config"]
    return merged


def _tied(config: Mapping[str, Any], inner: Mapping[str, Any], wrapper: Wrapper) -> Any:
    """The whole model has the head, so what it says counts, whatever that is."""
    said = (
        part["tie_word_embeddings"]
        for part in (config, inner)
        if part.get("tie_word_embeddings") is not None
    )
    return next(said, wrapper.tied)
