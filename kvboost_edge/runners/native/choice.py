"""Which runner a model gets, in which weight format, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvboost_edge.config import EngineConfig
from kvboost_edge.errors import ConfigError
from kvboost_edge.models.families import describe_model

__all__ = ["BYTES_PER_PARAM", "RunnerChoice", "backend_name", "choose_runner", "wants_native"]

# Quantized formats: the codes and one float16 scale for each group of 32.
BYTES_PER_PARAM = {"f32": 4.0, "bf16": 2.0, "int8": 1 + 2 / 32, "int4": 0.5 + 2 / 32}
_OF_DTYPE = {"float32": "f32", "bfloat16": "bf16"}
_NUMPY_BACKENDS = ("cpu", "reference")


@dataclasses.dataclass(frozen=True, slots=True)
class RunnerChoice:
    """`weights`: the native runner's format; empty for the torch runner."""

    name: str
    weights: str
    reason: str


def wants_native(config: EngineConfig) -> bool:
    """Whether the native runner, or a weight format of it, is asked for."""
    return config.runner == "native" or (config.runner == "auto" and config.weights != "auto")


def backend_name(config: EngineConfig) -> str:
    """The backend to ask for: the native runner's is "cpu", without asking torch for accelerators."""
    return "cpu" if config.backend == "auto" and config.device is None and wants_native(config) else config.backend


def choose_runner(
    config: EngineConfig, model_config: Mapping[str, Any], backend: str, num_params: int, available: int
) -> RunnerChoice:
    """The runner for a model on a backend. `available`: bytes of memory that may be used.

    The native runner runs where it, or a weight format of it, is asked for by name; "auto" is the torch runner, whose
    weights are the checkpoint's own. Raises ModelFormatError or ConfigError where it was asked for and does not apply.
    """
    if config.runner == "torch":
        if config.weights != "auto":
            raise ConfigError(f"weights={config.weights!r} belongs to the native runner, and runner='torch' was given")
        return RunnerChoice("torch", "", "asked for")
    if not wants_native(config):
        return RunnerChoice("torch", "", "any causal language model of transformers, with the checkpoint's own weights")
    if backend not in _NUMPY_BACKENDS:
        raise ConfigError(
            f"the native runner works with backend 'cpu' or 'reference', not {backend!r}; give backend='cpu'"
        )
    describe_model(model_config)
    weights, why = _weights(config, num_params, available)
    return RunnerChoice("native", weights, f"the family is known to it; weights {weights}: {why}")


def _weights(config: EngineConfig, num_params: int, available: int) -> tuple[str, str]:
    """The weight format and why. The pool takes at most a quarter of the memory, so weights may take another."""
    if config.weights != "auto":
        return config.weights, "asked for"
    if config.dtype != "auto":
        if config.dtype not in _OF_DTYPE:
            raise ConfigError(f"dtype={config.dtype!r} is not a format of the native runner; use {list(_OF_DTYPE)}")
        return _OF_DTYPE[config.dtype], f"dtype={config.dtype!r}"
    needed = int(num_params * BYTES_PER_PARAM["int8"])
    if 4 * needed <= available:
        return "int8", f"{needed / 1e6:.0f} MB are at most a quarter of {available / 1e6:.0f} MB"
    return "int4", f"int8 would take {needed / 1e6:.0f} MB, more than a quarter of {available / 1e6:.0f} MB"
