"""Pinned and retained prompts.

The blocks of a pinned prompt stay in the pool until it is unpinned or its time is over. Retained
blocks are evicted after all other blocks of their owner, but they are evicted when room is needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from kvboost_edge.errors import CacheCorruption, CapacityError, ConfigError, RequestError
from kvboost_edge.kvcache.block_pool import BlockPool
from kvboost_edge.kvcache.eviction.block_usage import Uses
from kvboost_edge.kvcache.eviction.order import RETAINED
from kvboost_edge.kvcache.hashing import TOKEN_BYTES, HashFn, encode_tokens
from kvboost_edge.kvcache.prefix_index import PrefixIndex, PrefixMatch

__all__ = ["Pins"]

_BETWEEN_LOOKS = 1.0  # least seconds between two scans for ended retention


class _Pin(NamedTuple):
    """One pinned prompt.

    Attributes:
        block_ids: its full blocks.
        owner: owner of the blocks once they are unpinned.
        until: time at which the pin ends; None: only by a call.
    """

    block_ids: list[int]
    owner: bytes
    until: float | None


class Pins:
    """Pins of one pool.

    A pinned block has one reference of the pool, no matter how many pins share it. It stays
    published, and a table that writes into it gets a copy. A pin is identified by root and tokens,
    so a caller can end, renew or see only pins of its own root.

    At most half of the pool can be pinned; the other half holds the tenants' floors. An owner may
    be limited to a share of that bound. If the shares add up to at most 1, refusals depend only on
    the owner's own pins and reveal nothing about other tenants.

    Args:
        pool: the block pool.
        index: the prefix index.
        uses: usage of the blocks.
        block_size: tokens of a block.
        hash_fn: chain hash.
        max_blocks: most pinned blocks, at most half the pool. None: half the pool.

    Attributes:
        max_blocks: most pinned blocks.
        num_ended: counter of ended pins.
    """

    def __init__(
        self,
        pool: BlockPool,
        index: PrefixIndex,
        uses: Uses,
        block_size: int,
        hash_fn: HashFn,
        max_blocks: int | None,
    ) -> None:
        half = pool.num_blocks // 2
        self.max_blocks = half if max_blocks is None else max_blocks
        if not 0 <= self.max_blocks <= half:
            raise ConfigError(
                f"max_pinned_blocks={max_blocks} must be in 0..{half}, half of the "
                f"{pool.num_blocks} blocks of the pool"
            )
        self.num_ended = 0
        self._pool = pool
        self._index = index
        self._uses = uses
        self._block_size = block_size
        self._hash_fn = hash_fn
        # By the serial of the last block, which identifies the whole prefix and is never reused.
        self._pins: dict[int, _Pin] = {}
        self._counts: dict[int, int] = {}  # pinned block -> number of pins
        self._owners: dict[int, bytes] = {}  # pinned block -> owner
        self._soonest: float | None = None
        self._next_look = math.inf  # next time at which retention may end

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_blocks(self) -> int:
        """Number of pinned blocks, without repeats."""
        return len(self._counts)

    @property
    def num_retained(self) -> int:
        """Number of retained blocks, referenced ones included."""
        return len(self._uses.retained)

    @property
    def next_end(self) -> float | None:
        """Time at which the next pin ends, or None."""
        return self._soonest

    def num_owned(self, owner: bytes) -> int:
        """Return the number of pinned blocks of one owner; approximate from other threads."""
        return list(self._owners.values()).count(owner)

    def check_size(self, num_tokens: int, share: float = 1.0) -> None:
        """Check that a prompt could be pinned if its owner had no other pins.

        Args:
            num_tokens: tokens of the prompt.
            share: the owner's share of the bound.

        Raises:
            RequestError: the prompt has no full block.
            CapacityError: the prompt exceeds the owner's share.
        """
        num_full = num_tokens // self._block_size
        if not num_full:
            raise RequestError(
                f"a prompt of {num_tokens} tokens cannot be pinned: it has no full block of "
                f"{self._block_size} tokens"
            )
        if num_full > self._most(share):
            raise CapacityError(self._refusal(num_full, share))

    def add(
        self,
        token_ids: Sequence[int],
        root: bytes,
        *,
        owner: bytes = b"",
        until: float | None = None,
        share: float = 1.0,
    ) -> int:
        """Pin the full blocks of a cached prompt; return their number.

        Args:
            token_ids: the prompt.
            root: root hash of its chain.
            owner: owner of the pin.
            until: time at which the pin ends, by the caller's clock. A prompt that is already
                pinned gets this end.
            share: part of the bound that its owner's pins may take, in (0, 1].

        Raises:
            RequestError: the prompt has no full block.
            CapacityError: other pins leave too little room, or blocks are not cached.
        """
        self.check_size(len(token_ids), share)
        num_full = len(token_ids) // self._block_size
        match = self._match(token_ids, root)
        if len(match.block_ids) < num_full:
            cached = len(match.block_ids)
            raise CapacityError(
                f"only {cached} of the prompt's {num_full} full blocks are cached; warm the prompt "
                "first"
            )
        added = [block_id for block_id in match.block_ids if block_id not in self._counts]
        if added and self.num_owned(owner) + len(added) > self._most(share):
            raise CapacityError(self._refusal(len(added), share))
        if self.num_blocks + len(added) > self.max_blocks:
            raise CapacityError(self._refusal(len(added), share))
        if match.serial not in self._pins:
            for block_id in match.block_ids:
                self._counts[block_id] = self._counts.get(block_id, 0) + 1
            for block_id in added:
                self._pool.hold(block_id)
                self._owners[block_id] = owner
        self._pins[match.serial] = _Pin(match.block_ids, owner, until)
        self._find_soonest()
        return num_full

    def end(self, token_ids: Sequence[int], root: bytes) -> int:
        """End the pin of exactly this prompt; return how many blocks are no longer pinned.

        Blocks of other pins stay pinned. The result is 0 if there is no such pin.
        """
        num_full = len(token_ids) // self._block_size
        match = self._match(token_ids, root)
        if len(match.block_ids) < num_full or match.serial not in self._pins:
            return 0
        before = self.num_blocks
        self._end(match.serial)
        self._find_soonest()
        return before - self.num_blocks

    def expire(self, now: float) -> None:
        """End the pins whose time is over, and retention that ended, at most a second late."""
        if now >= self._next_look:
            self._end_retained(now)
        if self._soonest is None or now < self._soonest:
            return
        over = [
            serial
            for serial, pin in self._pins.items()
            if pin.until is not None and pin.until <= now
        ]
        for serial in over:
            self._end(serial)
        self._find_soonest()

    def published(self, token_ids: Sequence[int], root: bytes) -> list[int]:
        """Return the blocks of the longest published prefix."""
        return self._match(token_ids, root).block_ids

    def retain(self, block_ids: Sequence[int], owner: bytes, until: float) -> None:
        """Retain published blocks.

        Until the given time, evict them only after all other blocks of their owner. Blocks already
        retained until a later time keep that time. Retained blocks still count as free: no request
        waits for them or fails because of them.

        Args:
            block_ids: blocks of a chain from its head.
            owner: owner of the blocks.
            until: end of the retention, by the caller's clock.
        """
        self._uses.mark(block_ids)
        retained = self._uses.retained
        for block_id in reversed(block_ids):
            retained[block_id] = max(until, retained.get(block_id, until))
            self._pool.regard(block_id, owner=owner, again=RETAINED)
        self._next_look = min(self._next_look, until)

    def num_of(self, token_ids: Sequence[int], root: bytes) -> int:
        """Return how many leading blocks of a prompt are pinned; approximate from other threads."""
        return sum(block_id in self._counts for block_id in self._match(token_ids, root).block_ids)

    def check(self) -> None:
        """Recount the pinned blocks; raise CacheCorruption if pool or index disagree."""
        counted: dict[int, int] = {}
        for serial, pin in self._pins.items():
            last = self._index.entry(pin.block_ids[-1])
            if last is None or last.serial != serial:
                raise CacheCorruption(
                    f"pinned block {pin.block_ids[-1]} no longer holds the pinned prefix"
                )
            for block_id in pin.block_ids:
                counted[block_id] = counted.get(block_id, 0) + 1
        if counted != self._counts or not set(counted) == set(self._pool.held()) == set(
            self._owners
        ):
            raise CacheCorruption(
                f"pins cover {len(counted)} blocks, but the pool has {len(self._pool.held())} "
                "pinned blocks"
            )

    def _match(self, token_ids: Sequence[int], root: bytes) -> PrefixMatch:
        num_full = len(token_ids) // self._block_size
        data = encode_tokens(token_ids[: num_full * self._block_size])
        return self._index.match(data, root, self._block_size * TOKEN_BYTES, self._hash_fn)

    def _end(self, serial: int) -> None:
        pin = self._pins.pop(serial)
        self._uses.mark(pin.block_ids)
        rank = self._uses.rank
        for block_id in reversed(pin.block_ids):  # last block first, as in `KVCacheManager.free`
            self._counts[block_id] -= 1
            if not self._counts[block_id]:
                del self._counts[block_id], self._owners[block_id]
                self._pool.let_go(block_id, matchable=True, owner=pin.owner, again=rank(block_id))
        self.num_ended += 1

    def _end_retained(self, now: float) -> None:
        """End the retention of blocks whose time is over, so that they count as used again now."""
        retained = self._uses.retained
        over = [block_id for block_id, until in retained.items() if until <= now]
        # Last block first: LRU then evicts a chain from its end.
        for block_id in sorted(over, key=self._serial_of, reverse=True):
            del retained[block_id]
            self._pool.demote(block_id)
        self._next_look = max(min(retained.values(), default=math.inf), now + _BETWEEN_LOOKS)

    def _serial_of(self, block_id: int) -> int:
        """Return a number that increases along a chain; 0 for a block that is being rewritten."""
        entry = self._index.entry(block_id)
        return 0 if entry is None else entry.serial

    def _find_soonest(self) -> None:
        self._soonest = min(
            (pin.until for pin in self._pins.values() if pin.until is not None), default=None
        )

    def _most(self, share: float) -> int:
        """Return the number of blocks in a share of the bound."""
        # The small number undoes rounding: a third of 9 blocks is 3, not 2.
        return int(self.max_blocks * share + 1e-6)

    def _refusal(self, num_blocks: int, share: float) -> str:
        # The message omits the number of pinned blocks, which may belong to other tenants. If
        # tenants have shares it also omits the total, which would reveal the number of tenants.
        bound = (
            f"the limit is max_pinned_blocks={self.max_blocks} of the {self._pool.num_blocks} "
            "blocks in the pool"
        )
        if share < 1:
            bound = f"this tenant's share of max_pinned_blocks is {self._most(share)}"
        return (
            f"{num_blocks} more blocks cannot be pinned: {bound}; unpin prompts, set a ttl, raise "
            "max_pinned_blocks (at most half of the pool), or enlarge max_cache_bytes or num_blocks"
        )
