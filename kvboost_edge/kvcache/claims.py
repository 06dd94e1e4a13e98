"""Single flight: which blocks live tables have promised to compute, so that nobody else computes them beside."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from kvboost_edge.kvcache.block_table import BlockTable

__all__ = ["Claims"]


class Claims:
    """One holder for each promised prefix hash. Hashes alone are compared: a collision makes a request wait, and never
    read another's KV.

    holders   prefix hash -> serial of the live table that computes it
    """

    __slots__ = ("holders",)

    def __init__(self) -> None:
        self.holders: dict[bytes, int] = {}

    def __contains__(self, prefix_hash: object) -> bool:
        """Whether a live table is still computing the block of this hash."""
        return prefix_hash in self.holders

    def make(self, table: BlockTable, index: int, prefix_hash: bytes) -> None:
        """Promise a block, unless its hash is promised already."""
        if prefix_hash not in self.holders:
            self.holders[prefix_hash] = table._serial
            table._claims[index] = prefix_hash

    def drop(self, table: BlockTable, index: int) -> None:
        """The table's promise of a block is kept, or will not be."""
        prefix_hash = table._claims.pop(index, None)
        if prefix_hash is not None:
            del self.holders[prefix_hash]

    def drop_all(self, table: BlockTable) -> None:
        """The table promises nothing any more."""
        for index in list(table._claims):
            self.drop(table, index)

    def last_promised(self, hashes: Iterable[bytes]) -> bytes | None:
        """The last of the promised ones that `hashes` begin with; None where the first is not promised."""
        promised = list(itertools.takewhile(self.holders.__contains__, hashes))
        return promised[-1] if promised else None
