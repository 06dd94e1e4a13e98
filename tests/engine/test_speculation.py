"""Tokens guessed ahead change when an answer comes, never what it is: proposers of every kind on the fake runner, whose
next token is a hash of all before it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from helpers.engine.fake_runner import VOCAB_SIZE, Bench, expected_tokens
from helpers.engine.hostile_drafts import KINDS, HostileDrafter, hostile
from kvboost_edge.engine.handle import RequestHandle
from kvboost_edge.engine.request import Request
from kvboost_edge.errors import KVBoostError
from kvboost_edge.runners.base import ForwardBatch

DRAFTS: dict[str, Any] = {"max_draft_tokens": 31, "always_drafts": True}
SIZE = 16


def drafting(kinds: Sequence[str] = KINDS, *, closes_blocks: bool = False, **options: Any) -> Bench:
    """A bench whose requests get proposals of these kinds in turn."""
    bench = Bench(**options)
    bench.scheduler.speculation._closes_blocks = closes_blocks
    bench.scheduler.speculation.drafter = hostile(  # type: ignore[method-assign]
        lambda request: [*request.prompt_ids, *expected_tokens(request.prompt_ids, 200)],
        lambda request: kinds[request.index % len(kinds)],
        VOCAB_SIZE,
    )
    return bench


def finish(bench: Bench, handles: Sequence[RequestHandle], limit: int = 3000) -> None:
    for _ in range(limit):
        if all(handle.done for handle in handles):
            return
        bench.step()
    raise AssertionError(f"not done after {limit} steps")


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 250, length).tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("closes_blocks", [False, True])
@pytest.mark.parametrize("length", [1, 14, 15, 16, 17, 40])
def test_the_answer_is_the_same_whatever_is_proposed(kind: str, closes_blocks: bool, length: int) -> None:
    bench = drafting([kind], closes_blocks=closes_blocks)
    handle = bench.submit(prompt(length, length), 60, terms=DRAFTS)
    finish(bench, [handle])
    result = handle.result(0)
    assert list(result.output_token_ids) == expected_tokens(prompt(length, length), 60)
    assert result.drafted_tokens > 0
    assert result.accepted_tokens == {"right": result.drafted_tokens, "wrong": 0}.get(kind, result.accepted_tokens)
    assert bench.scheduler.speculation.num_drafted == result.drafted_tokens
    assert bench.manager.free_block_count == 64


def test_right_guesses_save_passes_and_wrong_ones_cost_none() -> None:
    passes = {}
    for kind in ("right", "wrong"):
        bench = drafting([kind])
        finish(bench, [bench.submit(prompt(0, 20), 64, terms=DRAFTS)])
        passes[kind] = len(bench.runner.batches)
    assert passes["right"] < 16
    assert passes["wrong"] == 64


@pytest.mark.parametrize("seed", range(12))
def test_many_at_once_in_a_pool_that_is_too_small(seed: int) -> None:
    """Preempted with drafts under way, sharing prefixes of what was drafted, cancelled between: the tokens stand."""
    rng = random.Random(seed)
    bench = drafting(
        num_blocks=rng.choice((8, 12, 64)),
        max_num_seqs=rng.choice((2, 5)),
        max_batch_tokens=rng.choice((1, 3, 17, 64)),
        closes_blocks=rng.random() < 0.5,
    )
    prompts = [prompt(number % 3, rng.randrange(1, 50)) for number in range(6)]
    handles, doomed = [], []
    for number, token_ids in enumerate(prompts):
        terms = {"max_draft_tokens": rng.choice((0, 1, 5, 31, 31)), "always_drafts": rng.random() < 0.7}
        handles.append(bench.submit(token_ids, rng.randrange(1, 60), terms=terms, tenant="ab"[number % 2]))
        if rng.random() < 0.2:
            doomed.append(handles[-1])
        for _ in range(rng.randrange(4)):
            bench.step()
    for handle in doomed:
        handle.cancel()
    finish(bench, handles)
    for token_ids, handle in zip(prompts, handles, strict=True):
        output = list(handle.result(0).output_token_ids)
        assert output == expected_tokens(token_ids, len(output))
        assert handle in doomed or handle.result(0).finish_reason == "length"
    assert bench.manager.free_block_count == bench.manager.num_blocks


def test_nobody_is_preempted_for_a_guess_and_what_is_left_goes_back() -> None:
    bench = drafting(["wrong"], num_blocks=6)
    handles = [bench.submit(prompt(number, 2 * SIZE - 2), 14, terms=DRAFTS) for number in range(2)]
    finish(bench, handles)
    assert bench.scheduler.num_preemptions == 0
    assert bench.scheduler.speculation.num_drafted > 0


def test_only_a_certain_token_fills_a_block_that_closes() -> None:
    bench = drafting(["right", "random"], closes_blocks=True)
    drafted = 0

    def look(batch: ForwardBatch) -> None:
        nonlocal drafted
        starts = batch.layout.cu_seqlens_q.tolist()
        for first, stop in itertools.pairwise(starts):
            wanted = [row for row in batch.logit_rows.tolist() if first <= row < stop]
            guesses = batch.positions[wanted[1:]]  # the first row that is wanted is the certain one's
            drafted += len(guesses)
            assert (guesses % SIZE != SIZE - 1).all()

    bench.runner.on_forward = look
    handles = [bench.submit(prompt(number, 10 + number), 90, terms=DRAFTS) for number in range(4)]
    finish(bench, handles)
    assert drafted == bench.scheduler.speculation.num_drafted > 100


@pytest.mark.parametrize("kind", ["right", "one off"])
def test_a_stop_inside_a_draft_ends_there(kind: str) -> None:
    token_ids = prompt(3, 20)
    truth = expected_tokens(token_ids, 40)
    for at in (0, 1, 7, 20):
        bench = drafting([kind])
        by_id = bench.submit(token_ids, 40, stop_ids=frozenset({truth[at]}), terms=DRAFTS)
        limited = bench.submit(token_ids, at + 1, terms=DRAFTS)
        finish(bench, [by_id, limited])
        end = truth.index(truth[at]) + 1
        for handle, count, reason in ((by_id, end, "stop"), (limited, at + 1, "length")):
            assert list(handle.result(0).output_token_ids) == truth[:count]
            assert handle.result(0).finish_reason == reason


def test_a_stop_string_inside_a_draft_cuts_the_text_where_it_would_alone() -> None:
    token_ids = prompt(5, 20)
    alone = Bench()
    plain = alone.submit(token_ids, 60)
    finish(alone, [plain])
    text = plain.result(0).output_text
    pairs = (text[i : i + 2] for i in range(8, len(text) - 2))
    stop = next(pair for pair in pairs if pair.isprintable() and "\N{REPLACEMENT CHARACTER}" not in pair)
    for kind in KINDS:
        bench = drafting([kind])
        handle = bench.submit(token_ids, 60, stop=(stop,), terms=DRAFTS)
        finish(bench, [handle])
        assert handle.result(0).output_text == text[: text.index(stop)]


def test_samples_penalties_and_log_probabilities_are_those_without_drafts() -> None:
    options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "seed": 7, "logprobs": 3}
    options |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3}
    alone = Bench()
    plain = alone.submit(prompt(8, 30), 50, **options)
    finish(alone, [plain])
    truth = plain.result(0)
    for kind in KINDS:
        bench = Bench()
        bench.scheduler.speculation.drafter = hostile(  # type: ignore[method-assign]
            lambda request: [*request.prompt_ids, *truth.output_token_ids], lambda request, kind=kind: kind, VOCAB_SIZE
        )
        handle = bench.submit(prompt(8, 30), 50, terms=DRAFTS, **options)
        finish(bench, [handle])
        assert handle.result(0).output_token_ids == truth.output_token_ids
        assert handle.result(0).logprobs == truth.logprobs
        assert handle.result(0).drafted_tokens > 0


def test_nan_behind_a_wrong_guess_hurts_nobody_and_behind_a_right_one_fails_as_without_it() -> None:
    token_ids = prompt(9, 20)
    truth = expected_tokens(token_ids, 30)
    bad = next(token_id for token_id in range(VOCAB_SIZE) if token_id not in truth and token_id not in token_ids)

    class Poisoned(HostileDrafter):
        def propose(self, known: Sequence[int], most: int) -> Any:
            draft = super().propose(known, most)
            return draft._replace(token_ids=[bad, *draft.token_ids[1:]])

    bench = Bench()
    bench.runner.nan_for = {bad}
    bench.scheduler.speculation.drafter = lambda request: Poisoned("right", truth, VOCAB_SIZE, 0)  # type: ignore[method-assign]
    handle = bench.submit(token_ids, 30, terms=DRAFTS)
    finish(bench, [handle])
    assert list(handle.result(0).output_token_ids) == truth

    bench = drafting(["right"])
    bench.runner.nan_for = {truth[12]}
    handle = bench.submit(token_ids, 30, terms=DRAFTS)
    finish(bench, [handle])
    with pytest.raises(KVBoostError, match="NaN"):
        handle.result(0)
    assert bench.manager.free_block_count == 64


def test_nothing_that_was_not_accepted_is_published() -> None:
    """What the next request finds in the cache is what it would compute; the fake runner looks at every slot."""
    for kind in KINDS:
        bench = drafting([kind])
        first = bench.submit(prompt(2, 20), 50, terms=DRAFTS)
        finish(bench, [first])
        longer = [*prompt(2, 20), *first.result(0).output_token_ids]
        second = bench.submit(longer, 20, terms=DRAFTS)
        finish(bench, [second])
        assert second.result(0).cached_tokens == (len(longer) - 1) // SIZE * SIZE
        assert list(second.result(0).output_token_ids) == expected_tokens(longer, 20)


def test_a_step_has_no_more_tokens_than_its_budget() -> None:
    bench = drafting(["right"], max_batch_tokens=6)
    sizes: list[int] = []
    bench.runner.on_forward = lambda batch: sizes.append(len(batch.token_ids))
    finish(bench, [bench.submit(prompt(number, 9), 30, terms=DRAFTS) for number in range(4)])
    assert max(sizes) == 6


def test_a_tenant_is_charged_for_what_it_keeps() -> None:
    """Wrong guesses of one tenant are no tokens that it was served."""
    bench = drafting(["wrong"])
    handles = [bench.submit(prompt(number, 9), 30, tenant=t, terms=DRAFTS) for number, t in enumerate("ab")]
    while not all(handle.done for handle in handles):
        bench.step()
        for sequence in bench.scheduler.running:
            assert sequence.num_charged_tokens <= sequence.num_tokens


def test_a_request_that_generates_nothing_has_no_drafts() -> None:
    request_fields: list[Request] = []
    bench = drafting(["right"])
    original = bench.scheduler.speculation.drafter
    bench.scheduler.speculation.drafter = lambda request: (request_fields.append(request), original(request))[1]  # type: ignore[method-assign, func-returns-value]
    handle, rows = bench.submit_logits(prompt(1, 40), 10)
    finish(bench, [handle])
    assert np.concatenate(rows).shape == (30, VOCAB_SIZE)
    assert request_fields[0].max_draft_tokens == 0
