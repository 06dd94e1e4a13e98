"""The gated delta rule, token by token: a state of each value head, [key_dim, value_dim], that each token turns.

    S = decay * S;  d = share * (v - S^T k);  S = S + k d^T;  out = S^T q

OP_STEPS makes q, k, v, the share and the decay of each token: B_QUERY and B_KEY are then [key_heads, tokens, key_dim],
B_VALUE is [value_heads, value_dim / 16, tokens, 16], then [value_heads, tokens, 2]. So a unit of OP_SCAN reads what
lies one behind another; in the rows that q, k and v come from it would lie 50 KB apart, which took six times as long.
Such a unit is a tile of 16 value columns of one head of one sequence: 8 KB that stay in the first cache for the whole
pass. Columns do not meet, and tokens follow one another in every lane, so the bits do not depend on where a text was
cut. Drafts turn a copy of the tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba.core import cgutils, types

from kvboost_edge.kernels.attention.rope import copy_floats
from kvboost_edge.kernels.integers import int_constant
from kvboost_edge.kernels.jit import intrinsic, kernel
from kvboost_edge.kernels.program import sequences as ls
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.conv import conv_silu, keep_draft, window_of
from kvboost_edge.kernels.program.norms import norm_row
from kvboost_edge.kernels.program.route import sigmoid_f32
from kvboost_edge.kernels.program.table import ProgramJob
from kvboost_edge.kernels.program.tiles import tile_scratch
from kvboost_edge.kernels.vectors import (
    F32,
    I64,
    LANES,
    V16,
    emit_fma,
    emit_load,
    emit_scratch,
    emit_splat,
    emit_store,
    exp_f32,
    fma_f32,
    load_f32,
    store_f32,
)

__all__ = ["MOST_KEYS", "drafts_scratch", "scan", "scan_units", "softplus_f32", "steps", "value_at"]

_LINE = 4 * LANES
_CHAINS = 4  # of a sum over keys: key i goes to chain i mod 4
_MAX_EXPONENT = np.float32(88.0)
MOST_KEYS = 256
"""Rows of a tile at most."""

Value = Any
Builder = Any


@kernel
def softplus_f32(x: Any) -> Any:
    """log(1 + exp(x)) = max(x, 0) + log1p(y), y = exp(-|x|); log1p(y) = 2 artanh(s), s = y / (2 + y) <= 1 / 3, by its
    series, whose first omitted term is below 2e-8."""
    one, two = np.float32(1.0), np.float32(2.0)
    y = exp_f32(-abs(x))
    s = y / (two + y)
    square = s * s
    series = np.float32(1.0 / 13.0)
    series = fma_f32(series, square, np.float32(1.0 / 11.0))
    series = fma_f32(series, square, np.float32(1.0 / 9.0))
    series = fma_f32(series, square, np.float32(1.0 / 7.0))
    series = fma_f32(series, square, np.float32(1.0 / 5.0))
    series = fma_f32(series, square, np.float32(1.0 / 3.0))
    series = fma_f32(series, square, one)
    return fma_f32(two * s, series, x if x > np.float32(0.0) else np.float32(0.0))


@kernel
def _gates(job: ProgramJob, op: Any, token: int) -> None:
    """(share, decay) of each value head, behind the values."""
    heads = op[lt.F_HEADS]
    source = job.buffers[op[lt.F_SRC]] + 4 * (token * op[lt.F_SRC_STEP] + op[lt.F_BY_FIRST])
    out = _gates_at(job, op) + 8 * token
    for head in range(heads):
        wide = softplus_f32(load_f32(source + 4 * (heads + head)) + load_f32(op[lt.F_DT_BIAS] + 4 * head))
        power = load_f32(op[lt.F_DECAY] + 4 * head) * wide
        if power > _MAX_EXPONENT:  # and not min(), which may lose a NaN
            power = _MAX_EXPONENT
        store_f32(out, sigmoid_f32(load_f32(source + 4 * head)))
        store_f32(out + 4, exp_f32(power))
        out += 8 * job.tokens


@kernel
def _gates_at(job: ProgramJob, op: Any) -> Any:
    return job.buffers[lt.B_VALUE] + 4 * job.tokens * op[lt.F_HEADS] * op[lt.F_DIM]


@kernel
def value_at(job: ProgramJob, tile: int, token: int) -> Any:
    """Address of 16 values of a token, or of what became of them; tiles of one head behind those of another."""
    return job.buffers[lt.B_VALUE] + _LINE * (tile * job.tokens + token)


@kernel
def steps(job: ProgramJob, op: Any, eps: float, token: int) -> None:
    """What a token does to the states: queries and keys, normed, values, and the gates."""
    heads, dim, scratch = op[lt.F_KEY_HEADS], op[lt.F_KEY_DIM], tile_scratch()
    window = window_of(job, op, token)
    for head in range(2 * heads):
        conv_silu(window, 4 * head * dim, dim // LANES, scratch, _LINE)
        is_query = head < heads
        weight = op[lt.F_Q_NORM] if is_query else op[lt.F_K_NORM]
        out = job.buffers[lt.B_QUERY if is_query else lt.B_KEY]
        norm_row(scratch, weight, dim, eps, out + 4 * (head % heads * job.tokens + token) * dim)
    tiles = op[lt.F_HEADS] * op[lt.F_DIM] // LANES
    conv_silu(window, 8 * heads * dim, tiles, value_at(job, 0, token), _LINE * job.tokens)
    _gates(job, op, token)
    keep_draft(job, op, token, 2 * op[lt.F_HEADS])


def _sums(b: Builder) -> list[Value]:
    chains = [cgutils.alloca_once(b, V16) for _ in range(_CHAINS)]
    for chain in chains:
        b.store(emit_splat(b, F32(0.0)), chain)
    return chains


def _folded(b: Builder, chains: Sequence[Value]) -> Value:
    first, second, third, fourth = (b.load(chain) for chain in chains)
    return b.fadd(b.fadd(first, second), b.fadd(third, fourth))


def _number(b: Builder, address: Value, index: Value) -> Value:
    return emit_splat(b, emit_load(b, F32, b.add(address, b.mul(index, int_constant(4)))))


def _quads(b: Builder, dim: Value) -> Any:
    """A loop over keys, four at a time."""
    return cgutils.for_range(b, b.lshr(dim, int_constant(2)), intp=I64)


@intrinsic
def _dots(typing: Any, tile: Any, dim: Any, key: Any, out: Any) -> Any:
    """out = the sum over keys of key * row of the tile, 16 columns."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        tile, dim, key, out = arguments
        chains = _sums(b)
        with _quads(b, dim) as loop:
            first = b.mul(loop.index, int_constant(_CHAINS))
            for index, chain in enumerate(chains):
                i = b.add(first, int_constant(index))
                row = emit_load(b, V16, b.add(tile, b.mul(i, int_constant(_LINE))))
                b.store(emit_fma(b, _number(b, key, i), row, b.load(chain)), chain)
        emit_store(b, _folded(b, chains), out)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@intrinsic
def _turn(
    typing: Any, tile: Any, dim: Any, query: Any, key: Any, after: Any, values: Any, gates: Any, dots: Any
) -> Any:
    """One token: the tile becomes decay * tile + key d, d = share * (values - decay * dots), and the values what the
    query finds in it.

    gates  address of (share, decay)
    dots   address of what `_dots` has of `key`; becomes that of `after`, the key of the next token: the tile is read
           for both at once
    """

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        tile, dim, query, key, after, values, gates, dots = arguments
        share, decay = (_number(b, gates, int_constant(index)) for index in range(2))
        found = emit_fma(b, b.fneg(decay), emit_load(b, V16, dots), emit_load(b, V16, values))
        delta = b.fmul(found, share)
        outs, nexts = _sums(b), _sums(b)
        with _quads(b, dim) as loop:
            first = b.mul(loop.index, int_constant(_CHAINS))
            for index, (out, following) in enumerate(zip(outs, nexts, strict=True)):
                i = b.add(first, int_constant(index))
                place = b.add(tile, b.mul(i, int_constant(_LINE)))
                row = emit_fma(b, _number(b, key, i), delta, b.fmul(emit_load(b, V16, place), decay))
                b.store(emit_fma(b, _number(b, query, i), row, b.load(out)), out)
                b.store(emit_fma(b, _number(b, after, i), row, b.load(following)), following)
                emit_store(b, row, place)
        emit_store(b, _folded(b, outs), values)
        emit_store(b, _folded(b, nexts), dots)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen


@intrinsic
def drafts_scratch(typing: Any) -> Any:
    """Address of a tile on the stack of the calling kernel."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        return emit_scratch(b, _LINE * MOST_KEYS)

    return types.int64(), codegen


@kernel
def scan_units(job: ProgramJob, op: Any) -> Any:
    """Units of an OP_SCAN: those of one sequence, then those of the next."""
    return job.buffers[lt.B_SEQUENCES] * op[lt.F_HEADS] * (op[lt.F_DIM] // LANES)


@kernel
def _begin(state: int, before: int, floats: int) -> None:
    """A tile of the state as it was, or zeros."""
    if before == 0:
        for index in range(floats):
            store_f32(state + 4 * index, np.float32(0.0))
    elif before != state:
        copy_floats(before, floats, state)


@kernel
def scan(job: ProgramJob, op: Any, unit: int) -> None:
    """A tile of one head of one sequence: all rows of the pass. Values become results, in place."""
    heads, tiles, dim = op[lt.F_HEADS], op[lt.F_DIM] // LANES, op[lt.F_KEY_DIM]
    sequence, head, tile = unit // (heads * tiles), unit // tiles % heads, unit % tiles
    shared = op[lt.F_KEY_HEADS]
    key_head = head % shared if op[lt.F_TILED] != 0 else head // (heads // shared)
    first, rows = ls.of_sequence(job, sequence, ls.S_FIRST), ls.of_sequence(job, sequence, ls.S_ROWS)
    offset = op[lt.F_STATE] + (head * tiles + tile) * dim * _LINE
    before, state = ls.of_sequence(job, sequence, ls.S_IN), ls.of_sequence(job, sequence, ls.S_OUT) + offset
    _begin(state, before + offset if before != 0 else 0, dim * LANES)
    start = 4 * (key_head * job.tokens + first) * dim
    query, key = job.buffers[lt.B_QUERY] + start, job.buffers[lt.B_KEY] + start
    gates, values = _gates_at(job, op) + 8 * (head * job.tokens + first), value_at(job, head * tiles + tile, first)
    dots, saved, save = tile_scratch(), 0, ls.saved_rows(job, sequence, 0)
    certain = ls.of_sequence(job, sequence, ls.S_CERTAIN)
    if rows > 0:
        _dots(state, dim, key, dots)
    for row in range(rows):
        if row == certain:
            drafted = drafts_scratch()
            copy_floats(state, dim * LANES, drafted)
            state = drafted
        after = key + 4 * dim if row + 1 < rows else key
        _turn(state, dim, query, key, after, values, gates, dots)
        query, key, gates, values = query + 4 * dim, after, gates + 8, values + _LINE
        if row + 1 == save:
            copy_floats(state, dim * LANES, ls.saved_at(job, sequence, saved) + offset)
            saved += 1
            save = ls.saved_rows(job, sequence, saved)
