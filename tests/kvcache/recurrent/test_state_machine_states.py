"""Recurrent states under random operations, against a simulated memory of blocks and slots.

Each slot of a block holds the prefix that its KV represents, and each state slot the prefix that
its state represents. Passes of several tables run at once: all read before one writes. A state of
another prefix, one token ahead, of a failed pass, or in a reassigned slot shows as a slot with
other content.
"""

from __future__ import annotations

import dataclasses

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from helpers.kvcache.pool_model import POISON, ROOTS, Asking, picks, tokens_lists
from kvboost_edge.errors import CapacityError
from kvboost_edge.kvcache.block_table import BlockTable
from kvboost_edge.kvcache.hashing import encode_tokens
from kvboost_edge.kvcache.manager import KVCacheManager
from kvboost_edge.kvcache.recurrent.snapshots import StateSizes
from kvcache.test_state_machine import LONG, NUM_EXAMPLES, STEPS


@dataclasses.dataclass(eq=False)
class Open:
    """A live table and the tokens of its sequence."""

    table: BlockTable
    tokens: list[int]
    root: bytes
    uses_cache: bool = True

    def prefix(self, num_tokens):
        return self.root, tuple(self.tokens[:num_tokens])


class StatesMachine(Asking):
    @initialize(
        num_blocks=st.integers(4, 12),
        block_size=st.sampled_from([1, 2, 4]),
        num_slots=st.integers(2, 9),
        interval=st.sampled_from([1, 4, 1024]),
        every_block=st.booleans(),
    )
    def start(self, num_blocks, block_size, num_slots, interval, every_block):
        self.size = block_size
        sizes = StateSizes(num_slots, interval, every_block)
        self.manager = KVCacheManager(num_blocks, block_size, state_sizes=sizes)
        self.memory = [POISON] * (num_blocks * block_size)
        self.held = [POISON] * num_slots
        self.live = []

    @property
    def states(self):
        assert self.manager.states is not None
        return self.manager.states

    # the model

    def block_of(self, prefix):
        """Return the published block that ends with the prefix."""
        for block_id in self.manager._index.entries():
            if self.memory[(block_id + 1) * self.size - 1] == prefix:
                return block_id
        return None

    def served(self, tokens, root):
        """Return the numbers of tokens up to the deepest state and of tokens with KV, found without
        hashes.
        """
        cached = matched = 0
        for stop in range(self.size, len(tokens), self.size):
            block_id = self.block_of((root, tuple(tokens[:stop])))
            if block_id is None:
                break
            matched = stop
            if block_id in self.states.slots.snapshots():
                cached = stop
        return cached, matched

    def pick(self, number):
        return self.live[number % len(self.live)]

    def extend(self, one, stop):
        """Extend a table and poison its new blocks. Return False if there is no room."""
        try:
            copies = self.manager.extend(one.table, stop)
        except CapacityError:
            return False
        assert copies == [] or len(one.table) * self.size > one.table.num_computed_tokens
        for src, dst in copies:
            self.memory[dst * self.size : (dst + 1) * self.size] = self.memory[
                src * self.size : (src + 1) * self.size
            ]
        for block_id in self.manager.drain_new_blocks():
            self.memory[block_id * self.size : (block_id + 1) * self.size] = [POISON] * self.size
        return True

    def write(self, one, start, plan, stop):
        """Simulate the writes of a pass over the tokens start .. stop - 1."""
        for position, slot in enumerate(self.manager.slots(one.table, start, stop), start):
            self.memory[slot] = one.prefix(position + 1)
        self.held[plan.write] = one.prefix(stop)
        for count, slot in plan.saves:
            self.held[slot] = one.prefix(start + count)

    # operations

    @rule(
        tokens=tokens_lists,
        root=st.sampled_from(ROOTS),
        use_cache=st.sampled_from([True, True, True, False]),
        hints=st.lists(st.integers(0, 20), max_size=2),
    )
    def open(self, tokens, root, use_cache, hints):
        if len(self.live) == 5:
            self.free(0)
        served = self.served(tokens, root)
        assert self.manager.peek(tokens, root) == served[0]
        self.manager.awaited_hash(tokens, root)
        table = self.manager.open_table(tokens, root, use_cache=use_cache, hints=hints)
        assert (table.num_cached_tokens, table.num_matched_tokens) == (
            served if use_cache else (0, 0)
        )
        assert (table.miss_reason == "state") == (use_cache and served[0] < served[1])
        self.live.append(Open(table, list(tokens), root, use_cache))

    @rule(
        tokens=tokens_lists,
        root=st.sampled_from(ROOTS),
        answer=st.lists(st.integers(0, 1), max_size=9),
    )
    def prefill_and_answer(self, tokens, root, answer):
        self.open(tokens, root, True, [])
        for token in (*answer, None):
            self.compute([-1], 99, fails=False)
            if token is not None:
                self.append(-1, token)

    @rule(
        tokens=tokens_lists,
        root=st.sampled_from(ROOTS),
        state_block=st.integers(0, 20),
        stop=st.integers(0, 20),
    )
    def bring(self, tokens, root, state_block, stop):
        """Load blocks up to `stop` from elsewhere, then a state for the end of block number
        `state_block`. Both may be cached already.
        """
        tokens = tokens[: len(tokens) // self.size * self.size]
        one = Open(self.manager.open_load(tokens, root), tokens, root)
        start = one.table.num_computed_tokens
        stop = max(start, min(stop, len(tokens)) // self.size * self.size)
        if stop and self.states.has_room(one.table) and self.extend(one, stop):
            for position, slot in enumerate(self.manager.slots(one.table, start, stop), start):
                self.memory[slot] = one.prefix(position + 1)
            self.manager.commit(one.table, tokens, stop)
            self.manager.check_invariants([one.table, *(other.table for other in self.live)])
            if num_blocks := min(state_block, stop // self.size):
                state = one.prefix(num_blocks * self.size)
                self.states.arrive(
                    one.table, num_blocks, lambda slot: self.held.__setitem__(slot, state)
                )
                self.manager.check_invariants([one.table, *(other.table for other in self.live)])
        self.manager.free(one.table)

    @precondition(lambda self: self.live)
    @rule(number=picks, token=st.integers(0, 1))
    def append(self, number, token):
        one = self.pick(number)
        if one.table.num_computed_tokens == len(one.tokens):
            one.tokens.append(token)

    @precondition(lambda self: self.live)
    @rule(
        numbers=st.lists(picks, min_size=1, max_size=4),
        count=st.integers(1, 12),
        fails=st.sampled_from([False] * 5 + [True]),
    )
    def compute(self, numbers, count, fails):
        """Run a pass over the next tokens of several tables. All states are read before one is
        written.
        """
        members = list(dict.fromkeys(self.pick(number) for number in numbers))
        starts = {one: one.table.num_computed_tokens for one in members}
        stops = {one: min(len(one.tokens), starts[one] + count) for one in members}
        members = [
            one for one in members if stops[one] > starts[one] and self.extend(one, stops[one])
        ]
        for slot in self.states.unwritten():
            self.held[slot] = POISON
        plans = {one: self.states.plan(one.table, starts[one], stops[one]) for one in members}
        written = [
            slot
            for plan in plans.values()
            for slot in (plan.write, *(slot for _, slot in plan.saves))
        ]
        assert len(set(written)) == len(written)
        for one, plan in plans.items():
            assert one.prefix(starts[one]) == (
                self.held[plan.read] if plan.read >= 0 else (one.root, ())
            )
            assert plan.read not in written or plan.read == plan.write
            assert plan.write not in self.states.slots.snapshots().values()
            own = self.manager.slots(one.table, 0, starts[one])
            assert [self.memory[slot] for slot in own] == [
                one.prefix(n + 1) for n in range(starts[one])
            ]
        for one, plan in plans.items():
            self.write(one, starts[one], plan, stops[one])
        for one in members:
            if fails:
                self.free(self.live.index(one))
            else:
                self.manager.commit(one.table, one.tokens, stops[one])

    @precondition(lambda self: self.live)
    @rule(
        number=picks,
        guesses=st.lists(st.integers(0, 1), min_size=1, max_size=6),
        right=st.integers(0, 6),
        fails=st.sampled_from([False] * 5 + [True]),
    )
    def compute_with_drafts(self, number, guesses, right, fails):
        """Compute one token with draft tokens after it. The state then advances over the `right`
        accepted ones.
        """
        one = self.pick(number)
        start = one.table.num_computed_tokens
        right = min(right, len(guesses))
        if start + 1 != len(one.tokens) or not self.extend(one, start + 1 + len(guesses)):
            return
        for slot in self.states.unwritten():
            self.held[slot] = POISON
        plan = self.states.plan(one.table, start, start + 1)
        assert one.prefix(start) == (self.held[plan.read] if plan.read >= 0 else (one.root, ()))
        self.write(one, start, plan, start + 1)
        one.tokens += guesses
        for position, slot in enumerate(
            self.manager.slots(one.table, start + 1, len(one.tokens)), start + 1
        ):
            self.memory[slot] = one.prefix(position + 1)
        one.tokens[start + 1 + right :] = [right % 2]  # the token sampled after the accepted ones
        self.manager.shrink(one.table, len(one.tokens))
        self.manager.commit(one.table, one.tokens, start + 1)
        if not right:
            return
        plan = self.states.plan(one.table, start + 1, start + 1 + right)
        assert self.held[plan.read] == one.prefix(start + 1)
        assert plan.write == plan.read or plan.write in self.states.unwritten()
        if fails:
            self.held[plan.write] = POISON
            self.free(self.live.index(one))
            return
        self.write(one, start + 1, plan, start + 1 + right)
        self.manager.commit(one.table, one.tokens, start + 1 + right)

    @precondition(lambda self: self.live)
    @rule(number=picks)
    def fork(self, number):
        one = self.pick(number)
        if (
            len(self.live) < 5
            and len(one.table) * self.size < one.table.num_computed_tokens + self.size
        ):
            self.live.append(
                dataclasses.replace(
                    one, table=self.manager.fork(one.table), tokens=one.tokens.copy()
                )
            )

    @precondition(lambda self: self.live)
    @rule(number=picks)
    def free(self, number):
        """Free a table that is done, cancelled, preempted or half computed."""
        self.manager.free(self.live.pop(number % len(self.live)).table)

    @rule(share=st.integers(1, 4))
    def evict(self, share):
        """Allocate `share` quarters of the free blocks, oldest first, and free them."""
        one = Open(self.manager.open_table([], b"evict", use_cache=False), [], b"evict")
        self.extend(one, self.manager.free_block_count * share // 4 * self.size)
        self.manager.free(one.table)

    @rule(tokens=tokens_lists, root=st.sampled_from(ROOTS))
    def pin(self, tokens, root):
        published = self.manager.pins.published(tokens, root)
        if (
            published
            and len(published) + self.manager.pins.num_blocks <= self.manager.pins.max_blocks
        ):
            self.manager.pins.add(tokens[: len(published) * self.size], root, until=1)

    @rule()
    def unpin(self):
        self.manager.pins.expire(2)

    @rule()
    def reset(self):
        self.manager.reset()

    # invariants, checked after every operation

    @invariant()
    def bookkeeping_agrees(self):
        if hasattr(self, "manager"):
            self.manager.check_invariants(one.table for one in self.live)

    @invariant()
    def a_snapshot_is_the_state_after_its_block(self):
        if hasattr(self, "manager"):
            for block_id, slot in self.states.slots.snapshots().items():
                assert self.held[slot] == self.memory[(block_id + 1) * self.size - 1] != POISON

    @invariant()
    def what_a_live_table_holds_is_found(self):
        """The index finds all full blocks of each live table that uses the cache, despite
        evictions.
        """
        for one in getattr(self, "live", []):
            if one.uses_cache:
                full = one.table.num_computed_tokens // self.size
                data = encode_tokens(one.tokens[: full * self.size])
                match = self.manager._index.match(data, one.root)
                assert match.block_ids == one.table.block_ids[:full]

    def teardown(self):
        for one in getattr(self, "live", []):
            self.manager.free(one.table)
        if hasattr(self, "manager"):
            self.manager.check_invariants([])
            self.unpin()
            self.manager.reset()
            assert self.states.slots.num_used == 0


def test_random_operations_keep_states_consistent():
    count = NUM_EXAMPLES if LONG else NUM_EXAMPLES * 2 // 5
    run_state_machine_as_test(
        StatesMachine,
        settings=settings(max_examples=count, stateful_step_count=STEPS, deadline=None),
    )
