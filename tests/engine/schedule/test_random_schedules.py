"""Batch equals single: random schedules over tiny pools, against the output of each prompt alone."""

import functools
import itertools
import random
from collections import Counter

import pytest

from helpers.clocks import give_timer
from helpers.engine.draft_models import (
    ASSISTANT,
    DRAFT_KINDS,
    MTP,
    close_blocks,
    draft_runner,
    fake_drafter,
    gives_states,
    models_of,
)
from helpers.engine.fake_runner import EOS_ID, ROOT, Bench, expected_tokens
from helpers.engine.hand_io_thread import DictTier
from helpers.engine.hostile_drafts import draft_in_turn
from helpers.engine.model_kinds import HYBRID, PLAIN
from kvboost_edge.config import GenerationMode, RecomputeStrategy
from kvboost_edge.engine import core
from kvboost_edge.engine.spec_decode import model_drafts
from kvboost_edge.errors import CapacityError
from kvboost_edge.kvcache.manager import KVCacheManager
from kvboost_edge.reuse.recompute import Repair

MODES = [
    *[(GenerationMode.PREFIX_CACHE, None)] * 4,
    (GenerationMode.BASELINE, None),
    (GenerationMode.CHUNK_KV_REUSE, Repair(strategy=RecomputeStrategy.NONE)),
    (GenerationMode.CHUNK_KV_REUSE, Repair(strategy=RecomputeStrategy.SELECTIVE, overlap=3)),
    (
        GenerationMode.CHUNK_KV_REUSE,
        Repair(strategy=RecomputeStrategy.CACHEBLEND, overlap=0, ratio=0.5),
    ),
    (GenerationMode.CHUNK_KV_REUSE, Repair(strategy=RecomputeStrategy.QUERY, overlap=0, ratio=0.5)),
]

STALLED = 100  # steps without any progress, after which no schedule recovers


class PassFailed(Exception):
    """Simulated failure of a forward pass."""


def random_clock(seed):
    """Return a clock whose readings lie up to 10 ms apart, so that measured times are random but
    the same in each run.
    """
    ticks = random.Random(seed + 7)  # not the numbers that the schedule draws
    return functools.partial(next, itertools.accumulate(iter(lambda: 0.01 * ticks.random(), None)))


class RandomSchedule:
    """Random requests, cancels, resets, failed passes and slow tiers over a small pool of one kind
    of model.
    """

    def __init__(self, kind, seed):
        self.kind = kind
        self.rng = random.Random(seed)
        self.fails = seed % 4 == 0
        rng = self.rng
        max_num_seqs = self.rng.randrange(1, 13)
        near = DictTier("near", losses=0.1, seed=seed)
        far = DictTier("far", knows=False, losses=0.1, seed=seed)
        num_blocks = rng.choice((6, 7, 8, 40))
        drafts = (*DRAFT_KINDS, MTP, ASSISTANT, "")[seed % 7]
        num_slots = max_num_seqs + rng.choice((1, 2, 5, 40))
        options = {
            "interval": rng.choice((16, 32, 1024)),
            "every_block": rng.random() < 0.25,
            "max_batch_tokens": rng.choice((1, 2, 7, 16, 33, 64)),
        }
        closes_blocks = rng.random() < 0.3
        self.bench = kind.bench(
            num_blocks,
            num_slots,
            max_num_seqs=max_num_seqs,
            tiers=([], [near], [far], [near, far])[seed // 2 % 4],
            drafter=fake_drafter(
                num_blocks,
                drafts,
                num_open=max_num_seqs + 1 if closes_blocks else None,
                of=kind,
                short_vocabulary=(0, 200)[seed // 6 % 2],
            )
            if drafts
            else None,
            **options,
        )
        gives_states(self.bench)
        if closes_blocks:
            close_blocks(self.bench)
        draft_in_turn(self.bench)
        if self.fails:
            self.bench.runner.on_forward = self.fail_sometimes
            self.bench.runner.on_accept = self.fail_accepting
        self.stems = [
            [rng.randrange(256) for _ in range(rng.choice((15, 16, 17, 32, 48)))] for _ in range(2)
        ]
        self.known = []
        self.handles = []
        self.cancelled = []

    def fail_accepting(self):
        if self.rng.random() < 0.05:
            raise PassFailed

    def fail_sometimes(self, batch):
        if self.rng.random() < 0.02:
            runner = self.bench.runner
            runner.on_forward = None
            runner.forward(batch)  # no request may find the KV that it writes before the error
            runner.on_forward = self.fail_sometimes
            raise PassFailed

    def prompt(self, is_moved):
        """Draw a prompt: a stem, perhaps at another position, with a tail of its own; or a
        conversation that continues or branches.
        """
        rng = self.rng
        tail = [rng.randrange(256) for _ in range(rng.choice((0, 1, 5, 20)))]
        if self.known and rng.random() < 0.4:
            text = rng.choice(self.known)
            return text[: rng.randrange(1, len(text) + 1)][:150] + tail
        prompt = rng.choice(self.stems)[: rng.choice((16, 48))] + tail
        if is_moved:
            head = [rng.randrange(256) for _ in range(rng.choice((1, 16, 23)))]
            return head + rng.choice(self.stems) + [rng.randrange(256)] + prompt
        return prompt

    def submit(self):
        rng = self.rng
        mode, repair = rng.choice(MODES if self.kind is PLAIN else MODES[:5])
        prompt = self.prompt(repair is not None)
        count = rng.choice((1, 3, 30, 50))
        if len(prompt) + count - 1 > self.bench.manager.num_blocks * 16:
            with pytest.raises(CapacityError):
                self.bench.submit(prompt, count)
            return
        terms = {"max_draft_tokens": rng.choice((0, 3, 31)), "always_drafts": rng.random() < 0.7}
        if self.kind is HYBRID:
            terms["snapshot_hints"] = tuple(rng.choices(range(len(prompt) + 5), k=2))
        stop_ids = frozenset({EOS_ID})
        self.handles.append(
            self.bench.submit(
                prompt,
                count,
                mode,
                stop_ids,
                priority=rng.choice((0, 0, 0, -1, 1)),
                terms=terms,
                repair=repair,
            )
        )
        self.known.append(prompt + self.bench.runner.expected(prompt, count, stop_ids))
        if rng.random() < 0.15:
            self.cancelled.append(self.handles[-1])

    def run(self):
        rng = self.rng
        bench = self.bench
        pending = rng.randrange(3, 12)
        idle = stalled = 0
        while pending or bench.scheduler.has_work or idle < 1:
            if pending and rng.random() < 0.4:
                pending -= 1
                self.submit()
            if self.cancelled and rng.random() < 0.2:
                rng.choice(self.cancelled).cancel()
            if rng.random() < 0.06:
                bench.manager.reset()
            if rng.random() < 0.5:
                bench.io_thread.pump(rng.choice((1, 2)))
            before = bench.runner.computed, bench.runner.probed
            worked = bench.step()
            moved = bench.io_thread.pump(1)
            idle = 0 if worked or moved else idle + 1
            computed = before != (bench.runner.computed, bench.runner.probed)
            stalled = 0 if computed or moved else stalled + 1
            assert stalled < STALLED, "requests wait but nothing runs"
        bench.run()

    def outcome(self):
        """Check every answer and that nothing is held. Count the events, so that the test can
        require each kind.
        """
        bench = self.bench
        found = Counter(preemptions=self.bench.scheduler.num_preemptions)
        for handle in self.handles:
            try:
                result = bench.answer(handle)
            except PassFailed:
                found["failed"] += 1
                continue
            found += Counter(result.hit_tokens)
            found += Counter(
                spans=result.reused_span_tokens, missing_states=result.miss_reason == "state"
            )
            assert (result.matched_tokens > result.cached_tokens) == (result.miss_reason == "state")
        assert bench.manager.used_block_count == bench.io_thread.staging_bytes == 0
        bench.manager.check_invariants([])
        speculation = bench.scheduler.speculation
        found += Counter(
            right=speculation.num_accepted, wrong=speculation.num_drafted - speculation.num_accepted
        )
        if bench.parts.drafter is not None:
            assert models_of(bench).is_on
            runner = draft_runner(bench)
            by = "by_head" if runner.info.joins_hidden_states else "by_model"
            by = "by_assistant" if runner.info.borrows_kv else by
            restored = bench.core.tiering.num_draft_restored
            found.update({by: runner.computed, "restored_drafts": restored})
        if (states := bench.manager.states) is not None:
            assert states.slots.num_used == sum(states.slots.counts().values())
            assert bench.runner.taken_in == speculation.num_accepted or self.fails
            found.update(replayed=states.num_replayed, saved=bench.runner.saved)
        return found


EXPECTED = {
    "preemptions": 9,
    "pool": 1200,
    "near": 60,
    "far": 15,
    "failed": 12,
    "right": 240,
    "wrong": 240,
    "by_model": 240,
    "restored_drafts": 5,
    "by_head": 240,
    "by_assistant": 90,
}
OF_KIND = {PLAIN: {"spans": 30}, HYBRID: {"missing_states": 3, "replayed": 60, "saved": 90}}


def test_random_schedules_equal_single_runs(kind, scale, monkeypatch):
    """RELIABILITY 5 and 7: no schedule hangs, and the tokens equal those of a single run.

    This holds in any batch, order, pool size and budget, cold or cached, preempted, with any drafts
    and after failed passes.
    """
    found = Counter()
    for seed in range(scale(60, 3000)):
        with monkeypatch.context() as patch:
            give_timer(patch, random_clock(seed), core, model_drafts)
            schedule = RandomSchedule(kind, seed)
            schedule.run()
        found += schedule.outcome()
    lacking = {
        name: found[name]
        for name, least in (EXPECTED | OF_KIND[kind]).items()
        if found[name] <= least
    }
    assert not lacking


@pytest.mark.parametrize("budget", [1, 2, 16, 64])
@pytest.mark.some(3)
def test_sampling_does_not_depend_on_the_batch(kind, budget):
    prompts = [[i, *range(20 + i)] for i in range(6)]
    options = {"temperature": 1.3, "top_p": 0.95, "repetition_penalty": 1.2}
    alone = []
    for i, prompt in enumerate(prompts):
        bench = kind.bench()
        handle = bench.submit(prompt, 44, seed=100 + i, **options)
        bench.run()
        alone.append(handle.result(0).output_token_ids)
    bench = kind.bench(7, max_num_seqs=4, max_batch_tokens=budget)  # small enough to preempt
    handles = [
        bench.submit(prompt, 44, seed=100 + i, **options) for i, prompt in enumerate(prompts)
    ]
    bench.run()
    assert [handle.result(0).output_token_ids for handle in handles] == alone
    assert len(set(alone)) == len(alone)
    assert bench.scheduler.num_preemptions > 0


def test_a_shared_prefix_in_flight_is_computed_once(kind):
    bench = kind.bench(max_batch_tokens=32)
    prefix = list(range(160))
    handles = [bench.submit([*prefix, 200 + i], 1) for i in range(8)]
    bench.run()
    assert bench.runner.computed == len(prefix) + 8
    assert [handle.result(0).cached_tokens for handle in handles] == [0] + [160] * 7


def test_an_urgent_request_does_not_wait_for_the_prefix_of_a_less_urgent_one():
    bench = Bench(max_batch_tokens=16)
    prefix = list(range(160))
    slow = bench.submit([*prefix, 200], 4, priority=1)
    for _ in range(3):
        bench.step()
    others = [bench.submit([210 + i] * 150, 1) for i in range(2)]
    bench.step()
    urgent = bench.submit([*prefix, 201], 4, priority=-1)
    equal = bench.submit([*prefix, 202], 4, priority=-1)
    while not urgent.done:
        bench.step()
    assert not any(one.done for one in others)
    assert bench.scheduler.num_preemptions == 1
    bench.run()
    for one in (slow, *others, urgent, equal):
        bench.answer(one)
    assert urgent.result().cached_tokens == 48, "the blocks that are computed must be reused"
    assert equal.result().cached_tokens == 160, "equally urgent requests wait for each other"


def test_a_waiting_prompt_is_looked_up_once_not_every_step(monkeypatch):
    lookups = []
    real = KVCacheManager.awaited_hash

    def counted(self, token_ids, root, known=b""):
        lookups.append(token_ids[-1])
        return real(self, token_ids, root, known)

    monkeypatch.setattr(KVCacheManager, "awaited_hash", counted)
    bench = Bench(64, max_batch_tokens=16)
    prefix = list(range(160))
    handles = [bench.submit([*prefix, 200 + i], 1) for i in range(4)]
    assert bench.run() > 10
    assert all(handle.result(0).cached_tokens == 160 for handle in handles[1:])
    assert [lookups.count(200 + i) for i in range(1, 4)] == [
        2
    ] * 3  # on arrival, and when its prefix was ready


def test_a_blocked_request_is_admitted_once_others_publish_its_blocks():
    bench = Bench(5, max_num_seqs=2)
    prompt = list(range(17))
    first = bench.submit(prompt, 40)
    second_prompt = [*prompt, *expected_tokens(prompt, 46), 7]
    second = bench.submit(second_prompt, 1)
    while not second.done:
        bench.step()
    assert not first.done
    bench.run()
    assert bench.answer(second).cached_tokens == 32


def test_the_waiting_request_takes_over_when_the_computing_one_is_cancelled(kind):
    bench = kind.bench(max_batch_tokens=32)
    prefix = list(range(160))
    first, second = (bench.submit([*prefix, 200 + i], 4) for i in range(2))
    bench.step()
    bench.step()
    assert len(bench.scheduler.running) == 1
    first.cancel()
    bench.run()
    assert first.result(0).finish_reason == "cancelled"
    assert bench.answer(second).cached_tokens == 64


def test_the_kv_of_generated_tokens_serves_the_next_turn(kind):
    bench = kind.bench()
    prompt = list(range(30))
    turn = [*prompt, *bench.ask(prompt, 40).output_token_ids, 7, 8, 9]
    before = bench.runner.computed
    # 69 of the 70 tokens were computed; the four full blocks among them are served.
    assert bench.ask(turn, 4).cached_tokens == 64
    assert bench.runner.computed - before == 73 - 64 + 3


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 150])
def test_a_fully_cached_prompt_computes_what_its_kind_of_model_must(kind, length):
    bench = kind.bench()
    prompt = list(range(length))
    full = length // 16 * 16
    for cached in (0, min(full, kind.cached(length))):
        before = bench.runner.computed
        assert bench.ask(prompt, 1).cached_tokens == cached
        assert bench.runner.computed - before == length - cached


def test_two_fully_cached_prompts_at_once_copy_on_write():
    """The last token is recomputed into a block that the other request reads."""
    bench = Bench(max_batch_tokens=64)
    prompt = list(range(32))
    bench.ask(prompt, 1)
    long_runner = bench.submit([*prompt, 9, 9], 30)
    bench.step()
    bench.ask(prompt, 5)
    assert bench.manager.cow_copies == 1
    bench.answer(long_runner)


def test_a_copy_that_fails_ends_the_requests_of_its_step_and_no_other(monkeypatch):
    bench = Bench(max_batch_tokens=64)
    prompt = list(range(32))
    bench.ask(prompt, 1)
    running = bench.submit([*prompt, 9, 9], 30)
    bench.step()
    copying = bench.submit(prompt, 5)

    def fail(ops):
        raise RuntimeError("the copy failed")

    with monkeypatch.context() as patch:
        patch.setattr(bench.parts.backend, "copy_blocks", fail)
        bench.step()
    bench.ask(prompt, 5)
    for handle in (running, copying):
        with pytest.raises(RuntimeError, match="the copy failed"):
            handle.result(0)


def test_a_frequently_used_prompt_survives_a_flood(kind):
    bench = kind.bench(num_slots=12)
    prompt = list(range(160))
    for number in range(20):
        bench.ask([*prompt, 200 + number], 1)
    rng = random.Random(1)
    for _ in range(30):
        bench.ask(rng.choices(range(256), k=320), 1)
    assert bench.ask([*prompt, 255], 1).cached_tokens == 160


def test_a_baseline_request_neither_reads_nor_changes_the_cache(kind):
    bench = kind.bench(num_slots=8)
    known = list(range(40))
    bench.ask(known, 6)
    manager = bench.manager

    def traces():
        slots = {} if manager.states is None else manager.states.slots.counts()
        return manager.content.under(ROOT), slots, manager.pins.num_retained, manager.hit_tokens

    before = traces()
    kept_longer = {"retention": 60.0, "cache_key": b"key", "expect_reuse": True}
    for prompt in (known, list(range(100, 150)), known):
        answer = bench.ask(prompt, 20, GenerationMode.BASELINE, terms=kept_longer)
        assert (answer.cached_tokens, answer.mode) == (0, GenerationMode.BASELINE)
        assert traces() == before
    assert bench.ask(list(range(100, 150)), 1).cached_tokens == 0


def test_prompt_logprobs_bypass_the_cache(kind):
    bench = kind.bench(max_batch_tokens=16)
    bench.ask(list(range(60)), 1)
    assert bench.ask(list(range(60)), 3, prompt_logprobs=0).cached_tokens == 0


@pytest.mark.parametrize("budget", [1, 2, 8])
def test_prefill_and_decode_both_advance_under_any_budget(budget):
    """Decodes never starve a prefill, and a prefill never starves decodes."""
    bench = Bench(max_batch_tokens=budget)
    decoding = [bench.submit([i] * 3, 60) for i in range(3)]
    while (
        any(s.num_pending != 1 or s.num_tokens < 5 for s in bench.scheduler.running)
        or bench.scheduler.waiting
    ):
        bench.step()
    long_prompt = bench.submit(list(range(60)), 1)
    bench.step()
    before = [s.num_tokens for s in bench.scheduler.running[:3]]
    steps = 0
    while not long_prompt.done:
        bench.step()
        steps += 1
    assert steps <= 4 * 60
    after = [s.num_tokens for s in bench.scheduler.running[:3]]
    assert all(new > old for new, old in zip(after, before, strict=True)) or all(
        h.done for h in decoding
    )
    bench.run()


def test_decodes_take_turns_when_the_budget_is_smaller_than_their_number():
    bench = Bench(max_batch_tokens=2)
    for i in range(5):
        bench.submit([i], 40)
    for _ in range(60):
        bench.step()
    lengths = [s.num_tokens for s in bench.scheduler.running]
    assert len(lengths) == 5
    assert max(lengths) - min(lengths) <= 1
    bench.run()


def test_prefills_share_the_budget_so_a_short_one_is_not_stuck_behind_a_long_one():
    bench = Bench(max_batch_tokens=32)
    bench.submit(list(range(250)), 1)
    short = bench.submit([7] * 30, 1)
    for _ in range(2):
        bench.step()
    assert short.done
    bench.run()


def test_equal_prompts_finish_one_after_another():
    bench = Bench(80, max_num_seqs=16, max_batch_tokens=64)
    handles = [bench.submit([number] * 60, 1) for number in range(16)]
    done = []
    while not all(handle.done for handle in handles):
        bench.step()
        done.append(sum(handle.done for handle in handles))
    assert len(done) == 15, "every step must use the whole token budget"
    assert done.index(next(count for count in done if count >= 8)) < 10, done
    assert done[4] >= 3, done


def test_a_flow_of_short_prompts_does_not_starve_a_long_one():
    bench = Bench(80, max_num_seqs=16, max_batch_tokens=64)
    long = bench.submit(list(range(240)), 1)
    steps = 0
    while not long.done:
        for other in range(4):  # each step adds as many tokens as it can compute
            bench.submit([steps, other] * 8, 1)
        bench.step()
        steps += 1
        assert steps <= 20
    bench.run()


def test_a_flow_of_small_requests_does_not_starve_a_large_one(kind):
    bench = kind.bench(8, max_num_seqs=4)
    small = [bench.submit([i, i], 12) for i in range(3)]
    large = bench.submit(list(range(110)), 4)
    steps = 0
    while not large.done:
        small.append(bench.submit([steps % 200, 5], 12))
        bench.step()
        steps += 1
        assert steps < 100
    bench.run()
    assert all(handle.result(0).generated_tokens == 12 for handle in small)


def test_preemption_takes_the_latest_arrival_and_keeps_its_tokens(kind):
    bench = kind.bench(6, max_num_seqs=2)
    handles = [bench.submit([number] * 30, 50) for number in (1, 2)]
    bench.run()
    first, second = map(bench.answer, handles)
    assert (first.preemptions, second.preemptions > 0) == (0, True)
    assert (bench.manager.hit_tokens, bench.manager.miss_tokens) == (0, 60), (
        "a preempted request's own blocks must not count as hits"
    )


def test_a_request_that_fills_the_whole_pool_runs():
    bench = Bench(4)
    prompt = list(range(64))
    for _ in range(
        2
    ):  # the second time its prompt is cached and every block of the pool is its own
        bench.ask(prompt, 1)
    with pytest.raises(CapacityError, match=r"needs 5 blocks .* the pool has only 4"):
        bench.submit(prompt, 2)


def test_equal_requests_decode_in_lockstep():
    """Eight equal requests need as many steps as one."""
    bench = Bench(max_batch_tokens=64)
    for i in range(8):
        bench.submit([i], 20)
    assert bench.run() == 20
    assert set(bench.runner.batches) == {8}
