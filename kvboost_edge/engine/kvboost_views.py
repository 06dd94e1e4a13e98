"""Read-only views of an engine under KVBoost's attribute names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from kvboost_edge.chunk_registry import ChunkRegistry
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.build import EngineParts
from kvboost_edge.reuse.chunking import chunk_options

__all__ = ["CacheManagerView", "KVBoostViews"]

_POOL = "KV stays in the blocks of the engine's pool; use "
_READ_ONLY = "the view is read-only; use "
_NOT_OF_THE_VIEW = {
    **dict.fromkeys(
        "build_prefix_kv find_matching_chunks get get_by_content get_or_none kv_seq_len lookup "
        "merge_kv_list slice_kv store".split(),
        _POOL + "engine.warm to compute a prompt, and engine.warm_result to look it up",
    ),
    **dict.fromkeys(("clear", "invalidate"), _READ_ONLY + "engine.reset_cache"),
    **dict.fromkeys(("pin_content", "unpin_content"), _READ_ONLY + "engine.pin and engine.unpin"),
    "register_eviction_callback": "use engine.take_cache_events to read what left the cache",
}
_NOT_OF_THE_ENGINE = {
    "model": "only the torch runner calls a transformers model; load one and pass it to "
    "CPUPagedEngine(model, tokenizer), or see engine.runner_info",
    "assembler": "the engine reuses cached KV itself; choose how with mode= of generate",
    **dict.fromkeys(("allocator", "chunk_mapper"), _POOL + "engine.paged_stats"),
    **dict.fromkeys(
        ("cacheblend_recompute", "selective_recompute"),
        "the engine recomputes reused tokens itself; see engine.config.recompute_strategy",
    ),
    **{
        name: f"see engine.config.{name}"
        for name in ("overlap_k", "recompute_strategy", "sink_tokens")
    },
}


@dataclasses.dataclass(frozen=True, slots=True)
class CacheManagerView:
    """Cache figures under the attribute names of KVBoost's cache manager.

    Attributes:
        max_cache_bytes: size of the pool, in bytes.
        kv_cache_bits: bits of keys and of values in the pool, as in `EngineConfig`.
        read_stats: function that returns the current figures of `engine.cache_stats`.
    """

    max_cache_bytes: int
    kv_cache_bits: int | tuple[int, int] | None
    read_stats: Callable[[], dict[str, float]] = dataclasses.field(repr=False)

    def stats(self) -> dict[str, float]:
        """Return the figures of `engine.cache_stats`."""
        return self.read_stats()

    @property
    def hits(self) -> int:
        """Number of chunks found as part of a cached prefix."""
        return int(self.read_stats()["cache_hits"])

    @property
    def approximate_hits(self) -> int:
        """Number of chunks reused from other positions."""
        return int(self.read_stats()["approximate_hits"])

    @property
    def misses(self) -> int:
        """Number of chunks that had to be computed."""
        return int(self.read_stats()["cache_misses"])

    @property
    def evictions(self) -> int:
        """Number of evicted chunks."""
        return int(self.read_stats()["evictions"])

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            _refuse(self, name, _NOT_OF_THE_VIEW)


class KVBoostViews:
    """A mixin that gives `CPUPagedEngine` the attributes of KVBoost's engine."""

    _config: EngineConfig
    _parts: EngineParts

    if TYPE_CHECKING:

        def cache_stats(self) -> dict[str, float]: ...

    @property
    def model(self) -> Any:
        """The transformers model that the torch runner calls. Other runners do not have it."""
        runner = self._parts.runner
        if not hasattr(runner, "model"):
            _refuse(self, "model", _NOT_OF_THE_ENGINE)
        return runner.model

    @property
    def device(self) -> str:
        """The compute device, such as "cpu", "mps" or "cuda:0"."""
        return self._parts.backend.device

    @property
    def cache_manager(self) -> CacheManagerView:
        """Cache figures under KVBoost's names."""
        parts = self._parts
        size = parts.manager.num_blocks * parts.backend.spec.bytes_per_block
        return CacheManagerView(size, self._config.kv_cache_bits, self.cache_stats)

    @property
    def chunk_registry(self) -> ChunkRegistry:
        """Settings for splitting warmed documents into chunks."""
        options = chunk_options(self._config)
        codec = self._parts.tokenizer.codec
        return ChunkRegistry(
            options.chunk_size,
            options.strategy,
            1,
            options.chunk_boundary_window,
            piece_of=lambda token: codec.piece((token,)),
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            _refuse(self, name, _NOT_OF_THE_ENGINE)


def _refuse(owner: object, name: str, reasons: dict[str, str]) -> NoReturn:
    """Raise AttributeError for a missing attribute.

    If KVBoost has the attribute, the message names the replacement.
    """
    kind = type(owner).__name__
    if name in reasons:
        raise AttributeError(f"{kind}.{name} is not available: {reasons[name]}")
    raise AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=owner)
