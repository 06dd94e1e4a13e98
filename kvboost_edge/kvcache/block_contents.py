"""What blocks hold, by content: for whoever keeps copies of them elsewhere, and brings them
back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvboost_edge.kvcache.block_pool import BlockPool
from kvboost_edge.kvcache.block_table import BlockTable, PrefixEntry
from kvboost_edge.kvcache.hashing import BlockAddress, LoneRoot, encode_tokens
from kvboost_edge.kvcache.lookup import Lookup
from kvboost_edge.kvcache.prefix_index import PrefixIndex, PrefixMatch

__all__ = [
    "BLOCK_CACHED",
    "BLOCK_FREE",
    "BLOCK_REFERENCED",
    "BLOCK_SHARED",
    "AddressesAfter",
    "BlockContents",
    "PoolUsage",
]

BLOCK_FREE, BLOCK_CACHED, BLOCK_REFERENCED, BLOCK_SHARED = range(4)


class AddressesAfter(NamedTuple):
    """Of a prompt, and what the pool can serve of it now.

    Attributes:
        num_shared: blocks of the longest prefix that may be shared.
        num_there: blocks behind it that are in the pool too, and lack a state.
        addresses: of all full blocks behind it that could be served, those in the pool first;
            hashed when asked for.
    """

    num_shared: int
    num_there: int
    addresses: Iterator[BlockAddress]


class BlockContents:
    """Questions on content, and two lists of what changed. Until `track` is called the lists stay
    empty; who called it has to drain them.
    """

    __slots__ = ("_evicted", "_index", "_kept_inside", "_lookup", "_published", "_tracks")

    def __init__(self, index: PrefixIndex, lookup: Lookup) -> None:
        self._index = index
        self._lookup = lookup
        self._tracks = False
        self._kept_inside: set[bytes] = set()
        self._published: dict[int, None] = {}
        self._evicted: dict[int, PrefixEntry] = {}

    def track(self) -> None:
        """From here on remember which blocks were published and which were evicted."""
        self._tracks = True

    def keep_inside(self, *roots: bytes) -> None:
        """Blocks of these roots' chains, and of what is computed alone for them, are not told of:
        no copy of them is wanted elsewhere.
        """
        self._kept_inside.update(roots)

    def note_published(self, block_id: int) -> None:
        """A block can be found from now on."""
        if self._tracks and not self._is_kept_inside(self._index.entry(block_id)):
            self._published[block_id] = None

    def note_evicted(self, block_id: int, entry: PrefixEntry) -> None:
        """A published block was handed out again."""
        if self._tracks and not self._is_kept_inside(entry):
            self._evicted[block_id] = entry

    def leaves_pool(self, block_id: int) -> bool:
        """Whether copies of a published block may be kept elsewhere."""
        return self._index.entry(block_id) is not None and not self._is_kept_inside(
            self._index.entry(block_id)
        )

    def _is_kept_inside(self, entry: PrefixEntry | None) -> bool:
        if entry is None or not self._kept_inside:
            return False
        return (
            entry.root.user if isinstance(entry.root, LoneRoot) else entry.root
        ) in self._kept_inside

    def under(self, root: bytes) -> list[int]:
        """Published blocks that prompts of a root may share; of a `LoneRoot` those that nobody may.
        Looks at the whole pool.
        """
        return [block_id for block_id, entry in self._index.entries().items() if entry.root == root]

    def drain_published(self) -> list[int]:
        """Ids of blocks published since the last call, in order; some may have been evicted or
        withdrawn again.
        """
        published = self._published
        self._published = {}
        return list(published)

    def drain_evicted(self) -> dict[int, BlockAddress]:
        """Blocks handed out again since the last call, and what they held: it is there until the
        next pass or copy.
        """
        evicted = self._evicted
        self._evicted = {}
        return {block_id: entry.address for block_id, entry in evicted.items()}

    def address(self, block_id: int) -> BlockAddress | None:
        """What a published block holds; None for any other, and for one that is being rewritten."""
        entry = self._index.entry(block_id)
        return None if entry is None else entry.address

    def chain(self, table: BlockTable) -> list[bytes]:
        """Prefix hashes of a table's published blocks, in order."""
        return self.hashes(table.block_ids[: table._num_chained])

    def hashes(self, block_ids: Sequence[int]) -> list[bytes]:
        """Prefix hashes of published blocks, in their order."""
        return [
            entry.prefix_hash for entry in map(self._index.entry, block_ids) if entry is not None
        ]

    def addresses_after(
        self, token_ids: Sequence[int], root: bytes, known: bytes = b""
    ) -> AddressesAfter:
        """What is to be brought into the pool, so that more than the longest shared prefix is
        served. Changes nothing. `known` (see `Lookup`) finds the prefix and names nothing: a tier
        believes the hash it is asked by.
        """
        data = encode_tokens(token_ids)
        match = self._lookup.named(data, self._lookup.match(data, root, known))
        return AddressesAfter(len(match.block_ids), match.beyond, self._addresses(data, match))

    def _addresses(self, data: bytes, match: PrefixMatch) -> Iterator[BlockAddress]:
        size = self._lookup.block_bytes
        parent = match.prefix_hash
        for index, prefix_hash in enumerate(
            self._lookup.awaitable(data, match), len(match.block_ids)
        ):
            yield BlockAddress(prefix_hash, parent, data[index * size : (index + 1) * size])
            parent = prefix_hash


class PoolUsage:
    """What the blocks of a pool are at this moment, by block and counted."""

    _pool: BlockPool
    _index: PrefixIndex

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self._pool.num_blocks

    @property
    def free_block_count(self) -> int:
        """Blocks nobody references, idle cached ones included."""
        return self._pool.num_free

    @property
    def used_block_count(self) -> int:
        """Blocks referenced by a table, or pinned."""
        return self._pool.num_blocks - self._pool.num_free

    @property
    def cached_block_count(self) -> int:
        """Idle blocks that keep their prefix and can be matched. Counts the whole pool."""
        return self.block_states().count(BLOCK_CACHED)

    @property
    def shared_block_count(self) -> int:
        """Blocks referenced more than once. Counts the whole pool."""
        return self.block_states().count(BLOCK_SHARED)

    @property
    def published_block_count(self) -> int:
        """Blocks in the prefix index, idle or referenced. Counts the whole pool."""
        return len(self._index)

    def is_published(self, prefix_hash: bytes) -> bool:
        """Return whether a block of this hash can be matched."""
        return prefix_hash in self._index

    @property
    def usable_block_count(self) -> int:
        """Blocks that requests can ever get: all but the pinned ones."""
        return self._pool.num_blocks - len(self._pool.held())

    def protected_block_count(self, owner: bytes) -> int:
        """Free blocks that the eviction policy would rather keep from this owner; they can be taken
        all the same.
        """
        return self._pool.num_protected(owner)

    @property
    def reference_count(self) -> int:
        """References of all tables on all blocks."""
        return sum(self._pool.ref_counts())

    def ref_count(self, block_id: int) -> int:
        """References of all tables on a block."""
        return self._pool.ref_count(block_id)

    def block_state(self, block_id: int) -> int:
        """BLOCK_FREE, BLOCK_CACHED (idle, matchable), BLOCK_REFERENCED (by one table) or
        BLOCK_SHARED (by more).
        """
        count = self._pool.ref_count(block_id)
        if count:
            return BLOCK_REFERENCED if count == 1 else BLOCK_SHARED
        return BLOCK_FREE if self._index.entry(block_id) is None else BLOCK_CACHED

    def block_states(self) -> list[int]:
        """The state of every block, by id."""
        return [self.block_state(block_id) for block_id in range(self._pool.num_blocks)]
