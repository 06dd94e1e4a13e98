"""Pinned prompts, and prompts retained on a best-effort basis, such as by `prompt_cache_key`.

A client uses a key to announce that a prefix will recur. If two consecutive calls with a key share
leading blocks, these blocks are retained for an hour. The first call with a key, and text that only
one call has, are cached like any other text. A client therefore gains nothing from using new keys,
or one key for texts that never recur.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvboost_edge.errors import CapacityError, RequestError
from kvboost_edge.kvcache.eviction.order import AGAIN, ONCE, CachedOrder
from kvboost_edge.kvcache.eviction.pins import Pins
from kvboost_edge.kvcache.manager import KVCacheManager

if TYPE_CHECKING:
    from kvboost_edge.engine.schedule.sequence import Sequence as RunningSequence

__all__ = ["KEY_SECONDS", "MOST_KEYS", "CacheKeys", "Retention", "pin_prompt"]

KEY_SECONDS = 3600.0
"""Seconds that blocks common to a key's calls are retained after the last call."""

MOST_KEYS = 4096
"""Maximum number of keys of all tenants, which take a few MiB."""

_MARKS = 32
# Length of a shortened prefix hash in bytes. A collision only causes needless retention.
_MARK_BYTES = 8


class _Chain(NamedTuple):
    """The shortened prefix hashes of a chain of blocks.

    Attributes:
        num_blocks: number of blocks in the chain.
        stride: distance between marks, in blocks.
        marks: shortened hash of every `stride`-th block, concatenated.
        last: shortened hash of the last block.
    """

    num_blocks: int
    stride: int
    marks: bytes
    last: bytes

    @classmethod
    def of(cls, hashes: Sequence[bytes]) -> _Chain:
        """Build a chain from prefix hashes, with at most `_MARKS` marks."""
        stride = 1
        while len(hashes) // stride > _MARKS:
            stride *= 2
        marks = b"".join(prefix_hash[:_MARK_BYTES] for prefix_hash in hashes[stride - 1 :: stride])
        return cls(len(hashes), stride, marks, hashes[-1][:_MARK_BYTES] if hashes else b"")

    def common(self, hashes: Sequence[bytes]) -> int:
        """Return the number of leading blocks that another chain shares.

        The result may be up to `stride` - 1 too small if the chains diverge between two marks.
        """
        if 0 < self.num_blocks <= len(hashes) and hashes[self.num_blocks - 1].startswith(self.last):
            return self.num_blocks
        for number in range(min(self.num_blocks, len(hashes)) // self.stride, 0, -1):
            mark = self.marks[(number - 1) * _MARK_BYTES : number * _MARK_BYTES]
            if hashes[number * self.stride - 1].startswith(mark):
                return number * self.stride
        return 0


_NOTHING = _Chain.of(())


class _Calls(NamedTuple):
    """The last two calls with a key.

    Attributes:
        began: start of the latest call, in seconds of `time.perf_counter`.
        last: blocks that the latest call left in the cache.
        before: blocks that the previous call left in the cache.
    """

    began: float
    last: _Chain
    before: _Chain


class CacheKeys:
    """The last two calls with each key. Only digests of keys and tokens are stored.

    The sequences of one call, such as several choices or prompts, count as one call. If there are
    more than `capacity` keys, the least recently used key is evicted. If more than half of the keys
    were used only once, one of those is evicted. Tenants share the capacity like blocks
    (`CachedOrder`). New keys of one tenant do not evict another's keys below its floor.
    """

    def __init__(self, capacity: int = MOST_KEYS) -> None:
        self._capacity = capacity
        self._calls: dict[bytes, _Calls] = {}
        self._order: CachedOrder[bytes] = CachedOrder(capacity)
        self._order.once_share = capacity // 2

    def __len__(self) -> int:
        return len(self._calls)

    def note(self, key: bytes, tenant: bytes, began: float, hashes: Sequence[bytes]) -> int:
        """Record the blocks that a sequence of a call left in the cache.

        Args:
            began: start of the call, which is the same for all sequences of the call.
            hashes: prefix hashes of the blocks.

        Returns:
            The number of leading blocks that the previous call had too.
        """
        known = self._calls.get(key)
        if known is None:
            if len(self._calls) == self._capacity:
                del self._calls[self._order.take(1, tenant)[0]]
            self._order.put(key, tenant, again=ONCE)
            before = _NOTHING
        elif known.began == began:
            self._order.refresh(key)
            before = known.before
        else:
            self._order.remove(key)
            self._order.put(key, tenant, again=AGAIN)
            before = known.last
        self._calls[key] = _Calls(began, _Chain.of(hashes), before)
        return before.common(hashes)


class Retention:
    """Retention of finished sequences' blocks. Only the engine thread uses it."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.keys = CacheKeys()
        self._manager = manager

    def ended(self, sequence: RunningSequence, now: float) -> list[int]:
        """Retain blocks of a finished sequence before they are freed.

        The full blocks of the prompt are retained for the time that the request asked for. Blocks
        that the previous call with the same key had too are retained for an hour.

        Args:
            now: current time of the pins' clock, in seconds.

        Returns:
            The ids of the retained blocks.
        """
        request = sequence.request
        manager = self._manager
        if request.cache_key is None and request.terms.retention is None:
            return []
        if not request.publishes:
            return []
        block_ids = manager.pins.published(
            sequence.token_ids[: sequence.num_computed_tokens], request.root
        )
        kept = common = 0
        if request.cache_key is not None:
            hashes = manager.content.hashes(block_ids)
            common = self.keys.note(request.cache_key, request.tenant, request.entered_at, hashes)
            manager.pins.retain(block_ids[:common], request.tenant, now + KEY_SECONDS)
        if request.terms.retention is not None:
            kept = min(len(block_ids), request.num_prompt_tokens // manager.block_size)
            manager.pins.retain(block_ids[:kept], request.tenant, now + request.terms.retention)
        return block_ids[: max(kept, common)]


def pin_prompt(
    pins: Pins, sequence: RunningSequence, now: float
) -> CapacityError | RequestError | None:
    """Pin the parts of a prompt that its request asked for, before its blocks are freed.

    Tokens whose KV is not shared are left out. Entries of the request's `pins` that do not fit are
    skipped.

    Returns:
        The error if the whole prompt cannot be pinned, else None.
    """
    request = sequence.request
    shareable = request.shareable_ids
    terms = request.terms
    for num_tokens, seconds in terms.pins if request.publishes else ():
        with contextlib.suppress(CapacityError, RequestError):
            ids = shareable[:num_tokens]
            pins.add(
                ids,
                request.root,
                owner=request.tenant,
                # Without a holder, equal durations renew each other, and do not shorten others.
                holder=terms.pin_holder or f"{seconds:g} s",
                until=now + seconds,
                share=terms.pin_share,
            )
            sequence.handle.pinned_tokens = max(sequence.handle.pinned_tokens, len(ids))
    if not terms.pin:
        return None
    until = None if terms.ttl is None else now + terms.ttl
    try:
        pins.add(
            shareable,
            request.root,
            owner=request.tenant,
            holder=terms.pin_holder,
            until=until,
            share=terms.pin_share,
        )
    except (CapacityError, RequestError) as error:
        return error
    sequence.handle.pinned_tokens = max(sequence.handle.pinned_tokens, len(shareable))
    return None
