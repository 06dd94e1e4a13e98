"""CPU-first inference for decoder-only language models.

The public names are importable from here and loaded on first use: importing the package loads none
of torch, transformers and numba.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvboost_edge.compat.flash import (
        flash_attention_available,
        get_flash_attn_tier,
        install_flash_attention,
        uninstall_flash_attention,
    )
    from kvboost_edge.compat.hf_batches import batched_decode, broadcast_kv, pad_and_mask
    from kvboost_edge.compat.lmcache.builder import LMCacheEngineBuilder
    from kvboost_edge.compat.lmcache.config import LMCacheEngineConfig, LMCacheEngineMetadata
    from kvboost_edge.compat.lmcache.engine import LMCacheEngine
    from kvboost_edge.compat.page_cache import KVCache
    from kvboost_edge.config import ChunkStrategy, EngineConfig, GenerationMode, RecomputeStrategy
    from kvboost_edge.engine.engine import CPUPagedEngine
    from kvboost_edge.engine.handle import RequestHandle, TokenEvent
    from kvboost_edge.engine.request.request import SamplingParams
    from kvboost_edge.engine.request.results import (
        CorrectnessReport,
        GenerationResult,
        PromptCheck,
        TokenLogprobs,
        WarmResult,
    )
    from kvboost_edge.errors import (
        BackendUnavailable,
        CacheCorruption,
        CapacityError,
        ConfigError,
        KVBoostError,
        ModelFormatError,
        RequestError,
    )
    from kvboost_edge.kvcache.prompt_groups import find_common_chunk_prefix, group_by_prefix
    from kvboost_edge.models.config.architectures import (
        SUPPORTED_ARCHITECTURES,
        CompatibilityReport,
        check_model_compatibility,
    )

    KVBoost = CPUPagedEngine
    InferenceEngine = CPUPagedEngine

__version__ = "0.1.0"

# Public name -> module that defines it. The aliases name the attribute after a colon.
_EXPORTS = {
    "BackendUnavailable": "kvboost_edge.errors",
    "CPUPagedEngine": "kvboost_edge.engine.engine",
    "CacheCorruption": "kvboost_edge.errors",
    "CapacityError": "kvboost_edge.errors",
    "ChunkStrategy": "kvboost_edge.config",
    "CompatibilityReport": "kvboost_edge.models.config.architectures",
    "ConfigError": "kvboost_edge.errors",
    "CorrectnessReport": "kvboost_edge.engine.request.results",
    "EngineConfig": "kvboost_edge.config",
    "GenerationMode": "kvboost_edge.config",
    "RecomputeStrategy": "kvboost_edge.config",
    "GenerationResult": "kvboost_edge.engine.request.results",
    "InferenceEngine": "kvboost_edge.engine.engine:CPUPagedEngine",
    "KVBoost": "kvboost_edge.engine.engine:CPUPagedEngine",
    "KVBoostError": "kvboost_edge.errors",
    "KVCache": "kvboost_edge.compat.page_cache",
    "LMCacheEngine": "kvboost_edge.compat.lmcache.engine",
    "LMCacheEngineBuilder": "kvboost_edge.compat.lmcache.builder",
    "LMCacheEngineConfig": "kvboost_edge.compat.lmcache.config",
    "LMCacheEngineMetadata": "kvboost_edge.compat.lmcache.config",
    "ModelFormatError": "kvboost_edge.errors",
    "PromptCheck": "kvboost_edge.engine.request.results",
    "RequestError": "kvboost_edge.errors",
    "RequestHandle": "kvboost_edge.engine.handle",
    "SUPPORTED_ARCHITECTURES": "kvboost_edge.models.config.architectures",
    "SamplingParams": "kvboost_edge.engine.request.request",
    "TokenEvent": "kvboost_edge.engine.handle",
    "TokenLogprobs": "kvboost_edge.engine.request.results",
    "WarmResult": "kvboost_edge.engine.request.results",
    "batched_decode": "kvboost_edge.compat.hf_batches",
    "broadcast_kv": "kvboost_edge.compat.hf_batches",
    "check_model_compatibility": "kvboost_edge.models.config.architectures",
    "find_common_chunk_prefix": "kvboost_edge.kvcache.prompt_groups",
    "flash_attention_available": "kvboost_edge.compat.flash",
    "get_flash_attn_tier": "kvboost_edge.compat.flash",
    "group_by_prefix": "kvboost_edge.kvcache.prompt_groups",
    "install_flash_attention": "kvboost_edge.compat.flash",
    "pad_and_mask": "kvboost_edge.compat.hf_batches",
    "uninstall_flash_attention": "kvboost_edge.compat.flash",
}

__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "BackendUnavailable",
    "CPUPagedEngine",
    "CacheCorruption",
    "CapacityError",
    "ChunkStrategy",
    "CompatibilityReport",
    "ConfigError",
    "CorrectnessReport",
    "EngineConfig",
    "GenerationMode",
    "GenerationResult",
    "InferenceEngine",
    "KVBoost",
    "KVBoostError",
    "KVCache",
    "LMCacheEngine",
    "LMCacheEngineBuilder",
    "LMCacheEngineConfig",
    "LMCacheEngineMetadata",
    "ModelFormatError",
    "PromptCheck",
    "RecomputeStrategy",
    "RequestError",
    "RequestHandle",
    "SamplingParams",
    "TokenEvent",
    "TokenLogprobs",
    "WarmResult",
    "__version__",
    "batched_decode",
    "broadcast_kv",
    "check_model_compatibility",
    "find_common_chunk_prefix",
    "flash_attention_available",
    "get_flash_attn_tier",
    "group_by_prefix",
    "install_flash_attention",
    "pad_and_mask",
    "uninstall_flash_attention",
]


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562) and keep it."""
    target = _EXPORTS.get(name)
    if target is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = target.partition(":")
    value = getattr(importlib.import_module(module), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
