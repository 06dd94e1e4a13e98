"""Which runner a model gets, in which weight format, and why. Decisions only: nothing is loaded, torch is not asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvboost_edge.backends.base import KVSpec, LayerKVSpec
from kvboost_edge.config import EngineConfig
from kvboost_edge.errors import ConfigError, ModelFormatError
from kvboost_edge.models.config.families import ModelSpec, describe_model
from kvboost_edge.models.packed.plan import STORED, pack_plan, plan_bytes

__all__ = ["ModelTraits", "RunnerChoice", "choose_runner", "choose_weights", "native_kv_spec"]

_OF_DTYPE = {"float32": "f32", "bfloat16": "bf16"}
_TORCH_BACKENDS = ("torch", "mps", "cuda")
_ACCELERATORS = ("mps", "cuda")
_UNQUANTIZED = (16, 16)


class ModelTraits(NamedTuple):
    """What is known of a model before it is loaded: its config, and whether its weights are stored in a quantized
    format (which is then kept)."""

    config: Mapping[str, Any]
    is_gguf: bool = False
    is_quantized: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class RunnerChoice:
    """`weights`: the native runner's format; empty for the torch runner. `wanted`: somebody asked for this runner, or
    nothing else could run the model."""

    name: str
    weights: str
    reason: str
    wanted: bool = True


def choose_runner(config: EngineConfig, model: ModelTraits) -> RunnerChoice:
    """The runner, its `weights` still open: native wherever it knows the family and nothing asks for torch.

    Raises ConfigError for options that contradict each other, ModelFormatError where only the native runner could do
    what is asked for and does not know the model.
    """
    torch_wish, native_wish = _torch_wish(config), _native_wish(config, model)
    if torch_wish and native_wish:
        raise ConfigError(
            f"{native_wish} needs the native runner, which works with backend='cpu', and {torch_wish} asks for the "
            "torch runner; leave one of them out"
        )
    if torch_wish:
        return RunnerChoice("torch", "", f"{torch_wish} was asked for")
    try:
        describe_model(model.config)
    except ModelFormatError as error:
        if native_wish:
            raise ModelFormatError(f"{error}; {native_wish} needs the native runner") from error
        return RunnerChoice("torch", "", f"not the native runner: {error}", wanted=False)
    known = "the family is known to it"
    return RunnerChoice("native", "", f"{native_wish} was asked for" if native_wish else known, bool(native_wish))


def choose_weights(config: EngineConfig, model: ModelTraits, pool_bytes: int, available: int) -> tuple[str, str]:
    """The native runner's weight format, and why. `pool_bytes`: what the pool will take of the `available` memory.

    A quantized checkpoint keeps its own formats. Of a float one: int8 if weights and pool take at most half of the
    memory, else int4; both with head and embedding at 8 bit.
    """
    named = _OF_DTYPE.get(config.dtype, "")
    if config.weights != "auto":
        if named not in ("", config.weights):
            raise ConfigError(
                f"dtype={config.dtype!r} means weights={named!r} in the native runner, and weights={config.weights!r} "
                "was given; leave one of them out"
            )
        return config.weights, "asked for"
    if named:
        return named, f"dtype={config.dtype!r}"
    if model.is_quantized:
        return STORED, "as the checkpoint stores them"
    needed = plan_bytes(pack_plan(describe_model(model.config), "int8"))
    sum_of = f"{_mb(needed)} of int8 weights + {_mb(pool_bytes)} of pool"
    if 2 * (needed + pool_bytes) <= available:
        return "int8", f"{sum_of} are at most half of the {_mb(available)} available"
    return "int4", f"{sum_of} would be more than half of the {_mb(available)} available"


def native_kv_spec(spec: ModelSpec, weights: str, block_size: int, bits: tuple[int, int] = _UNQUANTIZED) -> KVSpec:
    """How the native runner stores KV: float32 beside float32 weights, else float16, or quantized to `bits`."""
    layers = tuple(LayerKVSpec(spec.num_kv_heads, spec.head_dim) for _ in spec.layers)
    dtype = "float32" if weights == "f32" and bits == _UNQUANTIZED else "float16"
    return KVSpec(layers, block_size, dtype, bits)


def _torch_wish(config: EngineConfig) -> str:
    """The option that asks for torch, empty if none does."""
    device = (config.device or "").partition(":")[0]
    wishes = {
        f"runner={config.runner!r}": config.runner == "torch",
        f"backend={config.backend!r}": config.backend in _TORCH_BACKENDS,
        f"device={config.device!r}": device in _ACCELERATORS,
        f"dtype={config.dtype!r}": config.dtype == "float16",
    }
    return next((name for name, given in wishes.items() if given), "")


def _native_wish(config: EngineConfig, model: ModelTraits) -> str:
    """The option, or the form of the checkpoint, that only the native runner serves, empty if none does."""
    wishes = {
        f"runner={config.runner!r}": config.runner == "native",
        f"weights={config.weights!r}": config.weights != "auto",
        f"kv_cache_bits={config.kv_cache_bits!r}": config.kv_bits != _UNQUANTIZED,
        "a GGUF file": model.is_gguf,
    }
    return next((name for name, given in wishes.items() if given), "")


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
