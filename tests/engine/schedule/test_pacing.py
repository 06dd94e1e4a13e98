"""Pacing: steps that end in time for the streams, on a machine with prescribed step times."""

import itertools
import random

import pytest

from helpers.engine.paced_bench import Paced, machine
from kvboost_edge.engine.schedule.step_cost import StepShape


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("streams", [1, 4, 8])
def test_streams_keep_their_pace_during_a_long_prompt(streams, noise):
    bench = Paced(noise=noise, max_num_seqs=16)
    bench.streams(streams)
    handle = bench.long_prompt()
    while not handle.done:
        bench.step()
    late = 0
    for shape, seconds in bench.steps:
        assert shape.sequences >= streams, "each stream must get a token in every step"
        alone = machine(StepShape(shape.sequences, shape.decode_depth))
        late += seconds > 2 * alone + 0.05
    assert late <= 0.01 * len(bench.steps)
    # The prompt gets most of the time that the streams leave, so it is not starved either.
    busy = sum(seconds for _, seconds in bench.steps)
    prompt = sum(0.001 * s.tokens + 5e-7 * s.prompt_depth for s, _ in bench.steps)
    assert prompt > 0.55 * busy


@pytest.mark.parametrize("tenant", ["", "other"])
@pytest.mark.parametrize("prompts", [2, 6])
def test_a_short_prompt_is_answered_within_two_steps_during_long_ones(prompts, tenant):
    bench = Paced(max_num_seqs=16)
    for _ in range(prompts):
        bench.long_prompt()
    for _ in range(10):
        bench.step()
    bench.steps.clear()
    handle = bench.submit([7, 1] * 30, 1, tenant=tenant)
    while not handle.done:
        bench.step()
    assert len(bench.steps) <= 2
    assert all(seconds < 0.3 for _, seconds in bench.steps)


def test_a_single_prompt_takes_full_steps_of_up_to_a_second():
    bench = Paced()
    handle = bench.long_prompt()
    while not handle.done:
        bench.step()
    sizes = [shape.tokens for shape, _ in bench.steps]
    assert sizes[0] == 512
    assert max(seconds for _, seconds in bench.steps) < 1.4
    # With 3 ms a token at the end, more than 300 tokens still take less than a second.
    assert min(sizes[:-1]) > 300


def test_target_tpot_bounds_the_steps():
    bench = Paced(target_tpot=30.0)
    bench.streams(2)
    handle = bench.long_prompt()
    while not handle.done:
        bench.step()
    mixed = [seconds for shape, seconds in bench.steps[5:] if shape.tokens]
    assert sorted(mixed)[len(mixed) // 2] == pytest.approx(0.03, rel=0.1)


def test_an_unreachable_target_still_computes_prompts():
    bench = Paced(target_tpot=1.0)
    bench.streams(2)
    handle = bench.long_prompt(300)
    for _ in range(200):
        bench.step()
    assert handle.done


def test_target_tpot_0_fills_steps_to_max_batch_tokens():
    bench = Paced(target_tpot=0.0)
    bench.streams(2)
    bench.long_prompt(1000)
    bench.step()
    shape, _ = bench.steps[0]
    assert shape == StepShape(2, shape.decode_depth, 510, 510 * 255.0)


def test_decode_only_steps_are_measured_regularly():
    bench = Paced()
    bench.streams(2)
    handle = bench.long_prompt()
    while not handle.done:
        bench.step()
    gaps = [i for i, (shape, _) in enumerate(bench.steps[:-1]) if not shape.tokens]
    assert len(gaps) > 3
    assert max(after - before for before, after in itertools.pairwise(gaps)) <= 33


@pytest.mark.parametrize("tenants", [1, 5])
@pytest.mark.some(2, 1)
def test_every_deep_prompt_advances_in_every_step(tenants):
    """A token that costs more than its tenant's share of the step is computed anyway."""
    bench = Paced(target_tpot=14.0, max_num_seqs=16)
    bench.streams(1)
    handles = [bench.long_prompt(600, tenant=f"t{i}") for i in range(tenants)]
    for _ in range(2000):
        bench.step()
    assert all(handle.done for handle in handles)


def test_never_more_than_max_batch_tokens(scale):
    for seed in range(scale(8, 20)):
        rng = random.Random(seed)
        most = rng.choice((1, 2, 5, 16, 64))
        bench = Paced(max_batch_tokens=most, max_num_seqs=rng.choice((1, 4, 16)))
        for number in range(8):
            bench.long_prompt(rng.randrange(1, 80), tenant=rng.choice("ab"), priority=number % 2)
        bench.run()
        assert max(shape.sequences + shape.tokens for shape, _ in bench.steps) <= most
