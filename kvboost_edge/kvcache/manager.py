"""The one face of the block pool: opens, grows, publishes, forks and frees the block tables of
sequences.

It moves integers only. Where content has to move it returns `CopyOp`s; whoever owns the KV applies
them, in order, before the next forward pass. One thread calls it; the counters and `block_states`
may be read from others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvboost_edge.errors import CacheCorruption, CapacityError, ConfigError
from kvboost_edge.kvcache.block_contents import (
    BLOCK_CACHED,
    BLOCK_FREE,
    BLOCK_REFERENCED,
    BLOCK_SHARED,
    BlockContents,
    PoolUsage,
)
from kvboost_edge.kvcache.block_pool import BlockPool
from kvboost_edge.kvcache.block_table import WHOLE, BlockTable, CopyOp
from kvboost_edge.kvcache.duplicates import DuplicateBlocks
from kvboost_edge.kvcache.events import EventLog
from kvboost_edge.kvcache.eviction.block_usage import Uses
from kvboost_edge.kvcache.eviction.pins import Pins
from kvboost_edge.kvcache.eviction.policy import EvictionPolicy, LeastRecentlyUsed
from kvboost_edge.kvcache.hashing import HashFn, chain_hash, encode_tokens
from kvboost_edge.kvcache.invariants import check_chains, check_tables
from kvboost_edge.kvcache.lookup import Lookup
from kvboost_edge.kvcache.prefix_index import PrefixIndex
from kvboost_edge.kvcache.prefix_sharing import Claims, Opener, Publisher
from kvboost_edge.kvcache.recurrent.tables import NoTableStates, StateSizes, TableStates
from kvboost_edge.kvcache.table_spans import Spans

__all__ = ["BLOCK_CACHED", "BLOCK_FREE", "BLOCK_REFERENCED", "BLOCK_SHARED", "KVCacheManager"]


class KVCacheManager(PoolUsage):
    """Block tables over a pool of blocks, with exact prefix sharing.

    Parameters:

    Attributes:
        num_blocks: blocks of the pool.
        block_size: tokens of a block.
        hash_fn: `hash_fn(parent, tokens) -> bytes`; tests make every hash collide.
        whole_blocks: full blocks are never written again (quantized storage), see `Lookup`.
        policy: order of the free blocks.

    Attributes:

    Attributes:
        cow_copies: blocks copied because another table still reads them.
        evictions: published blocks that were reused for other tokens.
        hit_tokens: tokens the cache served to tables opened with `use_cache` and then extended.
        miss_tokens: tokens that those tables had to compute; tables freed before they were extended
            do not count.
        spans: blocks reused at other positions, see `Spans`.
        content: content of blocks, for the offload tiers.
        events: prefixes that came and left, for cache-aware routing.
        duplicates: blocks that tables hold in addition to published ones of equal content.
        pins: pinned prompts, at most `max_pinned_blocks` blocks, see `Pins`.
        recurrent: recurrent state of tables, see `TableStates`; `NoTableStates` without
            `state_sizes`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        hash_fn: HashFn = chain_hash,
        whole_blocks: bool = False,
        policy: Callable[[Iterable[int]], EvictionPolicy] = LeastRecentlyUsed,
        max_pinned_blocks: int | None = None,
        state_sizes: StateSizes | None = None,
    ) -> None:
        if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
            raise ConfigError(f"block_size={block_size!r} must be an integer of at least 1")
        self._pool = BlockPool(num_blocks, policy)
        self._index = PrefixIndex(num_blocks)
        self._hash_fn = hash_fn
        self._live: dict[int, BlockTable] = {}
        self._next_table = 0
        self._claims = Claims()
        self.recurrent: TableStates | NoTableStates = NoTableStates()
        if state_sizes is None:
            self._lookup = Lookup(self._index, num_blocks, block_size, hash_fn, whole_blocks)
        else:
            held = self._pool.held()
            self.recurrent = TableStates(state_sizes, block_size, self._index, held)
            # A state is behind a block's last token, so the block of a prompt's last token is never
            # shared.
            self._lookup = Lookup(
                self._index, num_blocks, block_size, hash_fn, True, self.recurrent.deepest
            )
        self._uses = Uses(num_blocks)
        self._opener = Opener(self._lookup, self._pool, self._uses, self._claims, block_size)
        self.pins = Pins(
            self._pool, self._index, self._uses, block_size, hash_fn, max_pinned_blocks
        )
        self.content = BlockContents(self._index, self._lookup)
        self.events = EventLog(self._index, num_blocks, self.recurrent.slots)
        # Ids handed out, and ids freed with nothing to match, since the last drain; dicts as
        # ordered sets.
        self._fresh: dict[int, None] = {}
        self._released: dict[int, None] = {}
        self.duplicates = DuplicateBlocks(self._index, self._pool, self.content, self._released)
        self._publisher = Publisher(
            self._index, self._claims, self.content, self.duplicates, hash_fn, block_size
        )
        self.spans = Spans(
            self._pool, self._index, self._claims, self._take, self._released, block_size
        )
        self.block_size = block_size
        self.cow_copies = self.evictions = self.hit_tokens = self.miss_tokens = self._progress = 0

    @property
    def states(self) -> TableStates | None:
        """The recurrent state of tables; None where the model has none."""
        return self.recurrent if isinstance(self.recurrent, TableStates) else None

    def open_table(
        self,
        token_ids: Sequence[int],
        root: bytes,
        *,
        use_cache: bool = True,
        count: bool = True,
        owner: bytes = b"",
        again: bool = False,
        known: bytes = b"",
        hints: Iterable[int] = (),
        publish: bool = True,
    ) -> BlockTable:
        """Open a table for a sequence and share the published blocks of its longest known prefix.

        At least the last token is left to compute: with a prompt that is cached to its end, the
        table shares all its blocks, num_cached_tokens is len(token_ids) - 1, and `extend` makes the
        last block writable; with `whole_blocks` it leaves that last block out. `table.miss_reason`
        says why no more was found. The blocks of the prompt that are left to compute are claimed,
        see `awaited_hash`. `use_cache=False` shares and claims nothing, `publish=False` publishes
        nothing and keeps no recurrent state for others, `count=False` leaves hit_tokens and
        miss_tokens alone: a preempted sequence counted before. `owner` is whose blocks they are for
        the eviction policy; tables of one root have one owner; with `again` all of them count as
        used again, see `Uses`; `known`: see `Lookup`. `hints`: where a prompt that begins alike may
        go on otherwise; states are kept there. Takes no free block outside the match, so it cannot
        fail for lack of room. Raises RequestError for ids outside [0, 2^32).
        """
        data = encode_tokens(token_ids)
        table = BlockTable(
            self._next_table, root, owner, again=again, shares=use_cache, publishes=publish
        )
        match = (
            self._opener.share(table, data, known, count=count, again=again) if use_cache else None
        )
        self.recurrent.open(table, len(token_ids), match, hints)
        return self._enter(table)

    def open_load(
        self, token_ids: Sequence[int], root: bytes, *, owner: bytes = b"", known: bytes = b""
    ) -> BlockTable:
        """Open a table over whole blocks that come from elsewhere, and their state where there are
        states: it shares all that are published, gone on from or not, and claims the others. Counts
        nothing.
        """
        table = BlockTable(self._next_table, root, owner)
        self._opener.share_all(table, encode_tokens(token_ids), known)
        self.recurrent.wait(table)
        return self._enter(table)

    def _enter(self, table: BlockTable) -> BlockTable:
        self._next_table += 1
        self._live[table._serial] = table
        return table

    def peek(self, token_ids: Sequence[int], root: bytes) -> int:
        """Number of tokens `open_table` would serve now. Changes nothing; valid until the next
        change of the pool.
        """
        return self._lookup.servable(
            self._lookup.match(encode_tokens(token_ids), root), len(token_ids)
        )

    def awaited_hash(
        self, token_ids: Sequence[int], root: bytes, known: bytes = b""
    ) -> bytes | None:
        """Hash of the last of the blocks after the longest published prefix that live tables are
        computing, or None.

        The caller then waits while `is_in_flight`: blocks appear as a table commits, its claims go
        when it is freed. Who computes it is asked to keep the state behind it, where there are
        states; else nothing changes. Claims compare hashes alone: a collision makes a request wait,
        never read another's KV. `known`: see `Lookup`.
        """
        data = encode_tokens(token_ids)
        rest = self._lookup.awaitable(data, self._lookup.match(data, root, known), known)
        found = self._claims.last_promised(rest)
        if found is not None:
            holder = self._live[self._claims.holders[found]]
            index = next(index for index, claim in holder._claims.items() if claim == found)
            self.recurrent.ask(holder, index)
        return found

    def is_in_flight(self, prefix_hash: bytes | None) -> bool:
        """Whether a live table is still computing the block of this hash."""
        return prefix_hash in self._claims

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a plain table of so many tokens has."""
        return -(-num_tokens // self.block_size)

    def blocks_needed(self, table: BlockTable, num_tokens: int) -> int:
        """Free blocks `extend(table, num_tokens)` would take: new ones plus copies of shared ones.
        Changes nothing.
        """
        self._check_live(table)
        return self._taken(table, *self._written(table, num_tokens))

    def _taken(self, table: BlockTable, first: int, stop: int) -> int:
        """Free blocks it takes to own those of a table with indices [first, stop)."""
        ids = table.block_ids
        ref_count = self._pool.ref_count
        return max(0, stop - len(ids)) + sum(
            [ref_count(block_id) > 1 for block_id in ids[first:stop]]
        )

    def _written(self, table: BlockTable, num_tokens: int) -> tuple[int, int]:
        """Indices [first, stop) of the blocks that hold tokens num_computed_tokens .. num_tokens -
        1.
        """
        size = self.block_size
        if len(table.segments) == 1:  # nearly always, and every step of a sequence comes by
            return table.num_computed_tokens // size, -(-num_tokens // size)
        stop = table.index_of(num_tokens - 1, size) + 1 if num_tokens > 0 else 0
        first = table.index_of(table.num_computed_tokens, size)
        # Behind a span there is room already, of blocks that are the table's own: none but its last
        # part's may lack.
        return (max(first, table.segments[-1].first_index), stop) if table.spans else (first, stop)

    def extend(self, table: BlockTable, num_tokens: int) -> list[CopyOp]:
        """Make the slots of tokens num_computed_tokens .. num_tokens - 1 exist and writable.

        All or nothing: raises CapacityError, and changes nothing, when too few blocks, or states,
        are free. Apply the returned copies in order before the next forward pass, before
        `drain_new_blocks` are poisoned.
        """
        self._check_live(table)
        first, stop = self._written(table, num_tokens)
        needed = self._taken(table, first, stop)
        if needed > self._pool.num_free:
            raise CapacityError(
                f"{num_tokens} tokens need {needed} more blocks of {self.block_size} tokens, "
                f"{self._pool.num_free} of {self._pool.num_blocks} are free; enlarge "
                "max_cache_bytes or num_blocks"
            )
        self.recurrent.prepare(table)
        if table._uncounted_misses:
            self.hit_tokens += table.num_cached_tokens
            self.miss_tokens += table._uncounted_misses
            table._uncounted_misses = 0
        there = range(first, min(stop, len(table.block_ids)))
        copies = [
            copy for index in there if (copy := self._make_writable(table, index)) is not None
        ]
        if stop > len(table.block_ids):
            table.block_ids.extend(self._take(stop - len(table.block_ids), table.owner))
        return copies

    def make_writable(self, table: BlockTable, block_index: int) -> CopyOp | None:
        """Let the table write into its block `block_index`, the copy-on-write of forked tails and
        of recompute.

        A block others hold is replaced by a new one, and the copy to make is returned
        (CapacityError if none is free). A published block that only this table holds stays in place
        and is unmatchable until `commit`.
        """
        self._check_live(table)
        if not 0 <= block_index < len(table.block_ids):
            raise CacheCorruption(
                f"block index {block_index} is outside a table of {len(table.block_ids)} blocks"
            )
        return self._make_writable(table, block_index)

    def _make_writable(self, table: BlockTable, block_index: int) -> CopyOp | None:
        block_id = table.block_ids[block_index]
        entry = self._index.entry(block_id)
        if self._pool.ref_count(block_id) == 1:
            if entry is not None:
                table._withdrawn[block_index] = self._index.withdraw(block_id)
                self._claims.make(table, block_index, entry.prefix_hash)
            return None
        new = self._take(1, table.owner)[0]
        self._fresh.pop(new, None)  # it receives a copy: nothing to poison
        table.block_ids[block_index] = new
        self._pool.release(block_id, matchable=True)
        if entry is not None:
            self.duplicates.note(table, block_index, block_id, entry)
        self.cow_copies += 1
        return CopyOp(block_id, new)

    def slots(self, table: BlockTable, start: int, stop: int) -> list[int]:
        """Slots (block_id * block_size + offset) of tokens start .. stop - 1; CacheCorruption
        beyond the blocks.
        """
        self._check_live(table)
        num_slots = table.num_slots(self.block_size)
        if not 0 <= start <= stop <= num_slots:
            raise CacheCorruption(
                f"tokens {start} .. {stop} are outside the {num_slots} slots of the table"
            )
        return table.slots(start, stop, self.block_size)

    def _take(self, count: int, owner: bytes) -> list[int]:
        taken = self._pool.take(count, owner)
        again = self._uses.again
        for block_id in taken:
            if self._index.entry(block_id) is not None:
                entry = self._index.withdraw(block_id)
                self._lookup.forget(entry.prefix_hash, again[block_id])
                self.evictions += 1
                self.content.note_evicted(block_id, entry)
        self._uses.forget(taken)
        self._fresh.update(dict.fromkeys(taken))
        return taken

    def mark_filled(self, block_ids: Iterable[int]) -> None:
        """These new blocks hold content already: they are not among those `drain_new_blocks`
        gives.
        """
        for block_id in block_ids:
            self._fresh.pop(block_id, None)

    def commit(
        self,
        table: BlockTable,
        token_ids: Sequence[int],
        num_computed: int,
        *,
        publish: bool = True,
    ) -> None:
        """Record that the KV of token_ids[:num_computed] is in the pool, and publish each block
        this made full.

        `token_ids` is the running list, prompt and generated; only blocks not published before are
        read. Where an equal block is published already the table goes over to that
        (`DuplicateBlocks`).
        `publish=False`: content that its tokens alone do not determine; the table publishes nothing
        from here on. Raises CacheCorruption for a count below the last one, beyond the tokens or
        beyond the blocks, and for tokens that changed under a rewrite.
        """
        self._check_live(table)
        limit = min(len(token_ids), table.num_slots(self.block_size))
        if not table.num_computed_tokens <= num_computed <= limit:
            raise CacheCorruption(
                f"commit of {num_computed} tokens: {table.num_computed_tokens} were committed "
                f"before, {limit} fit"
            )
        table._publishes = table._publishes and publish
        if table._publishes:
            num_full = table.num_full_blocks(num_computed, self.block_size)
            if num_full > table._num_chained or table._withdrawn or table._duplicates:
                first = max(0, table._num_chained - 1)
                self._progress += self._publisher.publish(table, token_ids, num_full)
                self._uses.follow(table.block_ids[first : max(0, num_full - 1)])
        self.recurrent.commit(table, num_computed)
        table.num_computed_tokens = num_computed

    def shrink(self, table: BlockTable, num_tokens: int) -> None:
        """Give back the blocks at a table's end that so many tokens, all the computed ones among
        them, do not need.

        They were made by `extend` and hold nothing that was committed. Raises CacheCorruption for
        fewer tokens than are computed, and for blocks that are shared, published or not of its last
        part.
        """
        self._check_live(table)
        keep = table.index_of(num_tokens - 1, self.block_size) + 1 if num_tokens else 0
        if num_tokens < table.num_computed_tokens or keep < table.segments[-1].first_index:
            raise CacheCorruption(
                f"a table of {table.num_computed_tokens} computed tokens cannot be cut to "
                f"{num_tokens}"
            )
        for block_id in reversed(table.block_ids[keep:]):
            if self._pool.ref_count(block_id) != 1 or self._index.entry(block_id) is not None:
                raise CacheCorruption(
                    f"block {block_id} behind the tokens of a table is shared or published"
                )
            self._pool.release(block_id, matchable=False, owner=table.owner)
            self._fresh.pop(block_id, None)
            self._released[block_id] = None
        if len(table.block_ids) > keep:
            del table.block_ids[keep:]
            self._progress += 1

    def fork(self, table: BlockTable) -> BlockTable:
        """Return a second table over the same blocks, the partial tail included. Takes no block.

        Fork between `commit` and `extend`: a block made writable before the fork is shared after
        it.
        """
        self._check_live(table)
        child = BlockTable(self._next_table, table.root, table.owner, shares=table._shares)
        for block_id in table.block_ids:
            self._pool.touch(block_id)
        child.block_ids = table.block_ids.copy()
        child.segments = table.segments.copy()
        child.spans = table.spans
        child.num_cached_tokens = table.num_cached_tokens
        child.num_computed_tokens = table.num_computed_tokens
        child._num_chained = table._num_chained
        child._publishes = table._publishes
        child._chain_hash = table._chain_hash
        child._chain_serial = table._chain_serial
        child._duplicates = table._duplicates.copy()
        self.recurrent.fork(table, child)
        return self._enter(child)

    def free(self, table: BlockTable) -> None:
        """Give back the table's blocks and claims. Published blocks stay matchable until they are
        taken again.

        Tail first, so that a chain is later evicted from its end. Raises CacheCorruption for a
        table that was freed before or belongs to another manager. The table is empty afterwards.
        """
        self._check_live(table)
        self.recurrent.free(table)
        self._claims.drop_all(table)
        if table._goes_on:
            self._uses.mark(table.block_ids)
        rank = self._uses.rank
        for index in range(len(table.block_ids) - 1, -1, -1):
            self.duplicates.keep(table, index)
            block_id = table.block_ids[index]
            matchable = self._index.entry(block_id) is not None
            self._pool.release(
                block_id, matchable=matchable, owner=table.owner, again=rank(block_id)
            )
            if not matchable and not self._pool.ref_count(block_id):
                self._released[block_id] = None
        self.spans.give_back(table)
        del self._live[table._serial]
        table.block_ids = []
        table.segments = [WHOLE]
        table.spans = ()
        self._progress += 1

    def reset(self, among: Iterable[int] | None = None) -> int:
        """Forget every cached (idle) block, or those `among` some, and return how many; referenced
        ones stay.
        """
        ids = self._pool.free_ids() if among is None else among
        idle = [
            one
            for one in ids
            if self._index.entry(one) is not None and not self._pool.ref_count(one)
        ]
        for block_id in idle:
            self._lookup.forget(self._index.withdraw(block_id).prefix_hash)
            self._pool.regard(block_id, matchable=False)
        self._uses.forget(idle)
        return len(idle)

    @property
    def progress(self) -> int:
        """Counts tables freed, blocks published, pins ended: while it stands, a table that found no
        room finds none.
        """
        return self._progress + self.pins.num_ended + self.recurrent.num_released

    def drain_new_blocks(self) -> list[int]:
        """Ids `extend` appended to tables since the last call, targets of copies left out: they
        hold nothing yet.
        """
        fresh = list(self._fresh)
        self._fresh.clear()
        return fresh

    def drain_released(self) -> list[int]:
        """Ids freed since the last call with nothing to match: what is kept for a block that is not
        full may go.
        """
        released = list(self._released)
        self._released.clear()
        return released

    def check_invariants(self, tables: Iterable[BlockTable]) -> None:
        """Recompute all bookkeeping from `tables`, all the live ones, and from the pins;
        CacheCorruption on the first contradiction.
        """
        tables = list(tables)
        check_tables(tables, self._live, self._claims.holders, self.block_size)
        self._pool.check(
            block_id for table in tables for block_id in (*table.block_ids, *table.reserve)
        )
        self.pins.check()
        self._index.check()
        check_chains(tables, self._index, self._hash_fn, self.block_size)
        self.recurrent.check(tables)

    def _check_live(self, table: BlockTable) -> None:
        if self._live.get(table._serial) is not table:
            raise CacheCorruption(
                "stale block table: it was freed before (double free) or is not of this pool"
            )
