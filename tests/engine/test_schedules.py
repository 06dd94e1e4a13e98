"""Batch equals single: random schedules over tiny pools, checked against the output each prompt has alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from helpers.engine.fake_runner import EOS_ID, Bench, expected_tokens
from helpers.engine.hand_mover import DictTier
from kvboost_edge.config import GenerationMode, RecomputeStrategy
from kvboost_edge.engine.handle import RequestHandle
from kvboost_edge.errors import CapacityError
from kvboost_edge.kvcache.manager import KVCacheManager
from kvboost_edge.reuse.repair import Repair

EOS = frozenset({EOS_ID})


MODES: list[tuple[GenerationMode, Repair | None]] = [
    *[(GenerationMode.PREFIX_CACHE, None)] * 4,
    (GenerationMode.BASELINE, None),
    (GenerationMode.CHUNK_KV_REUSE, Repair(strategy=RecomputeStrategy.NONE)),
    (GenerationMode.CHUNK_KV_REUSE, Repair(strategy=RecomputeStrategy.SELECTIVE, overlap=3)),
    (GenerationMode.CHUNK_KV_REUSE, Repair(strategy=RecomputeStrategy.CACHEBLEND, overlap=0, ratio=0.5)),
    (GenerationMode.CHUNK_KV_REUSE, Repair(strategy=RecomputeStrategy.QUERY, overlap=0, ratio=0.5)),
]


def moved(rng: random.Random, stems: list[list[int]]) -> list[int]:
    """Something to stand before a prompt, so that what is cached of it is at other positions."""
    head = [rng.randrange(256) for _ in range(rng.choice((1, 16, 23)))]
    return head + rng.choice(stems) + [rng.randrange(256)]


def run_schedule(seed: int) -> tuple[int, Counter[str]]:
    """One random schedule; returns (preemptions, cached tokens by tier) so that the caller sees both happened."""
    rng = random.Random(seed)
    near, far = DictTier("near", losses=0.1, seed=seed), DictTier("far", knows=False, seed=seed)
    tiers = ([], [near], [far], [near, far])[seed % 4]
    bench = Bench(
        rng.choice((6, 7, 8, 40)),
        max_num_seqs=rng.choice((1, 2, 4, 8)),
        max_batch_tokens=rng.choice((1, 2, 7, 16, 33, 64)),
        tiers=tiers,
    )
    stems = [[rng.randrange(256) for _ in range(rng.choice((15, 16, 17, 32, 48)))] for _ in range(2)]
    wanted: list[tuple[RequestHandle, list[int]]] = []
    cancelled: list[RequestHandle] = []
    pending = rng.randrange(3, 9)
    idle = 0
    while pending or bench.scheduler.has_work or idle < 1:
        if pending and rng.random() < 0.4:
            pending -= 1
            tail = [rng.randrange(256) for _ in range(rng.choice((0, 1, 5, 20)))]
            prompt = rng.choice(stems)[: rng.choice((16, 48))] + tail
            count = rng.choice((1, 3, 30, 50))
            if len(prompt) + count - 1 > bench.manager.num_blocks * 16:
                with pytest.raises(CapacityError):
                    bench.submit(prompt, count)
                continue
            prompt = moved(rng, stems) + prompt if rng.random() < 0.3 else prompt
            if len(prompt) + count - 1 > bench.manager.num_blocks * 16:
                continue
            mode, repair = rng.choice(MODES)
            handle = bench.submit(prompt, count, mode, EOS, repair=repair)
            if rng.random() < 0.15:
                cancelled.append(handle)
            else:
                wanted.append((handle, expected_tokens(prompt, count, EOS)))
        if cancelled and rng.random() < 0.2:
            rng.choice(cancelled).cancel()
        if rng.random() < 0.03:
            bench.manager.reset()
        if rng.random() < 0.5:
            bench.mover.pump(rng.choice((1, 2)))
        idle = 0 if bench.step() or bench.mover.pump(1) else idle + 1
    for handle in cancelled:
        handle.cancel()
    bench.run()
    for handle, tokens in wanted:
        assert list(handle.result(0).output_token_ids) == tokens, f"seed {seed}, request {handle.index}"
    assert all(handle.done for handle in cancelled)
    assert bench.manager.used_block_count == 0
    bench.manager.check_invariants([])
    assert bench.mover.staging_bytes == 0
    hits = sum((Counter(handle.result(0).hit_tokens) for handle, _ in wanted), Counter())
    hits["spans"] = sum(handle.result(0).reused_span_tokens for handle, _ in wanted)
    return bench.scheduler.num_preemptions, hits


def test_random_schedules_equal_single_runs(scale: Callable[[int, int], int]) -> None:
    """RELIABILITY 5, 7: the same tokens in any batch, order, pool size and budget; no schedule hangs."""
    outcomes = [run_schedule(seed) for seed in range(scale(120, 3000))]
    assert sum(preemptions for preemptions, _ in outcomes) > 20
    hits = sum((cached for _, cached in outcomes), Counter())
    assert hits["pool"] > 400
    assert hits["near"] > 100
    assert hits["far"] > 100
    assert hits["spans"] > 100


@pytest.mark.parametrize("budget", [1, 2, 16, 64])
def test_sampling_is_the_same_in_any_batch(budget: int) -> None:
    prompts = [[i, *range(20 + i)] for i in range(6)]
    options = {"temperature": 1.3, "top_p": 0.95, "repetition_penalty": 1.2}
    alone = []
    for i, prompt in enumerate(prompts):
        bench = Bench()
        handle = bench.submit(prompt, 44, seed=100 + i, **options)
        bench.run()
        alone.append(handle.result(0).output_token_ids)
    bench = Bench(7, max_num_seqs=4, max_batch_tokens=budget)  # small enough to preempt
    handles = [bench.submit(prompt, 44, seed=100 + i, **options) for i, prompt in enumerate(prompts)]
    bench.run()
    assert [handle.result(0).output_token_ids for handle in handles] == alone
    assert len(set(alone)) == len(alone)
    assert bench.scheduler.num_preemptions > 0


def test_a_shared_prefix_in_flight_is_computed_once() -> None:
    bench = Bench(64, max_batch_tokens=32)
    prefix = list(range(160))
    handles = [bench.submit([*prefix, 200 + i], 1) for i in range(8)]
    bench.run()
    assert bench.runner.computed == len(prefix) + 8
    assert [handle.result(0).cached_tokens for handle in handles] == [0] + [160] * 7


def test_a_waiting_prompt_is_looked_up_once_not_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups: list[int] = []
    real = KVCacheManager.awaited_hash

    def counted(self: KVCacheManager, token_ids: Sequence[int], root: bytes, known: bytes = b"") -> bytes | None:
        lookups.append(token_ids[-1])
        return real(self, token_ids, root, known)

    monkeypatch.setattr(KVCacheManager, "awaited_hash", counted)
    bench = Bench(64, max_batch_tokens=16)
    prefix = list(range(160))
    handles = [bench.submit([*prefix, 200 + i], 1) for i in range(4)]
    assert bench.run() > 10
    assert all(handle.result(0).cached_tokens == 160 for handle in handles[1:])
    assert [lookups.count(200 + i) for i in range(1, 4)] == [2] * 3  # when it came, and when its prefix was there


def test_a_blocked_request_is_let_in_when_others_publish_what_it_needs() -> None:
    bench = Bench(5, max_num_seqs=2)
    prompt = list(range(17))
    first = bench.submit(prompt, 40)
    second_prompt = [*prompt, *expected_tokens(prompt, 46), 7]
    second = bench.submit(second_prompt, 1)
    while not second.done:
        bench.step()
    assert not first.done
    bench.run()
    assert second.result(0).cached_tokens == 32
    assert list(second.result(0).output_token_ids) == expected_tokens(second_prompt, 1)


def test_the_waiting_request_takes_over_when_the_computing_one_is_cancelled() -> None:
    bench = Bench(64, max_batch_tokens=32)
    prefix = list(range(160))
    first, second = (bench.submit([*prefix, 200 + i], 4) for i in range(2))
    bench.step()
    bench.step()
    assert len(bench.scheduler.running) == 1
    first.cancel()
    bench.run()
    assert first.result(0).finish_reason == "cancelled"
    assert second.result(0).cached_tokens == 64
    assert list(second.result(0).output_token_ids) == expected_tokens([*prefix, 201], 4)


def test_the_kv_of_generated_tokens_serves_the_next_turn() -> None:
    bench = Bench()
    prompt = list(range(30))
    turn = bench.submit(prompt, 40)
    bench.run()
    so_far = [*prompt, *turn.result(0).output_token_ids]
    second = bench.submit([*so_far, 1, 2, 3], 4)
    bench.run()
    # 69 of the 70 tokens were computed; the four full blocks among them are served.
    assert second.result(0).cached_tokens == 64
    assert list(second.result(0).output_token_ids) == expected_tokens([*so_far, 1, 2, 3], 4)


@pytest.mark.parametrize("length", [16, 32, 33])
def test_a_fully_cached_prompt_computes_its_last_token_only(length: int) -> None:
    bench = Bench()
    prompt = list(range(length))
    for expected_work in (length, 1):
        before = bench.runner.computed
        handle = bench.submit(prompt, 1)
        bench.run()
        assert bench.runner.computed - before == expected_work
        assert list(handle.result(0).output_token_ids) == expected_tokens(prompt, 1)


def test_two_fully_cached_prompts_at_once_copy_on_write() -> None:
    """The recompute of the last token goes into a block the other one reads."""
    bench = Bench(max_batch_tokens=64)
    prompt = list(range(32))
    bench.submit(prompt, 1)
    bench.run()
    long_runner = bench.submit([*prompt, 9, 9], 30)
    bench.step()
    again = bench.submit(prompt, 5)
    bench.run()
    assert bench.manager.cow_copies == 1
    assert list(again.result(0).output_token_ids) == expected_tokens(prompt, 5)
    assert list(long_runner.result(0).output_token_ids) == expected_tokens([*prompt, 9, 9], 30)


def test_a_copy_that_fails_ends_the_requests_of_its_step_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(max_batch_tokens=64)
    prompt = list(range(32))
    bench.submit(prompt, 1)
    bench.run()
    running = bench.submit([*prompt, 9, 9], 30)
    bench.step()
    copying = bench.submit(prompt, 5)

    def fail(ops: object) -> None:
        raise RuntimeError("the copy failed")

    with monkeypatch.context() as patch:
        patch.setattr(bench.parts.backend, "copy_blocks", fail)
        bench.step()
    later = bench.submit(prompt, 5)
    bench.run()
    for handle in (running, copying):
        with pytest.raises(RuntimeError, match="the copy failed"):
            handle.result(0)
    assert list(later.result(0).output_token_ids) == expected_tokens(prompt, 5)


def test_baseline_reads_nothing_and_gives_the_same() -> None:
    bench = Bench()
    prompt = list(range(50))
    warm = [bench.submit(prompt, 6)]
    bench.run()
    baseline = bench.submit(prompt, 6, GenerationMode.BASELINE)
    bench.run()
    assert baseline.result(0).cached_tokens == 0
    assert baseline.result(0).mode is GenerationMode.BASELINE
    assert baseline.result(0).output_token_ids == warm[0].result(0).output_token_ids


@pytest.mark.parametrize("budget", [1, 2, 8])
def test_prefill_and_decode_both_advance_under_any_budget(budget: int) -> None:
    """Decodes never starve a prefill and a prefill never starves decodes."""
    bench = Bench(max_batch_tokens=budget)
    decoding = [bench.submit([i] * 3, 60) for i in range(3)]
    while any(s.num_pending != 1 or s.num_tokens < 5 for s in bench.scheduler.running) or bench.scheduler.waiting:
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
    assert all(new > old for new, old in zip(after, before, strict=True)) or all(h.done for h in decoding)
    bench.run()


def test_decodes_take_turns_when_the_budget_is_smaller_than_their_number() -> None:
    bench = Bench(max_batch_tokens=2)
    for i in range(5):
        bench.submit([i], 40)
    for _ in range(60):
        bench.step()
    lengths = [s.num_tokens for s in bench.scheduler.running]
    assert len(lengths) == 5
    assert max(lengths) - min(lengths) <= 1
    bench.run()


def test_prefills_share_the_budget_so_a_short_one_is_not_stuck_behind_a_long_one() -> None:
    bench = Bench(max_batch_tokens=32)
    bench.submit(list(range(250)), 1)
    short = bench.submit([7] * 30, 1)
    for _ in range(2):
        bench.step()
    assert short.done
    bench.run()


def test_equal_prompts_that_come_together_are_done_one_after_another() -> None:
    bench = Bench(80, max_num_seqs=16, max_batch_tokens=64)
    handles = [bench.submit([number] * 60, 1) for number in range(16)]
    done = []
    while not all(handle.done for handle in handles):
        bench.step()
        done.append(sum(handle.done for handle in handles))
    assert len(done) == 15, "the budget is used to the last token"
    assert done.index(next(count for count in done if count >= 8)) < 10, done
    assert done[4] >= 3, done


def test_a_long_prompt_gets_on_though_short_ones_keep_coming() -> None:
    bench = Bench(80, max_num_seqs=16, max_batch_tokens=64)
    long = bench.submit(list(range(240)), 1)
    steps = 0
    while not long.done:
        for other in range(4):  # each step brings as much as it can compute
            bench.submit([steps, other] * 8, 1)
        bench.step()
        steps += 1
        assert steps <= 20
    bench.run()


def test_a_large_request_is_served_though_small_ones_keep_coming() -> None:
    bench = Bench(8, max_num_seqs=4, max_batch_tokens=64)
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


def test_preemption_takes_the_latest_arrival_and_keeps_its_tokens() -> None:
    bench = Bench(6, max_num_seqs=2)
    first, second = bench.submit([1] * 30, 50), bench.submit([2] * 30, 50)
    bench.run()
    assert first.result(0).preemptions == 0
    assert second.result(0).preemptions > 0
    assert (bench.manager.hit_tokens, bench.manager.miss_tokens) == (0, 60), "its own blocks are no hits"
    for token_id, handle in ((1, first), (2, second)):
        assert list(handle.result(0).output_token_ids) == expected_tokens([token_id] * 30, 50)


def test_a_request_that_fills_the_whole_pool_runs() -> None:
    bench = Bench(4)
    prompt = list(range(64))
    for _ in range(2):  # the second time its prompt is cached and every block of the pool is its own
        handle = bench.submit(prompt, 1)
        bench.run()
        assert list(handle.result(0).output_token_ids) == expected_tokens(prompt, 1)
    with pytest.raises(CapacityError, match=r"needs 5 blocks .* the pool has 4"):
        bench.submit(prompt, 2)


def test_steps_are_not_wasted() -> None:
    """A batch of equal requests decodes in lockstep: as many steps as the longest needs."""
    bench = Bench(max_batch_tokens=64)
    for i in range(8):
        bench.submit([i], 20)
    assert bench.run() == 20
    assert set(bench.runner.batches) == {8}
