"""`RunnerPlan` and compute dtype of the torch runner. Imports no torch."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from kvboost_edge.backends.base import KVSpec, LayerKVSpec
from kvboost_edge.backends.select import array_kind_of
from kvboost_edge.config import EngineConfig
from kvboost_edge.errors import install_extra
from kvboost_edge.models.config.architectures import is_bidirectional, rope_types
from kvboost_edge.models.config.quant_config import NVFP4_METHODS
from kvboost_edge.models.config.spec import may_keep_states
from kvboost_edge.runners.base import KEEPS_STATES, ModelTraits

__all__ = [
    "AUTO_BACKEND",
    "AUTO_BACKEND_REASON",
    "BIDIRECTIONAL",
    "WORKS_WITH",
    "choose_weights",
    "compute_dtype",
    "missing_package",
    "moved_keys_refusal",
    "torch_kv_spec",
    "unsupported_reason",
    "wish",
]

WORKS_WITH = "every backend"
AUTO_BACKEND = "auto"
AUTO_BACKEND_REASON = ""
BIDIRECTIONAL = (
    "the torch runner supports causal models only, and this one is bidirectional; use "
    "runner='native'"
)
_PACKAGES = ("torch", "transformers")
# Packages that transformers needs to load weights quantized by these methods.
_QUANTIZERS = {
    "awq": ("gptqmodel", "accelerate"),
    "gptq": ("optimum", "gptqmodel"),
    "mxfp4": ("accelerate",),
    "bitnet": ("accelerate",),
    "bitsandbytes": ("accelerate", "bitsandbytes"),
    "compressed-tensors": ("compressed_tensors",),
    "fp8": ("accelerate",),
}


def wish(config: EngineConfig, model: ModelTraits) -> str:
    """Return the option that only this runner supports, or ""."""
    wishes = {
        f"backend={config.backend!r}": array_kind_of(config.backend) == "torch",
        f"device={config.device!r}": array_kind_of(config.device or "") == "torch",
    }
    return next((name for name, given in wishes.items() if given), "")


def unsupported_reason(model: ModelTraits) -> str | None:
    """Return why the model (ONNX, bidirectional, recurrent or NVFP4) is unsupported, or None."""
    # Loading the model shows other limits of transformers.
    if model.onnx_refusal is not None:
        return "transformers does not load ONNX files"
    if is_bidirectional(model.config):
        return BIDIRECTIONAL
    method = _quant_method(model.config)
    if method in NVFP4_METHODS:
        return (
            f"transformers cannot read NVFP4 weights (quant_method={method!r}); use runner='native'"
        )
    return KEEPS_STATES if may_keep_states(model.config) else None


def missing_package(model_config: Mapping[str, Any]) -> str | None:
    """Return "needs ..." if a package must be installed to load this model, or None."""
    method = _quant_method(model_config)
    for package in (*_PACKAGES, *_QUANTIZERS.get(method, ())):
        if importlib.util.find_spec(package) is None:
            how = (
                f"install the extra: {install_extra('torch')}"
                if package in _PACKAGES
                else f"it reads {method} weights; install it"
            )
            return f"needs {package}, which is not installed; {how}"
    return None


def _quant_method(model_config: Mapping[str, Any]) -> str:
    return str((model_config.get("quantization_config") or {}).get("quant_method"))


def moved_keys_refusal(
    config: EngineConfig, model_config: Mapping[str, Any], backend: str
) -> str | None:
    """Return why keys cannot be reused at other positions, or None if no reason is visible."""
    # Interleaved RoPE and learned positions are only visible in a loaded model.
    others = sorted(rope_types(model_config) - {"default"})
    if others:
        return (
            f"RoPE type {others[0]!r} cannot be shifted in the torch runner, only plain RoPE; use "
            "runner='native'"
        )
    if array_kind_of(backend) != "torch":
        return (
            f"the torch runner on backend {backend!r} cannot use keys at other positions; use "
            "backend='torch'"
        )
    return None


def choose_weights(
    config: EngineConfig,
    model: ModelTraits,
    plan_pool: Callable[[KVSpec, int], int],
    available: int,
) -> tuple[str, str]:
    """Return ("", ""), because weights keep their format, in the compute dtype."""
    return "", ""


def torch_kv_spec(
    layers: tuple[LayerKVSpec, ...], block_size: int, dtype: str, bits: tuple[int, int]
) -> KVSpec:
    """Return the KV spec for a compute dtype and the bits of keys and values.

    The scales of quantized KV are float16, whatever the model computes in.
    """
    spec = KVSpec(layers, block_size, dtype, bits)
    return dataclasses.replace(spec, dtype="float16") if spec.is_quantized else spec


def compute_dtype(asked: str, stored: str, device: str) -> str:
    """Return the compute dtype, or "" if neither the option nor the checkpoint names one.

    "auto" means the stored dtype, except that float16 becomes float32 on the CPU, where half
    precision is slow.
    """
    if asked != "auto":
        return asked
    return "float32" if stored == "float16" and device.partition(":")[0] == "cpu" else stored
