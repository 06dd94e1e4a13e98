"""What tables share, promise and publish. Full blocks enter the prefix index, each as a link of the
table's chain; until then the table's promise to fill them keeps others from computing them beside
it (single flight).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from kvboost_edge.errors import CacheCorruption
from kvboost_edge.kvcache.block_contents import BlockContents
from kvboost_edge.kvcache.block_pool import BlockPool
from kvboost_edge.kvcache.block_table import BlockTable
from kvboost_edge.kvcache.duplicates import DuplicateBlocks
from kvboost_edge.kvcache.eviction.block_usage import Uses
from kvboost_edge.kvcache.hashing import TOKEN_BYTES, HashFn, LoneRoot, encode_tokens
from kvboost_edge.kvcache.lookup import Lookup
from kvboost_edge.kvcache.prefix_index import PrefixIndex, PrefixMatch

__all__ = ["Claims", "Opener", "Publisher"]


class Claims:
    """One holder for each promised prefix hash. Hashes alone are compared: a collision makes a
    request wait, and never read another's KV.

    Attributes:
        holders: prefix hash -> serial of the live table that computes it.
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
        """The last of the promised ones that `hashes` begin with; None where the first is not
        promised.
        """
        promised = list(itertools.takewhile(self.holders.__contains__, hashes))
        return promised[-1] if promised else None


class Opener:
    """What a new table shares of the published blocks, and which of the others it promises to fill.
    `data` are its encoded tokens, `known` their hashes, see `Lookup`.
    """

    __slots__ = ("_block_size", "_claims", "_lookup", "_pool", "_uses")

    def __init__(
        self, lookup: Lookup, pool: BlockPool, uses: Uses, claims: Claims, block_size: int
    ) -> None:
        self._lookup = lookup
        self._pool = pool
        self._uses = uses
        self._claims = claims
        self._block_size = block_size

    def share(
        self, table: BlockTable, data: bytes, known: bytes, *, count: bool, again: bool
    ) -> PrefixMatch:
        """The longest prefix that can be gone on from; at least one token is left to compute.
        `count`: the lookup counts; `again`: the table's blocks are used again in any case.
        """
        match = self._lookup.match(data, table.root, known)
        num_tokens = len(data) // TOKEN_BYTES
        rest = self._take(table, data, match, known, self._lookup.servable(match, num_tokens))
        table.miss_reason = self._lookup.miss_reason(match, num_tokens)
        table.missed_hash = match.next_hash
        if count:
            table._uncounted_misses = num_tokens - table.num_cached_tokens
            table._goes_on = self._uses.matched(match.block_ids) or again
            lost = self._lookup.lost(rest)
            if any(lost):
                self._pool.missed(once=lost[0], again=lost[1])
        return match

    def share_all(self, table: BlockTable, data: bytes, known: bytes) -> None:
        """All that is published, for who computes nothing: the last token too, and blocks without a
        state.
        """
        match = self._lookup.published(data, table.root, known)
        self._take(table, data, match, known, len(match.block_ids) * self._block_size)

    def _take(
        self, table: BlockTable, data: bytes, match: PrefixMatch, known: bytes, num_tokens: int
    ) -> list[bytes]:
        """Hold a match, of which so many tokens are served, and claim the full blocks behind it:
        their hashes.
        """
        for block_id in match.block_ids:
            self._pool.touch(block_id)
        table.block_ids = match.block_ids
        table._num_chained = len(match.block_ids)
        table._chain_hash = match.prefix_hash
        table._chain_serial = match.serial
        table.num_cached_tokens = table.num_computed_tokens = num_tokens
        table.num_matched_tokens = num_tokens + match.beyond * self._block_size
        rest = list(self._lookup.rest(data, match, known))
        for index, prefix_hash in enumerate(rest, len(match.block_ids)):
            self._claims.make(table, index, prefix_hash)
        return rest


class Publisher:
    """Publishes blocks of tables. Where an equal one is published already, the table goes over to
    that, see `DuplicateBlocks`.
    """

    __slots__ = ("_block_size", "_claims", "_content", "_duplicates", "_hash_fn", "_index")

    def __init__(
        self,
        index: PrefixIndex,
        claims: Claims,
        content: BlockContents,
        duplicates: DuplicateBlocks,
        hash_fn: HashFn,
        block_size: int,
    ) -> None:
        self._index = index
        self._claims = claims
        self._content = content
        self._duplicates = duplicates
        self._hash_fn = hash_fn
        self._block_size = block_size

    def publish(self, table: BlockTable, token_ids: Sequence[int], num_full: int) -> int:
        """Publish what the first `num_full` blocks of the table make new; how many blocks that is,
        and how many it gave up for equal ones.

        Args:
            token_ids: the running list; only blocks that are not published are read.
        """
        count = 0
        for index in [index for index in table._withdrawn if index < num_full]:
            count += self._republish(table, index, self._encode_block(token_ids, index))
        for index in range(table._num_chained, num_full):
            count += self._append(table, index, self._encode_block(token_ids, index))
        return count + self._duplicates.adopt(table, num_full)

    def _encode_block(self, token_ids: Sequence[int], index: int) -> bytes:
        return encode_tokens(token_ids[index * self._block_size : (index + 1) * self._block_size])

    def _append(self, table: BlockTable, index: int, tokens: bytes) -> bool:
        """Append the full block `index` to the table's chain; False if its equal is published."""
        parent_serial = table._chain_serial
        prefix_hash = self._hash_fn(table._chain_hash, tokens)
        keyed = tokens if index else table.root + tokens
        known = self._index.find(prefix_hash, keyed, parent_serial)
        if known is None:
            root = table.root
            place = (
                table._chain_hash,
                root.shared_with(index) if isinstance(root, LoneRoot) else root,
                index,
            )
            serial = self._index.publish(
                table.block_ids[index], prefix_hash, keyed, parent_serial, *place
            )
            self._content.note_published(table.block_ids[index])
        else:
            serial = self._note(table, index, known)
        table._num_chained = index + 1
        table._chain_hash = prefix_hash
        table._chain_serial = serial
        self._claims.drop(table, index)
        return known is None

    def _republish(self, table: BlockTable, index: int, tokens: bytes) -> bool:
        """Put a rewritten block back under its old identity, so that the prefixes cached below it
        stay reachable; False if its equal is published.
        """
        entry = table._withdrawn[index]
        if entry.tokens != (tokens if index else table.root + tokens):
            raise CacheCorruption(
                f"the tokens of block {table.block_ids[index]} changed while it was rewritten"
            )
        del table._withdrawn[index]
        known = self._index.find(entry.prefix_hash, entry.tokens, entry.parent_serial)
        if known is None:
            self._index.restore(table.block_ids[index], entry)
            self._content.note_published(table.block_ids[index])
        else:
            serial = self._note(table, index, known)
            if index == table._num_chained - 1:
                table._chain_serial = serial
        self._claims.drop(table, index)
        return known is None

    def _note(self, table: BlockTable, index: int, known: int) -> int:
        """Block `known` stands in the index for the table's own block: its serial."""
        entry = self._index.entry(known)
        assert entry is not None  # it was just found there
        self._duplicates.note(table, index, known, entry)
        return entry.serial
