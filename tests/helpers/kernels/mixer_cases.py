"""Mixers with recurrent state for tests: short convolutions, the gated delta rule and Mamba2's
state spaces.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from helpers.backends.state_views import draft_offset, matrices, tail
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
DELTA_EPS = 1e-6
SSD_EPS = 1e-5


class State(NamedTuple):
    """The conv state [taps, channels] and the matrices [heads, key_dim, value_dim]; a mixer without
    heads has no matrices.
    """

    tail: Numbers
    matrices: Numbers


def assert_same(found: State, expected: State) -> None:
    np.testing.assert_array_equal(found.tail, expected.tail)
    np.testing.assert_array_equal(found.matrices, expected.matrices)


class Mixer(abc.ABC):
    """Random input rows as the matrices of a layer produce them, the NumPy specification of the
    results, and the operations. The mixer's state is stored after another layer's.

    Attributes:
        columns: columns of an input row.
        width: columns of a result row.
        weights: weights of the convolution, [taps + 1, channels].
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
        """Return the state before any row, in the dtype of `rows`."""
        spec = self.specs[1]
        matrices = np.zeros((spec.heads, spec.key_dim, spec.value_dim), rows.dtype)
        return State(np.zeros((self.taps, self.channels), rows.dtype), matrices)

    @abc.abstractmethod
    def expected(self, rows: Numbers, before: State | None = None) -> tuple[Numbers, State]:
        """Return the results [tokens, width] and the state after them, in the dtype of `rows`."""

    def run(
        self, rows: Floats, pieces: Sequence[Piece], pool: StatePool, threads: int = 1
    ) -> Floats:
        """Return the results of the pieces of `rows`, one after another."""
        step = self.columns + 5
        out_step = self.width + 16
        wide, out = (np.full((len(rows), size), np.nan, np.float32) for size in (step, out_step))
        wide[:, : self.columns] = rows
        program = Program(len(rows))
        program.buffer(lt.B_PROJECTED, wide)
        program.buffer(lt.B_NORMED, out)
        add_states(program, pieces, pool)
        conv = self.convolution(pool, lt.BufferRows(lt.B_PROJECTED, step))
        conv = conv._replace(draft=draft_offset(pool, 1), draft_step=pool.draft_row_bytes)
        self.mix(program, pool, conv, lt.BufferRows(lt.B_NORMED, out_step))
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
        """Advance the states of the pieces by the accepted drafts of the last run.

        Args:
            saves: (piece, drafts, slot) of each snapshot.
        """
        program = accepting(pieces, pool, accepted, saves, written)
        first = draft_offset(pool, 1) // 4
        rows = lt.BufferRows(lt.B_DRAFTS, pool.draft_row_bytes // 4, first)
        gates = rows._replace(first=first + self.channels)
        self.advance(program, pool, self.convolution(pool, rows), gates)
        program.run(threads)

    @abc.abstractmethod
    def mix(
        self, program: Program, pool: StatePool, conv: lt.ConvInputs, out: lt.BufferRows
    ) -> None:
        """Add the operations that compute results from rows and advance the state."""

    @abc.abstractmethod
    def advance(
        self, program: Program, pool: StatePool, conv: lt.ConvInputs, gates: lt.BufferRows
    ) -> None:
        """Add the operations that advance the state."""

    def convolution(self, pool: StatePool, rows: lt.BufferRows) -> lt.ConvInputs:
        weights = self.weights.ctypes.data
        bias = _address(self.bias)
        return lt.ConvInputs(rows, self.channels, self.taps, pool.offset(1), weights, bias)

    def state(self, pool: StatePool, slot: int) -> State:
        """Return the state in a slot."""
        spec = self.specs[1]
        tiles = matrices(pool, slot, 1).transpose(0, 2, 1, 3)
        return State(
            tail(pool, slot, 1).copy(), tiles.reshape(spec.heads, spec.key_dim, spec.value_dim)
        )

    def put(self, pool: StatePool, slot: int, state: State) -> None:
        spec = self.specs[1]
        tiles = state.matrices.reshape(spec.heads, spec.key_dim, spec.value_dim // 16, 16)
        tail(pool, slot, 1)[:] = state.tail
        matrices(pool, slot, 1)[:] = tiles.transpose(0, 2, 1, 3)


def _address(array: Floats | None) -> int:
    return 0 if array is None else array.ctypes.data


class Conv(Mixer):
    """A gated convolution over rows [B | C | x]."""

    def __init__(self, channels: int, taps: int, *, bias: bool = False) -> None:
        super().__init__(LayerStateSpec(taps, channels), 3 * channels, channels, bias)

    def expected(self, rows: Numbers, before: State | None = None) -> tuple[Numbers, State]:
        tail, matrices = before or self.empty(rows)
        b, c, x = np.split(rows, 3, axis=1)
        sums, tail = conv_rows(b * x, tail, self.weights, self.bias)
        return c * sums, State(tail, matrices)

    def mix(
        self, program: Program, pool: StatePool, conv: lt.ConvInputs, out: lt.BufferRows
    ) -> None:
        conv = conv._replace(gated=1)
        program.ops += [lt.ConvOp(conv, out), lt.KeepConvOp(conv)]

    def advance(
        self, program: Program, pool: StatePool, conv: lt.ConvInputs, gates: lt.BufferRows
    ) -> None:
        program.ops.append(lt.KeepConvOp(conv))


class Scan(Mixer):
    """A mixer with matrices. A row holds the inputs of the convolution, a gate for each result, and
    from `gates` on the inputs of the decays.
    """

    def __init__(self, spec: LayerStateSpec, key_heads: int, bias: bool) -> None:
        width = spec.heads * spec.value_dim
        self.gates = spec.channels + width
        super().__init__(spec, self.gates + spec.gates, width, bias)
        self.key_heads = key_heads
        self.shared = key_heads * spec.key_dim
        self.decay = -np.exp(self.rng.uniform(-3, 2, spec.heads)).astype(np.float32)
        self.dt_bias = self.rng.standard_normal(spec.heads).astype(np.float32)

    def inputs(self) -> dict[str, Any]:
        """Return the fields of `ScanInputsOp` that only this mixer has."""
        return {}

    skip: Floats | None = None

    @abc.abstractmethod
    def gate(self) -> dict[str, Any]:
        """Return the fields of `GateOp` that only this mixer has."""

    def mix(
        self, program: Program, pool: StatePool, conv: lt.ConvInputs, out: lt.BufferRows
    ) -> None:
        self.advance(program, pool, conv, conv.rows._replace(first=self.gates))
        gates = conv.rows._replace(first=self.channels)
        program.ops.append(lt.GateOp(gates, out, self.heads(), **self.gate()))

    def advance(
        self, program: Program, pool: StatePool, conv: lt.ConvInputs, gates: lt.BufferRows
    ) -> None:
        spec = self.specs[1]
        sizes = {
            lt.B_QUERY: self.shared,
            lt.B_KEY: self.shared,
            lt.B_VALUE: self.width + 2 * spec.heads,
        }
        for number, size in sizes.items():
            program.buffer(number, np.full(program.tokens * size, np.nan, np.float32))
        heads = self.heads()
        decays = (self.decay.ctypes.data, self.dt_bias.ctypes.data)
        program.ops += [
            lt.ScanInputsOp(conv, heads, gates, *decays, **self.inputs()),
            lt.KeepConvOp(conv),
            lt.ScanOp(heads, pool.offset(1) + spec.tail_bytes, _address(self.skip)),
        ]

    def heads(self) -> lt.StateHeads:
        spec = self.specs[1]
        return lt.StateHeads(self.key_heads, spec.key_dim, spec.heads, spec.value_dim)


class DeltaShape(NamedTuple):
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    tiled: bool = False


class Delta(Scan):
    """The gated delta rule over rows [q | k | v | z | gates]."""

    def __init__(self, shape: DeltaShape, taps: int = 3, *, bias: bool = False) -> None:
        self.shape = shape
        keys, values, dim, width, _ = shape
        channels = 2 * keys * dim + values * width
        super().__init__(LayerStateSpec(taps, channels, values, dim, width, 2 * values), keys, bias)
        self.norm = self.rng.standard_normal(width).astype(np.float32)
        self.norms = [np.full(dim, factor, np.float32) for factor in (1 / dim, dim**-0.5)]

    def steps(self, mixed: Numbers, rows: Numbers) -> DeltaSteps:
        """Return the step inputs, given the output `mixed` of the convolution."""
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

    def heads(self) -> lt.StateHeads:
        return super().heads()._replace(tiled=int(self.shape.tiled))

    def inputs(self) -> dict[str, Any]:
        q_norm, k_norm = (norm.ctypes.data for norm in self.norms)
        return {"q_norm": q_norm, "k_norm": k_norm, "eps": DELTA_EPS / self.shape.key_dim}

    def gate(self) -> dict[str, Any]:
        address = self.norm.ctypes.data
        return {"weight": address, "groups": self.shape.value_heads, "eps": DELTA_EPS}


class SsdShape(NamedTuple):
    """Shape of a Mamba2 mixer. `norm` is one of MIXER_NORMS."""

    groups: int
    heads: int
    key_dim: int
    value_dim: int
    norm: str = "gated_before"
    limit: tuple[float, float] = (0.0, math.inf)


class Ssd(Scan):
    """Mamba2's mixer over rows [x | B | C | z | dt]."""

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
        """Return the step inputs, given the output `mixed` of the convolution."""
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

    def heads(self) -> lt.StateHeads:
        return super().heads()._replace(rule=lt.RULES["ssd"])

    def inputs(self) -> dict[str, Any]:
        least, most = self.shape.limit
        return {"least": least, "most": most}

    def gate(self) -> dict[str, Any]:
        groups = self.shape.groups
        norm = self.shape.norm
        return {
            "weight": _address(self.norm),
            "weight_step": self.width // groups,
            "gate_first": int(norm == "gated_before"),
            "groups": 0 if norm == "none" else groups,
            "eps": SSD_EPS,
        }
