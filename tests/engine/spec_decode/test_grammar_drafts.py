"""Drafts of structured output respect the grammar, and never change an answer.

The drafters of these tests know the model's logits, but not the grammar. Without a mask they would
mostly draft what the grammar forbids.
"""

import math
import random

import numpy as np
import pytest

from helpers.engine.draft_models import (
    ASSISTANT,
    MTP,
    draft_runner,
    drafting_bench,
    models_of,
    prompt,
)
from helpers.engine.fake_runner import EOS_ID, VOCAB_SIZE, fake_tokenizer
from helpers.engine.model_kinds import PLAIN
from kvboost_edge.engine.grammar import masks
from kvboost_edge.engine.grammar.compiler import GrammarCompiler
from kvboost_edge.engine.request.requested_grammar import Grammar
from kvboost_edge.engine.spec_decode.draft_lengths import DraftProposal
from kvboost_edge.engine.spec_decode.prompt_lookup import PromptLookup, TenantHistory

DRAFTS = {"max_draft_tokens": 4, "always_drafts": True}
WORDS = Grammar("regex", r"([a-h]{2,5}[ ,.]){8,60}")
OBJECT = Grammar("grammar", 'start: "{" pair ("," pair)* "}"\npair: /[a-z]{3,9}/ ":" /[0-9]{2,9}/')


@pytest.fixture(autouse=True)
def masks_are_cheap(monkeypatch):
    """Count all masks as cheap, so that no test depends on time."""
    monkeypatch.setattr(masks, "_CHEAP_SECONDS", 1.0)
    monkeypatch.setattr(masks, "_SLOW_SECONDS", 1.0)


def answers(bench, grammar=WORDS, seeds=range(4), **terms):
    """Return the tokens and log probabilities of greedy and sampled answers, and their results."""
    results = []
    for seed in seeds:
        for options in ({}, {"temperature": 1.2, "top_p": 0.95, "seed": seed}):
            handle = bench.submit(
                prompt(seed, 20 + seed),
                40,
                stop_ids=frozenset({EOS_ID}),
                terms={"grammar": grammar, **terms},
                logprobs=2,
                **options,
            )
            bench.run()
            results.append(handle.result(0))
    found = [(one.output_token_ids, one.logprobs, one.finish_reason) for one in results]
    return found, results


@pytest.mark.parametrize("drafts", ["right", "wrong", "random", "one off", MTP, ASSISTANT])
@pytest.mark.parametrize("grammar", [WORDS, OBJECT], ids=["words", "object"])
def test_answers_equal_those_without_drafts(drafts, grammar):
    expected, _ = answers(PLAIN.bench(), grammar)
    found, results = answers(drafting_bench(PLAIN, drafts), grammar, **DRAFTS)
    assert found == expected
    assert sum(one.drafted_tokens for one in results) > 50


@pytest.mark.parametrize("drafts", ["right", ASSISTANT])
def test_all_drafts_of_the_model_itself_are_accepted(drafts):
    bench = drafting_bench(PLAIN, drafts)
    for grammar in (WORDS, OBJECT):
        _, results = answers(bench, grammar, **DRAFTS)
        modeled = [one.drafts["draft_model" if drafts == "right" else "mtp"] for one in results]
        assert all(one.accepted_tokens == one.drafted_tokens > 2 for one in modeled)
    assert models_of(bench).is_on


def test_only_the_first_draft_token_is_masked_if_masks_are_slow(monkeypatch):
    """The counts of a right draft model, whose next tokens are right for the model alone."""
    monkeypatch.setattr(masks, "_CHEAP_SECONDS", -1.0)
    expected, _ = answers(PLAIN.bench())
    bench = drafting_bench(PLAIN, "right")
    found, _ = answers(bench, **DRAFTS)
    assert found == expected
    first, second = bench.scheduler.speculation.counts["draft_model"].accepted_by_position[:2]
    assert first > 100 > 20 > second


def test_drafts_end_where_the_short_vocabulary_has_no_allowed_id():
    expected, _ = answers(PLAIN.bench())
    assert min(fake_tokenizer().encode("abcdefgh ,.")) >= 10
    bench = drafting_bench(PLAIN, "right", short_vocabulary=10)
    models_of(bench).choose_vocabulary = lambda sequences: None
    found, results = answers(bench, **DRAFTS)
    assert found == expected
    assert draft_runner(bench).num_short > 100
    assert sum(one.drafted_tokens for one in results) == 0
    assert models_of(bench).is_on


def test_drafts_end_where_the_model_suppresses_all_allowed_ids():
    """The draft model chooses from fewer ids, so the error is not the request's."""
    letters = fake_tokenizer().encode("abcdefgh")
    assert letters == sorted(letters)
    bench = drafting_bench(PLAIN, "right", short_vocabulary=letters[2])
    models_of(bench).choose_vocabulary = lambda sequences: None
    found, _ = answers(bench, suppressed=tuple(letters[:2]), **DRAFTS)
    expected, _ = answers(PLAIN.bench(), suppressed=tuple(letters[:2]))
    assert found == expected
    assert models_of(bench).is_on


class Repeated(PromptLookup):
    """Prompt lookup that proposes a text that the grammar forbids from some token on."""

    def __init__(self, text):
        super().__init__(b"", TenantHistory())
        self.tokens = fake_tokenizer().encode(text)

    def propose(self, token_ids, most):
        tokens = self.tokens[:most]
        return DraftProposal(tokens, np.full(len(tokens), 0.9)) if tokens else None


@pytest.mark.parametrize("is_cheap", [True, False])
def test_lookup_drafts_nothing_that_the_grammar_forbids(monkeypatch, is_cheap):
    if not is_cheap:
        monkeypatch.setattr(masks, "_CHEAP_SECONDS", -1.0)
    expected, _ = answers(PLAIN.bench())
    for text, longest in (("ab1", 2), ("1ab", 0)):
        bench = PLAIN.bench()
        bench.scheduler.speculation.prompt_lookup = lambda request, text=text: Repeated(text)
        found, results = answers(bench, **DRAFTS)
        assert found == expected
        most = 3 if longest and not is_cheap else longest
        lengths = [one.drafts["lookup"] for one in results if "lookup" in one.drafts]
        means = [
            one.drafted_tokens / one.num_drafts for one in lengths
        ]  # ends of answers are short
        assert math.ceil(max(means, default=0)) == most


def test_forced_tokens_below_the_minimum_leave_room_for_other_drafts():
    """Prompt lookup proposes the tokens that the grammar forces, and one more."""
    grammar = Grammar("regex", r"(abcd[ef]){4,9}")
    expected, _ = answers(PLAIN.bench(), grammar)
    bench = PLAIN.bench()
    bench.scheduler.speculation.prompt_lookup = lambda request: Repeated("abcde")
    terms = {"max_draft_tokens": 5, "min_draft_tokens": 5, "always_drafts": True}
    found, results = answers(bench, grammar, **terms)
    assert found == expected
    assert all(list(one.drafts) == ["lookup"] for one in results)
    assert sum(one.drafts["lookup"].num_drafts for one in results) > 25


class Recorded(PromptLookup):
    """Prompt lookup that records its proposals."""

    def __init__(self):
        super().__init__(b"", TenantHistory())
        self.proposals = []

    def propose(self, token_ids, most):
        self.proposals.append(super().propose(token_ids, most))
        return self.proposals[-1]


def test_lookup_gives_up_a_source_that_the_grammar_forbids():
    """The source is digits, which the prompt repeats. The grammar allows only words."""
    digits = fake_tokenizer().encode("314159265358979323846264338327950288419")
    repeated = [*digits, 7, *digits[:9]]
    lookup = Recorded()
    assert lookup.propose(repeated, 4).token_ids == digits[9:13]
    bench = PLAIN.bench()
    bench.scheduler.speculation.prompt_lookup = lambda request: lookup
    terms = {"grammar": WORDS, **DRAFTS}
    handle = bench.submit(repeated, 12, terms=terms)
    bench.run()
    assert handle.result(0).drafted_tokens == 0
    assert [one is not None for one in lookup.proposals[1:9]] == [True] * 3 + [False] * 5


@pytest.mark.parametrize("seed", range(6))
def test_lookaheads_have_the_masks_of_the_grammar_and_leave_it_unchanged(seed):
    """Random tokens advance a lookahead and another copy of the grammar alike."""
    rng = random.Random(seed)
    compiler = GrammarCompiler(fake_tokenizer(), VOCAB_SIZE, frozenset({EOS_ID}))
    zeros = np.zeros(VOCAB_SIZE, np.float32)
    grammar = compiler.make((WORDS, OBJECT)[seed % 2])
    tokens = []
    for _ in range(20):
        before = grammar.masked(zeros).copy()
        ahead = grammar.lookahead()
        other = compiler.make((WORDS, OBJECT)[seed % 2])
        for token in tokens:
            other.advance(token)
        draft = []
        for _ in range(rng.randrange(1, 6)):
            allowed = other.masked(zeros)
            assert (ahead.masked(zeros) == allowed).all()
            draft.append(rng.choice(np.flatnonzero(allowed == 0).tolist()))
            forbidden = rng.choice(np.flatnonzero(allowed != 0).tolist())
            wrong = [*draft[:-1], forbidden, draft[-1]]
            assert grammar.lookahead().num_allowed(wrong) == len(draft) - 1
            is_whole = other.advance(draft[-1])
            assert ahead.advance(draft[-1]) == is_whole
            if is_whole:
                break
        assert grammar.lookahead().num_allowed(draft) == len(draft)
        assert (grammar.masked(zeros) == before).all()
        tokens.append(draft[0])
        if grammar.advance(draft[0]):
            break
