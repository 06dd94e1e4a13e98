"""Content addresses of blocks, publish and evict logs for offload tiers, and pool usage counts."""

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
    """Cached prefix of a prompt, and the addresses of the blocks after it that a tier could add.

    Attributes:
        num_shared: number of leading blocks that the pool can serve now.
        num_in_pool: number of blocks after them that are in the pool but cannot be shared, because
            their recurrent state is missing.
        addresses: addresses of all full blocks after the shared prefix, starting with those in the
            pool. Hashed lazily.
    """

    num_shared: int
    num_in_pool: int
    addresses: Iterator[BlockAddress]


class BlockContents:
    """Content lookups, and logs of published and evicted blocks.

    The logs stay empty until `track` is called. The caller of `track` must drain them.
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
        """Start logging published and evicted blocks."""
        self._tracks = True

    def keep_inside(self, *roots: bytes) -> None:
        """Exclude blocks of these roots from the logs, so no tier stores copies of them.

        This includes blocks of `LoneRoot` chains whose `user` is one of the roots.
        """
        self._kept_inside.update(roots)

    def note_published(self, block_id: int) -> None:
        """Log that a block was published."""
        if self._tracks and not self._is_kept_inside(self._index.entry(block_id)):
            self._published[block_id] = None

    def note_evicted(self, block_id: int, entry: PrefixEntry) -> None:
        """Log that a published block was evicted."""
        if self._tracks and not self._is_kept_inside(entry):
            self._evicted[block_id] = entry

    def leaves_pool(self, block_id: int) -> bool:
        """Return whether a tier may store copies of this block.

        True for a published block whose root was not passed to `keep_inside`.
        """
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
        """Return the published blocks of a root. Scans the whole pool.

        For a `LoneRoot`, these are the hidden blocks, which no prompt may share.
        """
        return [block_id for block_id, entry in self._index.entries().items() if entry.root == root]

    def drain_published(self) -> list[int]:
        """Return the ids of the blocks published since the last call, in order.

        Some of these blocks may have been evicted or withdrawn in the meantime.
        """
        published = self._published
        self._published = {}
        return list(published)

    def drain_evicted(self) -> dict[int, BlockAddress]:
        """Return the blocks evicted since the last call, mapped to their former addresses.

        The pool still holds their old content until the next forward pass or copy.
        """
        evicted = self._evicted
        self._evicted = {}
        return {block_id: entry.address for block_id, entry in evicted.items()}

    def address(self, block_id: int) -> BlockAddress | None:
        """Return the address of a block, or None if it is not published."""
        entry = self._index.entry(block_id)
        return None if entry is None else entry.address

    def chain(self, table: BlockTable) -> list[bytes]:
        """Return the prefix hashes of a table's published blocks, in order."""
        return self.hashes(table.block_ids[: table._num_hashed])

    def hashes(self, block_ids: Sequence[int]) -> list[bytes]:
        """Return the prefix hashes of published blocks, in the order of the ids."""
        return [
            entry.prefix_hash for entry in map(self._index.entry, block_ids) if entry is not None
        ]

    def addresses_after(
        self, token_ids: Sequence[int], root: bytes, known: bytes = b""
    ) -> AddressesAfter:
        """Return the cached prefix of a prompt and the addresses of the blocks to load after it.

        Does not modify the pool.

        Args:
            token_ids: the prompt.
            root: root hash of the prompt's chain.
            known: precomputed hashes of the prompt's first blocks. They are used only to find the
                cached prefix. The returned addresses are always hashed here, because a tier trusts
                the hash it is asked for.
        """
        data = encode_tokens(token_ids)
        match = self._index.named(data, self._lookup.match(data, root, known))
        return AddressesAfter(len(match.block_ids), match.beyond, self._addresses(data, match))

    def _addresses(self, data: bytes, match: PrefixMatch) -> Iterator[BlockAddress]:
        size = self._index.block_bytes
        parent = match.prefix_hash
        for index, prefix_hash in enumerate(
            self._lookup.awaitable(data, match), len(match.block_ids)
        ):
            yield BlockAddress(prefix_hash, parent, data[index * size : (index + 1) * size])
            parent = prefix_hash


class PoolUsage:
    """Status of each block in a pool, and block counts by status."""

    _pool: BlockPool
    _index: PrefixIndex

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool."""
        return self._pool.num_blocks

    @property
    def free_block_count(self) -> int:
        """Number of blocks without references, including idle cached blocks."""
        return self._pool.num_free

    @property
    def used_block_count(self) -> int:
        """Number of blocks that a table or a pin references."""
        return self._pool.num_blocks - self._pool.num_free

    @property
    def cached_block_count(self) -> int:
        """Number of idle blocks that can still be matched. Scans the whole pool."""
        return self.block_states().count(BLOCK_CACHED)

    @property
    def shared_block_count(self) -> int:
        """Number of blocks with more than one reference. Scans the whole pool."""
        return self.block_states().count(BLOCK_SHARED)

    @property
    def published_block_count(self) -> int:
        """Number of blocks in the prefix index, idle or referenced. Scans the whole pool."""
        return len(self._index)

    def is_published(self, prefix_hash: bytes) -> bool:
        """Return whether a block with this prefix hash is published."""
        return prefix_hash in self._index

    @property
    def usable_block_count(self) -> int:
        """Number of blocks that are not pinned and so available to requests."""
        return self._pool.num_blocks - len(self._pool.held())

    def protected_block_count(self, owner: bytes) -> int:
        """Return how many free blocks are protected for owners other than this one."""
        return self._pool.num_protected(owner)

    @property
    def reference_count(self) -> int:
        """Total number of block references held by tables and pins."""
        return sum(self._pool.ref_counts())

    def ref_count(self, block_id: int) -> int:
        """Return the number of references on a block."""
        return self._pool.ref_count(block_id)

    def has_entry(self, block_id: int) -> bool:
        """Return whether a block is published, which implies that it is full."""
        return self._index.entry(block_id) is not None

    def block_state(self, block_id: int) -> int:
        """Return `BLOCK_FREE`, `BLOCK_CACHED`, `BLOCK_REFERENCED` or `BLOCK_SHARED`.

        A cached block has no references but can still be matched. A referenced block has exactly
        one reference. A shared block has more.
        """
        count = self._pool.ref_count(block_id)
        if count:
            return BLOCK_REFERENCED if count == 1 else BLOCK_SHARED
        return BLOCK_FREE if self._index.entry(block_id) is None else BLOCK_CACHED

    def block_states(self) -> list[int]:
        """Return the status of every block, by id."""
        counts = self._pool.ref_counts()
        states = [
            BLOCK_FREE if not count else BLOCK_REFERENCED if count == 1 else BLOCK_SHARED
            for count in counts
        ]
        for block_id in self._index.entries():
            if not counts[block_id]:
                states[block_id] = BLOCK_CACHED
        return states
