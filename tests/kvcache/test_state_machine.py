"""The manager under random operations, against a model of plain dicts and a simulated memory.

The model knows no hashes: it keys published blocks by (identity of the parent, tokens) and prefixes
in flight by all their tokens. Each slot of the memory holds the prefix that its KV represents. A
wrong hit, a write into a shared block, a lost copy or a read of poisoned memory shows as a slot
with other content.
"""

import dataclasses
import os
import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from helpers.kvcache.pool_model import (
    POISON,
    ROOTS,
    Asking,
    Live,
    cut_hash,
    go_over,
    picks,
    tokens_lists,
)
from kvboost_edge.errors import CacheCorruption, CapacityError, RequestError
from kvboost_edge.kvcache.eviction.policy import LeastRecentlyUsed, TenantFloors
from kvboost_edge.kvcache.hashing import chain_hash
from kvboost_edge.kvcache.manager import (
    BLOCK_CACHED,
    BLOCK_FREE,
    BLOCK_REFERENCED,
    BLOCK_SHARED,
    KVCacheManager,
)

LONG, QUICK = (os.environ.get(f"KVBOOST_EDGE_TEST_{name}") == "1" for name in ("LONG", "QUICK"))
NUM_EXAMPLES = 10_000 if LONG else 100 if QUICK else 200
STEPS = 40 if LONG else 20
HOLDERS = ("", "a")


class PoolMachine(Asking):
    @initialize(
        num_blocks=st.integers(4, 10),
        block_size=st.sampled_from([1, 2, 4]),
        bits=st.sampled_from([1, 8, 256]),
        whole=st.booleans(),
        policy=st.sampled_from([LeastRecentlyUsed, TenantFloors]),
    )
    def start(self, num_blocks, block_size, bits, whole, policy):
        self.size = block_size
        self.whole = whole
        self.weak = bits < 256
        hash_fn = cut_hash(bits) if self.weak else chain_hash
        self.manager = KVCacheManager(
            num_blocks, block_size, hash_fn=hash_fn, whole_blocks=whole, policy=policy
        )
        self.memory = [POISON] * (num_blocks * block_size)
        self.live = []
        self.cached = {}  # (parent node, tokens) -> (block, node)
        self.claims = {}
        self.pins = {}  # node of the last block -> (blocks, {holder: end})
        self.now = self.next_node = 0
        self.evictions = self.cow_copies = self.hits = self.misses = 0

    # the model

    def refs(self):
        pinned = {block_id for block_ids, _ in self.pins.values() for block_id in block_ids}
        return Counter(
            (*pinned, *(block_id for seq in self.live for block_id in seq.table.block_ids))
        )

    def full_block(self, tokens, index):
        return tuple(tokens[index * self.size : (index + 1) * self.size])

    def prefix(self, seq_tokens, root, num_blocks):
        return root, tuple(seq_tokens[: num_blocks * self.size])

    def servable_blocks(self, tokens):
        """Count the full blocks that a prompt may share. Storage that cannot be rewritten excludes
        the block of the last token.
        """
        return (len(tokens) - int(self.whole)) // self.size

    def match(self, tokens, root):
        block_ids = []
        node = root
        for index in range(self.servable_blocks(tokens)):
            known = self.cached.get((node, self.full_block(tokens, index)))
            if known is None:
                break
            block_ids.append(known[0])
            node = known[1]
        return block_ids, node

    def forget_blocks(self, block_ids):
        lost = [key for key, (block_id, _) in self.cached.items() if block_id in block_ids]
        for key in lost:
            del self.cached[key]
        self.evictions += len(lost)

    def drop_claims(self, seq):
        self.claims = {prefix: owner for prefix, owner in self.claims.items() if owner is not seq}

    def withdraw_if_published(self, seq, index):
        """Withdraw a block that only `seq` holds and is about to write, so that no prompt matches
        it meanwhile.
        """
        for key, (block_id, node) in self.cached.items():
            if block_id == seq.table.block_ids[index]:
                seq.withdrawn[index] = (key, node)
                del self.cached[key]
                self.claims.setdefault(self.prefix(seq.tokens, seq.root, index + 1), seq)
                return

    def apply(self, ops):
        for src, dst in ops:
            for offset in range(self.size):
                self.memory[dst * self.size + offset] = self.memory[src * self.size + offset]
        for block_id in self.manager.drain_new_blocks():
            for offset in range(self.size):
                self.memory[block_id * self.size + offset] = POISON

    def made_writable(self, seq, before, indices, refs):
        """Update the model after `make_writable` of blocks `indices`, given the ids and reference
        counts before it.
        """
        new = [b for b in seq.table.block_ids if b not in before]
        assert all(refs[block_id] == 0 for block_id in new), "a block in use was allocated"
        self.forget_blocks(new)
        for index in indices:
            shared = refs[before[index]] > 1
            assert (seq.table.block_ids[index] != before[index]) == shared
            if shared:
                self.cow_copies += 1
                key = next(
                    (
                        key
                        for key, (block_id, _) in self.cached.items()
                        if block_id == before[index]
                    ),
                    None,
                )
                if key is not None:
                    seq.copied[index] = (key, self.cached[key][1])
            else:
                self.withdraw_if_published(seq, index)

    def pick(self, number):
        return self.live[number % len(self.live)]

    # operations

    @rule(tokens=tokens_lists, root=st.sampled_from(ROOTS), use_cache=st.booleans())
    def open(self, tokens, root, use_cache):
        if len(self.live) == 6:
            self.finish_or_cancel(0)
        block_ids, node = self.match(tokens, root)
        cached = min(len(block_ids) * self.size, len(tokens) - 1)
        assert self.manager.peek(tokens, root) == cached
        if not self.weak:
            following = self.prefix(tokens, root, len(block_ids) + 1)
            waiting = len(block_ids) < self.servable_blocks(tokens) and following in self.claims
            assert (self.manager.awaited_hash(tokens, root) is not None) == waiting
        table = self.manager.open_table(tokens, root, use_cache=use_cache)
        seq = Live(table, list(tokens), root, node=root, uses_cache=use_cache)
        self.live.append(seq)
        if not use_cache:
            assert (table.block_ids, table.num_cached_tokens) == ([], 0)
            return
        assert (table.block_ids, table.num_cached_tokens) == (block_ids, cached)
        assert not self.whole or cached % self.size == 0
        seq.computed = seq.extended = cached
        seq.chained = len(block_ids)
        seq.node = node
        seq.uncounted = (cached, len(tokens) - cached)
        # No request waits for blocks that are cached but were left out because they may not be
        # rewritten.
        first = len(block_ids) + int((node, self.full_block(tokens, len(block_ids))) in self.cached)
        for count in range(first + 1, len(tokens) // self.size + 1):
            self.claims.setdefault(self.prefix(tokens, root, count), seq)

    @rule(
        tokens=tokens_lists,
        root=st.sampled_from(ROOTS),
        use_cache=st.sampled_from([True, True, False]),
    )
    def prefill(self, tokens, root, use_cache):
        self.open(tokens, root, use_cache)
        self.extend(-1, len(tokens))
        self.compute(-1)

    @precondition(lambda self: self.live)
    @rule(number=picks, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def append(self, number, tokens):
        """Append tokens one at a time and compute each in a step of its own."""
        seq = self.pick(number)
        for token in tokens:
            seq.tokens.append(token)
            self.extend(number, len(seq.tokens))
            self.compute(number)

    @precondition(lambda self: self.live)
    @rule(number=picks, count=st.integers(1, 14))
    def extend(self, number, count):
        seq = self.pick(number)
        target = min(len(seq.tokens), seq.computed + count)
        refs = self.refs()
        before = seq.table.block_ids.copy()
        rewritten = range(seq.computed // self.size, min(len(before), -(-target // self.size)))
        new = max(0, -(-target // self.size) - len(before))
        needed = new + sum(refs[before[index]] > 1 for index in rewritten)
        assert self.manager.blocks_needed(seq.table, target) == needed
        if needed > self.manager.free_block_count:
            states = self.manager.block_states()
            with pytest.raises(CapacityError):
                self.manager.extend(seq.table, target)
            assert (states, before) == (self.manager.block_states(), seq.table.block_ids)
            return
        ops = self.manager.extend(seq.table, target)
        assert len(seq.table.block_ids) == len(before) + new
        self.made_writable(seq, before, rewritten, refs)
        self.apply(ops)
        self.hits = self.hits + seq.uncounted[0]
        self.misses = self.misses + seq.uncounted[1]
        seq.uncounted = (0, 0)
        seq.extended = max(seq.extended, target)

    @precondition(lambda self: self.live)
    @rule(number=picks)
    def compute(self, number):
        """Simulate a forward pass over the extended tokens, then commit."""
        seq = self.pick(number)
        refs = self.refs()
        for position, slot in enumerate(
            self.manager.slots(seq.table, seq.computed, seq.extended), seq.computed
        ):
            assert refs[slot // self.size] == 1, "a block with several references would be written"
            assert all(block_id != slot // self.size for block_id, _ in self.cached.values()), (
                "a published block would be written"
            )
            self.memory[slot] = (seq.root, tuple(seq.tokens[: position + 1]))
        before = seq.table.block_ids.copy()
        self.manager.commit(seq.table, seq.tokens, seq.extended)
        seq.computed = seq.extended
        num_full = seq.computed // self.size
        for index in [index for index in seq.withdrawn if index < num_full]:
            key, node = seq.withdrawn.pop(index)
            _, node = self.cached.setdefault(key, (before[index], node))
            if index == seq.chained - 1:
                seq.node = node
            self.claims = {
                p: o
                for p, o in self.claims.items()
                if (o, len(p[1])) != (seq, (index + 1) * self.size)
            }
        for index in range(seq.chained, num_full):
            key = (seq.node, self.full_block(seq.tokens, index))
            if key not in self.cached:
                self.cached[key] = (before[index], self.next_node)
                self.next_node += 1
            seq.node = self.cached[key][1]
            self.claims = {
                p: o
                for p, o in self.claims.items()
                if (o, len(p[1])) != (seq, (index + 1) * self.size)
            }
        seq.chained = max(seq.chained, num_full)
        if seq.uses_cache:
            go_over(seq, self.cached, before, num_full, self.size)
        else:
            assert seq.table.block_ids == before, (
                "a sequence without the cache must use only its own blocks"
            )

    @precondition(lambda self: self.live)
    @rule(number=picks, count=st.integers(1, 9))
    def draft(self, number, count):
        """Write `count` draft tokens after the last token, then give their blocks back."""
        seq = self.pick(number)
        self.extend(number, len(seq.tokens))
        target = len(seq.tokens) + count
        before = seq.table.block_ids.copy()
        needed = self.manager.blocks_needed(seq.table, target)
        if seq.extended < len(seq.tokens) or needed > self.manager.free_block_count:
            return
        assert self.manager.extend(seq.table, target) == []
        self.forget_blocks(seq.table.block_ids[len(before) :])
        self.apply([])
        for slot in self.manager.slots(seq.table, len(seq.tokens), target):
            self.memory[slot] = (b"draft", ())
        free = self.manager.free_block_count
        self.manager.shrink(seq.table, len(seq.tokens))
        assert seq.table.block_ids == before
        assert self.manager.free_block_count == free + needed

    @precondition(lambda self: self.live)
    @rule(number=picks)
    def fork(self, number):
        seq = self.pick(number)
        if len(self.live) == 6 or seq.extended > seq.computed:
            return
        child = dataclasses.replace(
            seq, table=self.manager.fork(seq.table), tokens=seq.tokens.copy(), withdrawn={}
        )
        child.copied = seq.copied.copy()
        child.lacks_some = seq.lacks_some or bool(seq.withdrawn)
        child.uncounted = (0, 0)
        assert child.table.block_ids == seq.table.block_ids
        self.live.append(child)

    @precondition(lambda self: any(seq.table.block_ids for seq in self.live))
    @rule(number=picks, position=picks)
    def copy_on_write(self, number, position):
        """Recompute into any block: make it writable and write the same prefix there again."""
        seq = self.pick(number)
        if not seq.table.block_ids:
            return
        index = position % len(seq.table.block_ids)
        refs = self.refs()
        before = seq.table.block_ids.copy()
        if refs[before[index]] > 1 and not self.manager.free_block_count:
            with pytest.raises(CapacityError):
                self.manager.make_writable(seq.table, index)
            assert seq.table.block_ids == before
            return
        op = self.manager.make_writable(seq.table, index)
        self.made_writable(seq, before, range(index, index + 1), refs)
        self.apply([] if op is None else [op])
        for made in range(index * self.size, min((index + 1) * self.size, seq.computed)):
            slot = seq.table.block_ids[index] * self.size + made % self.size
            self.memory[slot] = (seq.root, tuple(seq.tokens[: made + 1]))

    @precondition(lambda self: self.live)
    @rule(number=picks)
    def finish_or_cancel(self, number):
        """Free a table in any status: done, halfway through a pass, or just opened."""
        seq = self.live.pop(number % len(self.live))
        self.manager.free(seq.table)
        self.drop_claims(seq)
        with pytest.raises(CacheCorruption):
            self.manager.free(seq.table)
        with pytest.raises(CacheCorruption):
            self.manager.extend(seq.table, 1)

    @rule(share=st.integers(1, 4))
    def evict(self, share):
        """Allocate `share` quarters of the free blocks, oldest first, fill them with garbage and
        free them.
        """
        count = self.manager.free_block_count * share // 4
        table = self.manager.open_table([], b"evict", use_cache=False)
        self.apply(self.manager.extend(table, count * self.size))
        self.forget_blocks(table.block_ids)
        self.manager.free(table)

    @rule(
        tokens=tokens_lists,
        root=st.sampled_from(ROOTS),
        ttl=st.none() | st.integers(1, 3),
        holder=st.sampled_from(HOLDERS),
    )
    def pin(self, tokens, root, ttl, holder):
        num_full = len(tokens) // self.size
        until = None if ttl is None else self.now + ttl
        block_ids, node = self.match([*tokens, *[2] * self.size], root)
        pinned = {block_id for ids, _ in self.pins.values() for block_id in ids}
        if (
            not num_full
            or len(block_ids) < num_full
            or len(pinned | set(block_ids)) > self.manager.num_blocks // 2
        ):
            with pytest.raises((CapacityError, RequestError)):
                self.manager.pins.add(tokens, root, holder=holder, until=until)
            return
        assert self.manager.pins.add(tokens, root, holder=holder, until=until) == num_full
        self.pins.setdefault(node, (block_ids, {}))[1][holder] = until

    @rule(
        tokens=tokens_lists,
        root=st.sampled_from(ROOTS),
        holder=st.none() | st.sampled_from(HOLDERS),
    )
    def unpin(self, tokens, root, holder):
        block_ids, node = self.match([*tokens, *[2] * self.size], root)
        whole = len(block_ids) == len(tokens) // self.size
        before = len(self.refs())
        gone, ends = self.pins.get(node, ([], {})) if whole else ([], {})
        for one in list(ends) if holder is None else [holder]:
            ends.pop(one, None)
        if gone and not ends:
            del self.pins[node]
        pinned = {block_id for ids, _ in self.pins.values() for block_id in ids}
        assert self.manager.pins.end(tokens, root, holder) == len(set(gone) - pinned)
        assert len(self.refs()) <= before

    @rule(tokens=tokens_lists, root=st.sampled_from(ROOTS), ttl=st.integers(1, 3))
    def retain(self, tokens, root, ttl):
        pins = self.manager.pins
        pins.retain(pins.published(tokens, root), b"", self.now + ttl)

    @rule(seconds=st.integers(1, 3))
    def time_goes_by(self, seconds):
        self.now += seconds
        for node, (block_ids, ends) in list(self.pins.items()):
            left = {one: end for one, end in ends.items() if end is None or end > self.now}
            self.pins[node] = block_ids, left
            if not left:
                del self.pins[node]
        self.manager.pins.expire(self.now)
        assert self.manager.pins.next_end == min(
            (end for _, ends in self.pins.values() for end in ends.values() if end is not None),
            default=None,
        )

    @rule()
    def reset(self):
        refs = self.refs()
        idle = [key for key, (block_id, _) in self.cached.items() if refs[block_id] == 0]
        for key in idle:
            del self.cached[key]
        assert self.manager.reset() == len(idle)

    # invariants, checked after every operation

    @invariant()
    def bookkeeping_agrees(self):
        if not hasattr(self, "manager"):
            return
        manager = self.manager
        refs = self.refs()
        manager.check_invariants(seq.table for seq in self.live)
        published = {block_id for block_id, _ in self.cached.values()}
        assert len(published) == len(self.cached)
        idle = [
            BLOCK_CACHED if block_id in published else BLOCK_FREE
            for block_id in range(manager.num_blocks)
        ]
        held = {
            block_id: BLOCK_REFERENCED if count == 1 else BLOCK_SHARED
            for block_id, count in refs.items()
        }
        assert manager.block_states() == [
            held.get(block_id, idle[block_id]) for block_id in range(manager.num_blocks)
        ]
        assert manager.free_block_count == manager.num_blocks - len(refs)
        assert manager.used_block_count == len(refs)
        assert manager.published_block_count == len(published)
        assert (manager.evictions, manager.cow_copies) == (self.evictions, self.cow_copies)
        assert (manager.hit_tokens, manager.miss_tokens) == (self.hits, self.misses)

    @invariant()
    def every_computed_slot_holds_its_prefix(self):
        for seq in getattr(self, "live", []):
            assert seq.table.num_computed_tokens == seq.computed
            held = [self.memory[slot] for slot in self.manager.slots(seq.table, 0, seq.computed)]
            assert held == [
                (seq.root, tuple(seq.tokens[: position + 1])) for position in range(seq.computed)
            ]

    def teardown(self):
        for seq in getattr(self, "live", []):
            self.manager.free(seq.table)
        if hasattr(self, "manager"):
            self.manager.check_invariants([])
            for block_ids, _ in self.pins.values():
                assert all(self.manager.ref_count(block_id) == 1 for block_id in block_ids)
            self.manager.pins.expire(10**9)
            kept = [ends for _, ends in self.pins.values() if None in ends.values()]
            assert len(self.manager.pins) == len(kept)
            for block_id in list(self.manager._pool.held()):
                self.manager._pool.let_go(block_id, matchable=True)
            assert self.manager.free_block_count == self.manager.num_blocks


def test_random_operations_agree_with_the_model():
    run_state_machine_as_test(
        PoolMachine,
        settings=settings(max_examples=NUM_EXAMPLES, stateful_step_count=STEPS, deadline=None),
    )


@pytest.mark.parametrize("bits", [1, 8])
@pytest.mark.some(2)
def test_ten_thousand_lookups_under_a_weak_hash_without_a_wrong_hit(bits):
    rng = random.Random(bits)
    manager = KVCacheManager(64, 2, hash_fn=cut_hash(bits))
    # The oracle: the content of each published block, recorded by its writer without any hash.
    content = {}
    lookups = hits = 0
    while lookups < 10_000:
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 13))]
        root = rng.choice(ROOTS)
        lookups += 1
        table = manager.open_table(tokens, root)
        for index, block_id in enumerate(table.block_ids):
            assert content[block_id] == (root, tuple(tokens[: 2 * (index + 1)]))
            hits += 1
        for src, dst in manager.extend(table, len(tokens)):
            content[dst] = content[src]
        for index, block_id in enumerate(table.block_ids):
            content[block_id] = (root, tuple(tokens[: 2 * (index + 1)]))
        manager.commit(table, tokens, len(tokens))
        manager.free(table)
    assert hits > 5_000  # without real hits the test would check nothing
    manager.check_invariants([])
