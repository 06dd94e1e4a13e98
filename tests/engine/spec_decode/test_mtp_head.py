"""An MTP head as the drafter over the fake runner, whose states name the token that they belong to."""

import numpy as np
import pytest

from helpers.engine.draft_models import (
    ASSISTANT,
    MTP,
    assert_all_accepted,
    draft_runner,
    drafting_bench,
    models_of,
    prompt,
)
from helpers.engine.model_kinds import ModelKind
from kvboost_edge.config import GenerationMode
from kvboost_edge.engine.spec_decode.draft_chances import DraftChances
from kvboost_edge.engine.spec_decode.pass_costs import PassCosts

DRAFTS = {"max_draft_tokens": 4, "always_drafts": True}
SIZE = 16


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 40, 150])
@pytest.mark.parametrize("closes_blocks", [False, True])
@pytest.mark.some(3)
def test_a_perfect_head_is_always_accepted(kind, length, closes_blocks):
    bench = drafting_bench(kind, MTP, closes_blocks=closes_blocks)
    result = bench.ask(prompt(length, length), 60, terms=DRAFTS)
    assert_all_accepted(bench)
    assert result.drafts[MTP].drafted_tokens == result.drafted_tokens > 20
    assert draft_runner(bench).unknown == 1  # before the first token
    assert bench.manager.free_block_count == 64


def test_states_of_rejected_tokens_are_dropped(kind, monkeypatch):
    monkeypatch.setattr(DraftChances, "learn", lambda *outcome: None)  # so that drafts stay long
    bench = drafting_bench(kind, MTP)
    draft_runner(bench).kind = "one off"
    result = bench.ask(prompt(4, 30), 60, terms=DRAFTS)
    assert models_of(bench).is_on
    assert 10 < result.accepted_tokens < result.drafted_tokens
    assert draft_runner(bench).unknown == 1


@pytest.mark.parametrize("budget", [3, 16, 50])
def test_the_prompt_is_filled_in_the_steps_that_compute_it(kind, budget):
    bench = drafting_bench(kind, MTP, max_batch_tokens=budget)
    bench.ask(prompt(1, 130), 30, terms=DRAFTS)
    assert_all_accepted(bench)
    assert draft_runner(bench).unknown == 1


@pytest.mark.parametrize("length", [15, 16, 17, 32, 40])
def test_a_shared_prefix_is_not_recomputed_by_the_head(kind, length):
    bench = drafting_bench(kind, MTP)
    shared = prompt(1, length)
    bench.ask([*shared, 1], 10, terms=DRAFTS)
    runner = draft_runner(bench)
    before = runner.computed
    result = bench.ask([*shared, 2], 20, terms=DRAFTS)
    assert_all_accepted(bench)
    cached = result.cached_tokens
    assert cached == length // SIZE * SIZE
    assert runner.unknown == 2  # the state before the first computed token is not stored
    drafted = result.drafted_tokens
    assert runner.computed - before <= length + 20 - cached + drafted


def test_a_prefix_without_head_kv_is_filled_on_demand(kind):
    bench = drafting_bench(kind, MTP)
    shared = prompt(1, 128)
    bench.ask(shared, 1)  # without drafts
    result = bench.ask([*shared, 2], 40, terms=DRAFTS)
    assert result.cached_tokens > 0
    assert result.drafted_tokens > 20
    assert result.accepted_tokens < 3  # it does not see the prefix and is right only by chance
    assert draft_runner(bench).computed < 41 + result.drafted_tokens + SIZE


@pytest.mark.parametrize("answer", [20, 29, 44])
def test_the_head_sees_the_turns_before_this_one(kind, answer):
    """The KV of the last tokens of a request is missing when it ends."""
    bench = drafting_bench(kind, MTP)
    tokens = prompt(answer, 70)
    for _ in range(3):
        result = bench.ask(tokens, answer, terms=DRAFTS)
        assert_all_accepted(bench)
        tokens += [*result.output_token_ids, 7, 8, 9]
    assert result.cached_tokens > 70


@pytest.mark.parametrize("answer", [20, 25])
def test_the_head_sees_a_turn_whose_states_waited_until_its_end(kind, answer, monkeypatch):
    bench = drafting_bench(kind, MTP)
    tokens = prompt(answer, 70)
    with monkeypatch.context() as patch:
        patch.setattr(models_of(bench), "propose", lambda *args: None)
        result = bench.ask(tokens, answer, terms=DRAFTS)
    result = bench.ask([*tokens, *result.output_token_ids, 7, 8, 9], 40, terms=DRAFTS)
    assert result.cached_tokens > 70
    assert result.drafted_tokens > 20
    assert_all_accepted(bench)


def test_requests_that_lack_the_same_block_fill_all_others(kind, monkeypatch):
    bench = drafting_bench(kind, MTP, max_batch_tokens=256)
    tokens = prompt(5, 70)
    with monkeypatch.context() as patch:
        patch.setattr(models_of(bench), "propose", lambda *args: None)
        tokens += bench.ask(tokens, 30, terms=DRAFTS).output_token_ids
    handles = [bench.submit([*tokens, *prompt(seed, 120)], 30, terms=DRAFTS) for seed in range(2)]
    bench.run()
    assert all(bench.answer(handle).drafted_tokens > 15 for handle in handles)
    assert_all_accepted(bench)


def test_head_kv_of_recomputed_blocks_is_kept():
    """A block that was computed without the head is recomputed, because its state is missing."""
    bench = drafting_bench(ModelKind.HYBRID, MTP)
    shared = prompt(1, 160)
    bench.ask([*shared, *prompt(2, 50)], 1)  # without drafts
    for seed in range(2):
        result = bench.ask([*shared, *prompt(seed, 30)], 40, terms=DRAFTS)
        assert result.drafted_tokens > 20
        assert_all_accepted(bench)


def test_kv_that_a_tier_is_loading_is_not_computed(kind):
    bench = drafting_bench(kind, MTP)
    tokens = prompt(1, 100)
    manager, model = bench.manager, models_of(bench).model
    table = manager.open_table(tokens, b"")
    manager.extend(table, 100)
    model.note_filled(table, 0, 80)
    states = model.new_hidden_states()
    states.keep(table, 96, np.ones((4, 2), np.float32), 4)
    assert model.missing(table, 100, states) == [(80, 100)]
    manager.drafted.arriving[table.block_ids[5]] = None
    assert model.missing(table, 100, states) == [(96, 100)]


FILLS = {"prefill_only": True, "fills_drafter": True}


@pytest.mark.parametrize("length", [20, 128, 150])
@pytest.mark.parametrize("budget", [16, 50])
def test_the_head_fills_prompts_that_are_computed_in_advance(kind, length, budget):
    bench = drafting_bench(kind, MTP, max_batch_tokens=budget)
    shared = prompt(length, length)
    bench.submit(shared, 0, terms=FILLS)
    bench.run()
    assert draft_runner(bench).computed == length
    assert bench.scheduler.speculation.num_drafted == 0
    result = bench.ask([*shared, 1, 2], 40, terms=DRAFTS)
    assert result.cached_tokens == length // SIZE * SIZE
    assert_all_accepted(bench)


@pytest.mark.parametrize(
    ("answers", "is_filled"), [([], True), ([150] * 3, True), ([5] * 3, False), ([0] * 3, True)]
)
def test_the_head_fills_prompts_if_answers_are_long_enough(kind, answers, is_filled):
    """The maximum length of an answer says little about its length. A pass takes a second, so
    filling pays from about 110 tokens on.
    """
    terms = {"max_draft_tokens": 4}
    bench = drafting_bench(kind, MTP)
    models = models_of(bench)
    for costs in (bench.scheduler.speculation.costs, *models._costs):
        PassCosts.observe(costs, 1, 0.0, 0.2 if costs in models._costs else 1.0)
    models._fill_seconds_at = lambda depth: 0.3
    for number, length in enumerate(answers):
        bench.submit(prompt(number, 10), length, terms=terms if length else FILLS)
        bench.run()
    before = draft_runner(bench).computed
    handle = bench.submit(prompt(9, 150), 200, terms=terms)
    while bench.core._live[handle.index].num_computed_tokens < 150:
        bench.step()
    filled = draft_runner(bench).computed - before
    assert filled >= 128 if is_filled else filled <= 40
    bench.run()
    bench.answer(handle)


@pytest.mark.parametrize(
    ("drafts", "mode", "terms"),
    [
        (MTP, GenerationMode.PREFIX_CACHE, FILLS | {"fills_drafter": False}),
        (MTP, GenerationMode.BASELINE, FILLS),
        (MTP, GenerationMode.PREFIX_CACHE, FILLS | {"prefill_only": False, "logits_start": 0}),
        (ASSISTANT, GenerationMode.PREFIX_CACHE, FILLS),
        ("right", GenerationMode.PREFIX_CACHE, FILLS),
    ],
)
def test_kv_that_no_later_request_needs_is_not_filled(kind, drafts, mode, terms):
    bench = drafting_bench(kind, drafts)
    bench.submit(prompt(1, 150), 0, mode, terms=terms)
    bench.run()
    assert draft_runner(bench).computed == 0


def test_states_wait_while_nothing_is_drafted(kind, monkeypatch):
    """The head processes waiting states in groups, and later drafts lack none of them."""
    bench = drafting_bench(kind, MTP)
    models = models_of(bench)
    propose = models.propose
    monkeypatch.setattr(models, "propose", lambda *args: None)
    handle = bench.submit(prompt(3, 20), 120, terms=DRAFTS)
    passes = []
    draft_runner(bench).on_forward = lambda batch: passes.append(len(batch.token_ids))
    for _ in range(80):
        bench.step()
    assert 1 <= len(passes) <= 4
    monkeypatch.setattr(models, "propose", propose)
    bench.run()
    bench.answer(handle)
    assert_all_accepted(bench)
    assert draft_runner(bench).unknown == 1


def test_auto_fills_a_prompt_only_for_answers_that_are_long_enough(kind):
    terms = {"max_draft_tokens": 4}
    bench = drafting_bench(kind, MTP)
    speculation = bench.scheduler.speculation
    speculation.costs._num_observed = 1  # typical times
    models_of(bench).costs.guess(0.2)
    short = bench.ask(prompt(1, 240), 3, terms=terms)
    assert (short.drafted_tokens, draft_runner(bench).computed) == (0, 0)
    bench.ask(prompt(2, 240), 140, terms=terms)
    assert_all_accepted(bench)
