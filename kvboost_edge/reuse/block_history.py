"""Which blocks the pool has, or had: of those that are gone a tier may keep the contents."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from kvboost_edge.kvcache.block_table import PrefixEntry
from kvboost_edge.kvcache.hashing import TOKEN_BYTES, LoneRoot
from kvboost_edge.reuse.found_runs import Run
from kvboost_edge.reuse.span_index import SpanIndex

__all__ = ["BlockHistory", "Chain"]


class Chain(NamedTuple):
    """A text from its beginning to the end of some block of it, and where its hashes start."""

    tokens: bytes  # little-endian u32
    root: bytes


class BlockHistory:
    """The blocks that were published last, `limit` of them, whether they still are or not.

    Identities are those they had in the pool. A block that comes back gets a new one; those behind
    it that are still gone keep the old one before them, so that a run may be found as two.
    """

    def __init__(self, limit: int, block_size: int) -> None:
        self.index = SpanIndex(limit, block_size)
        self._size = block_size
        self._free = list(range(limit))
        self._places: OrderedDict[bytes, int] = OrderedDict()  # by prefix hash, the oldest first
        self._entries: dict[int, PrefixEntry] = {}  # by place in the index
        self._in_pool: dict[int, bytes] = {}  # by block id
        self._num_inside: Counter[bytes] = Counter()

    def entered(self, block_id: int, entry: PrefixEntry) -> None:
        """A block was published."""
        self._in_pool[block_id] = entry.prefix_hash
        self._num_inside[entry.prefix_hash] += 1
        if entry.prefix_hash in self._places:
            self._drop(entry.prefix_hash)
        elif not self._free:
            self._drop(next(iter(self._places)))
        place = self._free.pop()
        self._places[entry.prefix_hash] = place
        self._entries[place] = entry
        if not isinstance(entry.root, LoneRoot):
            tokens = entry.tokens[-self._size * TOKEN_BYTES :]
            self.index.offer(
                entry.root,
                place,
                entry.serial,
                entry.parent_serial,
                tokens,
                entry.depth * self._size,
            )

    def left(self, block_id: int) -> None:
        """It is published no more."""
        prefix_hash = self._in_pool.pop(block_id)
        self._num_inside[prefix_hash] -= 1
        if not self._num_inside[prefix_hash]:
            del self._num_inside[prefix_hash]

    def lost_chains(self, runs: Sequence[Run]) -> list[Chain]:
        """What to bring back for runs of the index: of each that lost blocks the text up to its
        last one. Left out are texts whose beginning is not remembered.
        """
        found: dict[Chain, None] = {}
        for run in runs:
            entries = [self._entries[piece.block_id] for piece in run.pieces]
            if any(entry.prefix_hash not in self._num_inside for entry in entries):
                chain = self._chain(entries[-1])
                if chain is not None:
                    found[chain] = None
        return list(found)

    def _chain(self, entry: PrefixEntry) -> Chain | None:
        pieces = [entry.tokens[-self._size * TOKEN_BYTES :]]
        while entry.depth:
            place = self._places.get(entry.parent_hash)
            if place is None or self._entries[place].depth != entry.depth - 1:
                return None
            entry = self._entries[place]
            pieces.append(entry.tokens[-self._size * TOKEN_BYTES :])
        root = entry.root
        if root != entry.parent_hash:  # computed alone, behind less than a block
            root = LoneRoot.of(root, 0)
        return Chain(b"".join(reversed(pieces)), root) if root == entry.parent_hash else None

    def _drop(self, prefix_hash: bytes) -> None:
        place = self._places.pop(prefix_hash)
        del self._entries[place]
        if place in self.index:
            self.index.withdraw(place)
        self._free.append(place)
