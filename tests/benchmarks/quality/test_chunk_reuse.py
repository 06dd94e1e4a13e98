"""Tests of the quality cost of non-prefix KV reuse with the bundled model, and of the figures of
`make quality`.

Facts within one chunk are answered correctly with any reuse. Facts that a chunk boundary splits are
therefore asked too: there, reuse without recompute must fail.
"""

import random

import pytest

from benchmarks.data.reuse_prompts import facts_cut, facts_moved
from benchmarks.data.reuse_texts import make_passages, make_questions
from benchmarks.quality.chunk_reuse import (
    OTHER_ORDER,
    Answered,
    Kept,
    Series,
    ask_round,
    row_of,
    wilson,
)
from kvboost_edge import CPUPagedEngine

SEED = "tested"


@pytest.fixture(
    scope="module", params=[16, pytest.param(8, marks=pytest.mark.full)], ids=["kv16", "kv8"]
)
def engine(request):
    with CPUPagedEngine.from_pretrained(
        "kvboost-edge/demo",
        num_blocks=1024,  # fits all prompts of a round, so nothing is evicted
        kv_cache_bits=request.param,
    ) as made:
        yield made


def test_reordered_facts_need_no_repair(engine):
    answered = list(ask_round(engine, facts_moved(engine, SEED, 0), {"one prompt": ("none",)}))
    row = row_of("moved", "one prompt", "none", [one for one in answered if one.rule == "none"])
    assert row["full right"] == row["of full"] == row["same top"] == 1
    assert row["KL"] <= 0.001
    assert row["found"] > 0.7
    assert row["recomputed"] < 0.05  # tokens that complete blocks before a span


def test_facts_divided_by_a_seam_need_repair(engine):
    rules = ("none", "overlap 8", "blocks", "default")
    answered = []
    for number in range(3):
        answered += ask_round(engine, facts_cut(engine, SEED, number), {"facts": rules})
    none, overlap, blocks, default = (
        row_of("cut", "facts", rule, [one for one in answered if one.rule == rule])
        for rule in rules
    )
    assert none["n"] >= 8
    assert none["found"] > 0.9
    assert none["of full"] < 0.6, (
        "reuse without recompute must lose answers, or the test shows nothing"
    )
    assert none["KL"] > 0.5
    assert overlap["recomputed"] <= 0.14
    for row in (overlap, blocks, default):
        assert row["of full"] >= 0.99
        assert row["KL"] <= 0.01
        assert row["same top"] >= 0.99


def answered(rule, kl, right=None, full_right=None):
    return Answered("harvest", rule, [kl, kl], [True, kl < 1], 0.5, 0.25, right, full_right)


def test_a_row_averages_over_tokens_and_counts_judged_prompts():
    some = [
        answered("none", 0.0, True, True),
        answered("none", 2.0, False, True),
        answered("none", 1.0),
    ]
    row = row_of("case", "harvest", "none", some)
    assert (row["n"], row["judged"], row["right"], row["full right"], row["of full"]) == (
        3,
        2,
        0.5,
        1.0,
        0.5,
    )
    assert (row["KL"], row["same top"], row["recomputed"]) == (1.0, 4 / 6, 0.25)
    assert row["KL 95%"][0] <= 1.0 <= row["KL 95%"][1]


def test_wilson_gives_the_known_interval():
    """The interval for 8 of 10 is that of Brown, Cai and DasGupta (2001)."""
    assert wilson(0, 0) is None
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert 0 <= wilson(0, 10)[0] < 1e-12
    assert 1 - 1e-12 < wilson(10, 10)[1] <= 1


def test_an_interrupted_run_resumes(tmp_path):
    path = tmp_path / "kept"
    first = Kept(path)
    first.keep("case", 0, [answered(OTHER_ORDER, 0.5), answered("none", 1.5, True, False)])
    again = Kept(path)
    assert again.rounds == first.rounds
    assert again.rows([Series("case", facts_moved, {}, 2)]) == first.rows(
        [Series("case", facts_moved, {}, 2)]
    )
    assert (
        len(again.rows([Series("case", facts_moved, {}, 2), Series("other", facts_moved, {}, 2)]))
        == 2
    )


def test_questions_are_answered_only_by_their_passages():
    rng = random.Random(SEED)
    passages = make_passages(rng, 8)
    for question in make_questions(rng, passages, 40):
        about = [passage for passage in passages if passage.text.split("\n")[0] in question.text]
        assert len(about) == len(question.gold)
        assert all(any(gold in passage.text for passage in about) for gold in question.gold)
