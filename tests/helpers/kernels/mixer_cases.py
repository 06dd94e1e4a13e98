"""Mixers with a state as tests have them: short convolutions, the gated delta rule and Mamba2's
state spaces.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from helpers.kernels.linear_driver import Program
from helpers.kernels.recurrent_cases import Piece, accepting, add_states
from kvboost_edge.backends.base import LayerStateSpec
from kvboost_edge.backends.state_pool import StatePool
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.reference.conv import conv_rows, silu_rows
from kvboost_edge.kernels.reference.floats import norm_rows_f32
from kvboost_edge.kernels.reference.gate import gated_rows
from kvboost_edge.kernels.reference.scan import DeltaSteps, delta_rows, delta_steps
from kvboost_edge.kernels.reference.ssd import SsdSteps, ssd_rows, ssd_steps

Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.floating[Any]]
Fields = Mapping[int, int]
DELTA_EPS = 1e-6
SSD_EPS = 1e-5


class State(NamedTuple):
    """The tail of a convolution [taps, channels] and the matrices [heads, key_dim, value_dim], of a
    mixer without heads none.
    """

    tail: Numbers
    matrices: Numbers


def assert_same(found: State, expected: State) -> None:
    np.testing.assert_array_equal(found.tail, expected.tail)
    np.testing.assert_array_equal(found.matrices, expected.matrices)


class Mixer(abc.ABC):
    """Rows of random numbers, as the matrices of a layer leave them, the specification of what they
    become, and the operations. Its state lies behind another layer's.

    columns  of a row
    width    of a row of results
    weights  of the convolution, [taps + 1, channels]
    """

    def __init__(self, spec: LayerStateSpec, columns: int, width: int, bias: bool) -> None:
        self.specs = (LayerStateSpec(3, 16), spec)
        self.taps = spec.taps
        self.channels = spec.channels
        self.columns = columns
        self.width = width
        self.rng = np.random.default_rng([spec.channels, columns])
        self.weights = self.rng.standard_normal((self.taps + 1, self.channels)).astype(np.float32)
        self.bias = self.rng.standard_normal(self.channels).astype(np.float32) if bias else None

    def rows(self, count: int, seed: int = 0) -> Floats:
        return (
            np.random.default_rng([count, seed])
            .standard_normal((count, self.columns))
            .astype(np.float32)
        )

    def empty(self, rows: Numbers) -> State:
        """The state before any row, in their dtype."""
        spec = self.specs[1]
        matrices = np.zeros((spec.heads, spec.key_dim, spec.value_dim), rows.dtype)
        return State(np.zeros((self.taps, self.channels), rows.dtype), matrices)

    @abc.abstractmethod
    def expected(self, rows: Numbers, before: State | None = None) -> tuple[Numbers, State]:
        """Results [tokens, width], and the state behind them, in the dtype of `rows`."""

    def run(
        self, rows: Floats, pieces: Sequence[Piece], pool: StatePool, threads: int = 1
    ) -> Floats:
        """Results of the pieces of `rows`, one behind another."""
        step = self.columns + 5
        out_step = self.width + 16
        wide, out = (np.full((len(rows), size), np.nan, np.float32) for size in (step, out_step))
        wide[:, : self.columns] = rows
        program = Program(len(rows))
        program.buffer(lt.B_WIDE, wide)
        program.buffer(lt.B_NORMED, out)
        add_states(program, pieces, pool)
        fields = {
            lt.F_SRC: lt.B_WIDE,
            lt.F_SRC_STEP: step,
            lt.F_DST: lt.B_NORMED,
            lt.F_DST_STEP: out_step,
        }
        fields |= {lt.F_DRAFT: pool.draft_offset(1), lt.F_DRAFT_STEP: pool.draft_row_bytes}
        self.mix(program, pool, fields)
        program.run(threads)
        assert np.isnan(out[:, self.width :]).all()
        np.testing.assert_array_equal(wide[:, : self.columns], rows)
        return out[:, : self.width].copy()

    def accept(
        self,
        pieces: Sequence[Piece],
        pool: StatePool,
        accepted: Sequence[int],
        saves: Sequence[tuple[int, int, int]] = (),
        threads: int = 1,
        written: Sequence[int] | None = None,
    ) -> None:
        """Let the states of the pieces take in so many of the drafts run last. saves: (piece,
        drafts, slot).
        """
        program = accepting(pieces, pool, accepted, saves, written)
        first = pool.draft_offset(1) // 4
        fields = {
            lt.F_SRC: lt.B_DRAFTS,
            lt.F_SRC_STEP: pool.draft_row_bytes // 4,
            lt.F_SRC_FIRST: first,
        }
        self.turn(program, pool, {**fields, lt.F_BY_FIRST: first + self.channels})
        program.run(threads)

    @abc.abstractmethod
    def mix(self, program: Program, pool: StatePool, fields: Fields) -> None:
        """Add what makes results of rows, and turns the state."""

    @abc.abstractmethod
    def turn(self, program: Program, pool: StatePool, fields: Fields) -> None:
        """Add what turns the state."""

    def convolution(self, pool: StatePool) -> dict[int, int]:
        fields = {lt.F_COUNT: self.channels, lt.F_TAPS: self.taps, lt.F_STATE: pool.offset(1)}
        return fields | {lt.F_WEIGHT: self.weights.ctypes.data, lt.F_BIAS: _address(self.bias)}

    def state(self, pool: StatePool, slot: int) -> State:
        """What a slot holds."""
        spec = self.specs[1]
        tiles = pool.matrices(slot, 1).transpose(0, 2, 1, 3)
        return State(
            pool.tail(slot, 1).copy(), tiles.reshape(spec.heads, spec.key_dim, spec.value_dim)
        )

    def put(self, pool: StatePool, slot: int, state: State) -> None:
        spec = self.specs[1]
        tiles = state.matrices.reshape(spec.heads, spec.key_dim, spec.value_dim // 16, 16)
        pool.tail(slot, 1)[:] = state.tail
        pool.matrices(slot, 1)[:] = tiles.transpose(0, 2, 1, 3)


def _address(array: Floats | None) -> int:
    return 0 if array is None else array.ctypes.data


class Conv(Mixer):
    """A gated convolution, of rows [B | C | x]."""

    def __init__(self, channels: int, taps: int, *, bias: bool = False) -> None:
        super().__init__(LayerStateSpec(taps, channels), 3 * channels, channels, bias)

    def expected(self, rows: Numbers, before: State | None = None) -> tuple[Numbers, State]:
        tail, matrices = before or self.empty(rows)
        b, c, x = np.split(rows, 3, axis=1)
        sums, tail = conv_rows(b * x, tail, self.weights, self.bias)
        return c * sums, State(tail, matrices)

    def mix(self, program: Program, pool: StatePool, fields: Fields) -> None:
        fields = {**fields, **self.convolution(pool), lt.F_GATED: 1}
        program.add(lt.OP_CONV, fields)
        program.add(lt.OP_TAILS, fields)

    def turn(self, program: Program, pool: StatePool, fields: Fields) -> None:
        program.add(lt.OP_TAILS, {**fields, **self.convolution(pool)})


class Scan(Mixer):
    """A mixer that has matrices: a row is the inputs of the convolution, then a gate for each of
    the results, and then, from `gates` on, the numbers that make decays.
    """

    def __init__(self, spec: LayerStateSpec, key_heads: int, bias: bool) -> None:
        width = spec.heads * spec.value_dim
        self.gates = spec.channels + width
        super().__init__(spec, self.gates + spec.gates, width, bias)
        self.key_heads = key_heads
        self.shared = key_heads * spec.key_dim
        self.decay = -np.exp(self.rng.uniform(-3, 2, spec.heads)).astype(np.float32)
        self.dt_bias = self.rng.standard_normal(spec.heads).astype(np.float32)

    @abc.abstractmethod
    def own(self) -> dict[int, tuple[Fields, dict[int, float]]]:
        """Fields and parameters of operations that no other rule has."""

    def mix(self, program: Program, pool: StatePool, fields: Fields) -> None:
        self.turn(program, pool, {**fields, lt.F_BY_FIRST: self.gates})
        own, params = self.own()[lt.OP_GATE]
        program.add(
            lt.OP_GATE, {**fields, **self.heads(), lt.F_SRC_FIRST: self.channels, **own}, params
        )

    def turn(self, program: Program, pool: StatePool, fields: Fields) -> None:
        spec = self.specs[1]
        sizes = {
            lt.B_QUERY: self.shared,
            lt.B_KEY: self.shared,
            lt.B_VALUE: self.width + 2 * spec.heads,
        }
        for number, size in sizes.items():
            program.buffer(number, np.full(program.tokens * size, np.nan, np.float32))
        fields = {**fields, **self.convolution(pool)}
        own = self.own()
        (of_steps, params) = own[lt.OP_STEPS]
        (of_scan, _) = own[lt.OP_SCAN]
        decays = {lt.F_DECAY: self.decay.ctypes.data, lt.F_DT_BIAS: self.dt_bias.ctypes.data}
        program.add(lt.OP_STEPS, {**fields, **self.heads(), **decays, **of_steps}, params)
        program.add(lt.OP_TAILS, fields)
        program.add(
            lt.OP_SCAN, {**self.heads(), lt.F_STATE: pool.offset(1) + spec.tail_bytes, **of_scan}
        )

    def heads(self) -> dict[int, int]:
        spec = self.specs[1]
        fields = {lt.F_KEY_HEADS: self.key_heads, lt.F_KEY_DIM: spec.key_dim}
        return fields | {lt.F_HEADS: spec.heads, lt.F_DIM: spec.value_dim}


class DeltaShape(NamedTuple):
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    tiled: bool = False


class Delta(Scan):
    """The gated delta rule, of rows [q | k | v | z | gates]."""

    def __init__(self, shape: DeltaShape, taps: int = 3, *, bias: bool = False) -> None:
        self.shape = shape
        keys, values, dim, width, _ = shape
        channels = 2 * keys * dim + values * width
        super().__init__(LayerStateSpec(taps, channels, values, dim, width, 2 * values), keys, bias)
        self.norm = self.rng.standard_normal(width).astype(np.float32)
        self.norms = [np.full(dim, factor, np.float32) for factor in (1 / dim, dim**-0.5)]

    def steps(self, mixed: Numbers, rows: Numbers) -> DeltaSteps:
        """mixed: what the convolution leaves."""
        keys, values, dim, _, _ = self.shape
        q, k = mixed[:, : 2 * keys * dim].reshape(len(rows), 2, keys, dim).swapaxes(0, 1)
        gates = (
            rows[:, self.gates : self.gates + values],
            rows[:, self.gates + values : self.gates + 2 * values],
        )
        return delta_steps(q, k, gates, self.decay, self.dt_bias, DELTA_EPS)

    def expected(self, rows: Numbers, before: State | None = None) -> tuple[Numbers, State]:
        keys, heads, dim, width, tiled = self.shape
        tail, matrices = before or self.empty(rows)
        sums, tail = conv_rows(rows[:, : self.channels], tail, self.weights, self.bias)
        mixed = silu_rows(sums)
        values = mixed[:, 2 * keys * dim :].reshape(len(rows), heads, width)
        out, matrices = delta_rows(self.steps(mixed, rows), values, matrices, tiled=tiled)
        gates = rows[:, self.channels : self.gates].reshape(out.shape)
        if rows.dtype == np.float64:
            normed = out / np.sqrt((out * out).mean(-1, keepdims=True) + DELTA_EPS) * self.norm
        else:
            normed = norm_rows_f32(out, self.norm, DELTA_EPS)
        return (silu_rows(gates) * normed).reshape(len(rows), self.width), State(tail, matrices)

    def own(self) -> dict[int, tuple[Fields, dict[int, float]]]:
        shape = self.shape
        (q_norm, k_norm) = (norm.ctypes.data for norm in self.norms)
        return {
            lt.OP_STEPS: (
                {lt.F_Q_NORM: q_norm, lt.F_K_NORM: k_norm},
                {lt.P_EPS: DELTA_EPS / shape.key_dim},
            ),
            lt.OP_SCAN: ({lt.F_TILED: int(shape.tiled)}, {}),
            lt.OP_GATE: (
                {lt.F_WEIGHT: self.norm.ctypes.data, lt.F_GROUPS: shape.value_heads},
                {lt.P_EPS: DELTA_EPS},
            ),
        }


class SsdShape(NamedTuple):
    """norm: as in Mixer."""

    groups: int
    heads: int
    key_dim: int
    value_dim: int
    norm: str = "gated_before"
    limit: tuple[float, float] = (0.0, math.inf)


class Ssd(Scan):
    """Mamba2's mixer, of rows [x | B | C | z | dt]."""

    def __init__(self, shape: SsdShape, *, bias: bool = True) -> None:
        self.shape = shape
        groups, heads, dim, width, _, _ = shape
        channels = heads * width + 2 * groups * dim
        super().__init__(LayerStateSpec(3, channels, heads, dim, width, heads), groups, bias)
        self.skip = self.rng.standard_normal(heads).astype(np.float32)
        self.norm = (
            None
            if shape.norm == "none"
            else self.rng.standard_normal(self.width).astype(np.float32)
        )

    def steps(self, mixed: Numbers, rows: Numbers) -> SsdSteps:
        """mixed: what the convolution leaves."""
        both = mixed[:, self.width :].reshape(len(rows), 2, self.shape.groups, self.shape.key_dim)
        k, q = both.swapaxes(0, 1)
        times = rows[:, self.gates : self.gates + self.shape.heads]
        return ssd_steps(q, k, times, self.decay, self.dt_bias, self.shape.limit)

    def expected(self, rows: Numbers, before: State | None = None) -> tuple[Numbers, State]:
        shape = self.shape
        tail, matrices = before or self.empty(rows)
        sums, tail = conv_rows(rows[:, : self.channels], tail, self.weights, self.bias)
        mixed = silu_rows(sums)
        values = mixed[:, : self.width].reshape(len(rows), shape.heads, shape.value_dim)
        out, matrices = ssd_rows(self.steps(mixed, rows), values, self.skip, matrices)
        gates = rows[:, self.channels : self.gates]
        first = shape.norm == "gated_before"
        flat = out.reshape(len(rows), self.width)
        return gated_rows(flat, gates, self.norm, shape.groups, SSD_EPS, gate_first=first), State(
            tail, matrices
        )

    def own(self) -> dict[int, tuple[Fields, dict[int, float]]]:
        groups = self.shape.groups
        norm = self.shape.norm
        (least, most) = self.shape.limit
        rule = {lt.F_RULE: lt.RULES["ssd"]}
        gate = {lt.F_WEIGHT: _address(self.norm), lt.F_WEIGHT_STEP: self.width // groups}
        gate |= {
            lt.F_GATE_FIRST: int(norm == "gated_before"),
            lt.F_GROUPS: 0 if norm == "none" else groups,
        }
        return {
            lt.OP_STEPS: (rule, {lt.P_LEAST: least, lt.P_MOST: most}),
            lt.OP_SCAN: ({**rule, lt.F_SKIP: self.skip.ctypes.data}, {}),
            lt.OP_GATE: (gate, {lt.P_EPS: SSD_EPS}),
        }
