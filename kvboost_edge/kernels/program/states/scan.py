"""Recurrent layers, token by token; each value head has a state S, float32 [key_dim, value_dim].

RULES["delta"] is the gated delta rule (Yang et al., 2024); RULES["ssd"] is in ssd.py:

    S = decay * S;  d = share * (v - S^T k);  S = S + k d^T;  out = S^T q

`ScanInputsOp` writes q, k, v and gates in a layout that lets a unit of `ScanOp` read consecutive
memory. That is six times as fast as reading the 50 KB rows of the pass:

    buffer         shape
    B_QUERY, B_KEY [key_heads, tokens, key_dim]
    B_VALUE        [value_heads, value_dim / 16, tokens, 16], then gates [value_heads, tokens, 2]

A unit is a tile of 16 value columns of one head of one sequence. Its 8 KB stay in the L1 cache for
the whole pass. Columns are independent, and each lane processes tokens in order, so the bits do not
depend on how a prompt was split into passes. Draft tokens update a copy of the tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvboost_edge.kernels.attention.rope import copy_floats
from kvboost_edge.kernels.integers import int_constant
from kvboost_edge.kernels.jit import intrinsic, kernel
from kvboost_edge.kernels.lazy import types
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.activations import ACT_SILU, activate_vectors
from kvboost_edge.kernels.program.expert_routing import sigmoid_f32
from kvboost_edge.kernels.program.matrix_tiles import tile_scratch
from kvboost_edge.kernels.program.norms import norm_row
from kvboost_edge.kernels.program.states import sequences as ls
from kvboost_edge.kernels.program.states.conv import conv_silu, keep_draft, window_of
from kvboost_edge.kernels.program.states.ssd import advance, advance_two
from kvboost_edge.kernels.program.states.sums import (
    CHAINS,
    LINE,
    MOST_KEYS,
    emit_number,
    emit_quads,
    emit_sums,
    emit_total,
    neighbours,
    tiles_at_once,
)
from kvboost_edge.kernels.program.table import (
    GateOp,
    ProgramJob,
    ScanInputsOp,
    ScanOp,
    StateHeads,
    row_at,
)
from kvboost_edge.kernels.vectors import (
    LANES,
    V16,
    emit_fma,
    emit_load,
    emit_scratch,
    emit_store,
    exp_f32,
    fma_f32,
    load_f32,
    store_f32,
)

__all__ = ["gate", "gates_at", "scan", "scan_units", "softplus_f32", "steps", "value_at"]

_SSD = lt.RULES["ssd"]

Value = Any
Builder = Any


_MAX_EXPONENT = np.float32(88.0)


@kernel
def softplus_f32(x: Any) -> Any:
    """Return log(1 + exp(x))."""
    # Compute max(x, 0) + log1p(y) with y = exp(-|x|). Here log1p(y) = 2 artanh(s) with s = y / (2 +
    # y) <= 1 / 3, from a series whose first omitted term is below 2e-8.
    one = np.float32(1.0)
    two = np.float32(2.0)
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
def store_gates(job: ProgramJob, op: ScanInputsOp, token: int) -> None:
    """Compute and store a token's gates for each value head.

    The gates are (share, decay) from a row [b | a], or (time, decay) from [dt] for RULES["ssd"].
    """
    heads = op.heads.heads
    is_ssd = op.heads.rule == _SSD
    source = row_at(job, op.gates, token)
    times = source if is_ssd else source + 4 * heads
    out = gates_at(job, op.heads) + 8 * token
    for head in range(heads):
        first = softplus_f32(load_f32(times + 4 * head) + load_f32(op.dt_bias + 4 * head))
        if is_ssd and first < op.least:  # min() and max() could drop a NaN
            first = op.least
        if is_ssd and first > op.most:
            first = op.most
        power = load_f32(op.decay + 4 * head) * first
        if power > _MAX_EXPONENT:
            power = _MAX_EXPONENT
        if not is_ssd:
            first = sigmoid_f32(load_f32(source + 4 * head))
        store_f32(out, first)
        store_f32(out + 4, exp_f32(power))
        out += 8 * job.tokens


@kernel
def gates_at(job: ProgramJob, heads: StateHeads) -> Any:
    """Return the address of the gates of the first token and value head."""
    return job.buffers[lt.B_VALUE] + 4 * job.tokens * heads.heads * heads.dim


@kernel
def gate(job: ProgramJob, op: GateOp, token: int) -> None:
    """Compute a token's output row from the results of `ScanOp` and its gates."""
    width = op.heads.heads * op.heads.dim
    gates = row_at(job, op.source, token)
    out = row_at(job, op.out, token)
    for tile in range(width // LANES):
        copy_floats(value_at(job, tile, token), LANES, out + 4 * LANES * tile)
    for stage in range(2):
        if stage != op.gate_first:
            activate_vectors(gates, out, ACT_SILU, width, width // LANES, out)
            continue
        for group in range(op.groups):
            count = width // op.groups
            at = out + 4 * group * count
            norm_row(at, op.weight + 4 * group * op.weight_step, count, op.eps, at)


@kernel
def value_at(job: ProgramJob, tile: int, token: int) -> Any:
    """Return the address of a token's 16 values (or results); tiles are counted over all heads."""
    return job.buffers[lt.B_VALUE] + LINE * (tile * job.tokens + token)


@kernel
def steps(job: ProgramJob, op: ScanInputsOp, token: int) -> None:
    """Compute the queries, keys, values and gates of one token.

    The convolution's channels are [q | k | v], or [v | k | q] for RULES["ssd"].
    """
    heads = op.heads.key_heads
    dim = op.heads.key_dim
    values = op.heads.heads * op.heads.dim
    is_ssd = op.heads.rule == _SSD
    window = window_of(job, op.conv, token)
    first = 4 * values if is_ssd else 0
    for head in range(2 * heads):
        is_query = (head < heads) != is_ssd
        out = (
            job.buffers[lt.B_QUERY if is_query else lt.B_KEY]
            + 4 * (head % heads * job.tokens + token) * dim
        )
        conv_silu(window, first + 4 * head * dim, dim // LANES, out, LINE)
        weight = op.q_norm if is_query else op.k_norm
        if weight != 0:
            norm_row(out, weight, dim, op.eps, out)
    conv_silu(
        window,
        0 if is_ssd else 8 * heads * dim,
        values // LANES,
        value_at(job, 0, token),
        LINE * job.tokens,
    )
    store_gates(job, op, token)
    num_gates = op.heads.heads if is_ssd else 2 * op.heads.heads
    keep_draft(job, op.conv, token, row_at(job, op.gates, token), num_gates)


@intrinsic
def _dots(typing: Any, tile: Any, dim: Any, key: Any, out: Any) -> Any:
    """Set out = key . tile, float32 [16], from float32 [dim] and [dim, 16]."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        tile, dim, key, out = arguments
        chains = emit_sums(b)
        with emit_quads(b, dim) as loop:
            first = b.mul(loop.index, int_constant(CHAINS))
            for index, chain in enumerate(chains):
                i = b.add(first, int_constant(index))
                row = emit_load(b, V16, b.add(tile, b.mul(i, int_constant(LINE))))
                b.store(emit_fma(b, emit_number(b, key, i), row, b.load(chain)), chain)
        emit_store(b, emit_total(b, chains), out)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


def _emit_turn(b: Builder, arguments: Sequence[Value], count: int) -> None:
    """Emit `_turn` for `count` consecutive tiles, in one pass over their rows."""
    tile, dim, query, key, after, values, apart, gates, dots = arguments
    share, decay = (emit_number(b, gates, int_constant(index)) for index in range(2))
    tiles = neighbours(b, tile, b.mul(dim, int_constant(LINE)), count)
    columns = neighbours(b, values, apart, count)
    known = neighbours(b, dots, int_constant(LINE), count)
    taken = []
    for place, dot in zip(columns, known, strict=True):
        found = emit_fma(b, b.fneg(decay), emit_load(b, V16, dot), emit_load(b, V16, place))
        taken.append(b.fmul(found, share))
    sums = [(emit_sums(b), emit_sums(b)) for _ in tiles]
    with emit_quads(b, dim) as loop:
        first = b.mul(loop.index, int_constant(CHAINS))
        for chain in range(CHAINS):
            i = b.add(first, int_constant(chain))
            at = b.mul(i, int_constant(LINE))
            of_key = emit_number(b, key, i)
            of_query = emit_number(b, query, i)
            of_after = emit_number(b, after, i)
            places = [b.add(tile, at) for tile in tiles]
            rows = [emit_load(b, V16, place) for place in places]
            rows = [
                emit_fma(b, of_key, delta, b.fmul(row, decay))
                for delta, row in zip(taken, rows, strict=True)
            ]
            for place, row, (outs, nexts) in zip(places, rows, sums, strict=True):
                b.store(emit_fma(b, of_query, row, b.load(outs[chain])), outs[chain])
                b.store(emit_fma(b, of_after, row, b.load(nexts[chain])), nexts[chain])
                emit_store(b, row, place)
    for place, dot, (outs, nexts) in zip(columns, known, sums, strict=True):
        emit_store(b, emit_total(b, outs), place)
        emit_store(b, emit_total(b, nexts), dot)


@intrinsic
def _turn(
    typing: Any,
    tile: Any,
    dim: Any,
    query: Any,
    key: Any,
    after: Any,
    values: Any,
    apart: Any,
    gates: Any,
    dots: Any,
) -> Any:
    """Process one token: tile = decay * tile + key d, d = share * (values - decay * dots).

    The values are replaced by the query's result from the new tile.

    Args:
        tile: address of float32 [dim, 16].
        dim: channels per key.
        query: address of float32 [dim].
        key: address of float32 [dim].
        after: address of the next token's key.
        values: address of float32 [16], updated.
        apart: bytes from one tile's values to the next tile's.
        gates: address of float32 (share, decay).
        dots: address of float32 [16], the `_dots` of `key`. It is replaced by the `_dots` of
            `after`, because both can share one read of the tile.
    """

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        _emit_turn(b, arguments, 1)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), codegen


@intrinsic
def _turn_two(
    typing: Any,
    tile: Any,
    dim: Any,
    query: Any,
    key: Any,
    after: Any,
    values: Any,
    apart: Any,
    gates: Any,
    dots: Any,
) -> Any:
    """Process one token in two consecutive tiles; see `_turn` for the arguments."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        _emit_turn(b, arguments, 2)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), codegen


@kernel
def _units_of_head(heads: StateHeads) -> Any:
    size = tiles_at_once(heads.key_dim)
    return (heads.dim // LANES + size - 1) // size


@intrinsic
def _drafts_scratch(typing: Any) -> Any:
    """Return the address of stack memory for a unit's tiles."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        return emit_scratch(b, LINE * MOST_KEYS)

    return types.int64(), codegen


@kernel
def scan_units(job: ProgramJob, heads: StateHeads) -> Any:
    """Return the number of units of a `ScanOp`; a unit is one or two tiles of a sequence's head."""
    return job.buffers[lt.B_SEQUENCES] * heads.heads * _units_of_head(heads)


@kernel
def _begin(state: int, before: int, floats: int) -> None:
    """Initialize tiles with the state before the pass, or with 0 if there is none."""
    if before == 0:
        for index in range(floats):
            store_f32(state + 4 * index, np.float32(0.0))
    elif before != state:
        copy_floats(before, floats, state)


@kernel
def scan(job: ProgramJob, op: ScanOp, unit: int) -> None:
    """Process all rows of a sequence in one or two tiles of a head; results overwrite values."""
    heads = op.heads.heads
    tiles = op.heads.dim // LANES
    dim = op.heads.key_dim
    size = tiles_at_once(dim)
    units = _units_of_head(op.heads)
    sequence = unit // (heads * units)
    head = unit // units % heads
    tile = unit % units * size
    count = min(size, tiles - tile)
    shared = op.heads.key_heads
    key_head = head % shared if op.heads.tiled != 0 else head // (heads // shared)
    first = ls.of_sequence(job, sequence, ls.S_FIRST)
    rows = ls.of_sequence(job, sequence, ls.S_ROWS)
    offset = op.state + (head * tiles + tile) * dim * LINE
    floats = count * dim * LANES
    before = ls.of_sequence(job, sequence, ls.S_IN)
    state = ls.of_sequence(job, sequence, ls.S_OUT) + offset
    _begin(state, before + offset if before != 0 else 0, floats)
    start = 4 * (key_head * job.tokens + first) * dim
    query = job.buffers[lt.B_QUERY] + start
    key = job.buffers[lt.B_KEY] + start
    gates = gates_at(job, op.heads) + 8 * (head * job.tokens + first)
    values = value_at(job, head * tiles + tile, first)
    apart = LINE * job.tokens
    dots = tile_scratch()
    saved = 0
    save = ls.saved_rows(job, sequence, 0)
    is_ssd = op.heads.rule == _SSD
    skip = op.skip + 4 * head
    certain = ls.of_sequence(job, sequence, ls.S_CERTAIN)
    if rows > 0 and not is_ssd:
        for index in range(count):
            _dots(state + index * dim * LINE, dim, key, dots + index * LINE)
    for row in range(rows):
        if row == certain:
            drafted = _drafts_scratch()
            copy_floats(state, floats, drafted)
            state = drafted
        after = key if row + 1 == rows else key + 4 * dim
        if is_ssd and count == 2 and row > 0:
            advance_two(state, dim, query, key, values, apart, gates, skip)
        # the first row reads the tiles from memory, which is faster one tile at a time
        elif is_ssd:
            for index in range(count):
                place = state + index * dim * LINE
                advance(place, dim, query, key, values + index * apart, apart, gates, skip)
        elif count == 2:
            _turn_two(state, dim, query, key, after, values, apart, gates, dots)
        else:
            _turn(state, dim, query, key, after, values, apart, gates, dots)
        query = query + 4 * dim
        key = after
        gates = gates + 8
        values = values + LINE
        if row + 1 == save:
            copy_floats(state, floats, ls.saved_at(job, sequence, saved) + offset)
            saved += 1
            save = ls.saved_rows(job, sequence, saved)
