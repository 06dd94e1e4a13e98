"""An assistant as the drafter over the fake runner, whose states name the token that they belong
to.
"""

import random

import pytest

from helpers.engine.draft_models import ASSISTANT, draft_runner, drafting_bench, models_of
from helpers.engine.fake_runner import VOCAB_SIZE
from helpers.engine.hand_io_thread import DictTier

DRAFTS = {"max_draft_tokens": 5, "always_drafts": True}


def prompt(seed, length):
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE - 4) for _ in range(length)]


def assert_all_accepted(bench):
    speculation = bench.scheduler.speculation
    assert models_of(bench).is_on
    assert speculation.num_accepted == speculation.num_drafted > 20
    assert draft_runner(bench).unknown == 0


@pytest.mark.parametrize("budget", [3, 16, 64])
def test_every_draft_sees_the_computed_tokens_and_the_last_state(kind, budget):
    bench = drafting_bench(kind, ASSISTANT, max_batch_tokens=budget)
    result = bench.ask(prompt(1, 70), 60, terms=DRAFTS)
    assert result.drafts["mtp"].drafted_tokens == result.drafted_tokens
    assert_all_accepted(bench)
    assert not any(bench.manager.drafted.filled)


def test_drafts_follow_a_cached_prefix_at_once(kind):
    bench = drafting_bench(kind, ASSISTANT)
    shared = prompt(1, 64)
    bench.ask(shared, 1)  # without drafts
    result = bench.ask([*shared, 2], 40, terms=DRAFTS)
    assert result.cached_tokens == 64
    assert result.accepted_tokens > 20
    assert_all_accepted(bench)


def test_drafts_follow_blocks_restored_from_a_tier(kind):
    tier = DictTier()
    for _ in range(2):
        bench = drafting_bench(kind, ASSISTANT, tiers=[tier])
        result = bench.ask(prompt(1, 70), 40, terms=DRAFTS)
        assert_all_accepted(bench)
        num_stored = len(tier.blocks)
    assert result.hit_tokens["near" if "near" in result.hit_tokens else tier.name] > 0
    plain = DictTier()
    bench = kind.bench(tiers=[plain])
    bench.ask(prompt(1, 70), 40)
    bench.ask(prompt(1, 70), 40)
    assert num_stored == len(plain.blocks)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.some(3)
def test_concurrent_requests_in_a_small_pool(kind, seed):
    rng = random.Random(seed)
    bench = drafting_bench(
        kind,
        ASSISTANT,
        rng.choice((8, 12, 64)),
        max_num_seqs=rng.choice((2, 5)),
        max_batch_tokens=rng.choice((3, 17, 64)),
    )
    handles = []
    for number in range(12):
        terms = {"max_draft_tokens": rng.choice((0, 1, 5, 31)), "always_drafts": rng.random() < 0.8}
        token_ids = prompt(number % 3, 40)[: rng.randrange(1, 41)]
        handles.append(
            bench.submit(token_ids, rng.randrange(1, 60), terms=terms, tenant="ab"[number % 2])
        )
        if rng.random() < 0.2:
            handles[-1].cancel()
        for _ in range(rng.randrange(12)):
            bench.step()
    bench.run()
    for handle in handles:
        bench.answer(handle)
    assert bench.manager.free_block_count == bench.manager.num_blocks
    assert_all_accepted(bench)


def test_an_error_of_the_assistant_turns_it_off(kind):
    bench = drafting_bench(kind, ASSISTANT)
    draft_runner(bench)._logits = None
    bench.ask(prompt(1, 30), 20, terms=DRAFTS)
    assert not models_of(bench).is_on
    assert bench.scheduler.speculation.num_drafted == 0
