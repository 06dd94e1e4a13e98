"""Tests of the benchmark of long prompts next to streams: gaps of streams and rows of the table."""

import dataclasses

import numpy as np
import pytest

from benchmarks.bench.bench_interference import Job, figures_of, measure, rows_of
from benchmarks.data.random_model import write_gguf
from benchmarks.data.shapes import SHAPES


def test_gaps_are_those_before_a_prompt_without_the_first_ones_and_those_that_touch_it():
    first = [0.0, 1.0, 1.1, 1.2, 1.3, 1.4, 1.6, 1.8, 3.0, 3.5, 5.0, 5.1]
    late = [1.9, 2.5]
    found = figures_of([first, late], began=2.0, ended=4.0)
    assert found["prompt"] == 2.0
    assert found["alone"] == pytest.approx([200, 200])
    assert found["during"] == pytest.approx([1200, 500, 1500, 600])


def test_a_token_at_the_end_of_the_prompt_is_counted():
    assert figures_of([[1.0, 4.0, 4.5]], began=2.0, ended=4.0)["during"] == [3000, 500]


def test_rows_pool_the_gaps_of_all_rounds_and_take_medians_of_other_figures():
    rounds = [
        {"paced": {"prompt": 3.0, "alone": [10.0], "during": [1.0, 2.0], "short": 5.0}},
        {"paced": {"prompt": 1.0, "alone": [20.0], "during": [9.0], "short": 7.0}},
    ]
    (row,) = rows_of(4, rounds)
    assert (row["streams"], row["engine"]) == (4, "paced")
    assert (row["during p50 ms"], row["during max ms"], row["alone p50 ms"]) == (2.0, 9.0, 15.0)
    assert (row["prompt s"], row["short ms"], row["cancel ms"]) == (2.0, 6.0, None)


@pytest.mark.parametrize(
    ("vocab", "context", "ids", "tokens"),
    [(1024, 512, (512, 1023), 472), (50_000, 8192, (1000, 40_000), 6000)],
)
def test_prompts_and_streams_fit_the_model(vocab, context, ids, tokens, tmp_path):
    shape = dataclasses.replace(SHAPES["tiny"], vocab=vocab, context=context, layers=1)
    write_gguf(tmp_path / "model.gguf", shape, "Q4_0")
    job = Job.of(tmp_path / "model.gguf", 1, 300)
    assert (job.ids, job.tokens, job.prompt) == (ids, tokens, 300)
    drawn = job.draw(np.random.default_rng(0), 2000)
    assert set(drawn) <= set(range(vocab))


@pytest.mark.full
def test_streams_and_a_long_prompt_are_measured_with_our_engine(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, SHAPES["tiny"], "Q4_0")
    found = measure(Job(str(path), 1, 1, 512, (300, 900), tokens=4000, alone_s=0.2), None)
    assert found["during"]
    assert all(found[name] > 0 for name in ("prompt", "short", "cancel"))
