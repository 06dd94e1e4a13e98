"""KV cache manager: opens, extends, publishes, forks and frees the block tables of sequences.

It handles integers only. If content has to move, it returns `CopyOp`s. The owner of the KV applies
them in order before the next forward pass. Only one thread may call the manager, but any thread may
read its counters and `block_states`.
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
from kvboost_edge.kvcache.drafted_blocks import DraftedBlocks
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
from kvboost_edge.kvcache.recurrent.snapshots import NoTableStates, StateSizes, TableStates
from kvboost_edge.kvcache.table_spans import Spans

__all__ = ["BLOCK_CACHED", "BLOCK_FREE", "BLOCK_REFERENCED", "BLOCK_SHARED", "KVCacheManager"]


class KVCacheManager(PoolUsage):
    """Block tables over a pool of blocks, with exact prefix sharing.

    Once a block is full, it is published in the prefix index, where other tables can match it. It
    stays published without references until it is evicted.

    Args:
        num_blocks: number of blocks in the pool.
        block_size: tokens per block.
        hash_fn: chain hash, `hash_fn(parent, tokens) -> bytes`. Tests pass one that always
            collides.
        whole_blocks: full blocks are never rewritten, because their KV is quantized. See `Lookup`.
        policy: factory that builds the eviction policy.
        max_pinned_blocks: maximum number of pinned blocks. None means half the pool.
        state_sizes: sizes for recurrent state, or None for models without recurrent layers.

    Attributes:
        cow_copies: number of blocks copied because another table still reads the original.
        evictions: number of published blocks that were reused for other tokens.
        hit_tokens: number of tokens served from the cache. Only tables opened with `use_cache` and
            then extended count.
        miss_tokens: number of prompt tokens that those tables had to compute.
        spans: blocks reused at other positions. See `Spans`.
        content: content addresses of blocks, and change logs for the offload tiers.
        events: log of prefixes that entered or left the cache, for cache-aware routers.
        duplicates: private blocks that have a published duplicate. See `DuplicateBlocks`.
        pins: pinned and retained prompts. See `Pins`.
        drafted: record of the blocks that have KV of a drafter. See `DraftedBlocks`.
        recurrent: recurrent state of the tables. It is a `NoTableStates` for models without
            recurrent layers.
        block_size: tokens per block.
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
        self._index = PrefixIndex(num_blocks, block_size, hash_fn)
        self._hash_fn = hash_fn
        self._live: dict[int, BlockTable] = {}
        self._next_table = 0
        self._claims = Claims()
        self.recurrent: TableStates | NoTableStates = NoTableStates()
        if state_sizes is None:
            self._lookup = Lookup(self._index, num_blocks, block_size, whole_blocks)
        else:
            held = self._pool.held()
            self.recurrent = TableStates(state_sizes, block_size, self._index, held)
            # Snapshots are taken at the ends of blocks, and the last token of a prompt must be
            # computed. The block with the last token is therefore never shared.
            self._lookup = Lookup(self._index, num_blocks, block_size, True, self.recurrent.deepest)
        self._uses = Uses(num_blocks)
        self._opener = Opener(self._lookup, self._pool, self._uses, self._claims, block_size)
        self.pins = Pins(self._pool, self._index, self._uses, block_size, max_pinned_blocks)
        self.content = BlockContents(self._index, self._lookup)
        self.events = EventLog(self._index, num_blocks, self.recurrent.slots)
        # Ids of blocks allocated, and of unmatchable blocks freed, since the last drain. The dicts
        # are used as ordered sets.
        self._fresh: dict[int, None] = {}
        self._released: dict[int, None] = {}
        self.drafted = DraftedBlocks(num_blocks, block_size)
        self.duplicates = DuplicateBlocks(
            self._index, self._pool, self.content, self._released, self.drafted
        )
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
        """Recurrent state of the tables, or None for models without recurrent layers."""
        return self.recurrent if isinstance(self.recurrent, TableStates) else None

    def open_table(
        self,
        token_ids: Sequence[int],
        root: bytes,
        *,
        use_cache: bool = True,
        count: bool = True,
        num_tokens: int | None = None,
        owner: bytes = b"",
        again: bool = False,
        known: bytes = b"",
        hints: Iterable[int] = (),
        publish: bool = True,
    ) -> BlockTable:
        """Open a table for a sequence that shares the longest published prefix of its tokens.

        At least the last token is left to compute. If the whole prompt is cached, the table shares
        all its blocks, num_cached_tokens is len(token_ids) - 1, and `extend` makes the last block
        writable. With `whole_blocks`, the last block is not shared in this case.

        The table claims the full blocks that it will compute, see `awaited_hash`. Opening a table
        allocates no blocks, so it never fails for lack of room.

        Args:
            token_ids: the prompt.
            root: root hash of the prompt's chain.
            use_cache: share cached blocks and claim the missing ones. If False, the table bypasses
                the cache.
            count: add this lookup to hit_tokens and miss_tokens. Pass False for a preempted
                sequence, which was counted before.
            num_tokens: number of tokens of the sequence, if `token_ids` are only those that may be
                shared and one more.
            owner: owner of the blocks, for the eviction policy. All tables of a root must have the
                same owner.
            again: count all blocks as used again. See `Uses`.
            known: precomputed hashes of the first blocks. See `Lookup`.
            hints: positions where prompts with the same beginning may diverge, at which snapshots
                of recurrent state are kept.
            publish: publish blocks and keep snapshots for other tables.

        Returns:
            the table. Its `miss_reason` explains why the cached prefix ends.

        Raises:
            RequestError: a token id is outside [0, 2^32).
        """
        data = encode_tokens(token_ids)
        table = BlockTable(
            self._next_table, root, owner, again=again, shares=use_cache, publishes=publish
        )
        total = len(token_ids) if num_tokens is None else num_tokens
        match = (
            self._opener.share(table, data, known, total, count=count, again=again)
            if use_cache
            else None
        )
        self.recurrent.open(table, len(token_ids), match, hints)
        return self._enter(table)

    def open_load(
        self, token_ids: Sequence[int], root: bytes, *, owner: bytes = b"", known: bytes = b""
    ) -> BlockTable:
        """Open a table whose missing blocks and recurrent state will be loaded from a tier.

        The table shares all published blocks, even those without a later snapshot, and claims the
        other full blocks. The lookup does not count as hits or misses.
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
        """Return how many tokens `open_table` would serve from the cache now."""
        return self._lookup.servable(
            self._lookup.match(encode_tokens(token_ids), root), len(token_ids)
        )

    def awaited_hash(
        self, token_ids: Sequence[int], root: bytes, known: bytes = b""
    ) -> bytes | None:
        """Return the hash of the last block of a prompt that is worth waiting for, or None.

        Blocks are worth waiting for if live tables are computing them and they directly follow the
        published prefix. The caller waits while `is_in_flight` is true for the hash. A block is
        published when its table commits it. A claim also ends when its table is freed. For hybrid
        models, this call also requests a snapshot after the block.

        Args:
            token_ids: the prompt.
            root: root hash of the prompt's chain.
            known: precomputed hashes of the first blocks. See `Lookup`.
        """
        # Claims compare hashes only. A collision makes a request wait but never serves wrong KV.
        data = encode_tokens(token_ids)
        rest = self._lookup.awaitable(data, self._lookup.match(data, root, known), known)
        found = self._claims.last_promised(rest)
        if found is not None:
            holder = self._live[self._claims.holders[found]]
            index = next(index for index, claim in holder._claims.items() if claim == found)
            self.recurrent.ask(holder, index)
        return found

    def is_in_flight(self, prefix_hash: bytes | None) -> bool:
        """Return whether a live table is still computing the block with this hash."""
        return prefix_hash in self._claims

    def brings(self, table: BlockTable, prefix_hash: bytes) -> bool:
        """Return whether a table will bring the block with this hash."""
        return self._claims.holders.get(prefix_hash) == table._serial

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks a table without spans needs for `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def fitting_blocks(self, token_ids: Sequence[int], root: bytes) -> int:
        """Return how many blocks a table can have, if its prompt begins with these tokens.

        Besides blocks that are not pinned, it can share the pinned blocks of its prefix.
        """
        usable = self.usable_block_count
        if usable == self.num_blocks:
            return usable
        # The last of the shared blocks may have to be copied, which takes one more block.
        return usable + max(self.pins.num_of(token_ids, root) - 1, 0)

    def blocks_needed(self, table: BlockTable, num_tokens: int) -> int:
        """Return how many free blocks `extend(table, num_tokens)` would allocate.

        The count includes copies of shared blocks. Does not modify the table.
        """
        self._check_live(table)
        return self._taken(table, *self._written(table, num_tokens))

    def _taken(self, table: BlockTable, first: int, stop: int) -> int:
        """Return how many blocks to allocate to make blocks [first, stop) of a table writable."""
        ids = table.block_ids
        ref_count = self._pool.ref_count
        return max(0, stop - len(ids)) + sum(
            [ref_count(block_id) > 1 for block_id in ids[first:stop]]
        )

    def _written(self, table: BlockTable, num_tokens: int) -> tuple[int, int]:
        """Return the index range [first, stop) of the blocks that `extend` must make writable."""
        size = self.block_size
        if len(table.segments) == 1:  # fast path, because this runs in every step of a sequence
            return table.num_computed_tokens // size, -(-num_tokens // size)
        stop = table.index_of(num_tokens - 1, size) + 1 if num_tokens > 0 else 0
        first = table.index_of(table.num_computed_tokens, size)
        # Blocks between spans are already allocated and writable. Only the last segment can grow.
        return (max(first, table.segments[-1].first_index), stop) if table.spans else (first, stop)

    def extend(self, table: BlockTable, num_tokens: int) -> list[CopyOp]:
        """Allocate writable slots for tokens num_computed_tokens to num_tokens - 1.

        The caller must apply the returned copies in order before the next forward pass, and before
        it poisons the blocks from `drain_new_blocks`.

        Raises:
            CapacityError: too few blocks or state slots are free. The table is unchanged.
        """
        self._check_live(table)
        first, stop = self._written(table, num_tokens)
        needed = self._taken(table, first, stop)
        if needed > self._pool.num_free:
            raise CapacityError(
                f"{num_tokens} tokens need {needed} more blocks of {self.block_size} tokens, but "
                f"only {self._pool.num_free} of {self._pool.num_blocks} are free; enlarge "
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
        """Make block `block_index` of a table writable (copy-on-write).

        A block that other tables also use is replaced with a new block, and the required copy is
        returned. A published block that only this table uses is kept, but it cannot be matched
        until `commit`.

        Raises:
            CapacityError: no block is free for the copy.
            CacheCorruption: the index is outside the table.
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
        self._fresh.pop(new, None)  # the copy fills it, so it must not be poisoned
        self.drafted.copy(block_id, new)
        table.block_ids[block_index] = new
        self._pool.release(block_id, matchable=True)
        if entry is not None:
            self.duplicates.note(table, block_index, block_id, entry)
        self.cow_copies += 1
        return CopyOp(block_id, new)

    def slots(self, table: BlockTable, start: int, stop: int) -> list[int]:
        """Return the slots (block_id * block_size + offset) of tokens start to stop - 1.

        Raises:
            CacheCorruption: the tokens are outside the table's blocks.
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
                self.drafted.note_evicted(block_id)
            self.drafted.empty(block_id)
        self._uses.forget(taken)
        self._fresh.update(dict.fromkeys(taken))
        return taken

    def mark_filled(self, block_ids: Iterable[int]) -> None:
        """Exclude blocks that have been filled from the result of `drain_new_blocks`."""
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
        """Record that the KV of token_ids[:num_computed] is in the pool, and publish full blocks.

        If an equal block is already published, the table shares that block (`DuplicateBlocks`).

        Args:
            table: the table.
            token_ids: running list of prompt and generated tokens. Only unpublished blocks are
                read.
            num_computed: tokens whose KV is in the pool.
            publish: pass False if the KV depends on more than the tokens. The table then stops
                publishing blocks.

        Raises:
            CacheCorruption: `num_computed` is less than in the previous call or exceeds the tokens
                or blocks, or the tokens of a rewritten block changed.
        """
        self._check_live(table)
        limit = min(len(token_ids), table.num_slots(self.block_size))
        if not table.num_computed_tokens <= num_computed <= limit:
            raise CacheCorruption(
                f"commit of {num_computed} tokens: {table.num_computed_tokens} are already "
                f"committed and at most {limit} fit"
            )
        table._publishes = table._publishes and publish
        if table._publishes:
            num_full = table.num_full_blocks(num_computed, self.block_size)
            if num_full > table._num_hashed or table._withdrawn or table._duplicates:
                first = max(0, table._num_hashed - 1)
                self._progress += self._publisher.publish(table, token_ids, num_full)
                self._uses.follow(table.block_ids[first : max(0, num_full - 1)])
        self.recurrent.commit(table, num_computed)
        table.num_computed_tokens = num_computed

    def shrink(self, table: BlockTable, num_tokens: int) -> None:
        """Free the blocks at the end of a table that `num_tokens` tokens do not need.

        Only blocks that `extend` added and that hold no committed tokens may be freed.

        Raises:
            CacheCorruption: num_tokens is below the number of computed tokens, or a block to free
                is shared, published or outside the last segment.
        """
        self._check_live(table)
        keep = table.index_of(num_tokens - 1, self.block_size) + 1 if num_tokens else 0
        if num_tokens < table.num_computed_tokens or keep < table.segments[-1].first_index:
            raise CacheCorruption(
                f"a table with {table.num_computed_tokens} computed tokens cannot be cut to "
                f"{num_tokens}"
            )
        for block_id in reversed(table.block_ids[keep:]):
            if self._pool.ref_count(block_id) != 1 or self._index.entry(block_id) is not None:
                raise CacheCorruption(
                    f"block {block_id} at the end of a table cannot be freed: it is shared or "
                    "published"
                )
            self._pool.release(block_id, matchable=False, owner=table.owner)
            self._fresh.pop(block_id, None)
            self._released[block_id] = None
        if len(table.block_ids) > keep:
            del table.block_ids[keep:]
            self._progress += 1

    def fork(self, table: BlockTable) -> BlockTable:
        """Return a second table that shares all blocks of this one, including a partial last block.

        No block is allocated. Call this between `commit` and `extend`, because forking makes
        writable blocks shared again.
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
        child._num_hashed = table._num_hashed
        child._publishes = table._publishes
        child._chain_hash = table._chain_hash
        child._chain_serial = table._chain_serial
        child._duplicates = table._duplicates.copy()
        self.recurrent.fork(table, child)
        return self._enter(child)

    def free(self, table: BlockTable) -> None:
        """Release the blocks and claims of a table, and empty it.

        Published blocks stay matchable until they are evicted.

        Raises:
            CacheCorruption: the table was already freed or belongs to another manager.
        """
        self._check_live(table)
        self.recurrent.free(table)
        self._claims.drop_all(table)
        if table._extends_chain:
            self._uses.mark(table.block_ids)
        rank = self._uses.rank
        # Release the last block first, so that LRU evicts a chain from its end.
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
        """Drop all idle cached blocks, or only those in `among`, and return their number."""
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
        """Counter of freed tables, published blocks and ended pins.

        As long as it does not change, retrying an allocation that failed is pointless.
        """
        return self._progress + self.pins.num_ended + self.recurrent.num_released

    def drain_new_blocks(self) -> list[int]:
        """Return the empty blocks that were allocated since the last call.

        Blocks allocated as copy targets are not included.
        """
        fresh = list(self._fresh)
        self._fresh.clear()
        return fresh

    def drain_released(self) -> list[int]:
        """Return the blocks without matchable content that were freed since the last call.

        The caller can drop data that it keeps outside the pool for these blocks.
        """
        released = list(self._released)
        self._released.clear()
        return released

    def check_invariants(self, tables: Iterable[BlockTable]) -> None:
        """Recompute all bookkeeping from the live tables and the pins.

        Args:
            tables: all live tables.

        Raises:
            CacheCorruption: the recorded values differ from the recomputed ones.
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
                "stale block table: it was already freed (double free) or belongs to another "
                "manager"
            )
