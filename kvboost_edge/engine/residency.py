"""The part of an engine's face that tells what its cache holds, for whoever sends requests to one
of many engines.
"""

from __future__ import annotations

from kvboost_edge.engine import stats
from kvboost_edge.engine.build import EngineParts
from kvboost_edge.engine.core import EngineCore
from kvboost_edge.kvcache.events import CacheEvents

__all__ = ["TellsResidency"]


class TellsResidency:
    """What of the cache others may know: figures and hashes, no tokens."""

    _core: EngineCore
    _parts: EngineParts

    @property
    def cache_root(self) -> bytes:
        """Where the prefix hashes of prompts without tenant and salt start; `hashing.shared_root`
        makes the others'. Engines of one root have equal models and settings of keys and values.
        """
        return self._parts.root

    def take_cache_events(self, whole: bool = False) -> CacheEvents:
        """Which prefix hashes came to the pool and left it since the last call, and which states of
        a model that keeps some, by their `state_hash`; all there are at the first one, when more
        changed than is remembered (as many as there are blocks), or with `whole`. For one asker;
        costs nothing before the first call.
        """
        with self._core.reading():
            return self._parts.manager.events.take(whole)

    def take_tier_events(self, whole: bool = False) -> dict[str, CacheEvents]:
        """The same of each tier outside the pool, by name: what it is known to hold without asking
        a device or a server. What leaves a tier is told some time later. For one asker; costs
        nothing before the first call.
        """
        self._core.check_open()
        return {
            name: CacheEvents(*held) for name, held in self._core.tiering.take_held(whole).items()
        }

    def cache_stats(self) -> dict[str, float]:
        """Hits, misses and sizes of the cache; keys in `stats.cache_stats`."""
        with self._core.reading():
            return stats.cache_stats(self._parts, self._core.tiering)
