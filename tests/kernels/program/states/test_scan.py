"""The gated delta rule against NumPy: the very bits, however the rows are cut, and states where they were asked for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from kvboost_edge.backends.base import LayerStateSpec
from kvboost_edge.backends.state_pool import StatePool
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.states.gates import softplus_f32
from kvboost_edge.kernels.reference.conv import conv_rows, silu_rows
from kvboost_edge.kernels.reference.floats import norm_rows_f32
from kvboost_edge.kernels.reference.floats import softplus_f32 as reference_softplus
from kvboost_edge.kernels.reference.scan import DeltaSteps, delta_rows, delta_steps
from linear_driver import Program
from state_cases import Piece, accepting, add_states, poisoned_pool

Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.floating[Any]]
LENGTHS = (1, 2, 15, 16, 17, 64, 300)
EPS = 1e-6


class State(NamedTuple):
    tail: Numbers
    matrices: Numbers


class Shape(NamedTuple):
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    tiled: bool = False


SHAPES = {
    "one head": Shape(1, 1, 16, 16),
    "shared keys": Shape(2, 4, 32, 48),
    "shared keys, tiled": Shape(2, 6, 16, 32, tiled=True),
    "as in models": Shape(1, 2, 128, 128),
}


class Delta:
    """Rows [q | k | v | z | gates] of random numbers, as the matrices of a layer leave them, and its vectors."""

    def __init__(self, shape: Shape, taps: int = 3, *, bias: bool = False) -> None:
        self.shape, self.taps = shape, taps
        keys, values, dim, width, _ = shape
        self.channels = 2 * keys * dim + values * width
        self.gates = self.channels + values * width
        self.step = self.gates + 2 * values + 5
        rng = np.random.default_rng(keys + values)
        self.decay = -np.exp(rng.uniform(-3, 2, values)).astype(np.float32)
        self.dt_bias = rng.standard_normal(values).astype(np.float32)
        self.weights = rng.standard_normal((taps + 1, self.channels)).astype(np.float32)
        self.bias = rng.standard_normal(self.channels).astype(np.float32) if bias else None
        self.norm = rng.standard_normal(width).astype(np.float32)
        self.norms = [np.full(dim, factor, np.float32) for factor in (1 / dim, dim**-0.5)]
        self.specs = (LayerStateSpec(3, 16), LayerStateSpec(taps, self.channels, values, dim, width, 2 * values))

    def rows(self, count: int, seed: int = 0) -> Floats:
        return np.random.default_rng([count, seed]).standard_normal((count, self.step)).astype(np.float32)

    def steps(self, mixed: Numbers, rows: Numbers) -> DeltaSteps:
        """mixed: what the convolution leaves."""
        keys, values, dim, _, _ = self.shape
        q, k = mixed[:, : 2 * keys * dim].reshape(len(rows), 2, keys, dim).swapaxes(0, 1)
        gates = rows[:, self.gates : self.gates + values], rows[:, self.gates + values : self.gates + 2 * values]
        return delta_steps(q, k, gates, self.decay, self.dt_bias, EPS)

    def expected(self, rows: Numbers, before: State | None = None) -> tuple[Numbers, State]:
        """Results [tokens, value_heads * value_dim], and the state behind them, in the dtype of `rows`."""
        keys, heads, dim, width, tiled = self.shape
        empty = State(np.zeros((self.taps, self.channels), rows.dtype), np.zeros((heads, dim, width), rows.dtype))
        tail, matrices = before or empty
        sums, tail = conv_rows(rows[:, : self.channels], tail, self.weights, self.bias)
        mixed = silu_rows(sums)
        values = mixed[:, 2 * keys * dim :].reshape(len(rows), heads, width)
        out, matrices = delta_rows(self.steps(mixed, rows), values, matrices, tiled=tiled)
        gates = rows[:, self.channels : self.gates].reshape(out.shape)
        if rows.dtype == np.float64:
            normed = out / np.sqrt((out * out).mean(-1, keepdims=True) + EPS) * self.norm
        else:
            normed = norm_rows_f32(out, self.norm, EPS)
        return (silu_rows(gates) * normed).reshape(len(rows), heads * width), State(tail, matrices)

    def run(self, rows: Floats, pieces: Sequence[Piece], pool: StatePool, threads: int = 1) -> Floats:
        """Results of the pieces of `rows`, one behind another."""
        _, values, _, width, _ = self.shape
        wide, count = rows.copy(), len(rows)
        out = np.full((count, values * width), np.nan, np.float32)
        program = Program(count)
        for number, array in {lt.B_WIDE: wide, lt.B_NORMED: out}.items():
            program.buffer(number, array)
        add_states(program, pieces, pool)
        conv = {lt.F_SRC: lt.B_WIDE, lt.F_SRC_STEP: self.step, lt.F_BY_FIRST: self.gates}
        conv |= {lt.F_DRAFT: pool.draft_offset(1), lt.F_DRAFT_STEP: pool.draft_row_bytes}
        conv = self.turn(program, pool, conv)
        norm = {lt.F_WEIGHT: self.norm.ctypes.data, lt.F_SRC_FIRST: self.channels, lt.F_GROUPS: values}
        program.add(lt.OP_GATE, {**conv, **norm}, {lt.P_EPS: EPS})
        program.run(threads)
        np.testing.assert_array_equal(wide, rows)
        return out

    def accept(
        self,
        pieces: Sequence[Piece],
        pool: StatePool,
        accepted: Sequence[int],
        saves: Sequence[tuple[int, int, int]] = (),
        threads: int = 1,
        written: Sequence[int] | None = None,
    ) -> None:
        """Let the states of the pieces take in so many of the drafts run last. saves: (piece, drafts, slot)."""
        program, first = accepting(pieces, pool, accepted, saves, written), pool.draft_offset(1) // 4
        source = {lt.F_SRC: lt.B_DRAFTS, lt.F_SRC_STEP: pool.draft_row_bytes // 4, lt.F_SRC_FIRST: first}
        self.turn(program, pool, {**source, lt.F_BY_FIRST: first + self.channels})
        program.run(threads)

    def turn(self, program: Program, pool: StatePool, source: dict[int, int]) -> dict[int, int]:
        """Add what goes through the matrices; the fields of all operations."""
        keys, values, dim, width, tiled = self.shape
        sizes = {lt.B_QUERY: keys * dim, lt.B_KEY: keys * dim, lt.B_VALUE: values * (width + 2)}
        for number, size in sizes.items():
            program.buffer(number, np.full(program.tokens * size, np.nan, np.float32))
        conv = {**source, lt.F_COUNT: self.channels, lt.F_TAPS: self.taps, lt.F_WEIGHT: self.weights.ctypes.data}
        conv |= {lt.F_DST: lt.B_NORMED, lt.F_DST_STEP: values * width, lt.F_STATE: pool.offset(1)}
        conv[lt.F_BIAS] = 0 if self.bias is None else self.bias.ctypes.data
        heads = {lt.F_KEY_HEADS: keys, lt.F_KEY_DIM: dim, lt.F_HEADS: values, lt.F_DIM: width, lt.F_TILED: int(tiled)}
        norms = {lt.F_Q_NORM: self.norms[0].ctypes.data, lt.F_K_NORM: self.norms[1].ctypes.data}
        gates = {lt.F_DECAY: self.decay.ctypes.data, lt.F_DT_BIAS: self.dt_bias.ctypes.data}
        program.add(lt.OP_STEPS, {**conv, **heads, **norms, **gates}, {lt.P_EPS: EPS / dim})
        program.add(lt.OP_TAILS, conv)
        program.add(lt.OP_SCAN, {**heads, lt.F_STATE: pool.offset(1) + self.specs[1].tail_bytes})
        return {**conv, **heads}

    def state(self, pool: StatePool, slot: int) -> State:
        """What a slot holds, the matrices as [value_heads, key_dim, value_dim]."""
        _, heads, dim, width, _ = self.shape
        matrices = pool.matrices(slot, 1).transpose(0, 2, 1, 3).reshape(heads, dim, width)
        return State(pool.tail(slot, 1).copy(), matrices)

    def put(self, pool: StatePool, slot: int, state: State) -> None:
        _, heads, dim, width, _ = self.shape
        pool.tail(slot, 1)[:] = state.tail
        pool.matrices(slot, 1)[:] = state.matrices.reshape(heads, dim, width // 16, 16).transpose(0, 2, 1, 3)


def assert_same(found: State, expected: State) -> None:
    np.testing.assert_array_equal(found.tail, expected.tail)
    np.testing.assert_array_equal(found.matrices, expected.matrices)


DELTAS = {name: Delta(shape) for name, shape in SHAPES.items()}
DELTAS["with bias"] = Delta(Shape(1, 2, 16, 16), 2, bias=True)


@pytest.mark.parametrize("name", DELTAS)
@pytest.mark.parametrize("length", LENGTHS)
def test_results_and_the_state_have_the_bits_of_the_specification(name: str, length: int) -> None:
    delta, rows = DELTAS[name], DELTAS[name].rows(length)
    pool = poisoned_pool(delta.specs, 2)
    out = delta.run(rows, [Piece(length, -1, 1)], pool)
    expected, state = delta.expected(rows)
    np.testing.assert_array_equal(out, expected)
    assert_same(delta.state(pool, 1), state)
    assert np.isnan(pool.matrices(0, 1)).all()
    assert np.isnan(pool.tail(1, 0)).all()


@pytest.mark.parametrize("name", DELTAS)
def test_rounding_stays_small_over_a_long_text(name: str) -> None:
    delta, rows = DELTAS[name], DELTAS[name].rows(300, 1)
    exact, exact_state = delta.expected(rows.astype(np.float64))
    out, state = delta.expected(rows)
    assert np.linalg.norm(out - exact) <= 2e-6 * np.linalg.norm(exact)
    apart = state.matrices - exact_state.matrices
    assert np.linalg.norm(apart) <= 2e-6 * np.linalg.norm(exact_state.matrices)


@pytest.mark.parametrize("name", ["shared keys", "shared keys, tiled"])
@pytest.mark.parametrize("cuts", [(1,), (2, 3), (16, 17), tuple(range(1, 20))], ids=str)
def test_any_cut_gives_the_same_bits(name: str, cuts: tuple[int, ...]) -> None:
    """In place, where a slot is read and written, and between two slots in turns."""
    delta, length = DELTAS[name], 40
    rows = delta.rows(length)
    whole, state = delta.expected(rows)
    bounds = [0, *cuts, length]
    for slots in ([0] * len(bounds), [index % 2 for index in range(len(bounds))]):
        pool = poisoned_pool(delta.specs, 2)
        for index, (first, stop) in enumerate(itertools.pairwise(bounds)):
            piece = Piece(stop - first, slots[index - 1] if index else -1, slots[index])
            np.testing.assert_array_equal(delta.run(rows[first:stop], [piece], pool), whole[first:stop])
        assert_same(delta.state(pool, slots[len(bounds) - 2]), state)


@pytest.mark.parametrize("threads", [1, 2])
def test_many_sequences_with_saves_do_not_see_each_other(threads: int) -> None:
    delta = DELTAS["shared keys"]
    pool = poisoned_pool(delta.specs, 12)
    _, old = delta.expected(delta.rows(9))
    _, other = delta.expected(delta.rows(8))
    before = {-1: None, 0: old, 9: other, 10: State(other.tail, old.matrices)}
    for slot in (0, 9, 10):
        delta.put(pool, slot, before[slot])
    # Two read one slot; one reads and writes its own; one has a single row, and one none.
    pieces = [
        Piece(20, -1, 1, ((1, 2), (2, 3), (16, 4), (20, 5))),
        Piece(5, 0, 6),
        Piece(1, 0, 7, ((1, 8),)),
        Piece(0, 9, 9),
        Piece(17, 10, 10, ((3, 11),)),
    ]
    rows = delta.rows(sum(piece.rows for piece in pieces))
    out = delta.run(rows, pieces, pool, threads)
    first = 0
    for piece in pieces:
        own = rows[first : first + piece.rows]
        expected, state = delta.expected(own, before[piece.read])
        np.testing.assert_array_equal(out[first : first + piece.rows], expected)
        assert_same(delta.state(pool, piece.write), state)
        for count, slot in piece.saves:
            _, saved = delta.expected(own[:count], before[piece.read])
            assert_same(delta.state(pool, slot), saved)
        first += piece.rows
    assert_same(delta.state(pool, 0), old)


@pytest.mark.parametrize("name", ["shared keys, tiled", "as in models", "with bias"])
def test_drafts_see_the_state_and_no_slot_sees_a_draft_until_it_is_accepted(name: str) -> None:
    delta, num_drafts = DELTAS[name], 5
    _, before = delta.expected(delta.rows(9))
    rows = delta.rows(2 + num_drafts)
    whole, _ = delta.expected(rows, before)
    states = [delta.expected(rows[: 2 + count], before)[1] for count in range(num_drafts + 1)]
    for count in range(num_drafts + 1):
        pool = poisoned_pool(delta.specs, 4, num_drafts)
        delta.put(pool, 0, before)
        pieces = [Piece(len(rows), 0, 0, ((2, 1),), drafts=num_drafts)]
        np.testing.assert_array_equal(delta.run(rows, pieces, pool), whole)
        assert_same(delta.state(pool, 0), states[0])
        assert_same(delta.state(pool, 1), states[0])
        if count:
            delta.accept(pieces, pool, [count], [(0, min(2, count), 2)], written=[3])
            assert_same(delta.state(pool, 3), states[count])
            assert_same(delta.state(pool, 0), states[0])
            delta.accept(pieces, pool, [count], [(0, min(2, count), 2)])
            assert_same(delta.state(pool, 2), states[min(2, count)])
        assert_same(delta.state(pool, 0), states[count])
        assert_same(delta.state(pool, 1), states[0])
        assert np.isnan(pool.tail(1, 0)).all()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("accepted", [(0, 3, 0, 2), (2, 0, 1, 0), (3, 3, 0, 4), (0, 0, 0, 1)], ids=str)
def test_each_sequence_takes_in_its_own_drafts(accepted: tuple[int, ...], threads: int) -> None:
    """The slot of one whose drafts were all wrong may be somebody else's by now."""
    delta = DELTAS["shared keys"]
    pieces = [Piece(4, -1, 0, drafts=3), Piece(6, 1, 1, drafts=3), Piece(3, -1, 2), Piece(5, 3, 3, drafts=4)]
    pieces = [piece._replace(drafts=max(piece.drafts, count)) for piece, count in zip(pieces, accepted, strict=True)]
    pool = poisoned_pool(delta.specs, 12, sum(piece.drafts for piece in pieces))
    _, old = delta.expected(delta.rows(9))
    for slot in (1, 3):
        delta.put(pool, slot, old)
    rows = delta.rows(sum(piece.rows for piece in pieces))
    delta.run(rows, pieces, pool, threads)
    taken = [index for index, count in enumerate(accepted) if not count]
    pool.poison(taken)
    delta.accept(pieces, pool, accepted, [(i, n, 4 + i) for i, n in enumerate(accepted) if n], threads)
    first = 0
    for index, (piece, count) in enumerate(zip(pieces, accepted, strict=True)):
        own = rows[first : first + piece.rows - piece.drafts + count]
        first += piece.rows
        if count:
            _, state = delta.expected(own, old if piece.read >= 0 else None)
            assert_same(delta.state(pool, index), state)
            assert_same(delta.state(pool, 4 + index), state)
        else:
            assert np.isnan(pool.matrices(index, 1)).all()
            assert np.isnan(pool.tail(index, 1)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_state_that_is_no_number_breaks_its_own_sequence_alone(bad: float) -> None:
    delta = DELTAS["shared keys"]
    pool = poisoned_pool(delta.specs, 2)
    _, old = delta.expected(delta.rows(9))
    old.matrices[1, 5, 7] = bad
    delta.put(pool, 0, old)
    rows = delta.rows(20)
    out = delta.run(rows, [Piece(10, 0, 0), Piece(10, -1, 1)], pool).reshape(20, 4, 48)
    assert np.isnan(out[:10, 1]).all()
    assert np.isfinite(out[10:]).all()
    assert np.isfinite(out[:10, [0, 2, 3]]).all()


def test_gates_far_out_are_the_limits_of_their_functions() -> None:
    delta = DELTAS["one head"]
    rows = delta.rows(4)
    rows[:, delta.gates] = [-np.inf, np.inf, -1e5, 1e5]
    rows[:, delta.gates + 1] = [np.inf, -np.inf, 1e5, -1e5]
    steps = delta.steps(rows[:, : delta.channels], rows)
    np.testing.assert_allclose(steps.shares[:, 0], [0, 1, 0, 1], atol=1e-37)
    np.testing.assert_array_equal(steps.decays[:, 0], np.float32([0, 1, 0, 1]))
    pool = poisoned_pool(delta.specs, 1)
    expected, _ = delta.expected(rows)
    np.testing.assert_array_equal(delta.run(rows, [Piece(4, -1, 0)], pool), expected)


def test_softplus_is_that_of_float64_and_of_the_specification() -> None:
    @kernel
    def of_all(x: Floats, out: Floats) -> None:
        for index in range(x.size):
            out[index] = softplus_f32(x[index])

    x = np.concatenate([np.linspace(-40, 40, 4001), [0.0, -0.0, 1e-30, -1e-30, 100.0, -100.0]]).astype(np.float32)
    out = np.empty_like(x)
    of_all(x, out)
    np.testing.assert_array_equal(out, reference_softplus(x))
    np.testing.assert_allclose(out, np.logaddexp(0, x.astype(np.float64)), rtol=5e-7, atol=1e-38)
