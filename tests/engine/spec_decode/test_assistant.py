"""An assistant as the drafter over the fake runner, whose states name the token that they belong
to.
"""

import pytest

from helpers.engine.draft_models import (
    ASSISTANT,
    assert_all_accepted,
    draft_runner,
    drafting_bench,
    models_of,
    prompt,
)
from helpers.engine.hand_io_thread import DictTier

DRAFTS = {"max_draft_tokens": 5, "always_drafts": True}


def assert_all_seen_and_accepted(bench):
    assert_all_accepted(bench, least=21)
    assert draft_runner(bench).unknown == 0


@pytest.mark.parametrize("budget", [3, 16, 64])
def test_every_draft_sees_the_computed_tokens_and_the_last_state(kind, budget):
    bench = drafting_bench(kind, ASSISTANT, max_batch_tokens=budget)
    result = bench.ask(prompt(1, 70), 60, terms=DRAFTS)
    assert result.drafts["mtp"].drafted_tokens == result.drafted_tokens
    assert_all_seen_and_accepted(bench)
    assert not any(bench.manager.drafted.filled)


def test_drafts_follow_a_cached_prefix_at_once(kind):
    bench = drafting_bench(kind, ASSISTANT)
    shared = prompt(1, 64)
    bench.ask(shared, 1)  # without drafts
    result = bench.ask([*shared, 2], 40, terms=DRAFTS)
    assert result.cached_tokens == 64
    assert result.accepted_tokens > 20
    assert_all_seen_and_accepted(bench)


def test_drafts_follow_blocks_restored_from_a_tier(kind):
    tier = DictTier()
    for _ in range(2):
        bench = drafting_bench(kind, ASSISTANT, tiers=[tier])
        result = bench.ask(prompt(1, 70), 40, terms=DRAFTS)
        assert_all_seen_and_accepted(bench)
        num_stored = len(tier.blocks)
    assert result.hit_tokens["near" if "near" in result.hit_tokens else tier.name] > 0
    plain = DictTier()
    bench = kind.bench(tiers=[plain])
    bench.ask(prompt(1, 70), 40)
    bench.ask(prompt(1, 70), 40)
    assert num_stored == len(plain.blocks)


def test_an_error_of_the_assistant_turns_it_off(kind):
    bench = drafting_bench(kind, ASSISTANT)
    draft_runner(bench)._logits = None
    bench.ask(prompt(1, 30), 20, terms=DRAFTS)
    assert not models_of(bench).is_on
    assert bench.scheduler.speculation.num_drafted == 0
