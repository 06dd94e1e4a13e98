"""Mamba2's mixer as a test has it: its rows and vectors, the specification of what it does, and the operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.base import LayerStateSpec
from kvboost_edge.backends.state_pool import StatePool
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.reference.conv import conv_rows, silu_rows
from kvboost_edge.kernels.reference.gate import gated_rows
from kvboost_edge.kernels.reference.ssd import SsdSteps, ssd_rows, ssd_steps
from linear_driver import Program
from state_cases import Piece, accepting, add_states

__all__ = ["EPS", "Shape", "Ssd", "State", "assert_same"]

Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.floating[Any]]
EPS = 1e-5


class State(NamedTuple):
    tail: Numbers
    matrices: Numbers


class Shape(NamedTuple):
    """norm: as in Mixer."""

    groups: int
    heads: int
    key_dim: int
    value_dim: int
    norm: str = "gated_before"
    limit: tuple[float, float] = (0.0, math.inf)


class Ssd:
    """Rows [x | B | C | z | dt] of random numbers, as the matrices of a layer leave them, and its vectors."""

    def __init__(self, shape: Shape, *, bias: bool = True) -> None:
        self.shape, self.taps = shape, 3
        self.width, self.shared = shape.heads * shape.value_dim, shape.groups * shape.key_dim
        self.channels = self.width + 2 * self.shared
        self.gates = self.channels + self.width
        self.step = self.gates + shape.heads + 5
        rng = np.random.default_rng(shape.heads + shape.key_dim)
        self.decay = -np.exp(rng.uniform(-3, 2, shape.heads)).astype(np.float32)
        self.dt_bias, self.skip = rng.standard_normal((2, shape.heads)).astype(np.float32)
        self.weights = rng.standard_normal((self.taps + 1, self.channels)).astype(np.float32)
        self.bias = rng.standard_normal(self.channels).astype(np.float32) if bias else None
        self.norm = None if shape.norm == "none" else rng.standard_normal(self.width).astype(np.float32)
        self.specs = (
            LayerStateSpec(3, 16),
            LayerStateSpec(self.taps, self.channels, shape.heads, shape.key_dim, shape.value_dim, shape.heads),
        )

    def rows(self, count: int, seed: int = 0) -> Floats:
        return np.random.default_rng([count, seed]).standard_normal((count, self.step)).astype(np.float32)

    def steps(self, mixed: Numbers, rows: Numbers) -> SsdSteps:
        """mixed: what the convolution leaves."""
        both = mixed[:, self.width :].reshape(len(rows), 2, self.shape.groups, self.shape.key_dim)
        k, q = both.swapaxes(0, 1)
        times = rows[:, self.gates : self.gates + self.shape.heads]
        return ssd_steps(q, k, times, self.decay, self.dt_bias, self.shape.limit)

    def expected(self, rows: Numbers, before: State | None = None) -> tuple[Numbers, State]:
        """Results [tokens, heads * value_dim], and the state behind them, in the dtype of `rows`."""
        shape = self.shape
        matrices = np.zeros((shape.heads, shape.key_dim, shape.value_dim), rows.dtype)
        tail, matrices = before or State(np.zeros((self.taps, self.channels), rows.dtype), matrices)
        sums, tail = conv_rows(rows[:, : self.channels], tail, self.weights, self.bias)
        mixed = silu_rows(sums)
        values = mixed[:, : self.width].reshape(len(rows), shape.heads, shape.value_dim)
        out, matrices = ssd_rows(self.steps(mixed, rows), values, self.skip, matrices)
        gates, first = rows[:, self.channels : self.gates], shape.norm == "gated_before"
        flat = out.reshape(len(rows), self.width)
        return gated_rows(flat, gates, self.norm, shape.groups, EPS, gate_first=first), State(tail, matrices)

    def run(self, rows: Floats, pieces: Sequence[Piece], pool: StatePool, threads: int = 1) -> Floats:
        """Results of the pieces of `rows`, one behind another."""
        shape, wide, count = self.shape, rows.copy(), len(rows)
        out = np.full((count, self.width), np.nan, np.float32)
        program = Program(count)
        for number, array in {lt.B_WIDE: wide, lt.B_NORMED: out}.items():
            program.buffer(number, array)
        add_states(program, pieces, pool)
        source = {lt.F_SRC: lt.B_WIDE, lt.F_SRC_STEP: self.step, lt.F_BY_FIRST: self.gates}
        source |= {lt.F_DRAFT: pool.draft_offset(1), lt.F_DRAFT_STEP: pool.draft_row_bytes}
        fields = self.turn(program, pool, source)
        norm = {lt.F_WEIGHT: _address(self.norm), lt.F_SRC_FIRST: self.channels}
        norm |= {lt.F_GATE_FIRST: int(shape.norm == "gated_before"), lt.F_WEIGHT_STEP: self.width // shape.groups}
        norm |= {lt.F_GROUPS: 0 if shape.norm == "none" else shape.groups}
        program.add(lt.OP_GATE, {**fields, **norm}, {lt.P_EPS: EPS})
        program.run(threads)
        np.testing.assert_array_equal(wide, rows)
        return out

    def accept(self, pieces: Sequence[Piece], pool: StatePool, accepted: Sequence[int]) -> None:
        """Let the states of the pieces take in so many of the drafts run last."""
        program, first = accepting(pieces, pool, accepted, ()), pool.draft_offset(1) // 4
        source = {lt.F_SRC: lt.B_DRAFTS, lt.F_SRC_STEP: pool.draft_row_bytes // 4, lt.F_SRC_FIRST: first}
        self.turn(program, pool, {**source, lt.F_BY_FIRST: first + self.channels})
        program.run()

    def turn(self, program: Program, pool: StatePool, source: dict[int, int]) -> dict[int, int]:
        """Add what goes through the matrices; the fields of all operations."""
        shape = self.shape
        sizes = {lt.B_QUERY: self.shared, lt.B_KEY: self.shared, lt.B_VALUE: self.width + 2 * shape.heads}
        for number, size in sizes.items():
            program.buffer(number, np.full(program.tokens * size, np.nan, np.float32))
        conv = {**source, lt.F_COUNT: self.channels, lt.F_TAPS: self.taps, lt.F_STATE: pool.offset(1)}
        conv |= {lt.F_DST: lt.B_NORMED, lt.F_DST_STEP: self.width}
        conv |= {lt.F_WEIGHT: self.weights.ctypes.data, lt.F_BIAS: _address(self.bias)}
        heads = {lt.F_KEY_HEADS: shape.groups, lt.F_KEY_DIM: shape.key_dim, lt.F_HEADS: shape.heads}
        heads |= {lt.F_DIM: shape.value_dim, lt.F_RULE: lt.RULES["ssd"]}
        gates = {lt.F_DECAY: self.decay.ctypes.data, lt.F_DT_BIAS: self.dt_bias.ctypes.data}
        limit = dict(zip((lt.P_LEAST, lt.P_MOST), shape.limit, strict=True))
        program.add(lt.OP_STEPS, {**conv, **heads, **gates}, limit)
        program.add(lt.OP_TAILS, conv)
        place = {lt.F_STATE: pool.offset(1) + self.specs[1].tail_bytes, lt.F_SKIP: self.skip.ctypes.data}
        program.add(lt.OP_SCAN, {**heads, **place})
        return {**conv, **heads}

    def state(self, pool: StatePool, slot: int) -> State:
        """What a slot holds, the matrices as [heads, key_dim, value_dim]."""
        matrices = pool.matrices(slot, 1).transpose(0, 2, 1, 3)
        return State(pool.tail(slot, 1).copy(), matrices.reshape(*matrices.shape[:2], self.shape.value_dim))

    def put(self, pool: StatePool, slot: int, state: State) -> None:
        pool.tail(slot, 1)[:] = state.tail
        tiles = state.matrices.reshape(*state.matrices.shape[:2], -1, 16).transpose(0, 2, 1, 3)
        pool.matrices(slot, 1)[:] = tiles


def _address(array: Floats | None) -> int:
    return 0 if array is None else array.ctypes.data


def assert_same(found: State, expected: State) -> None:
    np.testing.assert_array_equal(found.tail, expected.tail)
    np.testing.assert_array_equal(found.matrices, expected.matrices)
