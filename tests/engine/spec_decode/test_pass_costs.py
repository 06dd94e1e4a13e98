"""The expected time of a pass, against machines with prescribed times."""

import math
import random

import pytest

from kvboost_edge.engine.spec_decode.pass_costs import PassCosts

# Times of passes by number of rows, relative to one row.
SMALL = {1: 1.0, 2: 1.18, 4: 1.54, 8: 2.67, 16: 4.5}
LARGE = {1: 1.0, 2: 1.05, 4: 1.17, 8: 1.55, 16: 3.2}
COMPUTE_BOUND = {1: 1.0, 2: 1.7, 4: 3.1, 8: 5.9, 16: 11.5}
MACHINES = pytest.mark.parametrize("machine", [SMALL, LARGE, COMPUTE_BOUND])
DEPTH = 500


def seconds(machine, rows, depth=DEPTH, slower=1.0):
    return slower * 0.004 * (machine[rows] + rows * depth / 20_000)


def observe(costs, machine, rows, depth=DEPTH, slower=1.0):
    costs.observe(rows, float(rows * depth), seconds(machine, rows, depth, slower))


def ratio(costs, rows, depth=DEPTH):
    return costs.seconds(rows, float(rows * depth)) / costs.seconds(1, float(depth))


def test_before_the_first_pass_times_are_relative_to_one_row():
    costs = PassCosts()
    assert not costs.is_known
    assert costs.seconds(1, 0.0) == pytest.approx(1.0)
    assert costs.seconds(8, 0.0) == pytest.approx(1.9)


@MACHINES
def test_the_first_pass_sets_only_the_scale(machine):
    costs = PassCosts()
    observe(costs, machine, 1)
    assert costs.is_known
    assert costs.seconds(1, DEPTH) == pytest.approx(seconds(machine, 1), rel=0.02)
    assert costs.seconds(8, 0.0) / costs.seconds(1, 0.0) == pytest.approx(1.9, rel=0.02)


@MACHINES
def test_passes_of_each_size_set_its_ratio(machine):
    costs = PassCosts()
    for _ in range(20):
        for rows in machine:
            observe(costs, machine, rows)
    for rows in (2, 4, 8, 16):
        assert ratio(costs, rows) == pytest.approx(
            seconds(machine, rows) / seconds(machine, 1), rel=0.2
        )


@MACHINES
@pytest.mark.parametrize("noise", [0.03, 0.2])
@pytest.mark.parametrize("seed", range(3))
def test_noise_and_interruptions_average_out(machine, noise, seed):
    rng = random.Random(seed)
    costs = PassCosts()
    for step in range(400):
        rows = rng.choice((1, 1, 1, 2, 4, 8, 16))
        slower = math.exp(rng.gauss(0.0, noise)) * (3.0 if rng.random() < 0.03 else 1.0)
        observe(costs, machine, rows, 300 + step, slower)
    for rows in (2, 4, 8, 16):
        expected = seconds(machine, rows) / seconds(machine, 1)
        assert ratio(costs, rows) == pytest.approx(expected, rel=0.04 + noise)


def test_one_interrupted_pass_changes_little():
    costs = PassCosts()
    for _ in range(40):
        observe(costs, SMALL, 1)
        observe(costs, SMALL, 8)
    before = ratio(costs, 8)
    observe(costs, SMALL, 8, slower=50.0)
    assert ratio(costs, 8) == pytest.approx(before, rel=0.05)
    observe(costs, SMALL, 1, slower=50.0)
    assert ratio(costs, 8) == pytest.approx(before, rel=0.08)


def test_ratios_are_kept_on_a_loaded_machine():
    """Half of the passes are delayed, some of them for long."""
    for seed in range(5):
        rng = random.Random(seed)
        costs = PassCosts()
        for _ in range(60):
            held_up = 1 + rng.expovariate(0.7) if rng.random() < 0.5 else 1.0
            observe(costs, LARGE, rng.choice((1, 1, 1, 4, 8)), slower=held_up)
        assert ratio(costs, 8) == pytest.approx(seconds(LARGE, 8) / seconds(LARGE, 1), rel=0.3)


def test_ratios_are_kept_when_the_machine_slows_down():
    costs = PassCosts()
    for _ in range(60):
        observe(costs, SMALL, 1)
        observe(costs, SMALL, 8)
    for _ in range(40):
        observe(costs, SMALL, 1, slower=2.0)
    assert costs.seconds(1, DEPTH) == pytest.approx(seconds(SMALL, 1, slower=2.0), rel=0.05)
    assert ratio(costs, 8) == pytest.approx(seconds(SMALL, 8) / seconds(SMALL, 1), rel=0.1)


def test_attention_is_learned_from_the_depth():
    costs = PassCosts()
    for step in range(200):
        for rows in (1, 4):
            observe(costs, SMALL, rows, depth=step * 50)
    for depth in (100, 2_000, 10_000):
        expected = seconds(SMALL, 4, depth) / seconds(SMALL, 1, depth)
        assert ratio(costs, 4, depth) == pytest.approx(expected, rel=0.1)


def test_invalid_passes_are_ignored():
    costs = PassCosts()
    costs.observe(1, 10.0, 0.0)
    costs.observe(0, 10.0, 1.0)
    costs.observe(65, 10.0, 1.0)
    assert not costs.is_known


def test_passes_beyond_the_measured_rows_scale_linearly():
    costs = PassCosts()
    assert costs.seconds(128, 0.0) == pytest.approx(2 * costs.seconds(64, 0.0))
