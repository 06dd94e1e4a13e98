"""Which blocks a tier had and dropped: what a prompt misses is then known to have been there."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Dropped"]

# Hashes: about 2 MB. A chain goes from its end on, so the block that a prompt misses first went
# last.
_MOST = 1 << 14


class Dropped:
    """The last hashes that were dropped, in memory. One thread adds, any may look.

    A hash stays here when its block is stored again: who asks looks for the block first.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._hashes: dict[bytes, None] = {}

    def __contains__(self, prefix_hash: object) -> bool:
        return prefix_hash in self._hashes

    def add(self, prefix_hashes: Iterable[bytes]) -> None:
        """These were dropped, the last one last."""
        for prefix_hash in prefix_hashes:
            self._hashes.pop(prefix_hash, None)
            self._hashes[prefix_hash] = None
            if len(self._hashes) > self._most:
                del self._hashes[next(iter(self._hashes))]
