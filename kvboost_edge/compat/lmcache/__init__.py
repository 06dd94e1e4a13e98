"""LMCache's engine: a store of KV chunks in memory, on disk and in Redis, found by prefix."""

from kvboost_edge.compat.lmcache.builder import LMCacheEngineBuilder
from kvboost_edge.compat.lmcache.config import LMCacheEngineConfig, LMCacheEngineMetadata
from kvboost_edge.compat.lmcache.engine import LMCacheEngine

__all__ = ["LMCacheEngine", "LMCacheEngineBuilder", "LMCacheEngineConfig", "LMCacheEngineMetadata"]
