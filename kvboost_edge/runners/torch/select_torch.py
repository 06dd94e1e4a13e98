"""What the torch runner takes, what must be installed for it, and in which dtype it computes. Loads
no torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from kvboost_edge.backends.base import KVSpec
from kvboost_edge.backends.select import array_kind_of
from kvboost_edge.config import EngineConfig
from kvboost_edge.errors import install_extra
from kvboost_edge.models.config.architectures import attends_both_ways, rope_types
from kvboost_edge.models.config.spec import may_keep_states
from kvboost_edge.runners.base import KEEPS_STATES, ModelTraits

__all__ = [
    "AUTO_BACKEND",
    "AUTO_BACKEND_REASON",
    "BOTH_WAYS",
    "WORKS_WITH",
    "choose_weights",
    "compute_dtype",
    "missing_package",
    "moved_keys_refusal",
    "unsupported_reason",
    "wish",
]

WORKS_WITH = "every backend"
AUTO_BACKEND = "auto"
AUTO_BACKEND_REASON = ""
BOTH_WAYS = "the torch runner attends causally, and the model both ways; the native runner takes it"
_PACKAGES = ("torch", "transformers")
# What transformers needs to load weights that are quantized so.
_QUANTIZERS = {
    "awq": ("gptqmodel", "accelerate"),
    "gptq": ("optimum", "gptqmodel"),
    "mxfp4": ("accelerate",),
}


def wish(config: EngineConfig, model: ModelTraits) -> str:
    """The option that only this runner serves, empty if none does."""
    wishes = {
        f"backend={config.backend!r}": array_kind_of(config.backend) == "torch",
        f"device={config.device!r}": array_kind_of(config.device or "") == "torch",
    }
    return next((name for name, given in wishes.items() if given), "")


def unsupported_reason(model: ModelTraits) -> str | None:
    """Of an ONNX file, a model that attends both ways, and one with states; else None: what
    transformers cannot run shows when it is loaded.
    """
    if model.onnx_refusal is not None:
        return "transformers does not load ONNX files"
    if attends_both_ways(model.config):
        return BOTH_WAYS
    return KEEPS_STATES if may_keep_states(model.config) else None


def missing_package(model_config: Mapping[str, Any]) -> str | None:
    """What has to be installed to load this model, None where nothing is missing; of a quantized
    one transformers asks for more.
    """
    method = str((model_config.get("quantization_config") or {}).get("quant_method"))
    for package in (*_PACKAGES, *_QUANTIZERS.get(method, ())):
        if importlib.util.find_spec(package) is None:
            how = (
                f"install the extra: {install_extra('torch')}"
                if package in _PACKAGES
                else f"it reads {method} weights; install it"
            )
            return f"needs {package}, which is not installed; {how}"
    return None


def moved_keys_refusal(model_config: Mapping[str, Any], backend: str) -> str | None:
    """Of what only a loaded model shows, pairs of neighbouring channels and learned positions,
    nothing is known.
    """
    others = sorted(rope_types(model_config) - {"default"})
    if others:
        return (
            f"rope of type {others[0]!r} is not turned on the torch runner, plain rope alone is; "
            "use runner='native'"
        )
    if array_kind_of(backend) != "torch":
        return (
            f"the torch runner on backend {backend!r} attends keys only where they were computed; "
            "use 'torch'"
        )
    return None


def choose_weights(
    config: EngineConfig,
    model: ModelTraits,
    plan_pool: Callable[[KVSpec, int], int],
    available: int,
) -> tuple[str, str]:
    """No format of its own: the weights stay as the checkpoint has them, in the dtype of the
    compute.
    """
    return "", ""


def compute_dtype(asked: str, stored: str, device: str) -> str:
    """The name of the dtype to compute in. "auto" is the stored one ("" where nothing says which),
    but float16 becomes float32 on the CPU, where half precision arithmetic is slow.
    """
    if asked != "auto":
        return asked
    return "float32" if stored == "float16" and device.partition(":")[0] == "cpu" else stored
