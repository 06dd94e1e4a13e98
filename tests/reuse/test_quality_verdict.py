"""The quality test of reuse without a model: its text, its measure, its bound, and the key of its
verdict.
"""

import dataclasses
import itertools

import numpy as np
import pytest

from kvboost_edge.config import RecomputeStrategy
from kvboost_edge.reuse.builtin_texts import PASSAGES, PRIMER, QUESTIONS
from kvboost_edge.reuse.quality_verdict import (
    ANSWER_TOKENS,
    Comparison,
    QualityPrompts,
    Verdict,
    compare,
    make_material,
    outcome_stamp,
    read,
    write,
)
from kvboost_edge.reuse.recompute import Repair

MODEL = b"m" * 32
MATERIAL = QualityPrompts((1,), ((2, 3), (4,), (5, 6)), ((7,), (8,)))


def words(text):
    return [len(word) for word in text.split()]


def test_the_comparison_is_mean_kl_and_top_token_agreement():
    full = np.log(np.array([[0.5, 0.25, 0.25], [0.2, 0.7, 0.1]], np.float32)) + 3
    other = np.log(np.array([[0.25, 0.5, 0.25], [0.2, 0.7, 0.1]], np.float32)) - 5
    found = compare(full, other)
    assert found.mean_kl == pytest.approx((0.5 * np.log(2) + 0.25 * np.log(0.5)) / 2, abs=1e-6)
    assert (found.agreement, found.num_tokens) == (0.5, 2)
    assert compare(full, full) == Comparison(0.0, 2, 2)
    assert found + compare(full, full) == Comparison(found.kl, 3, 4)


def test_extreme_logits_give_a_finite_kl():
    full = np.array([[0, -1e4, 5]], np.float32)
    assert np.isfinite(compare(full, -full).mean_kl)


def test_impossible_tokens_count():
    """A logit of -inf, as of tokens that pad a vocabulary, contributes nothing to KL(p || q). An
    impossible token that the full computation predicts makes it infinite.
    """
    never = -np.inf
    full = np.array([[1, 2, never], [0.5, 3, never]], np.float32)
    other = np.array([[2, 1, never], [2.5, 0, never]], np.float32)
    found = compare(full, other)
    assert found.kl == pytest.approx(compare(full[:, :2], other[:, :2]).kl)
    assert found.kl > 1
    assert compare(full, np.array([[1, never, 0], [1, 1, 1]], np.float32)).kl == np.inf
    assert compare(full, np.full_like(full, np.nan)).kl == np.inf
    assert compare(np.full_like(full, np.nan), full).kl == np.inf


@pytest.mark.parametrize(
    ("reuse", "order", "passed"),
    [(0.1, 0.1, True), (0.11, 0.1, False), (0.0009, 0.0, True), (0.0011, 0.0, False)],
)
def test_the_verdict_compares_reuse_with_reordering(reuse, order, passed):
    verdict = Verdict(reuse, order, 0.9, 60, 0.5)
    assert verdict.passed is passed
    assert f"{reuse:.3g} nats" in str(verdict)
    assert f"{order:.3g}" in str(verdict)


def test_prompts_are_all_documents_and_one_question():
    assert MATERIAL.prompts() == [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 8]]
    assert MATERIAL.prompts(reordered=True) == [[1, 4, 2, 3, 5, 6, 7], [1, 4, 2, 3, 5, 6, 8]]


def test_a_reordering_moves_every_document():
    material = make_material(words, [1], None, most_tokens=10_000, least_tokens=10)
    documents = material.documents
    order = (*documents[1::2], *documents[::2])
    assert len(set(documents)) == len(documents) == len(PASSAGES)
    assert all(one != other for one, other in zip(documents, order, strict=True))
    assert not set(itertools.pairwise(documents)) & set(itertools.pairwise(order))


@pytest.mark.parametrize(
    ("most", "least", "count"),
    [(10_000, 32, 8), (10_000, 60, 4), (10_000, 105, 3), (300, 32, 8), (200, 40, 4)],
)
def test_documents_fit_the_prompt_and_have_the_minimum_length(most, least, count):
    material = make_material(words, [1, 2], [3], most_tokens=most, least_tokens=least)
    assert len(material.documents) == count
    assert min(map(len, material.documents)) >= least
    assert max(map(len, material.prompts())) + ANSWER_TOKENS <= most
    assert all(prompt[:2] == [1, 2] and prompt[-1] == 3 for prompt in material.prompts())


@pytest.mark.parametrize(("most", "least"), [(100, 32), (-5, 32), (10_000, 500)])
def test_fewer_than_three_documents_give_no_test(most, least):
    assert make_material(words, [1], None, most_tokens=most, least_tokens=least) is None


def test_the_primer_differs_from_the_test_texts():
    sentences = {
        s.strip()
        for text in (*PASSAGES, *QUESTIONS)
        for s in text.replace("\n", " ").split(".")
        if s.strip()
    }
    assert not any(sentence in PRIMER for sentence in sentences)


def test_a_stored_outcome_is_keyed_by_everything_it_depends_on(tmp_path):
    blend = Repair(strategy=RecomputeStrategy.CACHEBLEND)
    stamp = outcome_stamp(MODEL, blend, [1, 2], MATERIAL)
    verdict = Verdict(0.1, 0.2, 0.9, 60, 0.5)
    assert read(stamp, tmp_path) is None
    write(stamp, verdict, tmp_path)
    assert read(stamp, tmp_path) == verdict
    others = [
        outcome_stamp(b"n" * 32, blend, [1, 2], MATERIAL),
        outcome_stamp(MODEL, dataclasses.replace(blend, ratio=0.2), [1, 2], MATERIAL),
        outcome_stamp(MODEL, dataclasses.replace(blend, overlap=17), [1, 2], MATERIAL),
        outcome_stamp(
            MODEL,
            dataclasses.replace(blend, strategy=RecomputeStrategy.SELECTIVE),
            [1, 2],
            MATERIAL,
        ),
        outcome_stamp(MODEL, blend, [1], MATERIAL),
        outcome_stamp(MODEL, blend, [1, 2], MATERIAL._replace(introduction=(2,))),
    ]
    assert [read(one, tmp_path) for one in others] == [None] * len(others)
    # Options that a strategy ignores do not change the key.
    bare = [Repair(strategy=RecomputeStrategy.NONE, overlap=n, ratio=n / 10) for n in (1, 2)]
    assert len({outcome_stamp(MODEL, one, [1], MATERIAL) for one in bare}) == 1


def test_block_strategies_are_tested_with_ratios_not_above_the_requested():
    ratios = {
        strategy: Repair(strategy=strategy, overlap=20, ratio=0.2).tested.ratio
        for strategy in RecomputeStrategy
    }
    assert ratios == {
        RecomputeStrategy.NONE: 0,
        RecomputeStrategy.SELECTIVE: 0,
        RecomputeStrategy.CACHEBLEND: 0.1,
        RecomputeStrategy.QUERY: 0.1,
    }
    kept = [
        outcome_stamp(MODEL, Repair(strategy=strategy, ratio=ratio), [1], MATERIAL)
        for strategy in (RecomputeStrategy.CACHEBLEND, RecomputeStrategy.QUERY)
        for ratio in (0.1, 0.2)
    ]
    assert len(set(kept)) == 4
