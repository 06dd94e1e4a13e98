"""Memory of evicted blocks, which tells a miss of an evicted block from a first miss."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Dropped"]

_LEAST = 1 << 15


class Dropped:
    """Hashes of the blocks that a pool or a tier dropped most recently.

    It remembers the last `least` hashes, and at most twice as many, at about 70 bytes each. One
    thread adds; any thread may look up. A hash stays when its block is stored again, so look for
    the block itself first.
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
        """Add hashes of dropped blocks, the most recent one last."""
        for prefix_hash in prefix_hashes:
            if len(self._latest) >= self._least:
                self._before = self._latest
                self._latest = set()
            self._latest.add(_short(prefix_hash))


def _short(prefix_hash: bytes) -> int:
    """Return the first 64 bits of a hash. A collision only gives a miss the wrong reason."""
    return int.from_bytes(prefix_hash[:8], "little")
