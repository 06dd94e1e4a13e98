"""History of published blocks, including blocks that are now only stored in a tier."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from kvboost_edge.kvcache.block_table import PrefixEntry
from kvboost_edge.kvcache.hashing import LoneRoot
from kvboost_edge.reuse.found_runs import Run
from kvboost_edge.reuse.span_index import SpanIndex

__all__ = ["BlockHistory", "Chain"]


class Chain(NamedTuple):
    """Chain of full blocks, from the first token of a text to the end of some block.

    Attributes:
        tokens: tokens of the chain, little-endian u32.
        root: root hash of the chain.
    """

    tokens: bytes
    root: bytes


class BlockHistory:
    """Record of the last `limit` published blocks, including those that left the pool.

    Blocks keep the serials that they had in the pool. A block that is published again gets a new
    serial. Later blocks of its chain that have not returned still refer to the old serial. A run
    may therefore be found as two runs.

    Args:
        limit: maximum number of blocks to remember.
        block_size: tokens per block.

    Attributes:
        index: span index of the remembered blocks.
    """

    def __init__(self, limit: int, block_size: int) -> None:
        self.index = SpanIndex(limit, block_size)
        self._free = list(range(limit))
        # Index slots by prefix hash, oldest first.
        self._places: OrderedDict[bytes, int] = OrderedDict()
        self._entries: dict[int, PrefixEntry] = {}  # entries by index slot
        self._in_pool: dict[int, bytes] = {}  # prefix hashes by block id
        self._num_inside: Counter[bytes] = Counter()

    def entered(self, block_id: int, entry: PrefixEntry) -> None:
        """Record that a block was published."""
        self._in_pool[block_id] = entry.prefix_hash
        self._num_inside[entry.prefix_hash] += 1
        if entry.prefix_hash in self._places:
            self._drop(entry.prefix_hash)
        elif not self._free:
            self._drop(next(iter(self._places)))
        place = self._free.pop()
        self._places[entry.prefix_hash] = place
        self._entries[place] = entry
        self.index.offer_entry(place, entry)

    def left(self, block_id: int) -> None:
        """Record that a block is no longer published."""
        prefix_hash = self._in_pool.pop(block_id)
        self._num_inside[prefix_hash] -= 1
        if not self._num_inside[prefix_hash]:
            del self._num_inside[prefix_hash]

    def lost_chains(self, runs: Sequence[Run]) -> list[Chain]:
        """Return the chains to load from tiers for runs with blocks that left the pool.

        Each chain ends with the last block of its run. Chains whose beginning is not remembered are
        omitted.
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
        pieces = [entry.own_tokens]
        while entry.depth:
            place = self._places.get(entry.parent_hash)
            if place is None or self._entries[place].depth != entry.depth - 1:
                return None
            entry = self._entries[place]
            pieces.append(entry.own_tokens)
        root = entry.root
        # The text was computed on its own, after less than a block of context.
        if root != entry.parent_hash:
            root = LoneRoot.of(root, 0)
        return Chain(b"".join(reversed(pieces)), root) if root == entry.parent_hash else None

    def _drop(self, prefix_hash: bytes) -> None:
        place = self._places.pop(prefix_hash)
        del self._entries[place]
        if place in self.index:
            self.index.withdraw(place)
        self._free.append(place)
