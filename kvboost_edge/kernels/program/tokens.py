"""Token-wise operations of a layer program: embedding, norms, activation, quantization and RoPE."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from kvboost_edge.kernels.attention.rope import copy_floats, rotate_head
from kvboost_edge.kernels.jit import intrinsic, kernel
from kvboost_edge.kernels.lazy import types
from kvboost_edge.kernels.linear.grids import grid_of
from kvboost_edge.kernels.linear.panel import cell_bytes, token_place
from kvboost_edge.kernels.linear.weight_formats import (
    BLOCK_GROUPS,
    E2M1,
    FORMATS,
    GROUP,
    INT_KINDS,
    code_shift_kernel,
    group_bytes,
    high_shift_kernel,
    minima_bytes,
    per_kind,
    scale_bytes,
)
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.activations import activate_vectors
from kvboost_edge.kernels.program.attention_calls import attention_row, store_token
from kvboost_edge.kernels.program.norms import norm_row, quantize_groups
from kvboost_edge.kernels.program.table import ProgramJob, row_at
from kvboost_edge.kernels.tuples import load_row
from kvboost_edge.kernels.vectors import (
    KIND_F16,
    KIND_F32,
    LANES,
    exp_f32,
    fma_f32,
    load_f32,
    load_i64,
    load_scalar,
    store_f32,
)

__all__ = ["run_tokens", "token_units", "tokens_of"]

_BITS, _OFFSET, _PARTS, _MINIMA, _TABLE, _BLOCK_BYTES, _LARGEST_CODE, _SCALE_LOG = (
    per_kind(name)
    for name in (
        *("bits", "offset", "parts", "minima", "table", "block_bytes"),
        *("largest_code", "scale_log"),
    )
)
_FLOAT8 = per_kind("float8")
_INDEX_BITS, _ENTRY_WEIGHTS, _EIGHTHS, _SCALE_SIZE, _HAS_DELTAS, _SCALES_IN_CODES = (
    per_kind(name)
    for name in (
        *("index_bits", "entry_weights", "eighths", "scale_size"),
        *("has_deltas", "scales_in_codes"),
    )
)
# All grids as bytes, and the place of each format's grid among them.
_GRIDS = {form.kind: grid_of(form.name).reshape(-1) for form in FORMATS.values() if form.grid}
_GRID_BYTES = np.concatenate(list(_GRIDS.values()))
_GRID_START = np.zeros(max(_GRIDS) + 1, dtype=np.int64)
_GRID_START[list(_GRIDS)] = np.cumsum([0, *(grid.size for grid in _GRIDS.values())])[:-1]
# Weights of the codes of formats with values, and 8-bit floats divided by 2 ** 8, by their bits.
_VALUES = np.array(E2M1, dtype=np.int64)
_FLOAT8_VALUES = (
    (np.arange(128, dtype=np.uint16) << np.uint16(7)).view(np.float16).astype(np.float32)
)
_LINE = 4 * LANES
_PIECE = 32  # groups of 32 per piece of a row
# Tokens per unit. Neighbouring tokens share cache lines of a panel, so one token per unit causes
# false sharing: the norms of 2,112 tokens took 100 ms on two threads and 75 ms on one.
_UNIT = 12


@intrinsic
def _load_byte(typing: Any, address: Any) -> Any:
    def codegen(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        value = b.load(b.inttoptr(arguments[0], ir.PointerType()), align=1, typ=ir.IntType(8))
        return b.zext(value, ir.IntType(64))

    return types.int64(types.int64), codegen


@kernel
def _tokens_in_unit(tokens: int) -> Any:
    """Return the tokens per unit; with few tokens, units are smaller so every thread gets some."""
    return min(_UNIT, (tokens + 3) // 4)


@kernel
def tokens_of(job: ProgramJob, unit: int) -> Any:
    """Return the range [first, end) of tokens of a unit that processes whole rows."""
    size = _tokens_in_unit(job.tokens)
    return unit * size, min(job.tokens, unit * size + size)


@kernel
def _pieces(at: int) -> Any:
    """Return the number of pieces that a row is divided into."""
    if lt.is_op(lt.QuantizeOp, at):
        return _pieces_of(load_row(lt.QuantizeOp, at).size)
    if lt.is_op(lt.ActivateOp, at):
        return _pieces_of(load_row(lt.ActivateOp, at).size)
    return 1


@kernel
def _pieces_of(count: int) -> int:
    return (count + GROUP * _PIECE - 1) // (GROUP * _PIECE)


@kernel
def token_units(job: ProgramJob, at: int) -> Any:
    """Return the number of units of a token-wise operation.

    A unit is one piece of the rows of some tokens.
    """
    size = _tokens_in_unit(job.tokens)
    return (job.tokens + size - 1) // size * _pieces(at)


@kernel
def _code(matrix: lt.PackedMatrix, group: int, lane: int, index: int) -> Any:
    """Return the stored code (or table index) of one weight.

    Args:
        matrix: the weights.
        group: index of the group, counted from the first tile.
        lane: row in the tile.
        index: input in the group.
    """
    bits = _BITS[matrix.kind]
    size = group_bytes(matrix.kind)
    parts = _PARTS[matrix.kind]
    quads = GROUP // 4 // parts
    quad = index // 4
    part_at = matrix.weights + group * size + quad // quads * (size // parts)
    at = part_at + lane * 4 + index % 4
    quad %= quads
    if bits == 8:
        return _load_byte(at + quad * _LINE)
    if bits == 3:
        above = _load_byte(part_at + _LINE + lane * 2 + index % 2) >> (quad + index % 4 // 2 * 4)
        return _load_byte(at) >> (2 * quad) & 3 | (above & 1) << 2
    if bits < 4:
        shift = code_shift_kernel(bits, quad)
        byte = _load_byte(at + quad * bits // 8 * _LINE)
        return (byte >> shift if shift >= 0 else byte << -shift) & _LARGEST_CODE[matrix.kind]
    both = _load_byte(at + quad // 2 * _LINE)
    code = both >> 4 if quad % 2 == 1 else both & 15
    if bits == 4:
        return code
    above = _load_byte(at + quads // 2 * _LINE) >> (4 + high_shift_kernel(bits, quad))
    return code | (above & ((1 << (bits - 4)) - 1)) << 4


@kernel
def _grid_weight(matrix: lt.PackedMatrix, group: int, lane: int, index: int) -> Any:
    """Return one weight of a format with a grid, before scaling; for arguments see `_code`."""
    kind = matrix.kind
    parts = _PARTS[kind]
    each = _ENTRY_WEIGHTS[kind]
    inputs = GROUP // parts
    entries = inputs // each
    size = group_bytes(kind)
    at = matrix.weights + group * size + index // inputs * (size // parts)
    place = index % inputs
    entry = place // each
    number = _load_byte(at + LANES * entry + lane)
    signs = at + LANES * entries
    if _HAS_DELTAS[kind] != 0:
        if parts == 1:
            more = _load_byte(signs + 2 * lane) | _load_byte(signs + 2 * lane + 1) << 8
            is_lower = more >> 15
            more >>= 3 * entry
        else:
            more = _load_byte(signs + lane) >> (4 * entry)
            is_lower = more >> 3 & 1
        number |= (more & 7) << 8
        found = np.int64(_GRID_BYTES[_GRID_START[kind] + each * number + place % each])
        return found - 2 * is_lower - _OFFSET[kind]
    above = _INDEX_BITS[kind] - 8
    high = signs + LANES // 8 * (inputs + above * entry) + lane // 8
    for bit in range(above):
        number |= (_load_byte(high + LANES // 8 * bit) >> (lane % 8) & 1) << (8 + bit)
    weight = np.int64(_GRID_BYTES[_GRID_START[kind] + each * number + place % each])
    sign = _load_byte(signs + place // 4 * (LANES // 2) + lane // 2) >> (lane % 2 * 4 + place % 4)
    return -weight if sign & 1 else weight


@kernel
def _factors(matrix: lt.PackedMatrix, tile: int, group: int, part: int, lane: int) -> Any:
    """Return (scale, minimum) for one part of a group and row `lane` of a tile, in float32."""
    kind = matrix.kind
    groups = (matrix.inputs + GROUP - 1) // GROUP
    scale_at = matrix.scales + tile * scale_bytes(kind, groups)
    scale_at += (group >> _SCALE_LOG[kind]) * _SCALE_SIZE[kind]
    minima_at = matrix.minima + tile * minima_bytes(kind, groups) + 2 * lane
    minimum = np.float32(0.0)
    if _FLOAT8[kind] != 0:
        scale = _FLOAT8_VALUES[_load_byte(scale_at + part * LANES + lane) & 127]
        return scale * load_f32(minima_at + 2 * lane), minimum
    if _BLOCK_BYTES[kind] == 0:
        if _MINIMA[kind] != 0:
            minimum = load_scalar(minima_at + group * 2 * LANES, KIND_F16)
        return load_scalar(scale_at + 2 * lane, KIND_F16), minimum
    block_at = minima_at + group // BLOCK_GROUPS * minima_bytes(kind, 1)
    d = load_scalar(block_at, KIND_F16)
    if _SCALES_IN_CODES[kind] != 0:
        at = matrix.weights + (tile * groups + group) * group_bytes(kind)
        scale = _load_byte(at + LANES * GROUP // 8 + 2 * lane + 1) >> 4 & 7
        return np.float32(2 * scale + 1) * np.float32(0.125) * d, minimum
    if _INDEX_BITS[kind] != 0:
        in_part = _load_byte(scale_at + lane) >> (4 * part)
        both = _load_byte(scale_at + lane // 2) >> (4 * (lane % 2))
        scale = (in_part if _PARTS[kind] > 1 else both) & 15
        return np.float32(_EIGHTHS[kind] * (2 * scale + 1)) * np.float32(0.125) * d, minimum
    scale = _load_byte(scale_at + part * LANES + lane)
    if _MINIMA[kind] == 0:  # scales are signed bytes
        return np.float32(scale - 256 if scale > 127 else scale) * d, minimum
    least = _load_byte(scale_at + LANES + lane)
    if _PARTS[kind] > 1:  # each half of the group has a byte with both
        least = scale >> 4
        scale &= 15
    return np.float32(scale) * d, np.float32(least) * load_scalar(block_at + 2 * LANES, KIND_F16)


@kernel
def _embed(job: ProgramJob, op: lt.EmbedOp, token: int) -> None:
    """Dequantize a token's row of the embedding matrix, times `factor`; padding becomes 0."""
    token_id = load_i64(job.buffers[lt.B_TOKENS] + 8 * token)
    out = row_at(job, op.out, token)
    matrix = op.matrix
    tile = token_id // LANES
    lane = token_id % LANES
    count = matrix.inputs
    kind = matrix.kind
    for index in range(count, (count + GROUP - 1) // GROUP * GROUP):
        store_f32(out + 4 * index, np.float32(0.0))
    if kind in INT_KINDS:
        groups = (count + GROUP - 1) // GROUP
        has_table = _TABLE[kind] != 0
        has_grid = _INDEX_BITS[kind] != 0
        has_values = _FLOAT8[kind] != 0
        offset = 0 if has_table or has_grid or has_values else _OFFSET[kind]
        for index in range(count):
            group = index // GROUP
            place = index % GROUP
            if place % LANES == 0:
                part = place * _PARTS[kind] // GROUP
                scale, minimum = _factors(matrix, tile, group, part, lane)
            if has_grid:
                code = _grid_weight(matrix, tile * groups + group, lane, place)
            else:
                code = _code(matrix, tile * groups + group, lane, place)
            if has_table:
                code = _load_byte(matrix.minima + tile * minima_bytes(kind, groups) + code)
                code -= 256 if code > 127 else 0
            elif has_values:
                code = _VALUES[code]
            value = fma_f32(np.float32(code - offset), scale, -minimum) * op.factor
            store_f32(out + 4 * index, value)
    else:
        size = 4 if kind == KIND_F32 else 2
        for index in range(count):
            at = matrix.weights + ((tile * count + index) * LANES + lane) * size
            store_f32(out + 4 * index, load_scalar(at, kind) * op.factor)


@kernel
def _quantize(
    job: ProgramJob,
    panel: lt.PanelTarget,
    count: int,
    source: int,
    token: int,
    first: int,
    groups: int,
) -> None:
    """Quantize groups [first, first + groups) of a token's row into a panel.

    Args:
        job: the call.
        panel: the target.
        count: floats per row.
        source: address of the first of these groups.
        token: index of the token in the pass.
        first: first group.
        groups: number of groups.
    """
    total = (count + GROUP - 1) // GROUP
    start, size = token_place(token, job.tokens, panel.fine, job.matrix)
    cell = job.buffers[panel.buffer] + (start * total + first * size) * cell_bytes(
        panel.fine, panel.kind
    )
    quantize_groups(source, groups, cell, size, token - start, panel.kind, panel.fine)


@kernel
def _norm(job: ProgramJob, op: lt.NormOp, token: int) -> None:
    """Norm a token's row, zero the padding of the result, and quantize it if there is a panel."""
    count = op.size
    out = row_at(job, op.out, token)
    norm_row(row_at(job, op.source, token), op.weight, count, op.eps, out)
    for index in range(count, op.out.step - op.out.first):
        store_f32(out + 4 * index, np.float32(0.0))
    if op.panel.kind > 0:
        _quantize(job, op.panel, count, out, token, 0, (count + GROUP - 1) // GROUP)


@kernel
def _add_norm(job: ProgramJob, op: lt.AddNormOp, token: int) -> None:
    """Run `AddNormOp` for one token; the norm overwrites the source row."""
    source = row_at(job, op.source, token)
    out = row_at(job, op.out, token)
    norm_row(source, op.weight, op.size, op.eps, source)
    for index in range(op.size):
        value = fma_f32(load_f32(source + 4 * index), op.factor, load_f32(out + 4 * index))
        store_f32(out + 4 * index, value * op.sum_factor)


@kernel
def _per_layer(job: ProgramJob, op: lt.PerLayerOp, token: int) -> None:
    """Run `PerLayerOp` for one token."""
    count = op.size
    row = row_at(job, op.out, token)
    other = row_at(job, op.by, token)
    for first in range(0, op.by.step, count):
        norm_row(row + 4 * first, op.weight, count, op.eps, row + 4 * first)
        for index in range(first, first + count):
            value = fma_f32(load_f32(other + 4 * index), op.factor, load_f32(row + 4 * index))
            store_f32(row + 4 * index, value * op.sum_factor)


@kernel
def _quantize_piece(
    job: ProgramJob, panel: lt.PanelTarget, count: int, source: int, token: int, first: int
) -> None:
    """Quantize one piece of a row of `count` floats, from group `first` at address `source`."""
    groups = min(_PIECE, (count + GROUP - 1) // GROUP - first)
    _quantize(job, panel, count, source, token, first, groups)


@kernel
def _activate(job: ProgramJob, op: lt.ActivateOp, token: int, first: int) -> None:
    """Apply the activation to one piece of a row, starting at group `first`."""
    count = op.size
    at = 4 * GROUP * first
    source = row_at(job, op.source, token) + at
    out = row_at(job, op.out, token) + at
    up = row_at(job, op.by, token) + at if op.by.buffer > 0 else source + 4 * count
    groups = min(_PIECE, (count + GROUP - 1) // GROUP - first)
    activate_vectors(source, up, op.act, count - first * GROUP, 2 * groups, out)
    if op.panel.kind > 0:
        _quantize_piece(job, op.panel, count, out, token, first)


@kernel
def _heads(source: int, num: int, dim: int, norm: int, mode: int, eps: float) -> None:
    """Norm `num` heads of float32 [dim] in place.

    Args:
        source: address of the heads.
        num: number of heads.
        dim: channels per head.
        norm: address of the norm's weights.
        mode: 0 for no norm, 1 for each head, 2 for all heads as one row.
        eps: epsilon of the norm.
    """
    if mode == 1:
        for head in range(num):
            norm_row(source + 4 * head * dim, norm, dim, eps, source + 4 * head * dim)
    elif mode == 2:
        norm_row(source, norm, num * dim, eps, source)


@kernel
def _scale_queries(source: int, count: int, factor: float) -> None:
    """Multiply queries by a factor in place, before RoPE."""
    # RoPE is linear, so scaling may come first. This also scales the queries that attention rotates
    # itself.
    if factor != np.float32(1.0):
        for index in range(count):
            store_f32(source + 4 * index, load_f32(source + 4 * index) * factor)


@kernel
def _rope(job: ProgramJob, op: lt.RopeOp, token: int) -> None:
    """Run `RopeOp` for one token: apply norms and RoPE, and store the token's KV."""
    heads = op.heads
    kv_heads = op.kv_heads
    dim = op.dim
    half = op.half
    source = row_at(job, op.source, token)
    keys = source + 4 * heads * dim
    values = keys + 4 * kv_heads * dim
    if op.keys_twice != 0:
        copy_floats(keys, kv_heads * dim, values)
    late = op.late_norm != 0
    if not late:
        _heads(source, heads, dim, op.q_norm, op.norm_all, op.eps)
        _heads(keys, kv_heads, dim, op.k_norm, op.norm_all, op.eps)
    if op.v_norm != 0:
        _heads(values, kv_heads, dim, op.v_norm, 1, op.eps)
    position = load_i64(job.buffers[lt.B_POSITIONS] + 8 * token)
    if op.query_scale != 0:
        factor = load_f32(job.buffers[op.query_scale] + 4 * position)
        _scale_queries(source, heads * dim, factor)
    cos = job.buffers[op.table] + 4 * position * half
    sin = job.buffers[op.table + 1] + 4 * position * half
    query = job.buffers[lt.B_QUERY] + 4 * token * heads * dim
    key = job.buffers[lt.B_KEY] + 4 * token * kv_heads * dim
    for head in range(heads):
        rotate_head(source + 4 * head * dim, cos, sin, half, dim, query + 4 * head * dim)
    for head in range(kv_heads):
        rotate_head(keys + 4 * head * dim, cos, sin, half, dim, key + 4 * head * dim)
    if late:
        _heads(query, heads, dim, op.q_norm, op.norm_all, op.eps)
        _heads(key, kv_heads, dim, op.k_norm, op.norm_all, op.eps)
    if kv_heads == 0:
        return
    if job.buffers[lt.B_ROWS] != 0:
        store_token(attention_row(job, op.layer), key, values, token)
    else:
        copy_floats(values, kv_heads * dim, job.buffers[lt.B_VALUE] + 4 * token * kv_heads * dim)


@kernel
def _cap(job: ProgramJob, op: lt.CapOp, token: int) -> None:
    """Compute cap * tanh(x / cap) for a row, with tanh computed from exp(-2 |x / cap|)."""
    row = row_at(job, op.rows, token)
    cap = op.cap
    one = np.float32(1.0)
    for index in range(op.size):
        x = load_f32(row + 4 * index) / cap
        decay = exp_f32(np.float32(-2.0) * abs(x))
        tanh = (one - decay) / (one + decay)
        store_f32(row + 4 * index, cap * (tanh if x >= 0 else -tanh))


@kernel
def _on_token(job: ProgramJob, at: int, token: int, piece: int) -> None:
    """Run a token-wise operation for one token, or for one piece of the token's row."""
    if lt.is_op(lt.NormOp, at):
        _norm(job, load_row(lt.NormOp, at), token)
    elif lt.is_op(lt.RopeOp, at):
        _rope(job, load_row(lt.RopeOp, at), token)
    elif lt.is_op(lt.AddNormOp, at):
        _add_norm(job, load_row(lt.AddNormOp, at), token)
    elif lt.is_op(lt.PerLayerOp, at):
        _per_layer(job, load_row(lt.PerLayerOp, at), token)
    elif lt.is_op(lt.EmbedOp, at):
        _embed(job, load_row(lt.EmbedOp, at), token)
    elif lt.is_op(lt.ActivateOp, at):
        _activate(job, load_row(lt.ActivateOp, at), token, piece * _PIECE)
    elif lt.is_op(lt.QuantizeOp, at):
        op = load_row(lt.QuantizeOp, at)
        source = row_at(job, op.source, token) + 4 * GROUP * _PIECE * piece
        _quantize_piece(job, op.panel, op.size, source, token, piece * _PIECE)
    else:
        _cap(job, load_row(lt.CapOp, at), token)


@kernel
def run_tokens(job: ProgramJob, at: int, unit: int) -> None:
    """Run a unit of the token-wise operation whose fields are at an address."""
    pieces = _pieces(at)
    first, end = tokens_of(job, unit // pieces)
    for token in range(first, end):
        _on_token(job, at, token, unit % pieces)
