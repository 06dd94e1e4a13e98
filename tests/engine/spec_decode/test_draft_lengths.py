"""How many tokens of each draft are verified, on machines whose times the test knows."""

import itertools
import math

import numpy as np
import pytest

from kvboost_edge.engine.spec_decode.draft_lengths import DraftProposal, StepCosts, choose_lengths
from kvboost_edge.engine.spec_decode.pass_costs import PassCosts


def drafts(*chances, length=31):
    return [DraftProposal([0] * length, np.full(length, chance)) for chance in chances]


def measured(seconds, num_rows=64):
    """Costs of a machine on which a pass takes `seconds(rows)`."""
    costs = PassCosts()
    for _ in range(60):
        for rows in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, num_rows):
            costs.observe(rows, 0.0, seconds(rows))
    return costs


def test_longer_drafts_are_verified_if_they_are_more_likely():
    step = StepCosts(1, 0.0, PassCosts())
    chances = (0.02, 0.5, 0.8, 0.95, 0.995)
    lengths = [choose_lengths(drafts(chance), step)[0] for chance in chances]
    assert lengths == sorted(lengths)
    assert lengths[0] == 0
    assert lengths[1] > 0
    assert lengths[-1] >= 15


def test_a_full_batch_drafts_only_what_is_nearly_certain():
    assert choose_lengths(drafts(*[0.5] * 8), StepCosts(8, 0.0, PassCosts())) == [0] * 8
    assert choose_lengths(drafts(0.5), StepCosts(1, 0.0, PassCosts()))[0] > 0
    assert min(choose_lengths(drafts(*[0.99] * 8), StepCosts(8, 0.0, PassCosts()))) > 0


def test_the_likelier_draft_gets_more_rows():
    first, second, third = choose_lengths(drafts(0.5, 0.99, 0.9), StepCosts(3, 0.0, PassCosts()))
    assert first <= third <= second
    assert second > 0


def test_equal_drafts_share_the_rows():
    lengths = choose_lengths(drafts(1.0, 1.0, 1.0), StepCosts(3, 0.0, PassCosts()))
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.8, 0.9, 0.97])
@pytest.mark.parametrize("num_drafts", [1, 2])
@pytest.mark.parametrize("seconds", [math.sqrt, float, lambda rows: 1 + 0.1 * rows])
def test_no_other_lengths_make_more_tokens_per_second(chance, num_drafts, seconds):
    costs = measured(seconds)
    proposed = drafts(*[chance] * num_drafts, length=8)

    def rate(lengths):
        made = sum(sum(chance**place for place in range(length + 1)) for length in lengths)
        return made / costs.seconds(num_drafts + sum(lengths), 0.0)

    chosen = choose_lengths(proposed, StepCosts(num_drafts, 0.0, costs))
    most = max(rate(lengths) for lengths in itertools.product(range(9), repeat=num_drafts))
    assert rate(chosen) >= most / 1.02
    assert sum(chosen) == 0 or rate(chosen) > 1.02 * rate([0] * num_drafts)


def test_nothing_is_drafted_if_each_row_costs_a_whole_pass():
    costs = measured(float)
    assert choose_lengths(drafts(0.97), StepCosts(1, 0.0, costs)) == [0]


def test_deep_sequences_draft_less():
    """Attention of each row costs as much as its linear layers, or more."""
    costs = PassCosts()
    for rows, depth in itertools.product((1, 2, 4, 8, 16), (0, 1_000, 30_000)):
        for _ in range(20):
            costs.observe(rows, rows * depth, 1 + 0.05 * rows + rows * depth / 5_000)
    shallow = choose_lengths(drafts(0.8), StepCosts(1, 100.0, costs))[0]
    deep = choose_lengths(drafts(0.8), StepCosts(1, 30_000.0, costs))[0]
    assert shallow > deep


def by_model(*chances, length=8):
    return [one._replace(source="draft_model") for one in drafts(*chances, length=length)]


@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.6])
@pytest.mark.parametrize("chance", [0.5, 0.8, 0.95])
def test_passes_of_the_draft_model_count_as_part_of_the_step(ratio, chance):
    costs = measured(lambda rows: 1 + 0.05 * rows)
    drafter = measured(lambda rows: ratio * (1 + 0.05 * rows))
    step = StepCosts(1, 0.0, costs, drafter)

    def rate(length):
        made = sum(chance**place for place in range(length + 1))
        return made / (costs.seconds(1 + length, 0.0) + length * drafter.seconds(1, 0.0))

    (draft,) = by_model(chance)
    assert step.rates(draft).tolist() == pytest.approx([rate(length) for length in range(9)])
    (length,) = choose_lengths([draft], step)
    assert length == 0 or rate(length) == pytest.approx(max(map(rate, range(9))))
    assert choose_lengths([draft], step._replace(drafter=None))[0] >= length


def test_sequences_share_the_passes_of_the_draft_model():
    costs = measured(lambda rows: 1 + 0.02 * rows)
    drafter = measured(lambda rows: 0.5 + 0.001 * rows)
    alone = choose_lengths(by_model(0.7), StepCosts(1, 0.0, costs, drafter))
    together = choose_lengths(by_model(*[0.7] * 4), StepCosts(4, 0.0, costs, drafter))
    assert min(together) >= alone[0] > 0


def test_tokens_of_another_source_cost_no_pass_of_the_draft_model():
    costs = measured(lambda rows: 1 + 0.1 * rows)
    drafter = measured(lambda rows: 5.0 * rows)
    step = StepCosts(2, 0.0, costs, drafter)
    lengths = choose_lengths([*by_model(0.5), *drafts(0.9, length=8)], step)
    assert lengths[0] == 0
    assert lengths[1] > 0
