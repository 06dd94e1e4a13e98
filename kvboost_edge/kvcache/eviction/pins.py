"""Pinned and retained prompts.

The blocks of a pinned prompt stay in the pool until it is unpinned or the pin expires. Retained
blocks are only evicted after all other blocks of their owner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from kvboost_edge.errors import CacheCorruption, CapacityError, ConfigError, RequestError
from kvboost_edge.kvcache.block_pool import BlockPool
from kvboost_edge.kvcache.eviction.block_usage import Uses
from kvboost_edge.kvcache.eviction.order import RETAINED
from kvboost_edge.kvcache.hashing import encode_tokens
from kvboost_edge.kvcache.prefix_index import PrefixIndex, PrefixMatch

__all__ = ["Pins"]

_BETWEEN_LOOKS = 1.0  # minimum seconds between scans for expired retention


class _Pin(NamedTuple):
    """A pinned prompt.

    Attributes:
        block_ids: full blocks of the prompt.
        owner: owner of the blocks once they are unpinned.
        ends: time at which the pin expires for each of its holders. None means never.
    """

    block_ids: list[int]
    owner: bytes
    ends: dict[str, float | None]


class Pins:
    """Pinned and retained prompts of one pool.

    The pool holds one reference to each pinned block, no matter how many pins share it. A pinned
    block stays published, and a table that writes to it gets a copy. Pins are identified by root
    and tokens, so callers can only see, renew or end pins of their own root. A pin has one or more
    holders, such as a session, and lasts until the last of them ends it or expires.

    At most half of the pool can be pinned. The other half is for the tenants' floors. An owner may
    be limited to a share of the pinnable blocks. If the shares add up to at most 1, refusals depend
    only on the owner's own pins and reveal nothing about other tenants.

    Args:
        pool: the block pool.
        index: the prefix index.
        uses: usage of the blocks.
        block_size: tokens per block.
        max_blocks: maximum number of pinned blocks, at most half the pool. None means half the
            pool.

    Attributes:
        max_blocks: maximum number of pinned blocks.
        num_ended: number of pins that ended since the start.
    """

    def __init__(
        self,
        pool: BlockPool,
        index: PrefixIndex,
        uses: Uses,
        block_size: int,
        max_blocks: int | None,
    ) -> None:
        half = pool.num_blocks // 2
        self.max_blocks = half if max_blocks is None else max_blocks
        if not 0 <= self.max_blocks <= half:
            raise ConfigError(
                f"max_pinned_blocks={max_blocks} must be in 0..{half}, half of the "
                f"{pool.num_blocks} blocks in the pool"
            )
        self.num_ended = 0
        self._pool = pool
        self._index = index
        self._uses = uses
        self._block_size = block_size
        # Pins by the serial of their last block, which identifies the whole prefix and is never
        # reused.
        self._pins: dict[int, _Pin] = {}
        self._counts: dict[int, int] = {}  # pinned block -> number of pins
        self._owners: dict[int, bytes] = {}  # pinned block -> owner
        self._soonest: float | None = None
        self._next_look = math.inf  # next time to look for expired retention

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_blocks(self) -> int:
        """Number of distinct pinned blocks."""
        return len(self._counts)

    @property
    def num_retained(self) -> int:
        """Number of retained blocks, including referenced ones."""
        return len(self._uses.retained)

    @property
    def next_end(self) -> float | None:
        """Time at which a pin next expires for one of its holders, or None if none expires."""
        return self._soonest

    def num_owned(self, owner: bytes) -> int:
        """Return an owner's number of pinned blocks. The result is approximate in other threads."""
        return list(self._owners.values()).count(owner)

    def check_size(self, num_tokens: int, share: float = 1.0) -> None:
        """Check that a prompt could be pinned if there were no other pins.

        Args:
            num_tokens: number of tokens in the prompt.
            share: the owner's share of `max_blocks`.

        Raises:
            RequestError: the prompt has no full block.
            CapacityError: the prompt exceeds the owner's share.
        """
        num_full = num_tokens // self._block_size
        if not num_full:
            raise RequestError(
                f"the prompt cannot be pinned: the {num_tokens} tokens of it that other prompts "
                f"can share do not fill a block of {self._block_size}; pin a longer prompt"
            )
        if num_full > self._most(share):
            raise CapacityError(self._refusal(num_full, share))

    def add(
        self,
        token_ids: Sequence[int],
        root: bytes,
        *,
        owner: bytes = b"",
        holder: str = "",
        until: float | None = None,
        share: float = 1.0,
    ) -> int:
        """Pin the full blocks of a cached prompt, and return their number.

        Args:
            token_ids: the prompt.
            root: root hash of its chain.
            owner: owner of the pin.
            holder: name of the pin's holder, within the root.
            until: time at which the pin expires for this holder, by the caller's clock. If the
                holder has already pinned the prompt, its expiry is replaced.
            share: fraction of `max_blocks` available to the owner's pins, in (0, 1].

        Raises:
            RequestError: the prompt has no full block.
            CapacityError: other pins leave too little room, or some blocks are not cached.
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
        pin = self._pins.get(match.serial)
        if pin is None:
            pin = self._pins[match.serial] = _Pin(match.block_ids, owner, {})
            for block_id in match.block_ids:
                self._counts[block_id] = self._counts.get(block_id, 0) + 1
            for block_id in added:
                self._pool.hold(block_id)
                self._owners[block_id] = owner
        pin.ends[holder] = until
        self._find_soonest()
        return num_full

    def end(self, token_ids: Sequence[int], root: bytes, holder: str | None = None) -> int:
        """End the pin of exactly this prompt, and return how many blocks were unpinned.

        Blocks that other pins share stay pinned. The result is 0 if the prompt is not pinned.

        Args:
            token_ids: the prompt.
            root: root hash of its chain.
            holder: holder that ends the pin, which then lasts for the others. None ends it for
                all.
        """
        num_full = len(token_ids) // self._block_size
        match = self._match(token_ids, root)
        pin = self._pins.get(match.serial)
        if len(match.block_ids) < num_full or pin is None:
            return 0
        if holder is None:
            pin.ends.clear()
        else:
            pin.ends.pop(holder, None)
        before = self.num_blocks
        if not pin.ends:
            self._end(match.serial)
        self._find_soonest()
        return before - self.num_blocks

    def expire(self, now: float) -> None:
        """End expired pins, and expired retention with up to a second of delay."""
        if now >= self._next_look:
            self._end_retained(now)
        if self._soonest is None or now < self._soonest:
            return
        for pin in self._pins.values():
            for holder, until in list(pin.ends.items()):
                if until is not None and until <= now:
                    del pin.ends[holder]
        for serial in [serial for serial, pin in self._pins.items() if not pin.ends]:
            self._end(serial)
        self._find_soonest()

    def published(self, token_ids: Sequence[int], root: bytes) -> list[int]:
        """Return the blocks of a prompt's longest published prefix."""
        return self._match(token_ids, root).block_ids

    def retain(self, block_ids: Sequence[int], owner: bytes, until: float) -> None:
        """Retain published blocks until the given time.

        They are then evicted only after all other blocks of their owner. A block that is already
        retained for longer keeps its later end. Retained blocks still count as free, so no request
        waits or fails because of them.

        Args:
            block_ids: blocks of a chain, starting at its head.
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
        """Return how many of a prompt's blocks are pinned.

        The result is approximate in other threads.
        """
        return sum(block_id in self._counts for block_id in self._match(token_ids, root).block_ids)

    def check(self) -> None:
        """Recount the pinned blocks, and raise CacheCorruption if the pool or index disagrees."""
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
        return self._index.match(data, root)

    def _end(self, serial: int) -> None:
        pin = self._pins.pop(serial)
        self._uses.mark(pin.block_ids)
        rank = self._uses.rank
        # Release the last block first, as in `KVCacheManager.free`.
        for block_id in reversed(pin.block_ids):
            self._counts[block_id] -= 1
            if not self._counts[block_id]:
                del self._counts[block_id], self._owners[block_id]
                self._pool.let_go(block_id, matchable=True, owner=pin.owner, again=rank(block_id))
        self.num_ended += 1

    def _end_retained(self, now: float) -> None:
        """End expired retention of blocks, which then count as used again now."""
        retained = self._uses.retained
        over = [block_id for block_id, until in retained.items() if until <= now]
        # Demote the last block first, so that LRU evicts a chain from its end.
        for block_id in sorted(over, key=self._serial_of, reverse=True):
            del retained[block_id]
            self._pool.demote(block_id)
        self._next_look = max(min(retained.values(), default=math.inf), now + _BETWEEN_LOOKS)

    def _serial_of(self, block_id: int) -> int:
        """Return a number that increases along a chain; 0 for a block that is being rewritten."""
        entry = self._index.entry(block_id)
        return 0 if entry is None else entry.serial

    def _find_soonest(self) -> None:
        ends = (until for pin in self._pins.values() for until in pin.ends.values())
        self._soonest = min((until for until in ends if until is not None), default=None)

    def _most(self, share: float) -> int:
        """Return the number of pinned blocks that a share of `max_blocks` allows."""
        # The small offset compensates for rounding: a third of 9 blocks is 3, not 2.
        return int(self.max_blocks * share + 1e-6)

    def _refusal(self, num_blocks: int, share: float) -> str:
        # The message omits the number of pinned blocks, which may belong to other tenants. If
        # tenants have shares, it also omits the total, which would reveal the number of tenants.
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
