"""Memory of evicted blocks, to tell misses caused by eviction from first-time misses."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["EvictedHashes"]

_LEAST = 1 << 15


class EvictedHashes:
    """Record of the hashes of blocks that a pool or a tier dropped most recently.

    It holds between `least` and twice `least` hashes, at about 70 bytes each. Only one thread
    may add hashes, but any thread may look them up. A hash is not removed when its block is stored
    again, so callers must first check that the block is missing.
    """

    __slots__ = ("_before", "_latest", "_least")

    def __init__(self, least: int = _LEAST) -> None:
        self._least = least
        self._latest: set[int] = set()
        self._before: set[int] = set()

    def __contains__(self, prefix_hash: bytes) -> bool:
        key = _short(prefix_hash)
        return key in self._latest or key in self._before

    def add(self, prefix_hashes: Iterable[bytes]) -> None:
        """Add the hashes of dropped blocks, most recent last."""
        for prefix_hash in prefix_hashes:
            if len(self._latest) >= self._least:
                self._before = self._latest
                self._latest = set()
            self._latest.add(_short(prefix_hash))


def _short(prefix_hash: bytes) -> int:
    """Return the first 64 bits of a hash. A collision merely reports a wrong miss reason."""
    return int.from_bytes(prefix_hash[:8], "little")
