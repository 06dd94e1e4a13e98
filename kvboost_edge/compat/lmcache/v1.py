"""The part of LMCache's later engine (lmcache.v1) that works without a GPU connector.

A connector moves KV between the cache and the paged memory of a GPU. Here the caller passes
`kvcaches` instead: (k, v) of each layer, [num_tokens, num_heads, head_size], with a row for each
token of the whole sequence. Features that need a connector raise an error that names them.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from kvboost_edge.compat.lmcache.chunk_addresses import is_tensor, num_skipped
from kvboost_edge.compat.lmcache.config import LMCacheEngineConfig, space_of
from kvboost_edge.compat.lmcache.engine import LMCacheEngine as _Engine
from kvboost_edge.errors import ConfigError, RequestError

__all__ = ["LMCacheEngine", "LMCacheEngineConfig", "LMCacheMetadata"]

_LOCATIONS = {"LocalCPUBackend": "memory", "LocalDiskBackend": "disk", "RemoteBackend": "redis"}
_REFUSED = {
    "store_layer": "a chunk is one record of all layers; use store",
    "retrieve_layer": "a chunk is one record of all layers; use retrieve",
    "async_lookup_and_prefetch": "chunks are read immediately; use retrieve",
    "move": "chunks are stored in every backend of the configuration",
    "compress": "chunks are stored unchanged",
    "decompress": "chunks are stored unchanged",
    "freeze": "an engine always stores its input",
    "get_kv_events": "events are not recorded; use stats()",
}


@dataclasses.dataclass(frozen=True)
class LMCacheMetadata:
    """Identity of the stored KV.

    The key consists of model_name, world_size, worker_id, kv_dtype, and kv_shape without its chunk
    size. The other fields describe where an engine runs. Engines that differ only in those fields
    share chunks.

    Attributes:
        model_name: any text that identifies the model.
        world_size: number of workers of the model.
        worker_id: index of this worker.
        kv_dtype: type of the stored KV, as text or as a library's type; None for any.
        kv_shape: (num_layers, 2, chunk_size, num_kv_heads, head_size); None for any.
        use_mla: must be False, because keys and values are stored as two tensors.
    """

    model_name: str
    world_size: int = 1
    local_world_size: int = 1
    worker_id: int = 0
    local_worker_id: int = 0
    kv_dtype: Any = None
    kv_shape: tuple[int, int, int, int, int] | None = None
    use_mla: bool = False
    role: str | None = None
    served_model_name: str | None = None
    chunk_size: int = 256
    engine_id: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model_name, str) or not self.model_name:
            raise ConfigError(f"model_name={self.model_name!r} must be a non-empty string")
        if self.use_mla:
            raise ConfigError(
                "use_mla=True is not supported, because keys and values are stored as two "
                "tensors; set use_mla=False"
            )
        if self.kv_shape is not None and (len(self.kv_shape) != 5 or self.kv_shape[1] != 2):
            raise ConfigError(
                f"kv_shape={self.kv_shape!r} must be (num_layers, 2, chunk_size, num_kv_heads, "
                "head_size)"
            )

    @property
    def fmt(self) -> str:
        """Format of k and v: the token axis comes first."""
        return "vllm"

    @property
    def space(self) -> bytes:
        """Root hash of the engine's chunk chains."""
        shape = None if self.kv_shape is None else (*self.kv_shape[:2], *self.kv_shape[3:])
        dtype = "" if self.kv_dtype is None else str(self.kv_dtype)
        return space_of("v1", self.model_name, self.world_size, self.worker_id, dtype, shape)


class LMCacheEngine:
    """lmcache.v1's engine without a connector. Safe to use from any thread.

    Invalid arguments raise RequestError, which is a ValueError.
    """

    def __init__(self, config: LMCacheEngineConfig, metadata: LMCacheMetadata) -> None:
        self.config = config
        self.metadata = metadata
        self._engine = _Engine(config, metadata)
        self._pins: dict[str, list[bytes]] = {}
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> NoReturn:
        if name in _REFUSED:
            raise RequestError(f"{name}() is not supported: {_REFUSED[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def post_init(self, **_: Any) -> None:
        """Do nothing, because the constructor does all the work."""

    def store(
        self,
        tokens: Any = None,
        hashes: Any = None,
        offsets: Any = None,
        mask: Any = None,
        *,
        kvcaches: Any = None,
    ) -> None:
        """Store the KV of the tokens where `mask` is True, taken from `kvcaches`.

        Args:
            tokens: [num_tokens], the whole sequence.
            hashes: not supported.
            offsets: not supported.
            mask: booleans, False for the skipped leading tokens and True for all others. The number
                of skipped tokens is a multiple of chunk_size.
            kvcaches: (k, v) of each layer.
        """
        ids = self._tokens("store", tokens, hashes=hashes, offsets=offsets)
        layers = _layers(kvcaches, len(ids))
        start = num_skipped("mask", mask, len(ids))
        self._check_shape(layers)
        self._engine.store(ids, tuple((k[start:], v[start:]) for k, v in layers), mask)

    def retrieve(self, tokens: Any, mask: Any = None, *, kvcaches: Any = None) -> Any:
        """Write stored KV into `kvcaches`, for the tokens where `mask` is True.

        Args:
            tokens: [num_tokens], the whole sequence.
            mask: booleans, False for the skipped leading tokens and True for all others. None
                requests all tokens.
            kvcaches: (k, v) of each layer, changed in place.

        Returns:
            A mask of the tokens that were written.
        """
        ids = self._tokens("retrieve", tokens)
        layers = _layers(kvcaches, len(ids))
        found, ret_mask = self._engine.retrieve(tokens, mask)
        if found:
            written = np.flatnonzero(np.asarray(ret_mask))
            start = int(written[0])
            end = int(written[-1]) + 1
            mine, stored = (
                [_kind(array) for pair in kv for array in pair] for kv in (layers, found)
            )
            if mine != stored:
                raise RequestError(
                    f"kvcaches have {len(layers)} layers of {mine[0]}, but the stored KV has "
                    f"{len(found)} layers of {stored[0]}; pass arrays like the stored ones"
                )
            for targets, sources in zip(layers, found, strict=True):
                for target, source in zip(targets, sources, strict=True):
                    target[start:end] = source
        return ret_mask

    def lookup(
        self,
        tokens: Any = None,
        hashes: Any = None,
        search_range: Sequence[str] | None = None,
        lookup_id: str | None = None,
        pin: bool = False,
        request_configs: Any = None,
    ) -> int:
        """Return the length of the longest stored prefix, in tokens.

        Args:
            tokens: [num_tokens], the whole sequence.
            hashes: not supported.
            search_range: any of "LocalCPUBackend", "LocalDiskBackend" and "RemoteBackend"; None for
                all backends of the engine.
            lookup_id: name under which the chunks are pinned.
            pin: whether to keep the chunks in memory until `lookup_unpin(lookup_id)`.
            request_configs: not supported.
        """
        self._tokens("lookup", tokens, hashes=hashes, request_configs=request_configs)
        if pin and lookup_id is None:
            raise RequestError(
                "lookup(pin=True) needs a lookup_id; pass the same one to lookup_unpin"
            )
        keys: list[bytes] | None = [] if pin else None
        length = self._engine.find_prefix(tokens, _kinds("search_range", search_range), keys)
        if keys and lookup_id is not None:
            with self._lock:
                self._pins.setdefault(lookup_id, []).extend(keys)
        return length

    def lookup_unpin(self, lookup_ids: Sequence[str] | str) -> None:
        """Release the pins of these lookups. Unknown ids are ignored."""
        with self._lock:
            names = [lookup_ids] if isinstance(lookup_ids, str) else list(lookup_ids)
            keys = [key for name in names for key in self._pins.pop(name, [])]
        self._engine.unpin(keys)

    def clear(
        self,
        tokens: Any = None,
        locations: Sequence[str] | None = None,
        request_configs: Any = None,
    ) -> int:
        """Drop the chunks of a sequence, and return their number, summed over the locations.

        Without tokens, all chunks in memory are dropped. Other locations cannot be cleared as a
        whole.
        """
        if request_configs is not None:
            raise RequestError("clear(request_configs=) is not supported; leave it out")
        return self._engine.forget(tokens, _kinds("locations", locations))

    def health(self) -> bool:
        """Return whether all backends have worked so far."""
        return not any(stat.state for stat in self._engine.stats().values())

    def close(self) -> None:
        """Release memory, files and connections. A second call has no effect."""
        self._engine.close()

    def _tokens(self, method: str, tokens: Any, **refused: Any) -> Any:
        for name, value in refused.items():
            if value is not None:
                raise RequestError(
                    f"{method}({name}=) is not supported: chunks are found by tokens; pass tokens="
                )
        if not hasattr(tokens, "__len__"):
            raise RequestError(f"{method}() needs tokens as one row of integers, not {tokens!r}")
        return tokens

    def _check_shape(self, layers: Sequence[tuple[Any, Any]]) -> None:
        expected = self.metadata.kv_shape
        if expected is not None:
            given = (len(layers), *layers[0][0].shape[1:])
            if given != (expected[0], *expected[3:]):
                raise RequestError(
                    f"kvcaches have (num_layers, num_kv_heads, head_size)={given}, but "
                    f"kv_shape={expected}"
                )


def _layers(kvcaches: Any, num_tokens: int) -> list[tuple[Any, Any]]:
    """Return (k, v) of each layer, after checking that each has `num_tokens` rows."""
    if not isinstance(kvcaches, Sequence) or not kvcaches:
        raise RequestError(
            "kvcaches must hold one (k, v) pair per layer, each [num_tokens, num_heads, "
            "head_size]; connectors are not supported"
        )
    for pair in kvcaches:
        if (
            not isinstance(pair, Sequence)
            or len(pair) != 2
            or not all(_is_cache(array, num_tokens) for array in pair)
        ):
            raise RequestError(
                f"kvcaches must hold one (k, v) pair per layer, each [{num_tokens} tokens, "
                "num_heads, head_size]"
            )
    return [(pair[0], pair[1]) for pair in kvcaches]


def _is_cache(array: Any, num_tokens: int) -> bool:
    return (
        (isinstance(array, np.ndarray) or is_tensor(array))
        and array.ndim == 3
        and array.shape[0] == num_tokens
    )


def _kind(array: Any) -> tuple[str, tuple[int, ...]]:
    """Return the type of an array, and its axes after the token axis."""
    return str(array.dtype), tuple(array.shape[1:])


def _kinds(name: str, locations: Sequence[str] | None) -> list[str] | None:
    if locations is None:
        return None
    given = [locations] if isinstance(locations, str) else list(locations)
    unknown = [location for location in given if location not in _LOCATIONS]
    if unknown:
        raise RequestError(f"{name} contains {unknown}; supported: {', '.join(_LOCATIONS)}")
    return [_LOCATIONS[location] for location in given]
