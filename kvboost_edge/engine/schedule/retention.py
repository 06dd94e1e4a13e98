"""Pinned prompts, and prompts that are retained without a promise, such as by `prompt_cache_key`.

A key says that prompts come again; it is believed as far as they did. What a call has in common
with the call before it under the same key, counted in whole blocks from the beginning, is retained
for an hour: from the second call on, so that the third finds it. A first call, a key that is never
sent again, and what one call alone had, a text that was read once, are kept as anything else is. So
who sends a new key, or one and the same key, with texts that never come again gains nothing by it.
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
"""How long what a key's calls have in common is retained after the last of them."""

MOST_KEYS = 4096
"""Keys that are remembered, of all tenants: a few MiB at most."""

_MARKS = 32
_MARK_BYTES = (
    8  # of a prefix hash; a collision retains a block that nobody wants, and serves nothing
)


class _Chain(NamedTuple):
    """The prefix hashes of a chain of `num_blocks` blocks, cut short: of every `stride`-th block,
    and of the last.
    """

    num_blocks: int
    stride: int
    marks: bytes
    last: bytes

    @classmethod
    def of(cls, hashes: Sequence[bytes]) -> _Chain:
        """With at most `_MARKS` marks, whatever the chain's length."""
        stride = 1
        while len(hashes) // stride > _MARKS:
            stride *= 2
        marks = b"".join(prefix_hash[:_MARK_BYTES] for prefix_hash in hashes[stride - 1 :: stride])
        return cls(len(hashes), stride, marks, hashes[-1][:_MARK_BYTES] if hashes else b"")

    def common(self, hashes: Sequence[bytes]) -> int:
        """Blocks that it has in common with another chain, from the beginning; up to `stride` - 1
        fewer where the two part between two marks.
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
    """The last call under a key, by when it began, what it left in the cache, and what the call
    before it left.
    """

    began: float
    last: _Chain
    before: _Chain


class CacheKeys:
    """The last two calls of each key, by the key's digest: neither its text nor a prompt's token is
    kept.

    Several sequences of one call (choices, prompts of a list) are one call. Beyond `capacity` keys
    the least recently used one is forgotten, where more than half were sent once only one of those.
    Tenants share the room as they share blocks (`CachedOrder`): no tenant's new keys flush
    another's below its floor.
    """

    def __init__(self, capacity: int = MOST_KEYS) -> None:
        self._capacity = capacity
        self._calls: dict[bytes, _Calls] = {}
        self._order: CachedOrder[bytes] = CachedOrder(capacity)
        self._order.once_share = capacity // 2

    def __len__(self) -> int:
        return len(self._calls)

    def note(self, key: bytes, tenant: bytes, began: float, hashes: Sequence[bytes]) -> int:
        """A sequence of a call ended and left a chain of these hashes in the cache; how many of its
        blocks, from the first on, the call before had too.
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
    """Retains what ended sequences left in the cache. The engine's thread alone calls it."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.keys = CacheKeys()
        self._manager = manager

    def ended(self, sequence: RunningSequence, now: float) -> list[int]:
        """A sequence is done, by the clock of the pins, and still holds its blocks; those that are
        retained now.

        Of its prompt all full blocks for as long as it asked for; of prompt and answer what its
        key's last call had, for an hour.
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


def pin_prompt(pins: Pins, sequence: RunningSequence, now: float) -> CapacityError | None:
    """Let what a sequence that still holds its blocks wants pinned of its prompt stay; the error if
    other pins leave no room for all of it. What it wants where there is room is tried, and never an
    error.
    """
    request = sequence.request
    terms = request.terms
    for num_tokens, seconds in terms.pins if request.publishes else ():
        with contextlib.suppress(CapacityError, RequestError):
            ids = request.prompt_ids[:num_tokens]
            pins.add(
                ids,
                request.root,
                owner=request.tenant,
                until=now + seconds,
                share=terms.pin_share,
            )
            sequence.handle.pinned_tokens = max(sequence.handle.pinned_tokens, num_tokens)
    if not terms.pin:
        return None
    until = None if terms.ttl is None else now + terms.ttl
    try:
        pins.add(
            request.prompt_ids,
            request.root,
            owner=request.tenant,
            until=until,
            share=terms.pin_share,
        )
    except CapacityError as error:
        return error
    return None
