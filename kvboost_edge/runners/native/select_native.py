"""`RunnerPlan` and KV spec of the native runner."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvboost_edge import shareable
from kvboost_edge.backends.base import KVSpec, LayerKVSpec, LayerStateSpec
from kvboost_edge.config import EngineConfig
from kvboost_edge.errors import ConfigError, ModelFormatError
from kvboost_edge.kernels.linear.weight_formats import GROUP
from kvboost_edge.models.config.architectures import pin_notice
from kvboost_edge.models.config.spec import ModelSpec, describe_model
from kvboost_edge.models.families.mixers import Mixer
from kvboost_edge.models.packed.pack_plan import STORED
from kvboost_edge.runners.base import ModelTraits, RunnerInfo
from kvboost_edge.segments import QUERY_BLOCK

if TYPE_CHECKING:
    from kvboost_edge.models.checkpoint import Checkpoint

__all__ = [
    "AUTO_BACKEND",
    "AUTO_BACKEND_REASON",
    "RECURRENT",
    "WORKS_WITH",
    "choose_weights",
    "keys_refusal",
    "log_dtype",
    "log_notices",
    "missing_package",
    "moved_keys_refusal",
    "native_kv_spec",
    "sparse_refusal",
    "state_spec",
    "unsupported_reason",
    "wish",
]

_LOG = logging.getLogger(__name__)

WORKS_WITH = "backend='cpu'"
AUTO_BACKEND = "cpu"
AUTO_BACKEND_REASON = (
    "compiled CPU kernels for the native runner; device='cuda' or 'mps' would use the torch runner"
)
RECURRENT = (
    "recurrent: layers of this model keep a state of all earlier tokens, so cached text cannot be "
    "reused at other positions"
)
_OF_DTYPE = {"float32": "f32", "bfloat16": "bf16"}
_UNQUANTIZED = (16, 16)
_STORES_NOTHING = "the model is bidirectional and stores no KV"
_SPARSE_BLOCKS = (16, 32, 64)  # sizes that divide a tile of attention
_ANYWHERE = (8, 8)  # kv_bits that the torch runner supports as well


def wish(config: EngineConfig, model: ModelTraits) -> str:
    """Return the option or model format that only this runner supports, or ""."""
    wishes = {
        f"weights={config.weights!r}": config.weights != "auto",
        f"kv_cache_bits={config.kv_cache_bits!r}": config.kv_bits not in (_UNQUANTIZED, _ANYWHERE),
        f"rope_range={config.rope_range!r}": config.rope_range != "short",
        f"arithmetic={config.arithmetic!r}": config.arithmetic != "exact",
        f"prefill={config.prefill!r}": config.prefill != "exact",
        "a GGUF file": model.is_gguf,
    }
    return next((name for name, given in wishes.items() if given), "")


def unsupported_reason(model: ModelTraits) -> str | None:
    """Return why this runner does not support the model, or None if it does."""
    if model.native_refusal:
        return model.native_refusal
    try:
        _ = model.spec
    except ModelFormatError as error:
        return str(error)
    return None


def missing_package(model_config: Mapping[str, Any]) -> str | None:
    """Return None, because every installation has the packages of this runner."""
    return None


def moved_keys_refusal(
    config: EngineConfig, model_config: Mapping[str, Any], backend: str
) -> str | None:
    """Return why keys cannot be reused at other positions, or None if they can."""
    return keys_refusal(describe_model(model_config), backend, is_wide=config.arithmetic == "wide")


def keys_refusal(spec: ModelSpec, backend: str, *, is_wide: bool) -> str | None:
    """Return why keys cannot be reused at other positions, or None if they can.

    Args:
        spec: the model.
        backend: name of the backend, or "" for none.
        is_wide: whether shared KV is computed in wide arithmetic.
    """
    if spec.bidirectional:
        return _STORES_NOTHING
    if spec.mixer is not None:
        return RECURRENT
    if spec.family.late_norm:
        return (
            "this family norms queries and keys after RoPE, so stored keys cannot be moved to "
            "other positions"
        )
    if is_wide:
        return (
            "with arithmetic='wide', keys are not reused at other positions; use arithmetic='exact'"
        )
    # Attention can rotate queries again only if the pass is one kernel call, which keeps queries
    # before RoPE.
    if backend != AUTO_BACKEND:
        name = f"backend {backend!r}" if backend else "no backend"
        return f"the native runner on {name} cannot use keys at other positions; use backend='cpu'"
    width = next((n for layer in spec.layers if (n := spec.num_heads * layer.head_dim) % GROUP), 0)
    if width:
        return (
            f"heads x head_dim = {width} is not a multiple of {GROUP}, so queries before RoPE are "
            "not kept"
        )
    return None


def choose_weights(
    config: EngineConfig,
    model: ModelTraits,
    plan_pool: Callable[[KVSpec, int], int],
    available: int,
) -> tuple[str, str]:
    """Return the weight format and the reason for it.

    A quantized checkpoint keeps its formats. A float checkpoint is converted to int8 if weights and
    pool take at most half of the available memory, otherwise to int4. The LM head and the embedding
    stay at 8 bits.

    Args:
        config: options of the engine.
        model: the model.
        plan_pool: returns the size of the pool in bytes for a KV spec and a maximum sequence
            length.
        available: available memory in bytes.
    """
    spec = model.spec
    if config.arithmetic == "wide":
        _check_wide(config, spec)
    if config.prefill != "exact" and (reason := sparse_refusal(spec, config)):
        raise ConfigError(f"prefill={config.prefill!r} is refused: {reason}; use prefill='exact'")
    pool_bytes = plan_pool(
        native_kv_spec(spec, "", config.block_size, config.kv_bits), spec.max_context
    )
    named = _OF_DTYPE.get(config.dtype, "")
    if config.weights != "auto":
        if named not in ("", config.weights):
            raise ConfigError(
                f"dtype={config.dtype!r} means weights={named!r} in the native runner, but "
                f"weights={config.weights!r} was given; leave one of them out"
            )
        return config.weights, "requested"
    if named:
        return named, f"dtype={config.dtype!r}"
    if model.is_quantized:
        return STORED, "as the checkpoint stores them"
    assert model.packed_bytes is not None
    needed = model.packed_bytes("int8")
    sum_of = f"{_mb(needed)} of int8 weights + {_mb(pool_bytes)} of pool"
    if 2 * (needed + pool_bytes) <= available:
        return "int8", f"{sum_of} are at most half of the {_mb(available)} available"
    return "int4", f"{sum_of} would be more than half of the {_mb(available)} available"


def _check_wide(config: EngineConfig, spec: ModelSpec) -> None:
    """Check that arithmetic='wide' applies to a model and the other options.

    Raises:
        ConfigError: it does not apply.
    """
    reason = ""
    if spec.bidirectional:
        reason = _STORES_NOTHING
    elif spec.mixer is not None:
        reason = "layers of this model keep a recurrent state"
    elif config.weights in _OF_DTYPE.values() or config.dtype in _OF_DTYPE:
        reason = f"weights={_OF_DTYPE.get(config.dtype, config.weights)!r} are not integers"
    if reason:
        raise ConfigError(f"arithmetic='wide' is refused: {reason}; use arithmetic='exact'")


def native_kv_spec(
    spec: ModelSpec, weights: str, block_size: int, bits: tuple[int, int] = _UNQUANTIZED
) -> KVSpec:
    """Return the KV spec for a weight format and the bits of keys and values.

    Unquantized KV is float32 with f32 weights, otherwise float16. A bidirectional model stores no
    KV. Recurrent states are always float32.

    Raises:
        ConfigError: `bits` is given for a bidirectional model.
    """
    if spec.bidirectional:
        if bits != _UNQUANTIZED:
            raise ConfigError(
                f"kv_cache_bits={bits} has no effect: {_STORES_NOTHING}; leave it out"
            )
        return KVSpec((), block_size, "float32")
    given = {layer.kv for layer in spec.layers if not layer.owns_kv}
    layers = tuple(
        LayerKVSpec(layer.num_kv_heads, layer.head_dim, layer.kv + 1 if layer.kv in given else 0)
        for layer in spec.kv_layers
    )
    dtype = "float32" if weights == "f32" and bits == _UNQUANTIZED else "float16"
    states = (
        ()
        if spec.mixer is None
        else (state_spec(spec.mixer),) * sum(layer.state >= 0 for layer in spec.layers)
    )
    return KVSpec(layers, block_size, dtype, bits, states)


def sparse_refusal(spec: ModelSpec, config: EngineConfig) -> str:
    """Return why a model cannot have sparse prefill with these options, or ""."""
    if spec.bidirectional:
        return "the model is bidirectional"
    if spec.mixer is not None:
        return "the model has recurrent layers, whose state depends on every token"
    if any(layer.attends and not layer.owns_kv for layer in spec.layers):
        return "layers of this model attend to the KV of other layers"
    if any(spec.num_heads * layer.head_dim % GROUP for layer in spec.kv_layers):
        return f"heads x head_dim must be a multiple of {GROUP}"
    if all(layer.window for layer in spec.kv_layers):
        return "every layer has a sliding window, and only other layers select blocks"
    context = min(spec.max_context, config.max_model_len or spec.max_context)
    first, size = shareable.FIRST_POSITION, config.block_size
    if shareable.sparse_end(context, size) == first:
        return (
            f"a context of {context} tokens is too short; only prompts of at least "
            f"{first + shareable.DENSE_TAIL + size} tokens have tokens that select blocks"
        )
    if config.backend not in ("auto", AUTO_BACKEND):
        return f"backend={config.backend!r} computes every block, and only 'cpu' selects blocks"
    if config.arithmetic != "exact":
        return f"it cannot be combined with arithmetic={config.arithmetic!r}"
    if config.block_size not in _SPARSE_BLOCKS:
        return f"block_size={config.block_size} must be one of {_SPARSE_BLOCKS}"
    if config.max_batch_tokens < QUERY_BLOCK:
        return (
            f"max_batch_tokens={config.max_batch_tokens} must be at least {QUERY_BLOCK}, the "
            "tokens of a query block, which are computed at once"
        )
    return ""


def state_spec(mixer: Mixer) -> LayerStateSpec:
    """Return the recurrent state that a layer with this mixer stores per sequence."""
    if mixer.kind == "conv":
        return LayerStateSpec(mixer.taps, mixer.channels)
    heads = mixer.value_heads
    gates = (2 if mixer.kind == "delta" else 1) * mixer.value_heads
    return LayerStateSpec(mixer.taps, mixer.channels, heads, mixer.key_dim, mixer.value_dim, gates)


def log_notices(checkpoint: Checkpoint) -> None:
    """Log that the context of a loaded model is limited, or that parts of it are unused."""
    notice = pin_notice(checkpoint.config)
    parts = checkpoint.unused_parts
    if notice:
        _LOG.warning("%s: %s", checkpoint.path, notice)
    if parts:
        named = ", ".join(f"{part} ({count})" for part, count in sorted(parts.items()))
        _LOG.info("%s: text only; tensors of %s are not used", checkpoint.path, named)


def log_dtype(dtype: str, info: RunnerInfo) -> None:
    """Warn about a dtype that the runner does not compute in, and name the formats it uses."""
    if dtype == "auto" or dtype in _OF_DTYPE:
        return
    kv = info.kv_spec
    stored = f"{kv.bits[0]} and {kv.bits[1]} bits" if kv.is_quantized else kv.dtype
    keys = f", KV in {stored}" if info.stores_kv else ""
    _LOG.warning(
        "the native runner does not support dtype=%r and uses weights in %s%s; to compute in %s, "
        "set runner='torch'",
        dtype,
        info.dtype,
        keys,
        dtype,
    )


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
