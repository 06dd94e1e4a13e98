"""The predicted time of a step, against machines with prescribed times."""

import random
from types import SimpleNamespace

import pytest

from kvboost_edge.engine.schedule.step_cost import StepCost, StepShape
from kvboost_edge.engine.schedule.step_plan import ScheduledTokens

BASE, SEQUENCE, READ = 0.010, 0.0005, 6.5e-7
TOKEN, ATTEND = 0.0013, 2.8e-7


def decoding(shape):
    return BASE + SEQUENCE * shape.sequences + READ * shape.decode_depth


def machine(shape):
    return decoding(shape) + TOKEN * shape.tokens + ATTEND * shape.prompt_depth


def item(start, count, num_drafted=0):
    return ScheduledTokens(SimpleNamespace(), start, [0] * count, 1, num_drafted)


def test_a_steps_shape_separates_decode_and_prompt_tokens():
    work = [item(100, 1), item(200, 3, num_drafted=2), item(1000, 64)]
    assert StepShape.of(work) == StepShape(2, 300.0, 64, 64 * 1032.0)


def test_costs_are_unknown_before_the_first_step():
    cost = StepCost()
    assert not cost.knows_decode
    assert not cost.knows_prompts
    assert cost.decode_seconds(StepShape(4, 400)) == cost.prompt_token(1000) == 0.0


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("sequences", [1, 4, 8])
def test_a_growing_prompt_is_predicted_at_every_depth(sequences, noise):
    rng = random.Random(sequences)
    cost = StepCost()
    position = 0
    errors = []
    for step in range(600):
        alone = StepShape(sequences, sequences * (200.0 + step))
        # Every 16th step has no prompt.
        shape = (
            alone
            if step % 16 == 0
            else alone._replace(tokens=32, prompt_depth=32 * (position + 16.0))
        )
        if step > 100:
            errors.append(cost.decode_seconds(alone) / decoding(alone))
            errors.append(cost.prompt_token(position) / (TOKEN + ATTEND * position))
        cost.observe(shape, machine(shape) * (1 + noise * rng.uniform(-1, 1)))
        position += shape.tokens
    assert 0.8 < min(errors) < max(errors) < 1.25


def test_a_slowdown_is_learned_within_a_few_steps():
    cost = StepCost()
    alone = StepShape(2, 1000.0)
    shape = StepShape(2, 1000.0, 32, 32 * 500.0)
    for _ in range(50):
        cost.observe(alone, machine(alone))
        cost.observe(shape, machine(shape))
    for _ in range(8):
        cost.observe(alone, 2 * machine(alone))
        cost.observe(shape, 2 * machine(shape))
    assert cost.decode_seconds(alone) == pytest.approx(2 * machine(alone), rel=0.15)
    expected = 2 * (TOKEN + ATTEND * 500)
    assert cost.prompt_token(500) == pytest.approx(expected, rel=0.2)


def test_one_delayed_step_changes_little():
    cost = StepCost()
    alone = StepShape(2, 1000.0)
    for _ in range(50):
        cost.observe(alone, machine(alone))
    cost.observe(alone, 100 * machine(alone))
    assert cost.decode_seconds(alone) < 1.3 * machine(alone)


def test_a_step_of_zero_seconds_is_ignored():
    cost = StepCost()
    cost.observe(StepShape(1, 10.0), 0.0)
    cost.observe(StepShape(), 1.0)
    assert not cost.knows_decode
