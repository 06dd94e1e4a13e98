"""The histogram of step times."""

import time

import pytest

from helpers.engine.fake_runner import Bench
from kvboost_edge.engine.stats import StepTimes


def test_bucket_counts_are_cumulative_and_bounds_inclusive():
    times = StepTimes()
    for seconds in (0.0, 0.001, 0.0011, 0.2, 0.21, 99.0):
        times.observe(seconds)
    counts = times.cumulative()
    assert [counts[le] for le in ("0.001", "0.0025", "0.15", "0.2", "0.3", "10.0", "+Inf")] == [
        2,
        3,
        3,
        4,
        5,
        5,
        6,
    ]
    assert list(counts.values()) == sorted(counts.values())
    assert times.seconds == pytest.approx(99.4121)


def test_each_step_that_computes_is_counted_once():
    bench = Bench()
    bench.submit([1, 2, 3], 5)
    began = time.perf_counter()
    steps = bench.run()
    elapsed = time.perf_counter() - began
    assert not bench.step()
    times = bench.core.step_times
    assert times.cumulative()["+Inf"] == steps == 5
    assert 0 < times.seconds <= elapsed


def test_step_time_includes_the_forward_pass():
    bench = Bench()
    bench.submit([1, 2, 3], 3)
    bench.runner.on_forward = lambda batch: time.sleep(0.03)
    bench.run()
    counts = bench.core.step_times.cumulative()
    assert (counts["0.025"], counts["+Inf"]) == (0, 3)
    assert bench.core.step_times.seconds >= 0.09


def test_a_step_whose_pass_fails_is_not_counted():
    bench = Bench()
    bench.submit([1, 2, 3], 3)

    def fail(batch):
        raise RuntimeError("the pass failed")

    bench.runner.on_forward = fail
    assert bench.step()
    assert bench.core.step_times.cumulative()["+Inf"] == 0
