"""Mamba2's mixer against NumPy: the very bits, however the rows are cut, and states where they were asked for."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ssd_cases import Shape, Ssd, State, assert_same
from state_cases import Piece, poisoned_pool

LENGTHS = (1, 2, 15, 16, 17, 64, 300)
SHAPES = {
    "one head": Shape(1, 1, 16, 32),
    "groups": Shape(2, 6, 32, 48, limit=(0.3, 1.5)),
    "norm before gates": Shape(2, 4, 16, 16, "gated_after"),
    "no norm": Shape(1, 3, 64, 32, "none", (0.01, 0.5)),
    "as in models": Shape(1, 2, 128, 64),
    "a wide state": Shape(1, 1, 256, 64),
}
MIXERS = {name: Ssd(shape) for name, shape in SHAPES.items()}
MIXERS["without bias"] = Ssd(Shape(1, 2, 16, 16), bias=False)


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("length", LENGTHS)
def test_results_and_the_state_have_the_bits_of_the_specification(name: str, length: int) -> None:
    ssd, rows = MIXERS[name], MIXERS[name].rows(length)
    pool = poisoned_pool(ssd.specs, 2)
    out = ssd.run(rows, [Piece(length, -1, 1)], pool)
    expected, state = ssd.expected(rows)
    np.testing.assert_array_equal(out, expected)
    assert_same(ssd.state(pool, 1), state)
    assert np.isnan(pool.matrices(0, 1)).all()
    assert np.isnan(pool.tail(1, 0)).all()


@pytest.mark.parametrize("name", MIXERS)
def test_rounding_stays_small_over_a_long_text(name: str) -> None:
    ssd, rows = MIXERS[name], MIXERS[name].rows(300, 1)
    exact, exact_state = ssd.expected(rows.astype(np.float64))
    out, state = ssd.expected(rows)
    assert np.linalg.norm(out - exact) <= 2e-6 * np.linalg.norm(exact)
    apart = state.matrices - exact_state.matrices
    assert np.linalg.norm(apart) <= 2e-6 * np.linalg.norm(exact_state.matrices)


@pytest.mark.parametrize("name", ["groups", "a wide state"])
@pytest.mark.parametrize("cuts", [(1,), (2, 3), (16, 17), tuple(range(1, 20))], ids=str)
def test_any_cut_gives_the_same_bits(name: str, cuts: tuple[int, ...]) -> None:
    """In place, where a slot is read and written, and between two slots in turns."""
    ssd, length = MIXERS[name], 40
    rows = ssd.rows(length)
    whole, state = ssd.expected(rows)
    bounds = [0, *cuts, length]
    for slots in ([0] * len(bounds), [index % 2 for index in range(len(bounds))]):
        pool = poisoned_pool(ssd.specs, 2)
        for index, (first, stop) in enumerate(itertools.pairwise(bounds)):
            piece = Piece(stop - first, slots[index - 1] if index else -1, slots[index])
            np.testing.assert_array_equal(ssd.run(rows[first:stop], [piece], pool), whole[first:stop])
        assert_same(ssd.state(pool, slots[len(bounds) - 2]), state)


@pytest.mark.parametrize("threads", [1, 2])
def test_many_sequences_with_saves_do_not_see_each_other(threads: int) -> None:
    ssd = MIXERS["groups"]
    pool = poisoned_pool(ssd.specs, 12)
    _, old = ssd.expected(ssd.rows(9))
    _, other = ssd.expected(ssd.rows(8))
    before = {-1: None, 0: old, 9: other, 10: State(other.tail, old.matrices)}
    for slot in (0, 9, 10):
        ssd.put(pool, slot, before[slot])
    # Two read one slot; one reads and writes its own; one has a single row, and one none.
    pieces = [
        Piece(20, -1, 1, ((1, 2), (2, 3), (16, 4), (20, 5))),
        Piece(5, 0, 6),
        Piece(1, 0, 7, ((1, 8),)),
        Piece(0, 9, 9),
        Piece(17, 10, 10, ((3, 11),)),
    ]
    rows = ssd.rows(sum(piece.rows for piece in pieces))
    out = ssd.run(rows, pieces, pool, threads)
    first = 0
    for piece in pieces:
        own = rows[first : first + piece.rows]
        expected, state = ssd.expected(own, before[piece.read])
        np.testing.assert_array_equal(out[first : first + piece.rows], expected)
        assert_same(ssd.state(pool, piece.write), state)
        for count, slot in piece.saves:
            _, saved = ssd.expected(own[:count], before[piece.read])
            assert_same(ssd.state(pool, slot), saved)
        first += piece.rows
    assert_same(ssd.state(pool, 0), old)


@pytest.mark.parametrize("name", ["groups", "a wide state", "without bias"])
def test_states_take_in_the_drafts_that_were_right_and_no_others(name: str) -> None:
    ssd, num_drafts = MIXERS[name], 4
    _, before = ssd.expected(ssd.rows(9))
    rows = ssd.rows(2 * (1 + num_drafts))
    halves = np.split(rows, 2)
    for count in range(num_drafts + 1):
        pool = poisoned_pool(ssd.specs, 2, 2 * num_drafts)
        ssd.put(pool, 0, before)
        pieces = [Piece(1 + num_drafts, 0, 0, drafts=num_drafts), Piece(1 + num_drafts, -1, 1, drafts=num_drafts)]
        wholes = [ssd.expected(half, state)[0] for half, state in zip(halves, (before, None), strict=True)]
        np.testing.assert_array_equal(ssd.run(rows, pieces, pool), np.concatenate(wholes))
        counts = (count, num_drafts - count)
        ssd.accept(pieces, pool, counts)
        for slot, (half, state, right) in enumerate(zip(halves, (before, None), counts, strict=True)):
            assert_same(ssd.state(pool, slot), ssd.expected(half[: 1 + right], state)[1])


@pytest.mark.parametrize("name", ["groups", "as in models", "a wide state"])
@pytest.mark.parametrize("accepted", [0, 1, 5])
def test_drafts_see_the_state_and_no_slot_sees_a_draft_until_it_is_accepted(name: str, accepted: int) -> None:
    ssd = MIXERS[name]
    _, before = ssd.expected(ssd.rows(9))
    rows = ssd.rows(7)
    pool = poisoned_pool(ssd.specs, 1, 5)
    ssd.put(pool, 0, before)
    pieces = [Piece(7, 0, 0, drafts=5)]
    np.testing.assert_array_equal(ssd.run(rows, pieces, pool), ssd.expected(rows, before)[0])
    assert_same(ssd.state(pool, 0), ssd.expected(rows[:2], before)[1])
    if accepted:
        ssd.accept(pieces, pool, [accepted])
        assert_same(ssd.state(pool, 0), ssd.expected(rows[: 2 + accepted], before)[1])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_state_that_is_no_number_breaks_its_own_sequence_alone(bad: float) -> None:
    """And of that only the head: there is no norm that others share with it."""
    ssd = MIXERS["no norm"]
    pool = poisoned_pool(ssd.specs, 2)
    _, old = ssd.expected(ssd.rows(9))
    old.matrices[1, 5, 7] = bad
    ssd.put(pool, 0, old)
    out = ssd.run(ssd.rows(20), [Piece(10, 0, 0), Piece(10, -1, 1)], pool).reshape(20, 3, 32)
    assert not np.isfinite(out[:10, 1, 7]).any()
    assert np.isfinite(out[10:]).all()
    assert np.isfinite(out[:10, [0, 2]]).all()


@pytest.mark.parametrize(("name", "limit"), [("no norm", (0.01, 0.5)), ("one head", (0.0, np.inf))])
def test_steps_of_time_stay_within_their_limits(name: str, limit: tuple[float, float]) -> None:
    ssd = MIXERS[name]
    rows = ssd.rows(5)
    rows[:, ssd.gates] = [-1e5, 1e5, -np.inf, 2e5, np.nan]
    times = ssd.steps(rows[:, : ssd.channels], rows).times[:, 0]
    least, most = (np.float32(end) for end in limit)
    np.testing.assert_array_equal(times[[0, 2]], [least] * 2)
    np.testing.assert_array_equal(times[[1, 3]], np.minimum(np.float32([1e5, 2e5]) + ssd.dt_bias[0], most))
    pool = poisoned_pool(ssd.specs, 1)
    with np.errstate(invalid="ignore", over="ignore"):
        expected, _ = ssd.expected(rows)
    np.testing.assert_array_equal(ssd.run(rows, [Piece(5, -1, 0)], pool), expected)
    assert np.isnan(expected[4, 0])
