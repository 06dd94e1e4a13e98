"""Speculative decoding changes the time of an answer, never its tokens.

Drafters of every kind run on the fake runner, whose next token is a hash of all before it.
"""

import itertools
import random

import numpy as np
import pytest

from helpers.engine.draft_models import prompt
from helpers.engine.fake_runner import VOCAB_SIZE
from helpers.engine.hostile_drafts import KINDS, CutDrafter, HostileDrafter, draft_in_turn
from helpers.engine.model_kinds import PLAIN
from kvboost_edge.engine.spec_decode import speculation
from kvboost_edge.engine.spec_decode.prompt_lookup import PromptLookup, TenantHistory
from kvboost_edge.engine.spec_decode.speculation import DraftTokens
from kvboost_edge.errors import KVBoostError

DRAFTS = {"max_draft_tokens": 31, "always_drafts": True}
SIZE = 16


def drafting(kind, drafts=KINDS, *, closes_blocks=False, **options):
    """Build a bench whose requests get drafts of these kinds in turn."""
    bench = draft_in_turn(kind.bench(**options), drafts)
    bench.scheduler.speculation._closes_blocks = closes_blocks
    return bench


@pytest.mark.parametrize("drafts", KINDS)
@pytest.mark.parametrize("closes_blocks", [False, True])
@pytest.mark.some(3)
def test_answers_do_not_depend_on_drafts(kind, drafts, closes_blocks):
    for length in (1, 14, 15, 16, 17, 40):
        bench = drafting(kind, [drafts], closes_blocks=closes_blocks)
        result = bench.ask(prompt(length, length), 60, terms=DRAFTS)
        assert result.drafted_tokens > 0
        if drafts in ("right", "wrong"):
            assert result.accepted_tokens == (drafts == "right") * result.drafted_tokens
        assert bench.scheduler.speculation.num_drafted == result.drafted_tokens
        assert bench.manager.free_block_count == 64


def test_right_drafts_save_passes_and_wrong_ones_cost_none(kind):
    passes = {}
    for drafts in ("right", "wrong"):
        bench = drafting(kind, [drafts])
        bench.runner.on_forward = lambda batch, drafts=drafts: passes.update(
            {drafts: passes.get(drafts, 0) + 1}
        )
        bench.ask(prompt(0, 20), 64, terms=DRAFTS)
    assert passes["right"] < 16
    assert passes["wrong"] == 64


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < 2 else pytest.mark.full) for seed in range(6)]
)
def test_concurrent_requests_in_a_small_pool(kind, seed):
    """Requests are preempted during a draft, cancelled, and share drafted prefixes. The tokens stay
    the same.
    """
    rng = random.Random(seed)
    bench = drafting(
        kind,
        num_blocks=rng.choice((8, 12, 64)),
        max_num_seqs=rng.choice((2, 5)),
        max_batch_tokens=rng.choice((1, 3, 17, 64)),
        closes_blocks=rng.random() < 0.5,
    )
    prompts = [prompt(number % 3, rng.randrange(1, 50)) for number in range(6)]
    handles = []
    doomed = []
    for number, token_ids in enumerate(prompts):
        terms = {
            "max_draft_tokens": rng.choice((0, 1, 5, 31, 31)),
            "always_drafts": rng.random() < 0.7,
        }
        handles.append(
            bench.submit(token_ids, rng.randrange(1, 60), terms=terms, tenant="ab"[number % 2])
        )
        if rng.random() < 0.2:
            doomed.append(handles[-1])
        for _ in range(rng.randrange(4)):
            bench.step()
    for handle in doomed:
        handle.cancel()
    bench.run()
    for handle in handles:
        assert bench.answer(handle).finish_reason == "length" or handle in doomed
    assert bench.manager.free_block_count == bench.manager.num_blocks


def test_drafts_preempt_no_request_and_release_their_blocks(kind):
    bench = drafting(kind, ["wrong"], num_blocks=6)
    for number in range(2):
        bench.submit(prompt(number, 2 * SIZE - 2), 14, terms=DRAFTS)
    bench.run()
    assert bench.scheduler.num_preemptions == 0
    assert bench.scheduler.speculation.num_drafted > 0


def test_only_certain_tokens_close_a_quantized_block(kind):
    bench = drafting(kind, ["right", "random"], closes_blocks=True)
    drafted = 0

    def look(batch):
        nonlocal drafted
        starts = batch.layout.cu_seqlens_q.tolist()
        for first, stop in itertools.pairwise(starts):
            wanted = [row for row in batch.logit_rows.tolist() if first <= row < stop]
            guesses = batch.positions[
                wanted[1:]
            ]  # the first wanted row is that of the certain token
            drafted += len(guesses)
            assert (guesses % SIZE != SIZE - 1).all()

    bench.runner.on_forward = look
    for number in range(4):
        bench.submit(prompt(number, 10 + number), 90, terms=DRAFTS)
    bench.run()
    assert drafted == bench.scheduler.speculation.num_drafted > 100


@pytest.mark.parametrize("drafts", ["right", "one off"])
@pytest.mark.some(3)
def test_a_stop_token_within_a_draft_ends_the_answer(kind, drafts):
    """The next turn hits all full blocks up to the stop token, with the recurrent state of a
    hybrid.
    """
    token_ids = prompt(3, 20)
    truth = kind.bench().runner.expected(token_ids, 40)
    for at in (0, 1, *range(7, 21)):
        bench = drafting(kind, [drafts])
        by_id = bench.submit(token_ids, 40, stop_ids=frozenset({truth[at]}), terms=DRAFTS)
        limited = bench.submit(token_ids, at + 1, terms=DRAFTS)
        bench.run()
        assert (bench.answer(by_id).finish_reason, bench.answer(limited).finish_reason) == (
            "stop",
            "length",
        )
        longer = [*token_ids, *truth[: at + 1], 5, 6]
        assert bench.ask(longer, 3).cached_tokens == (len(longer) - 3) // SIZE * SIZE


def test_a_stop_string_within_a_draft_cuts_the_text_as_without_drafts(kind):
    token_ids = prompt(5, 20)
    text = kind.bench().ask(token_ids, 60).output_text
    pairs = (text[i : i + 2] for i in range(8, len(text) - 2))
    stop = next(
        pair for pair in pairs if pair.isprintable() and "\N{REPLACEMENT CHARACTER}" not in pair
    )
    for drafts in KINDS:
        bench = drafting(kind, [drafts])
        handle = bench.submit(token_ids, 60, stop=(stop,), terms=DRAFTS)
        bench.run()
        assert handle.result(0).output_text == text[: text.index(stop)]


def test_samples_penalties_and_logprobs_equal_those_without_drafts(kind):
    options = {"temperature": 0.9, "top_p": 0.9, "seed": 7, "logprobs": 3}
    options |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3}

    def sampled(bench):
        handle = bench.submit(prompt(8, 30), 50, terms=DRAFTS, **options)
        bench.run()
        return handle.result(0)

    truth = sampled(draft_in_turn(kind.bench(), ["wrong"]))
    assert truth.accepted_tokens == 0
    for drafts in KINDS:
        result = sampled(draft_in_turn(kind.bench(), [drafts], truth.output_token_ids))
        assert (result.output_token_ids, result.logprobs) == (
            truth.output_token_ids,
            truth.logprobs,
        )
        assert result.drafted_tokens > 0


def test_nan_in_draft_rows_fails_only_accepted_tokens(kind):
    token_ids = prompt(9, 20)
    bench = kind.bench()
    truth = bench.runner.expected(token_ids, 30)
    bad = next(
        token_id
        for token_id in range(VOCAB_SIZE)
        if token_id not in truth and token_id not in token_ids
    )

    class Poisoned(HostileDrafter):
        def propose(self, known, most):
            draft = super().propose(known, most)
            return draft._replace(token_ids=[bad, *draft.token_ids[1:]])

    bench.runner.nan_for = {bad}
    bench.scheduler.speculation.prompt_lookup = lambda request: Poisoned(
        "right", truth, VOCAB_SIZE, 0
    )
    bench.ask(token_ids, 30, terms=DRAFTS)

    bench = drafting(kind, ["right"])
    bench.runner.nan_for = {truth[12]}
    with pytest.raises(KVBoostError, match="NaN"):
        bench.ask(token_ids, 30, terms=DRAFTS)
    assert bench.manager.free_block_count == 64


def test_rejected_tokens_are_never_published(kind):
    """The next request hits all full blocks, and the fake runner verifies the content of each slot
    that it reads.
    """
    for drafts in KINDS:
        bench = drafting(kind, [drafts])
        longer = [*prompt(2, 20), *bench.ask(prompt(2, 20), 50, terms=DRAFTS).output_token_ids]
        assert bench.ask(longer, 20, terms=DRAFTS).cached_tokens == (len(longer) - 1) // SIZE * SIZE


def test_a_step_has_no_more_tokens_than_its_budget(kind):
    bench = drafting(kind, ["right"], max_batch_tokens=6)
    sizes = []
    bench.runner.on_forward = lambda batch: sizes.append(len(batch.token_ids))
    for number in range(4):
        bench.submit(prompt(number, 9), 30, terms=DRAFTS)
    bench.run()
    assert max(sizes) == 6


@pytest.mark.parametrize(("most", "least"), [(31, 0), (31, 5), (31, 31), (4, 9)])
@pytest.mark.parametrize("num_blocks", [64, 20])
@pytest.mark.some(3)
def test_drafts_below_the_minimum_are_not_verified(kind, most, least, num_blocks):
    """The minimum also applies to drafts that a full pool or batch shortens. It is limited to the
    maximum.
    """
    bench = drafting(kind, ["right"], num_blocks=num_blocks, max_batch_tokens=40)
    terms = {"max_draft_tokens": most, "min_draft_tokens": least, "always_drafts": True}
    verified = set()
    settle = bench.scheduler.speculation.settle

    def note(work, num_accepted):
        verified.add(work.num_drafted)
        settle(work, num_accepted)

    bench.scheduler.speculation.settle = note
    handles = [bench.submit(prompt(number, 9), 140, terms=terms) for number in range(2)]
    bench.run()
    assert all(bench.answer(handle).finish_reason == "length" for handle in handles)
    assert any(verified)
    assert min(verified - {0}) >= min(most, least)
    assert bench.manager.free_block_count == num_blocks


def test_automatic_drafts_are_as_long_as_the_minimum(monkeypatch):
    """Two tokens would be the fastest length, but four are still faster than none."""
    monkeypatch.setattr(speculation, "observe_pass", lambda *given: None)

    class Fixed(CutDrafter):
        def propose(self, token_ids, most):
            draft = super().propose(token_ids, most)
            return draft._replace(chances=np.full(len(draft.token_ids), 0.6))

    token_ids = prompt(1, 20)
    truth = [*token_ids, *PLAIN.bench().runner.expected(token_ids, 60)]
    verified = {}
    for least in (0, 4):
        bench = PLAIN.bench()
        drafts = bench.scheduler.speculation
        for _ in range(60):
            for rows in range(1, 10):
                drafts.costs.observe(rows, 0.0, 1 + 0.2 * (rows - 1))
        drafts.prompt_lookup = lambda request: Fixed(truth, 8, 8, VOCAB_SIZE)
        settle = drafts.settle
        verified[least] = []

        def note(work, num_accepted, settle=settle, counts=verified[least]):
            counts.append(work.num_drafted)
            settle(work, num_accepted)

        drafts.settle = note
        bench.ask(token_ids, 40, terms={"max_draft_tokens": 8, "min_draft_tokens": least})
    assert max(verified[0]) == 2
    assert set(verified[4]) == {0, 4}
    assert verified[4].count(4) > 4


def test_a_tenant_is_charged_for_accepted_tokens_only(kind):
    """Rejected tokens of a tenant are not charged."""
    bench = drafting(kind, ["wrong"])
    for number, tenant in enumerate("ab"):
        bench.submit(prompt(number, 9), 30, tenant=tenant, terms=DRAFTS)
    while bench.step():
        for sequence in bench.scheduler.running:
            assert sequence.num_charged_tokens <= sequence.num_tokens


def test_a_request_that_generates_nothing_has_no_drafts():
    request_fields = []
    bench = drafting(PLAIN, ["right"])
    original = bench.scheduler.speculation.prompt_lookup
    bench.scheduler.speculation.prompt_lookup = lambda request: (
        request_fields.append(request),
        original(request),
    )[1]
    _, rows = bench.submit_logits(prompt(1, 40), 10)
    bench.run()
    assert np.concatenate(rows).shape == (30, VOCAB_SIZE)
    assert request_fields[0].max_draft_tokens == 0


def test_prompt_lookup_learns_from_its_own_proposals():
    """Drafts by the grammar count as steps without a draft. Tokens that prompt lookup proposed when
    the draft model drafted are compared with the generated ones.
    """

    def chance(source, *outcome, passed_over=(), idle=0):
        drafts = DraftTokens(PromptLookup(b"root", TenantHistory()))
        token_ids = [1, 2, 3, 4, 1, 2, 3]
        for _ in range(4):
            drafts.lookup.propose(token_ids, 1)
            drafts.source = source
            drafts.passed_over = list(passed_over)
            drafts.learn(*outcome, [4, 1, 2])
            for _ in range(idle):  # steps without a proposal
                drafts.learn(0, 0, [7])
        return float(drafts.lookup.propose(token_ids, 1).chances[0])

    nothing = chance("", 0, 0)
    assert chance("grammar", 4, 0) == chance("grammar", 4, 4) == nothing
    for tokens, outcome in (
        ([4, 1], (2, 2)),
        ([4, 1, 2, 3], (3, 3)),
        ([4, 9, 2], (2, 1)),
        ([9, 4, 1], (1, 0)),
    ):
        for idle in (0, 2):
            found = chance("draft_model", 2, 2, passed_over=tokens, idle=idle)
            assert found == chance("lookup", *outcome, idle=idle)
    assert chance("lookup", 4, 0) < nothing < chance("lookup", 4, 4)
