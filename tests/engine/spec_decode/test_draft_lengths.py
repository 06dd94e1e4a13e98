"""Choice of how many tokens of each draft are verified, on machines with prescribed times."""

import itertools
import math
import statistics

import numpy as np
import pytest

from kvboost_edge.engine.spec_decode.draft_lengths import (
    DraftCredit,
    DraftProposal,
    StepCosts,
    least_chances,
    observe_pass,
)
from kvboost_edge.engine.spec_decode.draft_lengths import choose_lengths as choose
from kvboost_edge.engine.spec_decode.pass_costs import PassCosts


def drafts(*chances, length=31):
    return [DraftProposal([0] * length, np.full(length, chance)) for chance in chances]


def choose_lengths(proposed, step, balance=100.0):
    credit = DraftCredit()
    credit.balance = balance
    return choose(proposed, step, credit)


def measured(seconds, num_rows=64):
    """Return the costs of a machine on which a pass takes `seconds(rows)`."""
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
@pytest.mark.some(2)
def test_the_chosen_lengths_are_optimal(chance, num_drafts, seconds):
    costs = measured(seconds)
    proposed = drafts(*[chance] * num_drafts, length=8)

    def rate(lengths):
        made = [sum(chance**place for place in range(length + 1)) for length in lengths]
        return statistics.geometric_mean(made) / costs.seconds(num_drafts + sum(lengths), 0.0)

    chosen = choose_lengths(proposed, StepCosts(num_drafts, 0.0, costs))
    most = max(rate(lengths) for lengths in itertools.product(range(9), repeat=num_drafts))
    assert rate(chosen) >= most / 1.02
    assert sum(chosen) == 0 or rate(chosen) > 1.02 * rate([0] * num_drafts)


@pytest.mark.parametrize("least", [2, 4, 7])
@pytest.mark.parametrize("chances", [(0.6,), (0.9,), (0.6, 0.6), (0.5, 0.95)])
@pytest.mark.parametrize("slope", [0.03, 0.1, 0.2])
@pytest.mark.some(2)
def test_lengths_below_the_minimum_are_not_chosen(least, chances, slope):
    """The second of two drafts has no minimum."""
    costs = measured(lambda rows: 1 + slope * (rows - 1))
    first, *others = drafts(*chances, length=8)
    proposed = [first._replace(least_tokens=least), *others]
    possible = [[0, *range(least, 9)], *[range(9)] * len(others)]

    def rate(lengths):
        made = [
            sum(chance**place for place in range(length + 1))
            for chance, length in zip(chances, lengths, strict=True)
        ]
        return statistics.geometric_mean(made) / costs.seconds(len(made) + sum(lengths), 0.0)

    chosen = choose_lengths(proposed, StepCosts(len(chances), 0.0, costs))
    assert chosen[0] in possible[0]
    best = max(map(rate, itertools.product(*possible)))
    assert rate(chosen) >= best / (1.03 if len(chances) == 1 else 1.07)


def test_a_minimum_above_the_best_length_is_chosen_if_it_beats_no_draft():
    step = StepCosts(1, 0.0, measured(lambda rows: 1 + 0.2 * (rows - 1)))
    (draft,) = drafts(0.6, length=8)
    assert choose_lengths([draft], step) == [2]
    assert choose_lengths([draft._replace(least_tokens=4)], step) == [4]
    assert choose_lengths([draft._replace(least_tokens=8)], step) == [0]
    (short,) = drafts(0.99, length=3)
    assert choose_lengths([short], step) == [3]
    assert choose_lengths([short._replace(least_tokens=4)], step) == [0]


def test_one_of_equal_drafts_gets_its_minimum_if_the_credit_does_not_suffice_for_both():
    costs = measured(lambda rows: 1 + 0.05 * rows)
    first, second = (one._replace(least_tokens=4) for one in drafts(0.9, 0.9, length=8))
    step = StepCosts(2, 0.0, costs)
    assert min(choose_lengths([first, second], step)) >= 4
    assert choose_lengths([first, second], step, 4.5 * 0.05 / 1.1) == [4, 0]


def test_nothing_is_drafted_if_each_row_costs_a_whole_pass():
    costs = measured(float)
    assert choose_lengths(drafts(0.97), StepCosts(1, 0.0, costs)) == [0]


def test_one_sequence_does_not_slow_down_many_others():
    costs = measured(lambda rows: 1 + 0.1 * rows)
    (length,) = choose_lengths(drafts(0.99), StepCosts(8, 0.0, costs))
    assert length <= 1
    (length,) = choose_lengths(drafts(0.99), StepCosts(1, 0.0, costs))
    assert length >= 16


def test_no_draft_costs_more_than_the_credit():
    costs = measured(lambda rows: 1 + 0.1 * rows)
    for balance in (0.0, 0.2, 0.5, 1.0):
        (length,) = choose_lengths(drafts(0.99), StepCosts(1, 0.0, costs), balance)
        assert costs.seconds(1 + length, 0.0) <= (1 + balance) * costs.seconds(1, 0.0)
        assert costs.seconds(2 + length, 0.0) > (1 + balance) * costs.seconds(1, 0.0)


@pytest.mark.parametrize("num_rows", [1, 8])
def test_drafts_that_are_always_rejected_cost_a_hundredth(num_rows):
    """The limit holds however likely the drafts seem, and after any number of accepted ones."""
    costs = measured(lambda rows: 1 + 0.1 * rows)
    step = StepCosts(num_rows, 0.0, costs)
    credit = DraftCredit()
    for _ in range(100):
        credit.settle([7], 1)
    most = 2 * credit.balance
    plain = costs.seconds(num_rows, 0.0)
    added = 0.0
    for _ in range(2000):
        rows = num_rows + sum(choose(drafts(*[0.95] * num_rows), step, credit))
        added += costs.seconds(rows, 0.0) - plain
        credit.settle([], num_rows)
    assert added <= (0.01 * 2000 + most) * plain


def test_accepted_tokens_earn_the_time_of_their_passes():
    credit = DraftCredit()
    credit.spend(1.5)
    before = credit.balance
    credit.settle([], 4)
    idle = credit.balance
    credit.settle([2], 1)
    assert before < idle < before + 0.02
    assert credit.balance - idle == pytest.approx(idle - before + 2)
    credit.spend(3)
    spent = credit.balance
    credit.settle([1, 1, 1, 1], 4)
    assert credit.balance - spent == pytest.approx(idle - before + 1)
    credit.spend(3)
    spent = credit.balance
    credit.settle([7], 4)
    assert credit.balance - spent < 7 / 4, (
        "seven accepted tokens of one sequence must earn less than 7/4"
    )


def test_deep_sequences_draft_less():
    """At this depth, the attention of a row costs as much as its linear layers, or more."""
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
    assert choose_lengths([draft], StepCosts(1, 0.0, costs))[0] >= length


def test_the_rates_of_several_drafts_in_a_step_do_not_depend_on_their_order():
    """The step computes its times once for each length and kind of source."""
    costs = measured(lambda rows: 1 + 0.05 * rows)
    drafter = measured(lambda rows: 0.3 + 0.05 * rows)
    proposed = [
        *by_model(0.5, 0.9, length=8),
        *by_model(0.7, length=3),
        *drafts(0.7, 0.9, length=8),
        *drafts(0.6, length=3),
    ]
    alone = [StepCosts(2, 5.0, costs, drafter).rates(draft).tolist() for draft in proposed]
    for order in (range(6), reversed(range(6))):
        step = StepCosts(2, 5.0, costs, drafter)
        assert {index: step.rates(proposed[index]).tolist() for index in order} == dict(
            enumerate(alone)
        )


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


def test_marginal_costs_are_averaged_over_slow_row_counts():
    """Three rows take longer than four. The third row counts as half of what the third and fourth
    add together.
    """
    times = {1: 1.0, 2: 1.1, 3: 1.5, 4: 1.3, 6: 1.9, 8: 2.5, 9: 2.8}
    passes = measured(lambda rows: float(np.interp(rows, list(times), list(times.values()))))
    drafter = measured(lambda rows: 0.2)
    step = StepCosts(1, 0.0, passes, drafter)
    least, least_more = least_chances(step, 0.8, 8)
    added = [0.1, 0.1, -0.2, 0.3, 0.3, 0.3, 0.3, 0.3]  # cost of one more row, after 1 to 8 rows
    assert least == pytest.approx([0.8 * one for one in added], abs=0.04)
    expected = [0.8 / 0.85 * (one + 0.2) for one in [*added[1:], added[-1]]]
    assert least_more == pytest.approx(expected, abs=0.05)


def test_a_draft_that_ends_early_is_verified_whole_for_a_single_sequence():
    costs = measured(lambda rows: 1 + 0.1 * rows)
    chances = np.full(8, 0.5)
    cut, whole = (
        DraftProposal([0] * 8, chances, "draft_model", ends_early) for ends_early in (False, True)
    )
    step = StepCosts(1, 0.0, costs, measured(lambda rows: 0.2))
    assert 0 < choose_lengths([cut], step)[0] < 8
    assert choose_lengths([whole], step) == [8]
    unlikely = whole._replace(chances=np.full(8, 0.05))
    assert choose_lengths([unlikely], step) == [0]
    together = StepCosts(2, 0.0, costs, measured(lambda rows: 0.2))
    assert choose_lengths([whole], together) == choose_lengths([cut], together)


@pytest.mark.parametrize(("chance", "leaves_out"), [(0.3, True), (0.99, False)])
def test_passes_without_drafts_are_measured_regularly_if_the_gain_is_small(chance, leaves_out):
    costs = measured(lambda rows: 1 + 0.1 * rows)
    credit = DraftCredit()
    step = StepCosts(1, 0.0, costs)
    lengths = []
    for _ in range(40):
        credit.balance = 8.0
        length = choose(drafts(chance), step, credit)[0]
        observe_pass(costs, credit, 1, 1 + length, 0.0, 1 + 0.1 * (1 + length))
        lengths.append(length)
    assert [number for number, length in enumerate(lengths) if not length] == (
        [16, 33] if leaves_out else []
    )
