"""Short convolutions against NumPy: the very bits, however the rows are cut, and tails where they were asked for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvboost_edge.backends.base import LayerStateSpec
from kvboost_edge.backends.state_pool import StatePool
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.reference.conv import conv_rows
from linear_driver import Program
from state_cases import Piece, accepting, add_states, poisoned_pool

Floats = npt.NDArray[np.float32]
Saves = Sequence[tuple[int, int, int]]
LENGTHS = (1, 2, 15, 16, 17, 64, 300)
OFFSET_SPEC = LayerStateSpec(2, 16)  # a state before the one that is looked at


class Conv:
    """A gated convolution and its weights."""

    def __init__(self, channels: int, taps: int, *, bias: bool = False) -> None:
        rng = np.random.default_rng(channels + taps)
        self.channels, self.taps = channels, taps
        self.weights = rng.standard_normal((taps + 1, channels)).astype(np.float32)
        self.bias = rng.standard_normal(channels).astype(np.float32) if bias else None
        self.specs = (OFFSET_SPEC, LayerStateSpec(taps, channels))

    def rows(self, count: int) -> Floats:
        return np.random.default_rng(count).standard_normal((count, 3 * self.channels)).astype(np.float32)

    def expected(
        self, rows: npt.NDArray[np.floating[Any]], tail: npt.NDArray[np.floating[Any]] | None = None
    ) -> tuple[npt.NDArray[np.floating[Any]], npt.NDArray[np.floating[Any]]]:
        """Results and the tail behind them, in the dtype of `rows`."""
        tail = np.zeros((self.taps, self.channels), rows.dtype) if tail is None else tail
        b, c, x = np.split(rows, 3, axis=1)
        sums, tail = conv_rows(b * x, tail, self.weights, self.bias)
        return c * sums, tail

    def run(self, rows: Floats, pieces: Sequence[Piece], pool: StatePool, threads: int = 1) -> Floats:
        """Results of the pieces of `rows`, one behind another."""
        step, width = rows.shape[1] + 32, self.channels + 16
        wide, out = np.full((len(rows), step), np.nan, np.float32), np.full((len(rows), width), np.nan, np.float32)
        wide[:, : rows.shape[1]] = rows
        program = Program(len(rows))
        program.buffer(lt.B_WIDE, wide)
        program.buffer(lt.B_NORMED, out)
        add_states(program, pieces, pool)
        fields = {lt.F_SRC: lt.B_WIDE, lt.F_SRC_STEP: step, lt.F_COUNT: self.channels, lt.F_TAPS: self.taps}
        fields |= {lt.F_DST: lt.B_NORMED, lt.F_DST_STEP: width, lt.F_GATED: 1}
        fields |= {lt.F_WEIGHT: self.weights.ctypes.data, lt.F_STATE: pool.offset(1)}
        fields[lt.F_BIAS] = 0 if self.bias is None else self.bias.ctypes.data
        fields |= {lt.F_DRAFT: pool.draft_offset(1), lt.F_DRAFT_STEP: pool.draft_row_bytes}
        program.add(lt.OP_CONV, fields)
        program.add(lt.OP_TAILS, fields)
        program.run(threads)
        assert np.isnan(out[:, self.channels :]).all()
        np.testing.assert_array_equal(wide[:, : rows.shape[1]], rows)
        return out[:, : self.channels].copy()

    def accept(self, pieces: Sequence[Piece], pool: StatePool, accepted: Sequence[int], saves: Saves = ()) -> None:
        """Let the tails of the pieces take in so many of the drafts that were run last."""
        program, first = accepting(pieces, pool, accepted, saves), pool.draft_offset(1) // 4
        fields = {lt.F_SRC: lt.B_DRAFTS, lt.F_SRC_STEP: pool.draft_row_bytes // 4, lt.F_SRC_FIRST: first}
        fields |= {lt.F_COUNT: self.channels, lt.F_TAPS: self.taps, lt.F_STATE: pool.offset(1)}
        program.add(lt.OP_TAILS, fields)
        program.run()


CONVS = {
    "of whole units": Conv(1024, 2),
    "of more than a unit": Conv(528, 3),
    "with bias": Conv(16, 2, bias=True),
    "longer": Conv(32, 7),
}


@pytest.mark.parametrize("name", CONVS)
@pytest.mark.parametrize("length", LENGTHS)
def test_results_and_the_tail_have_the_bits_of_the_specification(name: str, length: int) -> None:
    conv, rows = CONVS[name], CONVS[name].rows(length)
    pool = poisoned_pool(conv.specs, 2)
    out = conv.run(rows, [Piece(length, -1, 1)], pool)
    expected, tail = conv.expected(rows)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(pool.tail(1, 1), tail)
    exact, _ = conv.expected(rows.astype(np.float64))
    np.testing.assert_allclose(out, exact, rtol=2e-5, atol=2e-5)
    assert np.isnan(pool.tail(0, 1)).all()
    assert np.isnan(pool.tail(1, 0)).all()


@pytest.mark.parametrize("name", CONVS)
@pytest.mark.parametrize("cuts", [(1,), (2, 3), (16, 17), tuple(range(1, 20))], ids=str)
def test_any_cut_gives_the_same_bits(name: str, cuts: tuple[int, ...]) -> None:
    """In place, where a slot is read and written; between two slots in turns; and in and out of others."""
    conv, length = CONVS[name], 40
    rows = conv.rows(length)
    whole, tail = conv.expected(rows)
    bounds = [0, *cuts, length]
    for slots in ([0] * len(bounds), [index % 2 for index in range(len(bounds))]):
        pool = poisoned_pool(conv.specs, 2)
        for index, (first, stop) in enumerate(itertools.pairwise(bounds)):
            piece = Piece(stop - first, slots[index - 1] if index else -1, slots[index])
            np.testing.assert_array_equal(conv.run(rows[first:stop], [piece], pool), whole[first:stop])
        np.testing.assert_array_equal(pool.tail(slots[len(bounds) - 2], 1), tail)


@pytest.mark.parametrize("threads", [1, 2])
def test_many_sequences_with_saves_do_not_see_each_other(threads: int) -> None:
    conv = CONVS["of more than a unit"]
    pool = poisoned_pool(conv.specs, 12)
    old = conv.rows(7)[:3, : conv.channels]
    pool.tail(0, 1)[:] = old
    # Two read one slot; one reads and writes its own; one has a single row, and one none.
    pieces = [
        Piece(20, -1, 1, ((1, 2), (2, 3), (16, 4), (20, 5))),
        Piece(5, 0, 6),
        Piece(1, 0, 7, ((1, 8),)),
        Piece(0, 9, 9),
        Piece(17, 10, 10, ((3, 11),)),
    ]
    pool.tail(9, 1)[:] = 9
    pool.tail(10, 1)[:] = old + 1
    tails = {-1: None, 0: old, 9: pool.tail(9, 1).copy(), 10: old + 1}
    rows = conv.rows(sum(piece.rows for piece in pieces))
    out = conv.run(rows, pieces, pool, threads)
    first = 0
    for piece in pieces:
        own = rows[first : first + piece.rows]
        expected, tail = conv.expected(own, tails[piece.read])
        np.testing.assert_array_equal(out[first : first + piece.rows], expected)
        np.testing.assert_array_equal(pool.tail(piece.write, 1), tail)
        for count, slot in piece.saves:
            np.testing.assert_array_equal(pool.tail(slot, 1), conv.expected(own[:count], tails[piece.read])[1])
        first += piece.rows
    np.testing.assert_array_equal(pool.tail(0, 1), old)


@pytest.mark.parametrize("name", ["of more than a unit", "longer"])
def test_tails_take_in_the_drafts_that_were_right_and_no_others(name: str) -> None:
    conv, num_drafts = CONVS[name], 9
    old = conv.rows(9)[: conv.taps, : conv.channels]
    rows = conv.rows(2 * (1 + num_drafts))
    halves = np.split(rows, 2)
    for count in range(num_drafts + 1):
        pool = poisoned_pool(conv.specs, 4, 2 * num_drafts)
        pool.tail(0, 1)[:] = old
        pieces = [Piece(1 + num_drafts, 0, 0, drafts=num_drafts), Piece(1 + num_drafts, -1, 1, drafts=num_drafts)]
        wholes = [conv.expected(half, tail)[0] for half, tail in zip(halves, (old, None), strict=True)]
        np.testing.assert_array_equal(conv.run(rows, pieces, pool), np.concatenate(wholes))
        counts = (count, num_drafts - count)
        conv.accept(pieces, pool, counts, [(i, n, 2 + i) for i, n in enumerate(counts) if n])
        for slot, (half, tail, right) in enumerate(zip(halves, (old, None), counts, strict=True)):
            _, expected = conv.expected(half[: 1 + right], tail)
            np.testing.assert_array_equal(pool.tail(slot, 1), expected)
            if right:
                np.testing.assert_array_equal(pool.tail(2 + slot, 1), expected)
        assert np.isnan(pool.tail(0, 0)).all()


def test_a_number_that_is_none_stays_in_its_sequence_and_channel() -> None:
    conv = CONVS["of more than a unit"]
    rows = conv.rows(30)
    rows[10, 3] = np.nan
    pool = poisoned_pool(conv.specs, 2)
    out = conv.run(rows, [Piece(20, -1, 0), Piece(10, -1, 1)], pool)
    broken = np.zeros_like(out, dtype=bool)
    broken[10 : 10 + conv.taps + 1, 3] = True
    np.testing.assert_array_equal(np.isnan(out), broken)
