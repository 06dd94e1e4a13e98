"""Operations of a layer program that go token by token: embedding, norms, activation, quantization,
rope.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from kvboost_edge.kernels.attention.rope import copy_floats, rotate_head
from kvboost_edge.kernels.jit import intrinsic, kernel
from kvboost_edge.kernels.linear.panel import cell_bytes, token_place
from kvboost_edge.kernels.linear.weight_dot import OFFSET
from kvboost_edge.kernels.linear.weight_layout import (
    BLOCK_GROUPS,
    SCALE_BYTES,
    group_bytes_kernel,
    high_shift_kernel,
    minima_bytes_kernel,
)
from kvboost_edge.kernels.linear.weight_tiles import (
    GROUP,
    INT_KINDS,
    KIND_INT4,
    KIND_INT4_ASYM,
    KIND_INT4T,
    KIND_INT8,
    KIND_Q4K,
    KIND_Q5K,
    KIND_Q6K,
)
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.activations import activate_vectors
from kvboost_edge.kernels.program.attention_calls import attention_row, store_token
from kvboost_edge.kernels.program.norms import norm_row, quantize_groups
from kvboost_edge.kernels.program.table import ProgramJob
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

_OFFSET_INT8 = OFFSET[KIND_INT8]
_OFFSET_INT4 = OFFSET[KIND_INT4]
_OFFSET_Q6K = OFFSET[KIND_Q6K]
_LINE = 4 * LANES
_PIECE = 32  # groups of 32 in a piece of a row
# Tokens in a unit: neighbours share cache lines of a panel. With one each, the norms of 2,112
# tokens took two threads 100 ms and one thread 75.
_UNIT = 12


@intrinsic
def _load_byte(typing: Any, address: Any) -> Any:
    def codegen(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        value = b.load(b.inttoptr(arguments[0], ir.PointerType()), align=1, typ=ir.IntType(8))
        return b.zext(value, ir.IntType(64))

    return types.int64(types.int64), codegen


@kernel
def _tokens_in_unit(tokens: int) -> Any:
    """Of a few tokens every thread still finds some."""
    return min(_UNIT, (tokens + 3) // 4)


@kernel
def tokens_of(job: ProgramJob, unit: int) -> Any:
    """The first token of a unit of whole rows, and the end of them."""
    size = _tokens_in_unit(job.tokens)
    return unit * size, min(job.tokens, unit * size + size)


@kernel
def _pieces(op: Any) -> Any:
    """Pieces a row is cut into."""
    if op[lt.F_OP] in (lt.OP_QUANT, lt.OP_ACT):
        return (op[lt.F_COUNT] + GROUP * _PIECE - 1) // (GROUP * _PIECE)
    return 1


@kernel
def token_units(job: ProgramJob, op: Any) -> Any:
    """Units an operation on tokens is cut into: some tokens, one piece of each."""
    size = _tokens_in_unit(job.tokens)
    return (job.tokens + size - 1) // size * _pieces(op)


@kernel
def _code(op: Any, kind: int, group: int, lane: int, index: int) -> Any:
    """The stored code of input `index` of a group, in row `lane` of its tile; `group` counts from
    the first tile on. Of KIND_INT4T its place in the table.
    """
    quad = index // 4
    at = op[lt.F_WEIGHT] + group * group_bytes_kernel(kind) + lane * 4 + index % 4
    if kind == KIND_INT8:
        return _load_byte(at + quad * _LINE)
    if kind == KIND_Q6K:
        at += quad // 4 * (3 * _LINE)
        quad %= 4
    both = _load_byte(at + quad // 2 * _LINE)
    code = both >> 4 if quad % 2 == 1 else both & 15
    if kind < KIND_Q5K or kind == KIND_INT4T:
        return code
    above = _load_byte(at + (2 if kind == KIND_Q6K else 4) * _LINE) >> (
        4 + high_shift_kernel(kind, quad)
    )
    return code | (above & (3 if kind == KIND_Q6K else 1)) << 4


@kernel
def _factors(op: Any, kind: int, tile: int, group: int, half: int, lane: int) -> Any:
    """(scale, minimum) of a group (of KIND_Q6K: of one of its halves) of row `lane` of a tile,
    float32.
    """
    groups = (op[lt.F_COUNT] + GROUP - 1) // GROUP
    scale_at = op[lt.F_SCALE] + (tile * groups + group) * SCALE_BYTES
    minima_at = op[lt.F_MINIMA] + tile * minima_bytes_kernel(kind, groups) + 2 * lane
    zero = np.float32(0.0)
    if kind < KIND_Q4K or kind == KIND_INT4T:
        minimum = (
            load_scalar(minima_at + group * 2 * LANES, KIND_F16) if kind == KIND_INT4_ASYM else zero
        )
        return load_scalar(scale_at + 2 * lane, KIND_F16), minimum
    block_at = minima_at + group // BLOCK_GROUPS * minima_bytes_kernel(kind, 1)
    scale = _load_byte(scale_at + half * LANES + lane)
    d = load_scalar(block_at, KIND_F16)
    if kind == KIND_Q6K:
        return np.float32(scale - 256 if scale > 127 else scale) * d, zero
    minimum = np.float32(_load_byte(scale_at + LANES + lane)) * load_scalar(
        block_at + 2 * LANES, KIND_F16
    )
    return np.float32(scale) * d, minimum


@kernel
def _code_offset(kind: int) -> Any:
    if kind == KIND_INT8:
        return _OFFSET_INT8
    if kind == KIND_Q6K:
        return _OFFSET_Q6K
    return _OFFSET_INT4 if kind == KIND_INT4 else 0


@kernel
def _embed(op: Any, factor: float, token_id: int, out: int) -> None:
    """Row `token_id` of the table, which lies in the weight layout, times factor; the padding is
    0.
    """
    tile = token_id // LANES
    lane = token_id % LANES
    count = op[lt.F_COUNT]
    kind = op[lt.F_KIND]
    for index in range(count, op[lt.F_DST_STEP]):
        store_f32(out + 4 * index, np.float32(0.0))
    if kind in INT_KINDS:
        groups = (count + GROUP - 1) // GROUP
        offset = _code_offset(kind)
        for index in range(count):
            group = index // GROUP
            place = index % GROUP
            if place % LANES == 0:
                scale, minimum = _factors(
                    op, kind, tile, group, place // LANES if kind == KIND_Q6K else 0, lane
                )
            code = _code(op, kind, tile * groups + group, lane, place)
            if kind == KIND_INT4T:
                code = _load_byte(op[lt.F_MINIMA] + tile * minima_bytes_kernel(kind, groups) + code)
                code -= 256 if code > 127 else 0
            store_f32(out + 4 * index, fma_f32(np.float32(code - offset), scale, -minimum) * factor)
    else:
        size = 4 if kind == KIND_F32 else 2
        for index in range(count):
            at = op[lt.F_WEIGHT] + ((tile * count + index) * LANES + lane) * size
            store_f32(out + 4 * index, load_scalar(at, kind) * factor)


@kernel
def _quantize(job: ProgramJob, op: Any, source: int, token: int, first: int, groups: int) -> None:
    """Groups [first, first + groups) of a token's row, starting at address `source`, into the
    operation's panel.
    """
    total = (op[lt.F_COUNT] + GROUP - 1) // GROUP
    fine = op[lt.F_FINE]
    start, size = token_place(token, job.tokens, fine, job.matrix)
    cell = job.buffers[op[lt.F_PANEL]] + (start * total + first * size) * cell_bytes(
        fine, op[lt.F_QUANT]
    )
    quantize_groups(source, groups, cell, size, token - start, op[lt.F_QUANT], fine)


@kernel
def _norm(job: ProgramJob, op: Any, eps: float, token: int) -> None:
    count = op[lt.F_COUNT]
    step = op[lt.F_DST_STEP]
    out = job.buffers[op[lt.F_DST]] + 4 * token * step
    norm_row(
        job.buffers[op[lt.F_SRC]] + 4 * token * op[lt.F_SRC_STEP], op[lt.F_WEIGHT], count, eps, out
    )
    for index in range(count, step):
        store_f32(out + 4 * index, np.float32(0.0))
    if op[lt.F_QUANT] > 0:
        _quantize(job, op, out, token, 0, (count + GROUP - 1) // GROUP)


@kernel
def _add_norm(job: ProgramJob, op: Any, params: Any, token: int) -> None:
    """destination = (destination + factor * norm(source)) * factor of the sum."""
    count = op[lt.F_COUNT]
    source = job.buffers[op[lt.F_SRC]] + 4 * token * op[lt.F_SRC_STEP]
    out = job.buffers[op[lt.F_DST]] + 4 * token * op[lt.F_DST_STEP]
    norm_row(source, op[lt.F_WEIGHT], count, params[lt.P_EPS], source)
    for index in range(count):
        value = fma_f32(
            load_f32(source + 4 * index), params[lt.P_FACTOR], load_f32(out + 4 * index)
        )
        store_f32(out + 4 * index, value * params[lt.P_SUM_FACTOR])


@kernel
def _per_layer(job: ProgramJob, op: Any, params: Any, token: int) -> None:
    """Pieces of `count` floats of a row, in place: (norm(piece) + factor * another row's piece) *
    factor of the sum.
    """
    count = op[lt.F_COUNT]
    step = op[lt.F_DST_STEP]
    row = job.buffers[op[lt.F_DST]] + 4 * token * step
    other = job.buffers[op[lt.F_BY]] + 4 * token * op[lt.F_BY_STEP]
    for first in range(0, op[lt.F_BY_STEP], count):
        norm_row(row + 4 * first, op[lt.F_WEIGHT], count, params[lt.P_EPS], row + 4 * first)
        for index in range(first, first + count):
            value = fma_f32(
                load_f32(other + 4 * index), params[lt.P_FACTOR], load_f32(row + 4 * index)
            )
            store_f32(row + 4 * index, value * params[lt.P_SUM_FACTOR])


@kernel
def _elementwise(job: ProgramJob, op: Any, token: int, first: int) -> None:
    """One piece of 1024 elements of one token: the activation if the operation has one, then
    quantization.
    """
    count = op[lt.F_COUNT]
    groups = min(_PIECE, (count + GROUP - 1) // GROUP - first)
    source = job.buffers[op[lt.F_SRC]] + 4 * (
        token * op[lt.F_SRC_STEP] + op[lt.F_SRC_FIRST] + first * GROUP
    )
    if op[lt.F_OP] == lt.OP_ACT:
        out = job.buffers[op[lt.F_DST]] + 4 * (token * op[lt.F_DST_STEP] + first * GROUP)
        left = count - first * GROUP
        up = source + 4 * count
        if op[lt.F_BY] > 0:
            up = job.buffers[op[lt.F_BY]] + 4 * (
                token * op[lt.F_BY_STEP] + op[lt.F_BY_FIRST] + first * GROUP
            )
        activate_vectors(source, up, op[lt.F_ACT], left, 2 * groups, out)
        source = out
    if op[lt.F_QUANT] > 0:
        _quantize(job, op, source, token, first, groups)


@kernel
def _heads(source: int, num: int, dim: int, norm: int, mode: int, eps: float) -> None:
    """Norm of the heads in place: none (mode 0), each head (1), all heads as one row (2)."""
    if mode == 1:
        for head in range(num):
            norm_row(source + 4 * head * dim, norm, dim, eps, source + 4 * head * dim)
    elif mode == 2:
        norm_row(source, norm, num * dim, eps, source)


@kernel
def _scale_queries(source: int, count: int, factor: float) -> None:
    """In place; rope is linear, so this may stand before it, where attention finds queries that it
    turns itself.
    """
    if factor != np.float32(1.0):
        for index in range(count):
            store_f32(source + 4 * index, load_f32(source + 4 * index) * factor)


@kernel
def _rope(job: ProgramJob, op: Any, eps: float, token: int) -> None:
    """Split a row of queries, keys and values; norm them; rotate queries and keys; write the three
    buffers. A layer that attends to another's keys and values has none.
    """
    heads = op[lt.F_HEADS]
    kv_heads = op[lt.F_KV_HEADS]
    dim = op[lt.F_DIM]
    half = op[lt.F_HALF]
    source = job.buffers[op[lt.F_SRC]] + 4 * token * op[lt.F_SRC_STEP]
    keys = source + 4 * heads * dim
    values = keys + 4 * kv_heads * dim
    if op[lt.F_KEYS_TWICE] != 0:
        copy_floats(keys, kv_heads * dim, values)
    late = op[lt.F_LATE_NORM] != 0
    if not late:
        _heads(source, heads, dim, op[lt.F_Q_NORM], op[lt.F_NORM_ALL], eps)
        _heads(keys, kv_heads, dim, op[lt.F_K_NORM], op[lt.F_NORM_ALL], eps)
    if op[lt.F_V_NORM] != 0:
        _heads(values, kv_heads, dim, op[lt.F_V_NORM], 1, eps)
    position = load_i64(job.buffers[lt.B_POSITIONS] + 8 * token)
    if op[lt.F_QUERY_SCALE] != 0:
        _scale_queries(
            source, heads * dim, load_f32(job.buffers[op[lt.F_QUERY_SCALE]] + 4 * position)
        )
    cos = job.buffers[op[lt.F_TABLE]] + 4 * position * half
    sin = job.buffers[op[lt.F_TABLE] + 1] + 4 * position * half
    for head in range(heads):
        out = job.buffers[lt.B_QUERY] + 4 * (token * heads + head) * dim
        rotate_head(source + 4 * head * dim, cos, sin, half, dim, out)
    for head in range(kv_heads):
        out = job.buffers[lt.B_KEY] + 4 * (token * kv_heads + head) * dim
        rotate_head(keys + 4 * head * dim, cos, sin, half, dim, out)
    if late:
        _heads(
            job.buffers[lt.B_QUERY] + 4 * token * heads * dim,
            heads,
            dim,
            op[lt.F_Q_NORM],
            op[lt.F_NORM_ALL],
            eps,
        )
        key_row = job.buffers[lt.B_KEY] + 4 * token * kv_heads * dim
        _heads(key_row, kv_heads, dim, op[lt.F_K_NORM], op[lt.F_NORM_ALL], eps)
    if kv_heads == 0:
        return
    if job.buffers[lt.B_ROWS] != 0:
        key = job.buffers[lt.B_KEY] + 4 * token * kv_heads * dim
        store_token(attention_row(job, op), key, values, token)
    else:
        copy_floats(values, kv_heads * dim, job.buffers[lt.B_VALUE] + 4 * token * kv_heads * dim)


@kernel
def _cap(job: ProgramJob, op: Any, cap: float, token: int) -> None:
    """In place: x -> cap * tanh(x / cap), through exp(-2 |x / cap|)."""
    row = job.buffers[op[lt.F_SRC]] + 4 * token * op[lt.F_SRC_STEP]
    one = np.float32(1.0)
    for index in range(op[lt.F_COUNT]):
        x = load_f32(row + 4 * index) / cap
        decay = exp_f32(np.float32(-2.0) * abs(x))
        tanh = (one - decay) / (one + decay)
        store_f32(row + 4 * index, cap * (tanh if x >= 0 else -tanh))


@kernel
def _on_token(job: ProgramJob, op: Any, params: Any, token: int, piece: int) -> None:
    code = op[lt.F_OP]
    if code == lt.OP_NORM:
        _norm(job, op, params[lt.P_EPS], token)
    elif code == lt.OP_ROPE:
        _rope(job, op, params[lt.P_EPS], token)
    elif code == lt.OP_ADD_NORM:
        _add_norm(job, op, params, token)
    elif code == lt.OP_PER_LAYER:
        _per_layer(job, op, params, token)
    elif code == lt.OP_EMBED:
        token_id = load_i64(job.buffers[lt.B_TOKENS] + 8 * token)
        _embed(
            op,
            params[lt.P_FACTOR],
            token_id,
            job.buffers[op[lt.F_DST]] + 4 * token * op[lt.F_DST_STEP],
        )
    elif code in (lt.OP_QUANT, lt.OP_ACT):
        _elementwise(job, op, token, piece * _PIECE)
    else:
        _cap(job, op, params[lt.P_CAP], token)


@kernel
def run_tokens(job: ProgramJob, op: Any, params: Any, unit: int) -> None:
    pieces = _pieces(op)
    first, end = tokens_of(job, unit // pieces)
    for token in range(first, end):
        _on_token(job, op, params, token, unit % pieces)
