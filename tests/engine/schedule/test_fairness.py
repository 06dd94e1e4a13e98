"""Tenants share one machine: no mix of requests starves a tenant or evicts its cache below its
floor.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from helpers.engine.fake_runner import Bench, expected_tokens
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.engine.schedule.sequence import SequenceStatus
from kvboost_edge.engine.schedule.step_plan import ScheduledTokens
from kvboost_edge.errors import RequestError


class Shared(Bench):
    """A bench that counts the tokens computed for each tenant."""

    def __init__(self, num_blocks=4000, **options):
        super().__init__(num_blocks, debug_checks=False, **options)
        self.computed = Counter()
        self.num_prompts = 0
        schedule = self.scheduler.schedule

        def counted():
            plan = schedule()
            one: ScheduledTokens[Any]
            for one in plan.work:
                self.computed[one.sequence.tenant] += len(one.token_ids)
            return plan

        self.scheduler.schedule = counted

    def ask(self, tenant, num_tokens, count=8, **options):
        """Submit a request of `num_tokens` tokens that differs from all before."""
        self.num_prompts += 1
        rng = random.Random(self.num_prompts)
        prompt = [rng.randrange(256) for _ in range(num_tokens)]
        return self.submit(prompt, count, tenant=tenant, **options)

    def waiting_of(self, tenant):
        live = self.core._live.values()
        return sum(s.tenant == tenant.encode() and s.status is SequenceStatus.WAITING for s in live)

    def check(self):
        """Skip the checks after each step, which would take most of the time of these long runs."""


def test_a_short_request_does_not_wait_for_another_tenants_batch():
    bench = Shared(max_num_seqs=16)
    for _ in range(256):
        bench.ask("a", 20, 100)
    for _ in range(5):
        bench.step()
    handle = bench.ask("b", 20, 1)
    for _ in range(3):
        bench.step()
    assert handle.done
    assert bench.scheduler.num_preemptions == 1, "one request of tenant a must be preempted"


def test_requests_that_wait_for_a_prefix_do_not_keep_preempting_another_tenant():
    bench = Shared(max_num_seqs=4, max_batch_tokens=16)
    answers = [bench.ask("a", 40, 300) for _ in range(4)]
    for _ in range(30):
        bench.step()
    document = list(range(250)) * 2
    asked = [bench.submit([*document, i], 4, tenant="b") for i in range(2)]
    while not all(one.done for one in asked):
        bench.step()
    assert bench.scheduler.num_preemptions <= 2, "each request takes one place"
    assert asked[1].result(0).cached_tokens == 496
    assert not any(one.done for one in answers)
    bench.run()
    for one in (*answers, *asked):
        bench.answer(one)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.some(6)
def test_the_slower_half_gets_at_least_40_percent(seed):
    rng = random.Random(seed)
    slots = rng.choice((1, 2, 3, 5, 16))
    budget = rng.choice((4, 7, 16, 64))
    bench = Shared(max_num_seqs=slots, max_batch_tokens=budget)
    prompt, count = rng.choice(((20, 40), (100, 4), (40, 120)))
    asked = {"a": rng.choice((40, 60)), "b": slots + rng.choice((1, 3))}
    for _ in range(asked["a"]):  # all requests of tenant a arrive first
        bench.ask("a", rng.randrange(1, 2 * prompt), rng.randrange(1, 2 * count))
    bench.step()
    for _ in range(asked["b"]):
        bench.ask("b", rng.randrange(1, 2 * prompt), rng.randrange(1, 2 * count))
    bench.computed.clear()
    while bench.computed.total() < 4000:
        assert bench.step()
        for tenant in "ab":
            while bench.waiting_of(tenant) < 2:
                bench.ask(tenant, rng.randrange(1, 2 * prompt), rng.randrange(1, 2 * count))
    assert min(bench.computed.values()) >= 0.4 * bench.computed.total(), (
        slots,
        budget,
        bench.computed,
    )


@pytest.mark.parametrize("budget", [1, 2, 4, 12])
def test_decoding_and_filling_tenants_share_a_short_budget(budget):
    bench = Shared(max_num_seqs=16, max_batch_tokens=64)
    for _ in range(8):
        bench.ask("a", 4, 400)
    for _ in range(4):
        bench.step()
    bench.scheduler.max_batch_tokens = budget
    for _ in range(8):
        bench.ask("b", 400, 1)
    bench.step()
    bench.computed.clear()
    for _ in range(60):
        bench.step()
    assert min(bench.computed[b"a"], bench.computed[b"b"]) >= 0.4 * bench.computed.total(), (
        bench.computed
    )


def test_a_long_answer_is_preempted_and_ends_unchanged():
    bench = Shared(max_num_seqs=1, max_batch_tokens=64)
    long = [bench.submit([i] * 40, 400, tenant=t) for i, t in enumerate("ab")]
    seen = {}
    while not all(handle.done for handle in long):
        bench.step()
        if bench.computed.total() > 400 and not seen:
            seen = {t: bench.computed[t.encode()] for t in "ab"}
    assert min(seen.values()) > 40, "both answers must progress before one is finished"
    assert bench.scheduler.num_preemptions >= 1
    for i, handle in enumerate(long):
        assert list(handle.result().output_token_ids) == expected_tokens([i] * 40, 400)


def test_priority_overrides_shares():
    bench = Shared(max_num_seqs=2, max_batch_tokens=16)
    urgent = [bench.ask("a", 20, 30, priority=-1) for _ in range(4)]
    other = bench.ask("b", 20, 2)
    while not all(handle.done for handle in urgent[:3]):
        bench.step()
        assert bench.computed[b"b"] == 0
    bench.run()
    assert other.result().generated_tokens == 2


def test_weights_divide_the_computed_tokens():
    bench = Shared(max_num_seqs=4, max_batch_tokens=8)
    for _ in range(40):
        bench.ask("a", 60, 20, weight=3.0)
        bench.ask("b", 60, 20)
    while bench.computed.total() < 3000:
        bench.step()
    assert 2.2 < bench.computed[b"a"] / bench.computed[b"b"] < 4.0, bench.computed
    assert Terms(weight=2).weight == 2.0
    for bad in (0, -1, float("nan"), float("inf"), 1e4, True, "2"):
        with pytest.raises(RequestError, match="weight="):
            Terms(weight=bad)


def test_short_memory_preempts_the_largest_tenant():
    bench = Bench(14, max_num_seqs=6, max_batch_tokens=32)
    wanted = []
    for i in range(12):
        prompt = [i, 1, 2, 3] * (3 + i % 4)
        wanted.append((bench.submit(prompt, 50, tenant="aaab"[i % 4]), expected_tokens(prompt, 50)))
    bench.run()
    assert bench.scheduler.num_preemptions > 0
    for handle, tokens in wanted:
        assert list(handle.result().output_token_ids) == tokens


def test_one_tenant_cannot_evict_anothers_reserved_cache():
    bench = Shared(40, max_num_seqs=4)
    prompts = [[i] * 49 for i in range(3)]  # three full blocks each
    for prompt in prompts:
        bench.submit(prompt, 1, tenant="b")
        bench.run()
    for _ in range(30):
        bench.ask("a", 100, 20)
    bench.run()
    again = [bench.submit(prompt, 1, tenant="b") for prompt in prompts]
    bench.run()
    assert [handle.result().cached_tokens for handle in again] == [48] * 3


def test_a_request_that_needs_the_whole_pool_runs():
    bench = Bench(10)
    bench.submit([1] * 80, 1, tenant="b")
    bench.run()
    big = bench.submit([2] * 150, 9, tenant="a")
    bench.run()
    assert big.result().generated_tokens == 9
