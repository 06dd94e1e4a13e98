"""Which blocks the pool or a tier had and dropped: what a prompt misses is then known to have been
there.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Dropped"]

_LEAST = 1 << 15


class Dropped:
    """The last hashes that were dropped, in memory: all of the last `least`, fewer than twice as
    many, each about 70 bytes. One thread adds, any may look.

    A hash stays here when its block is stored again: who asks looks for the block first.
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
        """These were dropped, the last one last."""
        for prefix_hash in prefix_hashes:
            if len(self._latest) >= self._least:
                self._before = self._latest
                self._latest = set()
            self._latest.add(_short(prefix_hash))


def _short(prefix_hash: bytes) -> int:
    """64 bits of a hash, by which equal ones are as good as certain."""
    return int.from_bytes(prefix_hash[:8], "little")
