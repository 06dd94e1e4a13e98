"""Sequences with states: cold, from a snapshot, chunked, batched, preempted, guessed ahead and behind failed passes the
tokens are the same."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from helpers.engine.fake_hybrid import HybridBackend, HybridRunner, expected_hybrid, hybrid_parts
from helpers.engine.fake_runner import EOS_ID, ROOT, VOCAB_SIZE, Bench
from helpers.engine.hand_mover import DictTier
from helpers.engine.hostile_drafts import KINDS, hostile
from kvboost_edge.config import GenerationMode
from kvboost_edge.engine.handle import RequestHandle
from kvboost_edge.errors import CacheCorruption, KVBoostError
from kvboost_edge.kvcache.content import ContentKey
from kvboost_edge.runners.base import ForwardBatch

EOS = frozenset({EOS_ID})


class PassFailed(Exception):
    """A forward pass failed."""


def bench_of(
    num_blocks: int = 64,
    num_slots: int = 40,
    *,
    interval: int = 1024,
    every_block: bool = False,
    max_num_seqs: int = 16,
    max_batch_tokens: int = 64,
    tiers: Sequence[DictTier] = (),
) -> Bench:
    """An engine by hand around a `HybridRunner`, debug checks on."""
    parts = hybrid_parts(num_blocks, num_slots, interval=interval, every_block=every_block)
    return Bench(num_blocks, max_num_seqs=max_num_seqs, max_batch_tokens=max_batch_tokens, parts=parts, tiers=tiers)


def random_prompt(rng: random.Random, stems: list[list[int]], known: list[list[int]]) -> list[int]:
    """A stem and something of its own, or a conversation that goes on, or branches off inside its answer."""
    tail = [rng.randrange(256) for _ in range(rng.choice((0, 1, 5, 20)))]
    if known and rng.random() < 0.4:
        text = rng.choice(known)
        return text[: rng.randrange(1, len(text) + 1)][:150] + tail
    return rng.choice(stems)[: rng.choice((16, 48))] + tail


def outcomes(wanted: list[tuple[RequestHandle, list[int]]], seed: int) -> Counter[str]:
    """What became of requests, each of which has the tokens of a single run, or the first of them."""
    found: Counter[str] = Counter()
    for handle, tokens in wanted:
        try:
            result = handle.result(0)
        except PassFailed:
            found["failed"] += 1
            continue
        output = list(result.output_token_ids)
        is_whole = result.finish_reason != "cancelled"
        assert output == (tokens if is_whole else tokens[: len(output)]), f"seed {seed}, request {handle.index}"
        found += Counter({tier: tokens for tier, tokens in result.hit_tokens.items() if tokens})
        found["missing states"] += result.miss_reason == "state"
        assert (result.matched_tokens > result.cached_tokens) == (result.miss_reason == "state")
    return found


def run_schedule(seed: int) -> Counter[str]:
    """One random schedule; what happened in it, so that the caller sees that everything did."""
    rng = random.Random(seed)
    max_num_seqs = rng.choice((1, 2, 4, 8))
    near, far = DictTier("near", losses=0.1, seed=seed), DictTier("far", knows=False, losses=0.1, seed=seed)
    bench = bench_of(
        rng.choice((6, 7, 8, 40)),
        max_num_seqs + rng.choice((1, 2, 5, 40)),
        interval=rng.choice((16, 32, 1024)),
        every_block=rng.random() < 0.25,
        max_num_seqs=max_num_seqs,
        max_batch_tokens=rng.choice((1, 2, 7, 16, 33, 64)),
        tiers=([], [near], [far], [near, far])[seed // 2 % 4],
    )
    runner = bench.runner
    assert isinstance(runner, HybridRunner)

    def fail_accepting() -> None:
        if rng.random() < 0.05:
            raise PassFailed

    def fail_sometimes(batch: ForwardBatch) -> None:
        if rng.random() < 0.02:
            runner.on_forward = None
            runner.forward(batch)  # what it writes before the error must not be found by anybody
            runner.on_forward = fail_sometimes
            raise PassFailed

    stems = [[rng.randrange(256) for _ in range(rng.choice((15, 16, 17, 32, 48)))] for _ in range(2)]
    wanted: list[tuple[RequestHandle, list[int]]] = []
    cancelled: list[RequestHandle] = []
    known: list[list[int]] = []
    pending, idle = rng.randrange(3, 12), 0
    if seed % 4 == 0:
        runner.on_forward, runner.on_accept = fail_sometimes, fail_accepting
    bench.scheduler.speculation._closes_blocks = rng.random() < 0.3
    bench.scheduler.speculation.drafter = hostile(  # type: ignore[method-assign]
        lambda request: [*request.prompt_ids, *expected_hybrid(request.prompt_ids, 50)],
        lambda request: KINDS[request.index % len(KINDS)],
        VOCAB_SIZE,
    )
    while pending or bench.scheduler.has_work or idle < 1:
        if pending and rng.random() < 0.4:
            pending -= 1
            prompt, count = random_prompt(rng, stems, known), rng.choice((1, 3, 30, 50))
            if len(prompt) + count - 1 > bench.manager.num_blocks * 16:
                continue
            hints = tuple(rng.choices(range(len(prompt) + 5), k=2))
            mode = rng.choice((*[GenerationMode.PREFIX_CACHE] * 4, GenerationMode.BASELINE))
            drafts = {"max_draft_tokens": rng.choice((0, 3, 31)), "always_drafts": rng.random() < 0.7}
            handle = bench.submit(prompt, count, mode, EOS, terms={"snapshot_hints": hints, **drafts})
            wanted.append((handle, expected_hybrid(prompt, count, EOS)))
            known.append(prompt + wanted[-1][1])
            if rng.random() < 0.15:
                cancelled.append(handle)
        if cancelled and rng.random() < 0.2:
            rng.choice(cancelled).cancel()
        if rng.random() < 0.03:
            bench.manager.reset()
        if rng.random() < 0.5:
            bench.mover.pump(rng.choice((1, 2)))
        idle = 0 if bench.step() or bench.mover.pump(1) else idle + 1
    bench.run()
    found = outcomes(wanted, seed)
    states = bench.manager.states
    assert states is not None
    assert bench.manager.used_block_count == 0
    bench.manager.check_invariants([])
    assert states.slots.num_used == sum(states.slots.counts().values())
    speculation = bench.scheduler.speculation
    assert runner.taken_in == speculation.num_accepted or seed % 4 == 0
    found.update(preemptions=bench.scheduler.num_preemptions, replayed=states.num_replayed, saved=runner.saved)
    found.update(taken_in=runner.taken_in, wrong=speculation.num_drafted - speculation.num_accepted)
    return found


def test_random_schedules_equal_single_runs(scale: Callable[[int, int], int]) -> None:
    """The same tokens cold, from any snapshot, in any chunks and batch, preempted, behind failed passes."""
    found = sum((run_schedule(seed) for seed in range(scale(150, 3000))), Counter())
    assert found["preemptions"] > 20
    assert found["pool"] > 2000
    assert found["near"] > 100
    assert found["far"] > 100
    assert found["missing states"] > 10
    assert found["replayed"] > 400
    assert found["saved"] > 400
    assert found["failed"] > 5
    assert found["taken_in"] > 400
    assert found["wrong"] > 400


def computed_by(
    bench: Bench, prompt: list[int], max_new_tokens: int = 1, **options: object
) -> tuple[int, RequestHandle]:
    """Run one request alone, check its tokens; how many tokens that computed."""
    before = bench.runner.computed
    handle = bench.submit(prompt, max_new_tokens, **options)
    bench.run()
    assert list(handle.result(0).output_token_ids) == expected_hybrid(prompt, max_new_tokens)
    return bench.runner.computed - before, handle


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 150])
def test_the_same_prompt_again_computes_what_is_behind_the_block_before_its_last_token(length: int) -> None:
    bench = bench_of()
    prompt = list(range(length))
    assert computed_by(bench, prompt)[0] == length
    again, handle = computed_by(bench, prompt)
    assert handle.result(0).cached_tokens == (length - 1) // 16 * 16
    assert again == length - (length - 1) // 16 * 16


def test_the_next_turn_goes_on_from_the_end_of_the_answer() -> None:
    bench = bench_of()
    prompt = list(range(30))
    _, turn = computed_by(bench, prompt, 40)
    following = [*prompt, *turn.result(0).output_token_ids, 7, 8, 9]
    computed, second = computed_by(bench, following, 4)
    assert second.result(0).cached_tokens == 64  # 69 tokens were computed, four full blocks
    assert computed == 73 - 64 + 3
    assert bench.manager.states is not None
    assert bench.manager.states.slots.counts()["answer"] <= 2, "an answer leaves one snapshot, not one for each block"


def test_a_prompt_that_branches_off_repairs_the_junction_at_once() -> None:
    bench = bench_of()
    stem = list(range(100, 150))
    computed_by(bench, [*stem, 1, 2, 3])
    computed, second = computed_by(bench, [*stem[:40], 4, 5, 6])
    result = second.result(0)
    assert (result.cached_tokens, result.matched_tokens, result.miss_reason) == (0, 32, "state")
    assert computed == 43
    computed, third = computed_by(bench, [*stem[:40], 9, 9, 9, 9])
    assert (third.result(0).cached_tokens, third.result(0).miss_reason) == (32, "tail")
    assert computed == 12


def test_a_hint_lets_the_first_prompt_that_branches_off_there_hit() -> None:
    bench = bench_of()
    stem = list(range(100, 150))
    computed_by(bench, [*stem, 1, 2, 3], terms={"snapshot_hints": (40, 10_000)})
    computed, second = computed_by(bench, [*stem[:40], 4, 5, 6])
    assert second.result(0).cached_tokens == 32
    assert computed == 11


def test_who_waits_for_a_prefix_in_flight_finds_its_state_there() -> None:
    bench = bench_of(max_batch_tokens=32)
    prefix = list(range(160))
    handles = [bench.submit([*prefix, 200 + i], 1) for i in range(8)]
    bench.run()
    assert bench.runner.computed == len(prefix) + 8
    assert [handle.result(0).cached_tokens for handle in handles] == [0] + [160] * 7
    shorter = [bench.submit([*prefix[:100], 240 + i, *prefix], 1) for i in range(2)]
    other = [bench.submit([*range(50, 150), 240 + i, *prefix], 1) for i in range(3)]
    bench.run()
    assert [handle.result(0).cached_tokens for handle in shorter] == [0, 96]
    assert [handle.result(0).cached_tokens for handle in other] == [0, 96, 96]


def test_nobody_goes_on_from_another_tenants_state() -> None:
    """Not one after the other, not at once, and not where slots are so few that the one's are taken for the other."""
    prompt = list(range(50))
    for num_slots in (40, 4):
        bench = bench_of(num_slots=num_slots, max_num_seqs=2)
        for tenant in ("one", "two", "one", "two"):
            computed, handle = computed_by(bench, prompt, 3, tenant=tenant)
            assert computed == (52 if handle.index <= 2 else 4), f"request {handle.index}, {num_slots} slots"
        handles = [bench.submit([*prompt[:40], 7], 3, tenant=tenant) for tenant in ("one", "three", "two", "")]
        bench.run()
        assert [handle.result(0).matched_tokens for handle in handles] == [32, 0, 32, 0]
        assert [handle.result(0).cached_tokens for handle in handles] == [0] * 4
        for handle in handles:
            assert list(handle.result(0).output_token_ids) == expected_hybrid([*prompt[:40], 7], 3)


def test_a_backbone_serves_a_prompt_that_nobody_foresaw() -> None:
    bench = bench_of(interval=64)
    text = [i % 256 for i in range(300)]
    computed_by(bench, text)
    _, other = computed_by(bench, [*text[:150], 3, 3, 3])
    assert (other.result(0).cached_tokens, other.result(0).matched_tokens) == (128, 144)


def test_small_states_are_kept_behind_every_block() -> None:
    bench = bench_of(every_block=True)
    text = [i % 256 for i in range(300)]
    computed_by(bench, text)
    _, other = computed_by(bench, [*text[:150], 3, 3, 3])
    assert (other.result(0).cached_tokens, other.result(0).miss_reason) == (144, "tail")


def test_a_preempted_sequence_goes_on_from_its_deepest_snapshot() -> None:
    bench = bench_of(6, max_num_seqs=2)
    handles = [bench.submit([number] * 30, 50) for number in (1, 2)]
    bench.run()
    assert handles[1].result(0).preemptions > 0
    for number, handle in zip((1, 2), handles, strict=True):
        assert list(handle.result(0).output_token_ids) == expected_hybrid([number] * 30, 50)


def test_a_slot_that_nobody_can_have_keeps_a_request_waiting_and_no_longer() -> None:
    bench = bench_of(64, 2, max_num_seqs=8)
    handles = [bench.submit([number] * 20, 30) for number in range(4)]
    bench.step()
    assert len(bench.scheduler.running) == 2
    bench.run()
    for number, handle in enumerate(handles):
        assert list(handle.result(0).output_token_ids) == expected_hybrid([number] * 20, 30)


def test_the_state_of_a_request_that_fails_is_found_by_nobody() -> None:
    bench = bench_of()
    bench.runner.nan_for = {9}
    prompt = [*range(40), 9]
    with pytest.raises(KVBoostError, match="NaN"):
        computed_by(bench, prompt)
    assert bench.manager.states is not None
    assert bench.manager.states.slots.num_used == 0
    bench.runner.nan_for = set()
    assert computed_by(bench, prompt)[0] == 41


def test_a_runner_that_writes_into_a_snapshot_is_found_out() -> None:
    """By the checks of a bench, after the pass that did."""
    bench, prompt = bench_of(), list(range(50))
    computed_by(bench, prompt)
    backend, states = bench.parts.backend, bench.manager.states
    assert isinstance(backend, HybridBackend)
    assert states is not None
    ((block_id, slot),) = states.slots.snapshots().items()
    bench.runner.on_forward = lambda batch: backend.write_state(slot, (1, 1))
    bench.submit([7, 8, 9], 1)
    with pytest.raises(CacheCorruption, match=f"behind block {block_id}, in slot {slot}, was written while it was"):
        bench.run()


def test_a_request_for_logits_and_one_with_logprobs_of_the_prompt_are_exact() -> None:
    bench = bench_of(max_batch_tokens=16)
    prompt = list(range(60))
    computed_by(bench, prompt)
    handle = bench.submit(prompt, 3, prompt_logprobs=0)
    bench.run()
    assert list(handle.result(0).output_token_ids) == expected_hybrid(prompt, 3)
    assert handle.result(0).cached_tokens == 0


def test_a_state_comes_back_with_its_block_from_a_tier() -> None:
    """To another engine: what was computed is loaded, the state behind it too, and nothing is computed again."""
    tier, prompt = DictTier(), list(range(100))
    first = bench_of(tiers=[tier])
    _, cold = computed_by(first, prompt, 20)
    for num_blocks in (64, 8):
        second = bench_of(num_blocks, tiers=[tier])
        computed, restored = computed_by(second, prompt, 20)
        assert restored.result(0).hit_tokens == {"pool": 0, "shelf": 96}
        assert computed == 4 + 19
        assert restored.result(0).output_token_ids == cold.result(0).output_token_ids
        following = [*prompt, *cold.result(0).output_token_ids, 1, 2]
        _, turn = computed_by(bench_of(tiers=[tier]), following)
        assert turn.result(0).hit_tokens == {"pool": 0, "shelf": 112}


def test_a_state_that_the_tier_lost_is_computed_again_and_kept() -> None:
    tier, prompt = DictTier(), list(range(100))
    computed_by(bench_of(tiers=[tier]), prompt)
    (lost,) = [name for name in tier.blocks if name not in {address.prefix_hash for address in keys_of(prompt)}]
    tier.drop([lost])
    bench = bench_of(tiers=[tier])
    computed, handle = computed_by(bench, prompt)
    assert (computed, handle.result(0).cached_tokens) == (100, 0)
    assert lost in tier.blocks


def test_where_only_the_state_was_dropped_it_comes_from_the_tier_alone() -> None:
    tier, prompt = DictTier(), list(range(100))
    bench = bench_of(tiers=[tier])
    computed_by(bench, prompt)
    assert bench.manager.states is not None
    for block_id in bench.manager.states.slots.snapshots():
        bench.manager.states.slots.drop(block_id)
    tier.num_read = 0
    computed, handle = computed_by(bench, prompt)
    assert (computed, handle.result(0).cached_tokens, tier.num_read) == (4, 96, 1)


def keys_of(prompt: list[int]) -> list[ContentKey]:
    """The blocks of a prompt, by content."""
    return list(bench_of().manager.content.keys_after(prompt, ROOT).keys)
