"""A registry of engines by name, for callers that cannot pass an engine around."""

from __future__ import annotations

import threading

from kvboost_edge.compat.lmcache.config import LMCacheEngineConfig, LMCacheEngineMetadata
from kvboost_edge.compat.lmcache.engine import LMCacheEngine
from kvboost_edge.errors import ConfigError

__all__ = ["LMCacheEngineBuilder"]


class LMCacheEngineBuilder:
    """Registry of engines by `instance_id` in this process. Safe to use from any thread."""

    _lock = threading.Lock()
    # LMCache's interface promises one registry per process.
    _engines: dict[str, LMCacheEngine] = {}  # noqa: RUF012

    @classmethod
    def get_or_create(
        cls, instance_id: str, config: LMCacheEngineConfig, metadata: LMCacheEngineMetadata
    ) -> LMCacheEngine:
        """Return the engine named `instance_id`, creating it if needed.

        Raises:
            ConfigError: the engine exists with another configuration. ConfigError is a ValueError.
        """
        with cls._lock:
            engine = cls._engines.get(instance_id)
            if engine is None:
                engine = cls._engines[instance_id] = LMCacheEngine(config, metadata)
            elif (engine.config, engine.metadata) != (config, metadata):
                raise ConfigError(
                    f"instance_id={instance_id!r} exists with another configuration, "
                    f"{engine.config} and {engine.metadata}; destroy it first, or use another name"
                )
            return engine

    @classmethod
    def get(cls, instance_id: str) -> LMCacheEngine | None:
        """Return the engine named `instance_id`, or None."""
        with cls._lock:
            return cls._engines.get(instance_id)

    @classmethod
    def destroy(cls, instance_id: str) -> None:
        """Close and remove the engine named `instance_id`. An unknown name is ignored."""
        with cls._lock:
            engine = cls._engines.pop(instance_id, None)
        if engine is not None:
            engine.close()
