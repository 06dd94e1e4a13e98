"""Pins: prompts whose blocks stay in the pool, whatever else comes, until they are let go or their
time is over. Beside them what is retained: blocks that go after all others of their owner, and yet
go when somebody needs the room.
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

_BETWEEN_LOOKS = 1.0  # seconds: what is retained is looked through no more often


class _Pin(NamedTuple):
    """One pinned prompt: its full blocks, whose they are when they go back, when it ends (None:
    never by itself).
    """

    block_ids: list[int]
    owner: bytes
    until: float | None


class Pins:
    """The pins of one pool. A pinned block has one reference of the pool's, however many pins share
    it; it stays published, and whoever would write into it gets a copy.

    A pin is known by its root and tokens: nobody can end, renew or see the pins of another root. At
    most half of the pool can be pinned, so that the floors of the tenants, which are the other
    half, are never touched. Of that bound an owner may have a share (1: all of it). Where the
    shares add up to 1 whether a pin is refused, and what the refusal says, depends on the owner's
    own pins alone.

    Attributes:
        num_ended: counts pins that are over.
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
        # By the serial of the last block, which says all of the prefix and is never reused.
        self._pins: dict[int, _Pin] = {}
        self._counts: dict[int, int] = {}  # pinned block -> pins that have it
        self._owners: dict[int, bytes] = {}  # pinned block -> whose it is
        self._soonest: float | None = None
        self._next_look = math.inf  # when something may be retained no more

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_blocks(self) -> int:
        """Pinned blocks, each once."""
        return len(self._counts)

    @property
    def num_retained(self) -> int:
        """Blocks that are retained, those in use included."""
        return len(self._uses.retained)

    @property
    def next_end(self) -> float | None:
        """When the next pin ends by itself."""
        return self._soonest

    def num_owned(self, owner: bytes) -> int:
        """Pinned blocks of one owner. May be asked from any thread, as a guess."""
        return list(self._owners.values()).count(owner)

    def check_size(self, num_tokens: int, share: float = 1.0) -> None:
        """RequestError for a prompt without a full block, CapacityError for one that its owner, who
        has this share of the bound, could not pin even as the only one.
        """
        num_full = num_tokens // self._block_size
        if not num_full:
            raise RequestError(
                f"a prompt of {num_tokens} tokens cannot be pinned: only full blocks of "
                f"{self._block_size} tokens are"
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
        """Pin the full blocks of a prompt that is in the cache, and return how many it has.

        Args:
            until: when it ends by itself, by the caller's clock; a prompt that is pinned already
                gets this end.
            share: the part of the bound that its owner's pins may take, in (0, 1] Raises what
                `check_size` does, and CapacityError if other pins leave too little or blocks are
                not in the cache.
        """
        self.check_size(len(token_ids), share)
        num_full = len(token_ids) // self._block_size
        match = self._match(token_ids, root)
        if len(match.block_ids) < num_full:
            cached = len(match.block_ids)
            raise CapacityError(
                f"{cached} of the prompt's {num_full} full blocks are in the cache; warm it first"
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
        """End the pin of exactly this prompt's full blocks; how many of them are pinned no more, 0
        without such a pin. What other pins share stays.
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
        """End the pins whose time is over, and a second later at most what is retained no
        longer.
        """
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
        """Blocks of the longest prefix that is published."""
        return self._match(token_ids, root).block_ids

    def retain(self, block_ids: Sequence[int], owner: bytes, until: float) -> None:
        """Let published blocks, a chain from its head, outlive all others of their owner, until a
        time; one that is retained longer stays so. They are no less free for that: nobody waits for
        them, and nothing fails.
        """
        self._uses.mark(block_ids)
        retained = self._uses.retained
        for block_id in reversed(block_ids):
            retained[block_id] = max(until, retained.get(block_id, until))
            self._pool.regard(block_id, owner=owner, again=RETAINED)
        self._next_look = min(self._next_look, until)

    def num_of(self, token_ids: Sequence[int], root: bytes) -> int:
        """Pinned blocks that a prompt begins with. Changes nothing; may be asked from any thread,
        as a guess.
        """
        return sum(block_id in self._counts for block_id in self._match(token_ids, root).block_ids)

    def check(self) -> None:
        """Recount the pinned blocks and compare them with the pool's and the index; CacheCorruption
        on a difference.
        """
        counted: dict[int, int] = {}
        for serial, pin in self._pins.items():
            last = self._index.entry(pin.block_ids[-1])
            if last is None or last.serial != serial:
                raise CacheCorruption(
                    f"pinned block {pin.block_ids[-1]} is not the prefix that was pinned"
                )
            for block_id in pin.block_ids:
                counted[block_id] = counted.get(block_id, 0) + 1
        if counted != self._counts or not set(counted) == set(self._pool.held()) == set(
            self._owners
        ):
            raise CacheCorruption(
                f"{len(counted)} blocks are pinned, {len(self._pool.held())} are held"
            )

    def _match(self, token_ids: Sequence[int], root: bytes) -> PrefixMatch:
        num_full = len(token_ids) // self._block_size
        data = encode_tokens(token_ids[: num_full * self._block_size])
        return self._index.match(data, root, self._block_size * TOKEN_BYTES, self._hash_fn)

    def _end(self, serial: int) -> None:
        pin = self._pins.pop(serial)
        self._uses.mark(pin.block_ids)
        rank = self._uses.rank
        for block_id in reversed(pin.block_ids):  # tail first, as all that is freed
            self._counts[block_id] -= 1
            if not self._counts[block_id]:
                del self._counts[block_id], self._owners[block_id]
                self._pool.let_go(block_id, matchable=True, owner=pin.owner, again=rank(block_id))
        self.num_ended += 1

    def _end_retained(self, now: float) -> None:
        """What is retained no longer counts as used again just now, the end of a chain before its
        beginning.
        """
        retained = self._uses.retained
        over = [block_id for block_id, until in retained.items() if until <= now]
        for block_id in sorted(over, key=self._serial_of, reverse=True):
            del retained[block_id]
            self._pool.demote(block_id)
        self._next_look = max(min(retained.values(), default=math.inf), now + _BETWEEN_LOOKS)

    def _serial_of(self, block_id: int) -> int:
        """Greater for a block than for those before it in its chain; one that is being rewritten
        has none.
        """
        entry = self._index.entry(block_id)
        return 0 if entry is None else entry.serial

    def _find_soonest(self) -> None:
        self._soonest = min(
            (pin.until for pin in self._pins.values() if pin.until is not None), default=None
        )

    def _most(self, share: float) -> int:
        """Blocks of a share of the bound; what a third of 9 lost in floating point is no block
        less.
        """
        return int(self.max_blocks * share + 1e-6)

    def _refusal(self, num_blocks: int, share: float) -> str:
        # Says nothing of how many are pinned: they may be other tenants'. Nor, where tenants have
        # shares, of all that is shared out: that would tell how many tenants there are.
        bound = (
            f"of the {self._pool.num_blocks} in the pool at most "
            f"max_pinned_blocks={self.max_blocks} are"
        )
        if share < 1:
            bound = f"this tenant's share of max_pinned_blocks is {self._most(share)}"
        return (
            f"{num_blocks} more blocks cannot be pinned: {bound}; unpin, give a ttl, raise "
            "max_pinned_blocks (half of the pool at most) or enlarge max_cache_bytes or num_blocks"
        )
