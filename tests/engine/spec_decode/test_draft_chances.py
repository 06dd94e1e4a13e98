"""Estimated probabilities of a draft model's tokens."""

import numpy as np
import pytest

from kvboost_edge.engine.spec_decode.draft_chances import AcceptanceCounts, DraftChances

MOST = 4


def learned(chances, truth, count, rng):
    for _ in range(count):
        accepted = 0
        while accepted < MOST and rng.random() < truth[accepted]:
            accepted += 1
        chances.learn(min(accepted + 1, MOST), accepted)


def test_acceptance_by_position_converges():
    of_all = AcceptanceCounts(MOST)
    rng = np.random.default_rng(0)
    truth = (0.6, 0.9, 0.8, 0.95)
    for _ in range(20):
        chances = DraftChances(MOST, of_all)
        learned(chances, truth, 20, rng)
    fresh = DraftChances(MOST, of_all).values
    np.testing.assert_allclose(fresh, truth, atol=0.12)


def test_a_sequence_has_its_own_acceptance():
    of_all = AcceptanceCounts(MOST)
    learned(DraftChances(MOST, of_all), (1.0,) * MOST, 50, np.random.default_rng(0))
    odd = DraftChances(MOST, of_all)
    before = odd.values[0]
    for _ in range(5):
        odd.learn(1, 0)
    assert odd.values[0] < before / 2


def test_acceptance_recovers_after_failures():
    chances = DraftChances(MOST, AcceptanceCounts(MOST))
    for _ in range(4):
        chances.learn(1, 0)
    low = chances.values[0]
    for _ in range(60):
        chances.learn(0, 0)
    assert chances.values[0] > 1.5 * low


@pytest.mark.parametrize("accepted", range(MOST + 1))
def test_an_outcome_updates_the_tried_positions_most(accepted):
    chances = DraftChances(MOST, AcceptanceCounts(MOST))
    before = chances.values
    chances.learn(min(accepted + 1, MOST), accepted)
    after = chances.values
    assert (after[:accepted] > before[:accepted]).all()
    changes = np.abs(after - before)
    if accepted < MOST:
        assert after[accepted] < before[accepted]
        assert (changes[accepted + 1 :] < changes[accepted]).all()


def test_untried_positions_follow_the_earlier_ones():
    chances = DraftChances(MOST, AcceptanceCounts(MOST))
    for _ in range(20):
        chances.learn(1, 1)
    assert (chances.values > 0.85).all()
