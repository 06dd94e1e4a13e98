"""Requests that share spans, and exact ones, in a small pool under random operations.

Hypothesis finds the shortest way to a leak, a use after free or a wrong token.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from helpers.engine.fake_runner import Bench
from helpers.engine.hand_io_thread import DictTier
from kvboost_edge.config import GenerationMode, RecomputeStrategy
from kvboost_edge.reuse.recompute import Repair

TEXTS = [[(7 * number + 3 * index * index) % 251 for index in range(66)] for number in range(3)]
REPAIRS = [
    Repair(strategy=RecomputeStrategy.NONE),
    Repair(strategy=RecomputeStrategy.SELECTIVE, overlap=5),
    Repair(strategy=RecomputeStrategy.CACHEBLEND, overlap=0, ratio=0.4),
    Repair(strategy=RecomputeStrategy.CACHEBLEND, overlap=16, ratio=1.0),
    Repair(strategy=RecomputeStrategy.QUERY, overlap=5, ratio=0.4),
]
heads = st.lists(st.integers(0, 250), max_size=20)
texts = st.lists(st.sampled_from(TEXTS), min_size=1, max_size=2)
cuts = st.integers(30, 66)
counts = st.integers(1, 20)


class ReuseMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(12, 24),
        budget=st.sampled_from([1, 5, 16, 40]),
        max_num_seqs=st.integers(1, 4),
        tier=st.sampled_from([None, 0.0, 0.1]),
    )
    def start(self, num_blocks, budget, max_num_seqs, tier):
        tiers = [] if tier is None else [DictTier(losses=tier)]
        self.bench = Bench(
            num_blocks, max_num_seqs=max_num_seqs, max_batch_tokens=budget, tiers=tiers
        )
        self.wanted = []

    def prompt(self, head, parts, cut):
        body = [token for part in parts for token in part[:cut]]
        return ([*head, *body] or [1])[: self.bench.manager.num_blocks * 16 - 24]

    @rule(head=heads, parts=texts, cut=cuts, count=counts)
    def ask_exactly(self, head, parts, cut, count):
        self.wanted.append(self.bench.submit(self.prompt(head, parts, cut), count))

    @rule(head=heads, parts=texts, cut=cuts, count=counts, repair=st.sampled_from(REPAIRS))
    def ask_with_reuse(self, head, parts, cut, count, repair):
        prompt = self.prompt(head, parts, cut)
        self.wanted.append(
            self.bench.submit(prompt, count, GenerationMode.CHUNK_KV_REUSE, repair=repair)
        )

    @rule(count=st.integers(1, 12))
    def step(self, count):
        for _ in range(count):
            self.bench.step()

    @rule(count=st.integers(1, 4))
    def move_blocks(self, count):
        self.bench.core.tiering.save_more()
        self.bench.io_thread.pump(count)

    @rule(pick=st.integers(0, 100))
    def cancel(self, pick):
        if self.wanted:
            self.wanted.pop(pick % len(self.wanted)).cancel()

    @rule()
    def forget_the_cache(self):
        self.bench.manager.reset()

    @invariant()
    def is_sound(self):
        if hasattr(self, "bench"):
            self.bench.check()

    def teardown(self):
        if not hasattr(self, "bench"):
            return
        self.bench.run()
        shared = sum(self.bench.answer(handle).reused_span_tokens for handle in self.wanted)
        assert self.bench.manager.used_block_count == 0
        self.bench.manager.check_invariants([])
        SHARED.append(shared)


SHARED = []


def test_random_operations_leak_nothing_and_keep_tokens(scale):
    SHARED.clear()
    count = scale(30, 10_000)
    run_state_machine_as_test(
        ReuseMachine, settings=settings(max_examples=count, stateful_step_count=14)
    )
    assert sum(shared > 0 for shared in SHARED) > count // 10
