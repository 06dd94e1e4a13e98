"""CPU-first inference for decoder-only language models.

All public names can be imported from here and are loaded on first use. Importing the package does
not import torch, transformers or Numba. The modules that mirror KVBoost's use the same table.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvboost_edge.chunk_registry import ChunkRegistry
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
    from kvboost_edge.kvcache.prompt_groups import (
        chained_hash,
        content_hash_from_tokens,
        find_common_chunk_prefix,
        group_by_prefix,
    )
    from kvboost_edge.models.config.architectures import (
        SUPPORTED_ARCHITECTURES,
        UNSUPPORTED_ARCHITECTURES,
        CompatibilityReport,
        check_model_compatibility,
    )

    KVBoost = CPUPagedEngine
    InferenceEngine = CPUPagedEngine
    __version__: str

# Module that defines each public name. For an alias, the defined name follows the colon.
_EXPORTS = {
    "BackendUnavailable": "kvboost_edge.errors",
    "CPUPagedEngine": "kvboost_edge.engine.engine",
    "CacheCorruption": "kvboost_edge.errors",
    "ChunkRegistry": "kvboost_edge.chunk_registry",
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
    "UNSUPPORTED_ARCHITECTURES": "kvboost_edge.models.config.architectures",
    "TokenEvent": "kvboost_edge.engine.handle",
    "TokenLogprobs": "kvboost_edge.engine.request.results",
    "WarmResult": "kvboost_edge.engine.request.results",
    "batched_decode": "kvboost_edge.compat.hf_batches",
    "broadcast_kv": "kvboost_edge.compat.hf_batches",
    "chained_hash": "kvboost_edge.kvcache.prompt_groups",
    "check_model_compatibility": "kvboost_edge.models.config.architectures",
    "chunk_id_from_tokens": "kvboost_edge.kvcache.prompt_groups:content_hash_from_tokens",
    "content_hash_from_tokens": "kvboost_edge.kvcache.prompt_groups",
    "find_common_chunk_prefix": "kvboost_edge.kvcache.prompt_groups",
    "flash_attention_available": "kvboost_edge.compat.flash",
    "get_flash_attn_tier": "kvboost_edge.compat.flash",
    "group_by_prefix": "kvboost_edge.kvcache.prompt_groups",
    "install_flash_attention": "kvboost_edge.compat.flash",
    "pad_and_mask": "kvboost_edge.compat.hf_batches",
    "uninstall_flash_attention": "kvboost_edge.compat.flash",
}

# Names that the modules mirroring KVBoost's re-export. They load them by `_load`, so that they need
# not import higher-level modules.
_MODULES: dict[str, set[str]] = {
    "kvboost_edge.batch": {
        "batched_decode",
        "broadcast_kv",
        "find_common_chunk_prefix",
        "group_by_prefix",
    },
    "kvboost_edge.chunk_registry": set(),  # only names that it defines
    "kvboost_edge.compat": {
        "SUPPORTED_ARCHITECTURES",
        "UNSUPPORTED_ARCHITECTURES",
        "check_model_compatibility",
    },
    "kvboost_edge.engine": {
        "CPUPagedEngine",
        "ChunkStrategy",
        "CorrectnessReport",
        "GenerationMode",
        "GenerationResult",
        "InferenceEngine",
        "KVBoost",
        "RecomputeStrategy",
        "WarmResult",
    },
    "kvboost_edge.models": {
        "WarmResult",
        "chained_hash",
        "chunk_id_from_tokens",
        "content_hash_from_tokens",
    },
}

_ENGINE_CACHE = "KV is stored in the engine's block pool; use "
# Public names of KVBoost without an equivalent here, and what to use instead.
_NOT_OFFERED = {
    **dict.fromkeys(
        ("AssembledPrompt", "CachedChunk", "ChunkMatch", "PastKVType"),
        _ENGINE_CACHE + "engine.warm_result(token_ids) to see how much of a prompt is cached",
    ),
    "KVCacheManager": _ENGINE_CACHE + "engine.cache_manager to read its statistics",
    **dict.fromkeys(
        ("BlockAllocator", "ChunkBlockMapper", "paged_attention_fwd"),
        _ENGINE_CACHE + "engine.paged_stats() to read its statistics",
    ),
    **dict.fromkeys(
        ("install_paged_attention", "uninstall_paged_attention"),
        "paged attention is the engine's own; use CPUPagedEngine(model, tokenizer)",
    ),
    **dict.fromkeys(
        ("AssemblyMode", "PromptAssembler"),
        "the engine reuses cached KV itself; choose how with mode= of generate",
    ),
    **dict.fromkeys(
        ("CacheBlendRecompute", "SelectiveRecompute"),
        "the engine recomputes reused tokens itself; choose how with its option recompute_strategy",
    ),
    **dict.fromkeys(
        ("QuantizedKV", "dequantize_kv", "quantize_kv"),
        "the pool quantizes KV itself; use the option kv_cache_bits",
    ),
    "DiskTier": "the engine opens its disk tier itself; use the option disk_cache_dir",
    "default_device": "the engine selects the device itself; leave device= out",
}

__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "UNSUPPORTED_ARCHITECTURES",
    "BackendUnavailable",
    "CPUPagedEngine",
    "CacheCorruption",
    "CapacityError",
    "ChunkRegistry",
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
    "chained_hash",
    "check_model_compatibility",
    "content_hash_from_tokens",
    "find_common_chunk_prefix",
    "flash_attention_available",
    "get_flash_attn_tier",
    "group_by_prefix",
    "install_flash_attention",
    "pad_and_mask",
    "uninstall_flash_attention",
]


def __getattr__(name: str) -> Any:
    """Load a public name or a module that mirrors KVBoost's on first use (PEP 562)."""
    if name == "__version__":
        return _installed_version()
    module = f"{__name__}.{name}"
    return importlib.import_module(module) if module in _MODULES else _load(__name__, name)


def _installed_version() -> str:
    """Return the version of the installed package; "0+unknown" for a tree that is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("kvboost-edge")
    except PackageNotFoundError:
        return "0+unknown"


def _load(module: str, name: str) -> Any:
    """Load a name that a module exports through the table, and cache it in the module.

    Raises:
        ImportError: KVBoost has the name, but this package does not.
        AttributeError: The name is unknown.
    """
    if name in _NOT_OFFERED:
        raise ImportError(f"{module}.{name} is not available: {_NOT_OFFERED[name]}", name=name)
    target = _EXPORTS.get(name) if name in _MODULES.get(module, __all__) else None
    if target is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    source, _, attribute = target.partition(":")
    value = getattr(importlib.import_module(source), attribute or name)
    setattr(sys.modules[module], name, value)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
