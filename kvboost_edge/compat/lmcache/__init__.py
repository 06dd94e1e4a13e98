"""LMCache's engine: KV chunks found by prefix, in memory, on disk and in Redis."""

from kvboost_edge.compat.lmcache.builder import LMCacheEngineBuilder
from kvboost_edge.compat.lmcache.config import LMCacheEngineConfig, LMCacheEngineMetadata
from kvboost_edge.compat.lmcache.engine import LMCacheEngine

__all__ = ["LMCacheEngine", "LMCacheEngineBuilder", "LMCacheEngineConfig", "LMCacheEngineMetadata"]
