"""`RunnerPlan` of the ONNX runner. Imports no onnxruntime."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from kvboost_edge.backends.base import KVSpec, LayerKVSpec
from kvboost_edge.config import EngineConfig
from kvboost_edge.errors import ConfigError, install_extra
from kvboost_edge.models.config.architectures import states_refusal
from kvboost_edge.models.config.spec import may_keep_states
from kvboost_edge.models.onnx.past_kv import PastLayout
from kvboost_edge.runners.base import KEEPS_STATES, ModelTraits

__all__ = [
    "AUTO_BACKEND",
    "AUTO_BACKEND_REASON",
    "MOVED_KEYS_REFUSAL",
    "WORKS_WITH",
    "choose_weights",
    "missing_package",
    "moved_keys_refusal",
    "onnx_kv_spec",
    "unsupported_reason",
    "wish",
]

MOVED_KEYS_REFUSAL = "the ONNX runner cannot use keys at other positions; use runner='native'"
WORKS_WITH = "backend='cpu' and 'reference'"
AUTO_BACKEND = "cpu"
AUTO_BACKEND_REASON = "blocks in NumPy arrays, which the ONNX runner copies to and from onnxruntime"


def wish(config: EngineConfig, model: ModelTraits) -> str:
    """Return "", because only runner="onnx" requires this runner."""
    return ""


def moved_keys_refusal(
    config: EngineConfig, model_config: Mapping[str, Any], backend: str
) -> str | None:
    """Return that keys cannot be moved, because the graph applies RoPE before they are readable."""
    return MOVED_KEYS_REFUSAL


def unsupported_reason(model: ModelTraits) -> str | None:
    """Return why the graph cannot be run, or None if no reason is visible."""
    if model.onnx_refusal is None:
        return "the model is not an ONNX file"
    # A graph with recurrent state would start each pass without it.
    if refusal := states_refusal(model.config):
        return refusal
    return (
        KEEPS_STATES
        if may_keep_states(model.config, model.onnx_layers)
        else model.onnx_refusal or None
    )


def missing_package(model_config: Mapping[str, Any]) -> str | None:
    """Return "needs onnxruntime ..." if it is not installed, or None."""
    if importlib.util.find_spec("onnxruntime") is None:
        return (
            f"needs onnxruntime, which is not installed; install the extra: {install_extra('onnx')}"
        )
    return None


def choose_weights(
    config: EngineConfig,
    model: ModelTraits,
    plan_pool: Callable[[KVSpec, int], int],
    available: int,
) -> tuple[str, str]:
    """Return ("", ""), because weights and dtype are those of the file.

    Raises:
        ConfigError: `dtype` or `kv_cache_bits` is set.
    """
    if config.dtype != "auto":
        raise ConfigError(
            f"dtype={config.dtype!r} does not apply to the ONNX runner, which uses the dtype of "
            "the file; leave it out"
        )
    if config.kv_bits != (16, 16):
        raise ConfigError(
            f"kv_cache_bits={config.kv_cache_bits!r} does not apply to the ONNX runner, whose "
            "graphs read floats; leave it out"
        )
    return "", ""


def onnx_kv_spec(layout: PastLayout, block_size: int) -> KVSpec:
    """Return the KV spec of a graph, in the graph's dtype."""
    layers = tuple(LayerKVSpec(layer.num_kv_heads, layer.head_dim) for layer in layout.layers)
    return KVSpec(layers, block_size, layout.dtype)
