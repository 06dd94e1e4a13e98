"""Prefetch of KV blocks from the offload tiers into the pool. This module handles integers only.

A prefetch holds an ordinary block table over the tokens that a tier may have. This claims the
blocks, so other sequences with the same prefix wait for the prefetch as they would wait for a
sequence that computes the prefix. A prefetch is best effort. It ends when a sequence needs its
blocks, and missing blocks are computed.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvboost_edge.engine.request.results import MissReason
from kvboost_edge.engine.schedule.planners import PendingPrefetch, Prefetcher, SpanPlacement
from kvboost_edge.kvcache.hashing import BlockAddress, state_hash
from kvboost_edge.kvcache.manager import KVCacheManager
from kvboost_edge.tiers.io_thread import IOThread

if TYPE_CHECKING:
    from kvboost_edge.engine.schedule.sequence import Sequence as Request
    from kvboost_edge.kvcache.block_table import BlockTable

__all__ = ["PATIENCE", "Prefetch", "PrefetchQueue"]

_LOG = logging.getLogger(__name__)

PATIENCE = 30.0
"""Seconds without progress of any prefetch after which a prefetch ends.

If loading 8 MiB takes longer, computing the blocks is faster. The I/O thread loads one prefetch
after the other, so a prefetch that waits in its queue is not silent while others arrive.
"""


class Prefetch:
    """A prefetch of a sequence's prefix, or of another text that shares a run of tokens with it.

    Attributes:
        table: Block table with the blocks already in the pool and those that arrived.
        token_ids: Token ids of all blocks that may arrive.
        is_prefix: True if the blocks are the sequence's own prefix.
        num_found: Number of blocks that were in the pool at the start.
        num_in_pool: Number of blocks at the end of `num_found` whose recurrent state is missing in
            the pool. The state to restore may follow one of them.
        arrived: Number of tokens that arrived, by tier.
        states: Hashes of the recurrent states of a hybrid model. One of them may arrive.
        waiting: Indices of other sequences that wait for one of these states.
        began_at: Time when it was queued, on the clock of `time.perf_counter`.
        is_done: True if nothing more will arrive.
    """

    def __init__(
        self,
        ticket: int,
        sequence: Request,
        table: BlockTable,
        token_ids: list[int],
        *,
        is_prefix: bool,
        states: frozenset[bytes],
        num_in_pool: int,
    ) -> None:
        self.ticket = ticket
        self.sequence = sequence
        self.table = table
        self.token_ids = token_ids
        self.is_prefix = is_prefix
        self.states = states
        self.num_found = len(table)
        self.num_in_pool = num_in_pool
        self.waiting: set[int] = set()
        self.arrived: Counter[str] = Counter()
        self.is_done = False
        self.began_at = time.perf_counter()

    def cut(self, num_tokens: int) -> None:
        """Count only the first `num_tokens` of the tokens that arrived."""
        rest = num_tokens
        kept = Counter[str]()
        for tier, count in self.arrived.items():
            kept[tier] = min(count, rest)
            rest -= kept[tier]
        self.arrived = +kept

    def end(self) -> None:
        """End the prefetch and report its tokens and duration to the sequence."""
        if not self.is_done:
            self.is_done = True
            self.sequence.features.restored.note(
                self.arrived if self.is_prefix else {}, time.perf_counter() - self.began_at
            )


class PrefetchQueue(Prefetcher):
    """The prefetches of all sequences."""

    def __init__(self, manager: KVCacheManager, io_thread: IOThread) -> None:
        self._manager = manager
        self._io_thread = io_thread
        self._tickets = itertools.count()
        self._by_ticket: dict[int, Prefetch] = {}
        self._by_sequence: dict[int, Prefetch] = {}
        self._is_stuck = False
        self._news_at = 0.0  # time of the last arrival

    def __len__(self) -> int:
        return len(self._by_ticket)

    def __iter__(self) -> Iterator[Prefetch]:
        return iter(self._by_ticket.values())

    def heard(self, ticket: int) -> Prefetch | None:
        """Return the prefetch that an arrived chunk belongs to, or None if it has ended."""
        self._is_stuck = False
        self._news_at = time.perf_counter()
        return self._by_ticket.get(ticket)

    def give_up_silent(self) -> None:
        """End prefetches without progress for `PATIENCE` seconds. Their blocks are computed.

        No new prefetch starts until a chunk arrives.
        """
        now = time.perf_counter()
        for load in list(self._by_ticket.values()):
            silent_seconds = now - max(load.began_at, self._news_at)
            if not load.is_done and silent_seconds > PATIENCE:
                _LOG.warning(
                    "an offload tier did not answer for %.0f s; the prompt is computed instead",
                    silent_seconds,
                )
                self._is_stuck = True
                self.finish(load)

    def of(self, sequence: Request) -> Prefetch | None:
        """Return a sequence's prefetch until it is used, or None."""
        return self._by_sequence.get(sequence.index)

    @property
    def num_arriving(self) -> int:
        """Number of prefetches that are still loading."""
        return sum(not load.is_done for load in self._by_ticket.values())

    def num_arriving_besides(self, sequence: Request) -> int:
        own = self.of(sequence)
        return self.num_arriving - (own is not None and not own.is_done)

    def is_awaited_by(self, sequence: Request) -> bool:
        return any(
            load.sequence is sequence or sequence.index in load.waiting
            for load in self
            if not load.is_done
        )

    def bring(self, sequence: Request, spare_blocks: int, sharing: SpanPlacement) -> bool:
        load: PendingPrefetch | None = self.of(sequence)
        restored = sequence.features.restored
        if load is None and sequence.uses_cache and not restored.was_asked:
            load = self.begin(sequence, spare_blocks)
            restored.was_asked = load is not None and load.sequence is sequence
        if load is None or load.is_done:
            load = sharing.bring(sequence, self, spare_blocks) or load
        return load is not None and not load.is_done

    def end(self, sequence: Request) -> None:
        load = self.of(sequence)
        if load is not None:
            self.finish(load)

    def begin(self, sequence: Request, spare_blocks: int) -> Prefetch | None:
        """Start prefetching the blocks after the sequence's longest prefix in the pool.

        Returns:
            The prefetch, or another sequence's prefetch that loads the same state. None if no tier
            may hold the blocks, or if `spare_blocks` are too few for the whole sequence.
        """
        others = (load for load in self if not load.is_done and sequence.index in load.waiting)
        if (other := next(others, None)) is not None:
            return other
        request = sequence.request
        known = request.prefix_hashes
        return self._begin(
            sequence, sequence.cacheable_ids, request.root, spare_blocks, known, is_prefix=True
        )

    def begin_run(
        self, sequence: Request, token_ids: Sequence[int], root: bytes, spare_blocks: int
    ) -> Prefetch | None:
        """Start prefetching another cached text that contains a run of the sequence's tokens.

        Args:
            sequence: The sequence.
            token_ids: Token ids of the text, in whole blocks.
            root: Root hash of the text.
            spare_blocks: Number of free blocks for the prefetch and the rest of the sequence.

        Returns:
            The prefetch, or another sequence's prefetch that loads the same state. None if no tier
            may hold the blocks, or if `spare_blocks` are too few.
        """
        # Add one token, because a quantized pool never serves the block of the last token.
        return self._begin(sequence, [*token_ids, 0], root, spare_blocks, b"", is_prefix=False)

    def _begin(
        self,
        sequence: Request,
        ids: Sequence[int],
        root: bytes,
        spare_blocks: int,
        known: bytes,
        *,
        is_prefix: bool,
    ) -> Prefetch | None:
        if self._is_stuck:
            return None
        manager = self._manager
        size = self._manager.block_size
        first, num_in_pool, after = manager.content.addresses_after(ids, root, known)
        blocks = list(itertools.islice(after, num_in_pool))
        may_hold = self._io_thread.may_hold
        blocks += itertools.takewhile(lambda block: may_hold(block.prefix_hash), after)
        states = self._stored_states(blocks)
        if manager.states is not None:
            # Without a recurrent state after them, later blocks cannot be used.
            blocks = blocks[: max(states, default=0)]
        wanted = frozenset(state.prefix_hash for state in states.values())
        # Blocks are published as they arrive, so no sequence waits for them any more. Their state
        # may still be loading in another prefetch, which this sequence then waits for.
        others = (load for load in self if not load.is_done and not load.states.isdisjoint(wanted))
        if (other := next(others, None)) is not None:
            other.waiting.add(sequence.index)
            return other
        if not blocks:
            return None
        token_ids = list(ids[: (first + len(blocks)) * size])
        table = manager.open_load(token_ids, root, owner=sequence.tenant, known=known)
        num_covered = first + len(blocks) if is_prefix else 0
        num_rest = manager.blocks_for(sequence.num_tokens) - num_covered
        if not self._has_room(table, first, len(token_ids), spare_blocks - num_rest):
            manager.free(table)
            return None
        if (before := self._by_sequence.get(sequence.index)) is not None:
            self.finish(before)
        # Only the deepest state is loaded. If only the tier knows which state that is, any may
        # arrive.
        deepest = frozenset([states[len(blocks)].prefix_hash] if states else [])
        coming = deepest if all(map(self._io_thread.holds, deepest)) else wanted
        ticket = next(self._tickets)
        num_in_pool = len(table) - first
        load = Prefetch(
            ticket,
            sequence,
            table,
            token_ids,
            is_prefix=is_prefix,
            states=coming,
            num_in_pool=num_in_pool,
        )
        self._by_ticket[ticket] = self._by_sequence[sequence.index] = load
        self._io_thread.load(ticket, blocks[num_in_pool:], states, num_in_pool)
        return load

    def _stored_states(self, blocks: list[BlockAddress]) -> dict[int, BlockAddress]:
        """Return the states that a tier may hold, keyed by the number of blocks before each."""
        if self._manager.states is None:
            return {}
        kept = ((number, block.state_address) for number, block in enumerate(blocks, 1))
        may_hold = self._io_thread.may_hold
        return {number: state for number, state in kept if may_hold(state.prefix_hash)}

    def _has_room(self, table: BlockTable, first: int, num_tokens: int, spare_blocks: int) -> bool:
        """Return whether blocks and a state slot for a prefetch are free.

        Args:
            table: Block table of the prefetch, with the blocks that are in the pool.
            first: Number of blocks that the pool served as a prefix.
            num_tokens: Number of tokens that the table will hold.
            spare_blocks: Number of free blocks that the prefetch may use.
        """
        manager = self._manager
        needed = manager.blocks_needed(table, num_tokens)
        # Cached blocks used only by this table counted as free before, so they count as needed.
        needed += sum(manager.ref_count(block_id) == 1 for block_id in table.block_ids[first:])
        return manager.recurrent.has_room(table) and needed <= spare_blocks

    def used(self, table: BlockTable) -> None:
        """Tell the tiers that an admitted sequence uses its cached blocks."""
        if table.num_cached_tokens:
            hashes = self._manager.content.chain(table)
            drafts = self._manager.drafted.hashes(table.block_ids, hashes)
            states = [] if self._manager.states is None else [state_hash(hashes[-1])]
            self._io_thread.touch([*hashes, *states, *drafts])

    def missed(self, table: BlockTable) -> MissReason:
        """Return why a table's first uncached token missed, and which tiers evicted its block."""
        if table.missed_hash is None or table.miss_reason not in ("evicted", "first_seen"):
            return MissReason(table.miss_reason)
        pool = ["pool"] if table.miss_reason == "evicted" else []
        dropped = (*pool, *self._io_thread.dropped_from(table.missed_hash))
        return MissReason("evicted" if dropped else table.miss_reason, dropped)

    def finish(self, load: Prefetch) -> None:
        """End a prefetch and free its table.

        Arrived blocks stay cached in the pool. Finishing a prefetch twice has no effect.
        """
        if self._by_ticket.pop(load.ticket, None) is None:
            return
        if not load.is_done:
            if self._manager.states is not None:
                load.cut(0)  # the state arrives last, and the blocks cannot be used without it
            load.end()
            self._io_thread.cancel(load.ticket)
        del self._by_sequence[load.sequence.index]
        self._manager.free(load.table)

    def make_room(self) -> bool:
        """End all prefetches to free their blocks, and return whether there were any."""
        ended = list(self._by_ticket.values())
        for load in ended:
            load.sequence.features.restored.was_asked = False  # allows another attempt
            self.finish(load)
        return bool(ended)
