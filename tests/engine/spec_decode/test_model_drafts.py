"""A draft model changes the time of an answer, never its tokens.

Draft models of every kind run over the fake runner, whose next token is a hash of all tokens that
it reads back. The right draft model reads its own pool, so a missing or stale token costs accepted
tokens. If all are accepted, all its KV is right.
"""

import logging
import random

import numpy as np
import pytest

from helpers.engine.draft_models import (
    ASSISTANT,
    DRAFT_KINDS,
    MTP,
    assert_all_accepted,
    draft_runner,
    drafting_bench,
    fake_drafter,
    models_of,
    prompt,
    with_lookup,
)
from helpers.engine.fake_runner import POISON, VOCAB_SIZE, Bench
from helpers.engine.model_kinds import PLAIN
from kvboost_edge.config import GenerationMode, RecomputeStrategy
from kvboost_edge.engine.spec_decode import model_drafts
from kvboost_edge.engine.spec_decode.draft_lengths import StepCosts
from kvboost_edge.engine.spec_decode.draft_model import DraftRows
from kvboost_edge.engine.spec_decode.model_drafts import ModelDrafts
from kvboost_edge.reuse.recompute import Repair
from kvboost_edge.runners.base import PassAbandoned

DRAFTS = {"max_draft_tokens": 4, "always_drafts": True}
SIZE = 16


@pytest.mark.parametrize("drafts", DRAFT_KINDS)
@pytest.mark.parametrize("closes_blocks", [False, True])
@pytest.mark.some(3)
def test_answers_do_not_depend_on_the_draft_model(kind, drafts, closes_blocks):
    for length in (1, 14, 15, 16, 17, 40):
        bench = drafting_bench(kind, drafts, closes_blocks=closes_blocks)
        result = bench.ask(prompt(length, length), 60, terms=DRAFTS)
        assert models_of(bench).is_on
        assert result.drafted_tokens > 20
        if drafts in ("right", "wrong"):
            assert result.accepted_tokens == (drafts == "right") * result.drafted_tokens
        assert bench.manager.free_block_count == 64


@pytest.mark.parametrize("drafts", ["wrong", "one off"])
def test_rejected_draft_tokens_leave_no_kv(kind, drafts):
    """The draft model's KV after the last accepted token is missing, although it was computed."""
    bench = drafting_bench(kind, drafts)
    handle = bench.submit(prompt(5, 40), 30, terms=DRAFTS)
    while not handle.done:
        bench.step()
        for sequence in bench.scheduler.running:
            end = SIZE * len(sequence.blocks.block_ids)
            computed = sequence.num_computed_tokens
            missing = models_of(bench).model.missing(sequence.blocks, end)
            after = [max(0, stop - max(first, computed)) for first, stop in missing]
            assert sum(after) == end - computed
    assert 0 <= bench.scheduler.speculation.num_accepted < bench.scheduler.speculation.num_drafted


def test_a_perfect_draft_model_saves_passes_and_computes_each_token_once(kind):
    bench = drafting_bench(kind)
    passes = []
    bench.runner.on_forward = lambda batch: passes.append(len(batch.token_ids))
    bench.ask(prompt(0, 40), 60, terms=DRAFTS)
    assert_all_accepted(bench)
    assert len(passes) < 20
    # Of the 99 tokens before the last one, those after the last draft are not computed.
    assert 95 <= draft_runner(bench).computed <= 99


@pytest.mark.parametrize("length", [15, 16, 17, 32, 40])
def test_a_shared_prefix_is_not_recomputed_by_the_drafter(kind, length):
    bench = drafting_bench(kind)
    shared = prompt(1, length)
    bench.ask([*shared, 1], 10, terms=DRAFTS)
    before = draft_runner(bench).computed
    bench.ask([*shared, 2], 10, terms=DRAFTS)
    assert_all_accepted(bench)
    fresh = length + 10 - length // SIZE * SIZE
    assert draft_runner(bench).computed - before <= fresh


def test_the_next_turn_does_not_recompute_the_answers_draft_kv(kind):
    bench = drafting_bench(kind)
    first = prompt(2, 40)
    answer = bench.ask(first, 50, terms=DRAFTS).output_token_ids
    before = draft_runner(bench).computed
    turn = [*first, *answer, 7, 8]
    bench.ask(turn, 10, terms=DRAFTS)
    assert_all_accepted(bench)
    # The last block before the drafts may lack its last token.
    assert draft_runner(bench).computed - before <= len(turn) % SIZE + SIZE + 10


def test_copy_on_write_copies_draft_kv():
    bench = drafting_bench(PLAIN)
    text = prompt(3, 32)
    bench.ask([*text, 9], 4, terms=DRAFTS)
    running = bench.submit([*text, 5], 30, terms=DRAFTS)
    bench.step()
    before = draft_runner(bench).computed
    again = bench.submit(text, 8, terms=DRAFTS)
    while not again.done:
        bench.step()
    assert bench.manager.cow_copies == 1
    bench.answer(again)
    bench.run()
    bench.answer(running)
    assert_all_accepted(bench)
    assert draft_runner(bench).computed - before <= 8 + 30


def test_a_fill_ends_where_another_sequence_leaves_a_block_unfinished(kind, monkeypatch):
    """Two sequences share a prefix without KV of the draft model. The first one fills some of it in
    a step, and the second one must not attend to the rest.
    """
    bench = drafting_bench(kind)

    def check(batch):
        tokens = draft_runner(bench).backend.tokens.copy()
        tokens.reshape(-1)[batch.layout.slot_mapping] = batch.token_ids
        for table, length in zip(batch.layout.block_tables, batch.layout.seq_lens, strict=True):
            assert (tokens[table].reshape(-1)[:length] != POISON).all()

    draft_runner(bench).on_forward = check
    text = prompt(1, 100)
    bench.ask(text, 1, terms={"max_draft_tokens": 0})
    fills = iter([20, 60])
    monkeypatch.setattr(
        ModelDrafts,
        "_num_fill",
        lambda self, sequence, gap, *others: min(gap, next(fills, 200)),
    )
    handles = [
        bench.submit([*text, number], 40, terms={"max_draft_tokens": 4}) for number in (1, 2)
    ]
    bench.run()
    assert all(bench.answer(handle).drafted_tokens for handle in handles)
    assert_all_accepted(bench)


def test_blocks_that_were_left_partly_filled_give_way(kind):
    """A quantized pool has few blocks that may be partly written. Four sequences each leave one
    behind, and all drafts are right afterwards.
    """
    bench = drafting_bench(kind, closes_blocks=True, max_num_seqs=1)
    texts = []
    for number in range(4):
        handle = bench.submit(prompt(number, 20), 40, terms=DRAFTS)
        for _ in range(3):
            bench.step()
        models_of(bench).is_on = False
        bench.run()
        models_of(bench).is_on = True
        texts.append([*prompt(number, 20), *bench.answer(handle).output_token_ids])
    for text in texts:
        bench.ask([*text, 7], 20, terms=DRAFTS)
    assert_all_accepted(bench, 60)


def test_drafts_go_on_after_an_abandoned_pass_that_would_fill_a_block(kind):
    bench = drafting_bench(kind, closes_blocks=True)
    handle = bench.submit(prompt(1, 20), 60, terms=DRAFTS)
    for _ in range(2):
        bench.step()
    abandoned = []

    def abandon(batch):
        if batch.positions[0] % SIZE and SIZE - 1 in batch.positions % SIZE:
            draft_runner(bench).on_forward = None
            abandoned.extend(batch.positions)
            raise PassAbandoned

    draft_runner(bench).on_forward = abandon
    bench.run()
    assert abandoned
    assert bench.answer(handle).drafted_tokens > 30
    assert_all_accepted(bench, 30)


def test_a_pass_that_would_continue_a_dropped_block_is_abandoned(kind, monkeypatch):
    bench = drafting_bench(kind, closes_blocks=True)
    handle = bench.submit(prompt(1, 20), 30, terms=DRAFTS)
    for _ in range(3):
        bench.step()
    model = models_of(bench).model
    (sequence,) = bench.scheduler.running
    ((start, _),) = model.missing(sequence.blocks, sequence.num_tokens)
    assert start % SIZE
    with monkeypatch.context() as patch:
        patch.setattr(model, "_num_open", 0)
        model._hold_open([])
    with pytest.raises(PassAbandoned):
        model.forward([DraftRows(sequence.blocks, start, [1])], lambda: False)
    bench.run()
    assert bench.answer(handle).drafted_tokens > 15
    assert_all_accepted(bench)


# In this order, the cases of `make test` combine the MTP head and the assistant with both kinds.
@pytest.mark.parametrize("drafts", [MTP, *DRAFT_KINDS[:3], ASSISTANT, *DRAFT_KINDS[3:]])
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < 2 else pytest.mark.full) for seed in range(4)]
)
@pytest.mark.some(4)
def test_concurrent_requests_in_a_small_pool(kind, drafts, seed):
    """Requests are preempted, cancelled and evicted, and share prefixes. The tokens stay the same,
    and those of the right draft model and of the assistant are all accepted.
    """
    rng = random.Random(seed)
    bench = drafting_bench(
        kind,
        drafts,
        rng.choice((8, 12, 64)),
        max_num_seqs=rng.choice((2, 5)),
        max_batch_tokens=rng.choice((3, 17, 64)),
        closes_blocks=rng.random() < 0.5,
    )
    handles = []
    doomed = []
    for number in range(12):
        terms = {"max_draft_tokens": rng.choice((0, 1, 5, 31)), "always_drafts": rng.random() < 0.8}
        token_ids = prompt(number % 3, 40)[: rng.randrange(1, 41)]
        handles.append(
            bench.submit(token_ids, rng.randrange(1, 60), terms=terms, tenant="ab"[number % 2])
        )
        if rng.random() < 0.2:
            doomed.append(handles[-1])
            if rng.random() < 0.5:
                handles[-1].cancel()
        for _ in range(rng.randrange(12)):
            bench.step()
    for handle in doomed:
        handle.cancel()
    bench.run()
    for handle in handles:
        assert bench.answer(handle).finish_reason == "length" or handle in doomed
    assert bench.manager.free_block_count == bench.manager.num_blocks
    assert models_of(bench).is_on
    if drafts in (MTP, ASSISTANT):
        assert bench.scheduler.speculation.num_accepted > 20
    if drafts in ("right", ASSISTANT):
        assert_all_accepted(bench)
    if drafts == ASSISTANT:
        assert draft_runner(bench).unknown == 0


def test_rejected_tokens_leave_no_kv_that_later_drafts_read(kind):
    """The draft model is sometimes wrong, then right over the same pool. From then on all its
    tokens are accepted.
    """
    bench = drafting_bench(kind, "one off")
    text = prompt(4, 30)
    handle = bench.submit(text, 60, terms=DRAFTS)
    for _ in range(20):
        bench.step()
    draft_runner(bench).kind = "right"
    speculation = bench.scheduler.speculation
    before = speculation.num_drafted - speculation.num_accepted
    assert before > 0
    bench.run()
    answer = bench.answer(handle).output_token_ids
    bench.ask([*text, *answer, 3], 20, terms=DRAFTS)
    assert speculation.num_drafted - speculation.num_accepted == before


def test_sampled_answers_are_unchanged_and_drafts_share_random_numbers(kind):
    options = {"temperature": 0.9, "top_p": 0.9, "seed": 7, "logprobs": 3}
    options |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3}

    def sampled(bench, **more):
        handle = bench.submit(prompt(8, 30), 50, terms=DRAFTS, **options, **more)
        bench.run()
        return handle.result(0)

    for more in ({}, {"mirostat": 2}):
        truth = sampled(kind.bench(), **more)
        for drafts in DRAFT_KINDS:
            bench = drafting_bench(kind, drafts)
            result = sampled(bench, **more)
            assert (result.output_token_ids, result.logprobs) == (
                truth.output_token_ids,
                truth.logprobs,
            )
            if drafts == "right" and not more:
                assert_all_accepted(bench)


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE - 1, VOCAB_SIZE + 12])
def test_vocabulary_padding_is_cut(kind, vocab_size):
    bench = drafting_bench(kind, vocab_size=vocab_size)
    bench.ask(prompt(9, 20), 60, terms=DRAFTS, logit_bias={VOCAB_SIZE - 1: -5.0})
    assert_all_accepted(bench)


SHORT = 128


def watch_drafts(bench):
    """A list that receives the position, the tokens and the number of accepted tokens of each
    draft, and whether its step used the short vocabulary.
    """
    speculation = bench.scheduler.speculation
    settle = speculation.settle
    found = []

    def note(work, num_accepted):
        if work.num_drafted:
            tokens = list(work.token_ids[-work.num_drafted :])
            short = models_of(bench).is_short
            found.append((work.certain_stop, tokens, num_accepted, short))
        settle(work, num_accepted)

    speculation.settle = note
    return found


@pytest.mark.parametrize("drafts", ["right", "random", MTP])
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE - 1, VOCAB_SIZE, VOCAB_SIZE + 12])
@pytest.mark.some(3)
def test_ids_outside_the_short_vocabulary_are_never_drafted(kind, drafts, vocab_size, monkeypatch):
    monkeypatch.setattr(model_drafts, "_MOST_RARE", 128)
    bench = drafting_bench(kind, drafts, vocab_size=vocab_size, short_vocabulary=SHORT)
    found = watch_drafts(bench)
    text = prompt(9, 20)
    tokens = [*text, *bench.ask(text, 60, terms=DRAFTS).output_token_ids]
    for place, drafted, num_accepted, is_short in found:
        assert is_short
        assert max(drafted) < SHORT
        if drafts == "right" and num_accepted < len(drafted):
            assert tokens[place + num_accepted] >= SHORT, "the only reason to reject"
    options = {"temperature": 0.9, "top_k": 200, "seed": 7, "logit_bias": {200: 3.0, 5: -2.0}}
    answers = []
    for one in (bench, kind.bench()):
        handle = one.submit(prompt(8, 30), 60, terms=DRAFTS, **options)
        one.run()
        answers.append(handle.result(0).output_token_ids)
    assert answers[0] == answers[1]
    assert models_of(bench).is_on
    assert draft_runner(bench).num_short > 20
    assert max(token for _, drafted, _, _ in found for token in drafted) < SHORT


def test_all_ids_are_drafted_while_ids_outside_the_short_vocabulary_are_frequent(kind):
    bench = drafting_bench(kind, short_vocabulary=SHORT)
    found = watch_drafts(bench)
    text = [token % SHORT for token in prompt(9, 140)]
    tokens = [*text, *bench.ask(text, 80, terms=DRAFTS).output_token_ids]
    for place, drafted, num_accepted, is_short in found:
        rare = sum(token >= SHORT for token in tokens[:place][-128:])
        assert is_short == (rare <= 12)
        assert is_short or num_accepted == len(drafted)
    assert {is_short for *_, is_short in found} == {True, False}


def test_one_sequence_with_other_ids_needs_all_ids_for_the_step():
    bench = drafting_bench(PLAIN, short_vocabulary=SHORT)
    ways = []
    draft_runner(bench).on_forward = lambda batch: ways.append(
        (len(batch.layout.seq_lens), batch.is_short)
    )
    low = bench.submit([token % SHORT for token in prompt(1, 40)], 9, terms=DRAFTS)
    bench.step()
    bench.step()
    high = bench.submit([token % SHORT + SHORT for token in prompt(2, 40)], 9, terms=DRAFTS)
    bench.run()
    for handle in (low, high):
        bench.answer(handle)
    assert (1, True) in ways
    assert (2, False) in ways
    assert (2, True) not in ways


def test_a_request_that_forbids_the_short_vocabulary_is_not_drafted(kind, monkeypatch):
    monkeypatch.setattr(model_drafts, "_MOST_RARE", 128)
    bench = drafting_bench(kind, short_vocabulary=4)
    bias = dict.fromkeys(range(4), -100.0)
    handle = bench.submit(prompt(3, 20), 30, terms=DRAFTS, logit_bias=bias)
    bench.run()
    assert models_of(bench).is_on
    assert handle.result(0).finish_reason == "length"
    assert handle.result(0).accepted_tokens == 0


def test_a_stop_token_ends_the_draft(kind):
    token_ids = prompt(3, 20)
    truth = kind.bench().runner.expected(token_ids, 40)
    for at in range(4, 12):
        bench = drafting_bench(kind)
        stopped = bench.submit(token_ids, 40, stop_ids=frozenset({truth[at]}), terms=DRAFTS)
        limited = bench.submit([*token_ids, 1], at + 1, terms=DRAFTS)
        bench.run()
        assert bench.answer(stopped).finish_reason == "stop"
        assert bench.answer(limited).finish_reason == "length"
        assert_all_accepted(bench)


def test_drafting_stops_at_the_draft_models_context(kind):
    bench = drafting_bench(kind, max_context=50)
    positions = []
    draft_runner(bench).on_forward = lambda batch: positions.extend(batch.positions.tolist())
    bench.ask(prompt(5, 30), 60, terms=DRAFTS)
    assert_all_accepted(bench)
    assert 45 < max(positions) < 50
    result = bench.ask(prompt(6, 60), 20, terms=DRAFTS)
    assert result.drafted_tokens == 0


@pytest.mark.parametrize("drafts", ["right", MTP])
def test_a_drafter_error_turns_it_off_without_failing_requests(kind, drafts, caplog):
    bench = drafting_bench(kind, drafts)
    first = bench.submit(prompt(5, 30), 60, terms=DRAFTS)
    for _ in range(5):
        bench.step()

    def fail(batch):
        raise RuntimeError("no more drafts")

    draft_runner(bench).on_forward = fail
    second = bench.submit(prompt(6, 90), 20, terms=DRAFTS)
    with caplog.at_level(logging.ERROR):
        bench.run()
    for handle in (first, second):
        bench.answer(handle)
    assert not models_of(bench).is_on
    assert bench.scheduler.speculation.draft_failed
    assert not any(bench.manager.drafted.filled)
    source = models_of(bench).model.source
    assert caplog.text.count(f"drafts of source {source} failed") == 1
    assert "no more drafts" in caplog.text
    before = draft_runner(bench).computed
    assert bench.ask(prompt(7, 90), 20, terms=DRAFTS).drafted_tokens == 0
    assert draft_runner(bench).computed == before


def test_nan_of_the_draft_model_stops_drafts_of_its_sequence_only(kind):
    bench = drafting_bench(kind)
    token_ids = prompt(9, 20)
    truth = bench.runner.expected(token_ids, 40)
    draft_runner(bench).nan_for = {truth[12]}
    bad = bench.submit(token_ids, 40, terms=DRAFTS)
    other = prompt(10, 20)
    assert truth[12] not in [*other, *bench.runner.expected(other, 40)]
    good = bench.submit(other, 40, terms=DRAFTS)
    bench.run()
    assert bench.answer(bad).drafted_tokens <= 12 < 20 < bench.answer(good).drafted_tokens
    assert models_of(bench).is_on


def test_a_cancel_takes_effect_before_the_next_draft_pass(kind):
    bench = drafting_bench(kind)
    handle = bench.submit(prompt(5, 30), 60, terms=DRAFTS)
    for _ in range(3):
        bench.step()
    runner = draft_runner(bench)
    passes = []

    def cancel(batch):
        passes.append(len(batch.token_ids))
        handle.cancel()

    runner.on_forward = cancel
    bench.step()
    assert len(passes) == 1
    bench.run()
    assert handle.result(0).finish_reason == "cancelled"
    assert bench.manager.free_block_count == 64


def test_a_missing_shared_block_is_filled_once(kind):
    bench = drafting_bench(kind, max_batch_tokens=64)
    shared = prompt(1, 48)
    bench.ask(shared, 1)  # without drafts
    handles = [bench.submit([*shared, number], 20, terms=DRAFTS) for number in range(3)]
    written = []

    def look(batch):
        slots = batch.layout.slot_mapping.tolist()
        assert len(set(slots)) == len(slots)
        written.extend(slots)

    draft_runner(bench).on_forward = look
    bench.run()
    for handle in handles:
        bench.answer(handle)
    assert_all_accepted(bench)
    assert len(written) <= 48 + 3 * 21


def test_auto_fills_a_long_prompt_in_parts_if_the_answer_is_long_enough(kind):
    terms = {"max_draft_tokens": 4}
    bench = drafting_bench(kind)
    short = bench.ask(prompt(1, 240), 3, terms=terms)
    assert (short.drafted_tokens, draft_runner(bench).computed) == (0, 0)
    passes = []
    draft_runner(bench).on_forward = lambda batch: passes.append(len(batch.token_ids))
    bench.ask(prompt(2, 240), 140, terms=terms)
    assert_all_accepted(bench)
    filling = [count for count in passes if count > 20]
    assert len(filling) > 1
    assert max(filling) < 200


@pytest.mark.parametrize("copied", [0, 1, 2])
def test_auto_fills_nothing_while_the_answer_is_a_copy(kind, copied):
    """Prompt lookup drafts such an answer as soon as the copy is long enough."""
    bench = drafting_bench(kind)
    filled_at = []

    def propose(lookup, token_ids, most):
        generated = len(token_ids) - 240
        lookup.match_length = generated if generated <= copied else 0

    with_lookup(bench, propose)
    draft_runner(bench).on_forward = lambda batch: filled_at.append(
        bench.scheduler.running[0].num_tokens
    )
    bench.ask(prompt(2, 240), 140, terms={"max_draft_tokens": 4})
    assert filled_at[0] == 240 + copied + 1


def test_prompt_lookup_learns_while_the_draft_model_drafts(kind):
    """A match of two tokens promises less than the draft model, until it has proved right."""
    token_ids = prompt(2, 20)
    truth = tuple(kind.bench().runner.expected(token_ids, 200))
    drafted = {}
    for is_right in (True, False):
        bench = drafting_bench(kind)

        def propose(lookup, known, most, is_right=is_right):
            tokens = list(truth[len(known) - 20 :][:most])
            return lookup._draft(tokens if is_right else [one ^ 1 for one in tokens], 2)

        with_lookup(bench, propose)
        result = bench.ask(token_ids, 190, terms={"max_draft_tokens": 4})
        assert result.output_token_ids == truth[:190]
        drafted[is_right] = {
            source: counts.drafted_tokens for source, counts in result.drafts.items()
        }
    assert drafted[True]["lookup"] > 100 > drafted[True]["draft_model"]
    assert drafted[False].keys() == {"draft_model"}


def test_filling_draft_kv_needs_no_separate_step(kind, monkeypatch):
    monkeypatch.setattr(model_drafts, "_PASS_TOKENS", 50)
    bench = drafting_bench(kind)
    passes = []
    draft_runner(bench).on_forward = lambda batch: passes.append(len(batch.token_ids))
    result = bench.ask(prompt(1, 130), 6, terms=DRAFTS)
    assert passes[:4] == [50, 50, 31, 1]
    assert result.drafted_tokens > 2


def test_drafts_are_counted_by_source_and_position(kind):
    bench = drafting_bench(kind, "one off")
    results = [bench.ask(prompt(seed, 20), 40, terms=DRAFTS) for seed in range(2)]
    for result in results:
        (counts,) = [result.drafts["draft_model"]]
        assert counts.drafted_tokens == result.drafted_tokens
        assert sum(counts.accepted_by_position) == result.accepted_tokens > 0
        assert list(counts.accepted_by_position) == sorted(counts.accepted_by_position)[::-1]
        assert max(counts.accepted_by_position) <= counts.num_drafts
    total = bench.scheduler.speculation.counts["draft_model"]
    assert total.drafted_tokens == bench.scheduler.speculation.num_drafted
    assert total.num_drafts == sum(one.drafts["draft_model"].num_drafts for one in results)


@pytest.mark.parametrize("least", [0.0, 0.3, 1.0])
def test_a_draft_ends_before_unlikely_tokens(kind, least, monkeypatch):
    """The cut token counts as rejected, so a model that is always unsure stops drafting."""

    def limit(self, draft, step, rate):
        draft.least = draft.least_more = np.full(8, least)

    monkeypatch.setattr(model_drafts.ModelDrafts, "_limit", limit)
    bench = drafting_bench(kind)
    result = bench.ask(prompt(5, 20), 60, terms=DRAFTS)
    assert_all_accepted(bench) if least < 1.0 else None
    assert (result.drafted_tokens == 0) == (least == 1.0)
    handle = bench.submit(prompt(6, 20), 60, terms={"max_draft_tokens": 4})
    bench.run()
    bench.answer(handle)


def test_a_draft_that_is_cut_below_the_minimum_is_dropped(kind, monkeypatch):
    """The cut does not count as a rejected token, because nothing of the draft was verified."""

    def limit(self, draft, step, rate):
        draft.least = draft.least_more = np.full(8, 0.3)

    def rates(self, draft):
        """Rate the longest drafts highest, so that they are planned."""
        return np.arange(1.0, len(draft.token_ids) + 2)

    steps = []
    prepare = model_drafts.DraftStep.__init__
    monkeypatch.setattr(
        model_drafts.DraftStep,
        "__init__",
        lambda self, *given: (steps.append(self), prepare(self, *given))[1],
    )
    monkeypatch.setattr(StepCosts, "rates", rates)
    monkeypatch.setattr(model_drafts.ModelDrafts, "_limit", limit)
    verified = {}
    for least in (0, 4):
        bench = drafting_bench(kind)
        settle = bench.scheduler.speculation.settle
        counts = verified[least] = []

        def note(work, num_accepted, settle=settle, counts=counts):
            counts.append(work.num_drafted)
            if work.sequence.drafting.model.is_cut:
                assert work.num_drafted == len(steps[-1].tokens)
            settle(work, num_accepted)

        bench.scheduler.speculation.settle = note
        bench.ask(prompt(5, 20), 60, terms={**DRAFTS, "min_draft_tokens": least})
        assert bench.manager.free_block_count == 64
    assert set(verified[0]) & {1, 2, 3}
    assert set(verified[4]) <= {0, 4}


@pytest.mark.parametrize(("most", "least"), [(4, 3), (31, 8), (31, 9)])
def test_no_draft_below_the_minimum_is_computed(kind, most, least):
    """Drafts of a wrong draft model would become short. It drafts at most eight tokens."""
    bench = drafting_bench(kind, "wrong")
    drafted = []
    draft_runner(bench).on_forward = lambda batch: drafted.append(len(batch.logit_rows))
    terms = {"max_draft_tokens": most, "min_draft_tokens": least, "always_drafts": True}
    result = bench.ask(prompt(5, 30), 60, terms=terms)
    assert sum(drafted) == result.drafted_tokens
    if least == 9:
        assert draft_runner(bench).computed == 0
    else:
        assert result.drafted_tokens > 100
    bench = drafting_bench(kind, "wrong")
    handle = bench.submit(prompt(5, 30), 60, terms={**terms, "always_drafts": False})
    bench.run()
    bench.answer(handle)


def test_a_draft_model_that_fails_its_first_trial_is_off(kind, caplog):
    drafter = fake_drafter(64, of=kind)

    def fail(batch):
        raise RuntimeError("no trial")

    drafter.runner.on_forward = fail
    with caplog.at_level(logging.ERROR):
        bench = kind.bench(64, drafter=drafter)
    assert "no trial" in caplog.text
    assert bench.ask(prompt(5, 20), 20, terms=DRAFTS).finish_reason == "length"
    assert not models_of(bench).is_on


@pytest.mark.parametrize("drafts", ["right", MTP])
def test_sequences_with_reused_spans_get_no_drafts(drafts):
    bench = drafting_bench(PLAIN, drafts)
    document = prompt(1, 64)
    bench.ask(document, 1)
    result = bench.ask(
        [*prompt(2, 23), *document, 9],
        20,
        GenerationMode.CHUNK_KV_REUSE,
        terms=DRAFTS,
        repair=Repair(strategy=RecomputeStrategy.NONE),
    )
    assert result.reused_span_tokens > 0
    assert (result.drafted_tokens, draft_runner(bench).computed) == (0, 0)


def test_a_request_for_logits_is_not_drafted(kind):
    bench = drafting_bench(kind)
    _, rows = bench.submit_logits(prompt(1, 40), 10)
    bench.run()
    assert np.concatenate(rows).shape == (30, VOCAB_SIZE)
    assert draft_runner(bench).computed == 0


def test_closing_the_engine_closes_the_draft_model():
    bench = drafting_bench(PLAIN)
    runner, backend, *_ = bench.parts.drafter
    bench.core.close()
    assert runner.closed
    assert backend.closed


def test_an_engine_without_a_draft_model_has_none():
    assert Bench().scheduler.speculation._models is None
