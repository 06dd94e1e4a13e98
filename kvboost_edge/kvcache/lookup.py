"""Lookups in the prefix index: cached prefixes, blocks worth waiting for, and miss reasons."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvboost_edge.errors import CacheCorruption
from kvboost_edge.kvcache.evicted_hashes import EvictedHashes
from kvboost_edge.kvcache.hashing import TOKEN_BYTES
from kvboost_edge.kvcache.prefix_index import PrefixIndex, PrefixMatch

__all__ = ["Lookup"]

_FORGOTTEN_PER_BLOCK = 2  # evictions remembered for the policy, per block in the pool
_REASONS_PER_BLOCK = 8  # evictions remembered for miss reasons, per block in the pool
_LEAST_REASONS = 1 << 15


class Lookup:
    """Lookups in a `PrefixIndex`.

    The methods share these arguments:

    - `data`: the encoded tokens of a prompt.
    - `root`: the root hash of the prompt's chain.
    - `known`: precomputed hashes of the prompt's first blocks, see `PrefixIndex.match`.

    Args:
        index: the prefix index.
        num_blocks: number of blocks in the pool.
        block_size: tokens per block.
        whole_blocks: full blocks cannot be rewritten, because their KV is quantized. The block with
            a prompt's last token is then never shared. Otherwise it is shared, and only the last
            token is recomputed.
        deepest: function that returns how many of the given blocks precede the deepest snapshot of
            recurrent state. Later blocks are not shared.
    """

    __slots__ = (
        "_block_size",
        "_deepest",
        "_dropped",
        "_forgotten",
        "_index",
        "_most_forgotten",
        "whole_blocks",
    )

    def __init__(
        self,
        index: PrefixIndex,
        num_blocks: int,
        block_size: int,
        whole_blocks: bool,
        deepest: Callable[[Sequence[int]], int] = len,
    ) -> None:
        self.whole_blocks = whole_blocks
        self._deepest = deepest
        self._index = index
        self._block_size = block_size
        # Recently dropped blocks, oldest first. The value is 1 if the block was used again and 0 if
        # not. It is None if the miss was already counted, or if the block was dropped without an
        # eviction.
        self._forgotten: OrderedDict[bytes, int | None] = OrderedDict()
        self._dropped = EvictedHashes(max(_LEAST_REASONS, _REASONS_PER_BLOCK * num_blocks))
        self._most_forgotten = _FORGOTTEN_PER_BLOCK * num_blocks

    def published(self, data: bytes, root: bytes, known: bytes = b"") -> PrefixMatch:
        """Return the longest published prefix, including blocks that cannot be shared."""
        return self._index.match(data, root, known)

    def match(self, data: bytes, root: bytes, known: bytes = b"") -> PrefixMatch:
        """Return the longest published prefix that can be shared."""
        found = self.published(data, root, known)
        covers_all = len(found.block_ids) * self._index.block_bytes == len(data)
        if self.whole_blocks and found.block_ids and covers_all:
            # The last block is cached but not writable, so there is no block to wait for.
            found = self._cut(found, root, len(found.block_ids) - 1)._replace(next_hash=None)
        depth = self._deepest(found.block_ids)
        beyond = len(found.block_ids) - depth
        return found if not beyond else self._cut(found, root, depth)._replace(beyond=beyond)

    def _cut(self, found: PrefixMatch, root: bytes, depth: int) -> PrefixMatch:
        """Return a match reduced to its first `depth` blocks."""
        following = self._index.entry(found.block_ids[depth])
        last = self._index.entry(found.block_ids[depth - 1]) if depth else None
        if following is None or (depth and last is None):
            raise CacheCorruption(
                f"block {found.block_ids[depth]} was matched but is not published"
            )
        prefix_hash = root if last is None else last.prefix_hash
        return PrefixMatch(
            found.block_ids[:depth], prefix_hash, following.parent_serial, following.prefix_hash
        )

    def servable(self, match: PrefixMatch, num_tokens: int) -> int:
        """Return how many tokens a match serves, which excludes the last token of the prompt."""
        return min(len(match.block_ids) * self._block_size, max(num_tokens - 1, 0))

    def rest(self, data: bytes, match: PrefixMatch, known: bytes = b"") -> Iterator[bytes]:
        """Return the hashes of the full blocks after the match."""
        return self._index.rest(data, match, known)

    def awaitable(self, data: bytes, match: PrefixMatch, known: bytes = b"") -> Iterator[bytes]:
        """Return the hashes of full blocks after the match that can be shared once published."""
        rest = self.rest(data, match, known)
        if not self.whole_blocks:
            return rest
        servable_blocks = max(len(data) // TOKEN_BYTES - 1, 0) // self._block_size
        return itertools.islice(rest, max(0, servable_blocks - len(match.block_ids)))

    def forget(self, prefix_hash: bytes, again: int | None = None) -> None:
        """Remember that a published block was dropped.

        Args:
            prefix_hash: prefix hash of the block.
            again: 1 if the block was evicted after repeated use, 0 if it was evicted after a single
                use, None if it was not evicted.
        """
        self._dropped.add([prefix_hash])
        self._forgotten[prefix_hash] = again
        self._forgotten.move_to_end(prefix_hash)
        if len(self._forgotten) > self._most_forgotten:
            self._forgotten.popitem(last=False)

    def lost(self, hashes: Iterable[bytes]) -> tuple[int, int]:
        """Return how many of these blocks were evicted after a single use, and after repeated use.

        Each eviction is counted only once over all calls.
        """
        counts = [0, 0]
        forgotten = self._forgotten
        for prefix_hash in hashes:
            again = forgotten.get(prefix_hash)
            if again is not None:
                counts[again] += 1
                forgotten[prefix_hash] = None
        return counts[0], counts[1]

    def miss_reason(self, match: PrefixMatch, num_tokens: int, total: int) -> str:
        """Return why the first token after the served prefix was missed.

        Args:
            match: the match of the first `num_tokens` tokens of a sequence.
            total: number of tokens of the sequence.

        - "": only the last token is left to compute.
        - "state": the token's KV is cached, but the recurrent state before it is not.
        - "evicted": the token's block is full and was dropped, by eviction or reset.
        - "first_seen": the token's block is full and was not recently cached.
        - "tail": the token's block is not full, or it cannot be rewritten.
        - "private_tail": the token is in a full block after those that may be shared.
        """
        # Hashes depend on the tenant's root, so the result reveals nothing about other tenants.
        if match.beyond:
            return "state"
        if match.next_hash is not None:
            return "evicted" if match.next_hash in self._dropped else "first_seen"
        served = self.servable(match, num_tokens)
        if served >= total - 1:
            return ""
        is_private = num_tokens < total and served + self._block_size < total
        return "private_tail" if is_private else "tail"
