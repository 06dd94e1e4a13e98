"""Sharing and publishing of prefixes by block tables.

A new table shares the published blocks of its prompt and claims the other full blocks (single
flight). Requests that need claimed blocks can wait for them instead of computing them too. When a
block is full, it enters the prefix index as the next link of its table's chain.
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
    """Claims on blocks that tables are about to compute, at most one claim per prefix hash.

    Only hashes are compared. A collision makes a request wait but never serves wrong KV.

    Attributes:
        holders: prefix hash -> serial of the live table that claims the block.
    """

    __slots__ = ("holders",)

    def __init__(self) -> None:
        self.holders: dict[bytes, int] = {}

    def __contains__(self, prefix_hash: object) -> bool:
        """Return whether a live table is still computing the block with this hash."""
        return prefix_hash in self.holders

    def make(self, table: BlockTable, index: int, prefix_hash: bytes) -> None:
        """Claim a block for a table, unless another table already claims its hash."""
        if prefix_hash not in self.holders:
            self.holders[prefix_hash] = table._serial
            table._claims[index] = prefix_hash

    def drop(self, table: BlockTable, index: int) -> None:
        """End a table's claim on one block."""
        prefix_hash = table._claims.pop(index, None)
        if prefix_hash is not None:
            del self.holders[prefix_hash]

    def drop_all(self, table: BlockTable) -> None:
        """End all of a table's claims."""
        for index in list(table._claims):
            self.drop(table, index)

    def last_promised(self, hashes: Iterable[bytes]) -> bytes | None:
        """Return the last hash of the longest claimed run at the start of `hashes`, or None."""
        promised = list(itertools.takewhile(self.holders.__contains__, hashes))
        return promised[-1] if promised else None


class Opener:
    """Fills new tables with the published blocks of their prompts, and claims the other blocks.

    The methods take the same `data` and `known` arguments as those of `Lookup`.
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
        self,
        table: BlockTable,
        data: bytes,
        known: bytes,
        total: int,
        *,
        count: bool,
        again: bool,
    ) -> PrefixMatch:
        """Share the longest prefix that a new table can continue from, and return the match.

        At least one token is left to compute.

        Args:
            table: the new table.
            data: encoded tokens.
            known: precomputed hashes of the first blocks.
            total: number of tokens of the sequence, which may have more than `data`.
            count: record the lookup in the counters and the usage of the matched blocks.
            again: count the table's blocks as used again, even if the prompt extends no published
                chain.
        """
        match = self._lookup.match(data, table.root, known)
        num_tokens = len(data) // TOKEN_BYTES
        rest = self._take(table, data, match, known, self._lookup.servable(match, num_tokens))
        table.miss_reason = self._lookup.miss_reason(match, num_tokens, total)
        table.missed_hash = match.next_hash
        if count:
            table._uncounted_misses = total - table.num_cached_tokens
            table._extends_chain = self._uses.matched(match.block_ids) or again
            lost = self._lookup.lost(rest)
            if any(lost):
                self._pool.missed(once=lost[0], again=lost[1])
        return match

    def share_all(self, table: BlockTable, data: bytes, known: bytes) -> None:
        """Share all published blocks with a new table that computes nothing.

        This includes the block with the last token, and blocks without a later snapshot.
        """
        match = self._lookup.published(data, table.root, known)
        self._take(table, data, match, known, len(match.block_ids) * self._block_size)

    def _take(
        self, table: BlockTable, data: bytes, match: PrefixMatch, known: bytes, num_tokens: int
    ) -> list[bytes]:
        """Share the matched blocks, claim the full blocks after them, and return their hashes.

        Args:
            table: the new table.
            data: encoded tokens.
            match: published prefix to share.
            known: precomputed hashes of the first blocks.
            num_tokens: number of tokens that the match serves.
        """
        for block_id in match.block_ids:
            self._pool.touch(block_id)
        table.block_ids = match.block_ids
        table._num_hashed = len(match.block_ids)
        table._chain_hash = match.prefix_hash
        table._chain_serial = match.serial
        table.num_cached_tokens = table.num_computed_tokens = num_tokens
        table.num_matched_tokens = num_tokens + match.beyond * self._block_size
        rest = list(self._lookup.rest(data, match, known))
        for index, prefix_hash in enumerate(rest, len(match.block_ids)):
            self._claims.make(table, index, prefix_hash)
        return rest


class Publisher:
    """Publishes full blocks of tables, or replaces them with published duplicates."""

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
        """Publish those of the first `num_full` blocks that are not published yet.

        Args:
            table: the table.
            token_ids: running list of the table's tokens. Only the tokens of unpublished blocks are
                read.
            num_full: number of full blocks in the table.

        Returns:
            the number of blocks that were published or replaced by duplicates.
        """
        count = 0
        for index in [index for index in table._withdrawn if index < num_full]:
            count += self._republish(table, index, self._encode_block(token_ids, index))
        for index in range(table._num_hashed, num_full):
            count += self._append(table, index, self._encode_block(token_ids, index))
        return count + self._duplicates.adopt(table, num_full)

    def _encode_block(self, token_ids: Sequence[int], index: int) -> bytes:
        return encode_tokens(token_ids[index * self._block_size : (index + 1) * self._block_size])

    def _append(self, table: BlockTable, index: int, tokens: bytes) -> bool:
        """Append full block `index` to the table's chain; return False if it is a duplicate."""
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
        table._num_hashed = index + 1
        table._chain_hash = prefix_hash
        table._chain_serial = serial
        self._claims.drop(table, index)
        return known is None

    def _republish(self, table: BlockTable, index: int, tokens: bytes) -> bool:
        """Publish a rewritten block under its old entry; return False if it is a duplicate."""
        # The old entry keeps its serial, so cached blocks after this one stay reachable.
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
            if index == table._num_hashed - 1:
                table._chain_serial = serial
        self._claims.drop(table, index)
        return known is None

    def _note(self, table: BlockTable, index: int, known: int) -> int:
        """Record published block `known` as the duplicate of a table's block; return its serial."""
        entry = self._index.entry(known)
        assert entry is not None  # the caller just found it
        self._duplicates.note(table, index, known, entry)
        return entry.serial
