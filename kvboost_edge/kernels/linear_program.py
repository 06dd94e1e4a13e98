"""A layer as a program: a table of operations that a team of threads runs in order, in one call.

Every operation is cut into units (a token, or a run of weight tiles) that threads take from a counter; a thread that
finds no unit left waits until all units of the operation are done, then goes on to the next. A thread that joins late
passes through what is done. Reductions over inputs are never cut, so results do not depend on the threads.

An operation is a row of int64 fields (the `F_*` constants) and a row of float32 parameters; operands are numbers of
buffers, whose addresses come with each call.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types

from kvboost_edge.kernels.jit import intrinsic, kernel
from kvboost_edge.kernels.linear_blocks import float_block, int_block, tokens_at_once
from kvboost_edge.kernels.linear_tiles import GROUP, KIND_INT4, KIND_INT8
from kvboost_edge.kernels.norms import (
    activate_vectors,
    fma_f32,
    norm_row,
    quantize_groups,
)
from kvboost_edge.kernels.rope import rotate_head
from kvboost_edge.kernels.vectors import (
    KIND_F32,
    LANES,
    address_of,
    exp_f32,
    fetch_add,
    load_f32,
    load_scalar,
    store_f32,
)

__all__ = ["COUNTERS_PER_OP", "NUM_FIELDS", "NUM_PARAMS", "ProgramJob", "run_program"]

# Operations.
OP_EMBED, OP_NORM, OP_ADD_NORM, OP_QUANT, OP_ACT, OP_ROPE, OP_LINEAR, OP_CAP = range(8)
# Fields of every operation: what it is, buffers read and written and their float32 a row (0: the operation's own).
F_OP, F_SRC, F_DST, F_SRC_STEP, F_DST_STEP = range(5)
# Sizes: outputs (or elements of a row) and inputs; the kind of the weights or of the activation.
F_COUNT, F_INPUTS, F_KIND, F_QUANT = range(5, 9)
# Addresses: weights, scales, bias. F_UNIT: tiles in a unit; F_ADD: add to the destination.
F_WEIGHT, F_SCALE, F_BIAS, F_UNIT, F_ADD = range(9, 14)
# F_GATHER: buffer of row numbers to read from, or -1. Rope: heads and dims, the norms' addresses, the table.
F_GATHER, F_HEADS, F_KV_HEADS, F_DIM, F_HALF, F_Q_NORM, F_K_NORM, F_NORM_ALL, F_TABLE = range(14, 23)
NUM_FIELDS = 24
# Float parameters: factor of the result, eps of a norm, the cap.
P_FACTOR, P_EPS, P_CAP, NUM_PARAMS = 0, 1, 2, 4

# Buffers that have a fixed meaning; tables of rope follow as pairs (cos, sin).
(
    B_TOKENS, B_POSITIONS, B_ROWS, B_HIDDEN, B_NORMED, B_CODES, B_SCALES, B_SUMS, B_WIDE, B_QUERY, B_KEY, B_VALUE,
    B_ATTENDED, B_LOGITS, B_TABLES,
) = range(15)  # fmt: skip

COUNTERS_PER_OP = 16  # two counters on cache lines of their own
_CHUNK = 32  # groups of 32 in a unit of an elementwise operation
_NEXT, _DONE = 0, 8
_WHOLE = 1 << 20
_SPINS = 4000  # about 60 us
_NAP_S = 50e-6


class ProgramJob(NamedTuple):
    """What the threads of one call share.

    ops       int64 [num_ops, NUM_FIELDS], run from `first` to before `last`
    params    float32 [num_ops, NUM_PARAMS]
    buffers   int64 [num_buffers], addresses
    counters  int64, zeros: COUNTERS_PER_OP for each op from first on, then one for the whole
    tokens    rows of this pass
    """

    ops: npt.NDArray[np.int64]
    params: npt.NDArray[np.float32]
    buffers: npt.NDArray[np.int64]
    counters: npt.NDArray[np.int64]
    first: int
    last: int
    tokens: int


@intrinsic
def _load_i64(typing: Any, address: Any) -> Any:
    def codegen(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        return b.load(b.inttoptr(arguments[0], ir.PointerType()), align=8, typ=ir.IntType(64))

    return types.int64(types.int64), codegen


@intrinsic
def _load_byte(typing: Any, address: Any) -> Any:
    def codegen(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        value = b.load(b.inttoptr(arguments[0], ir.PointerType()), align=1, typ=ir.IntType(8))
        return b.zext(value, ir.IntType(64))

    return types.int64(types.int64), codegen


@intrinsic
def _peek(typing: Any, address: Any) -> Any:
    """The int64 at an address that other threads write, with all they wrote before it."""

    def codegen(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        pointer = b.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return b.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def _relax(typing: Any) -> Any:
    """Tell the core that this is a waiting loop; nothing where there is no such hint."""

    def codegen(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        if b.module.triple.startswith(("x86_64", "i686", "amd64")):
            kind = ir.FunctionType(ir.VoidType(), [])
            b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), codegen


@kernel
def _units_of(op: Any, tokens: int) -> Any:
    """Units an operation is cut into."""
    code = op[F_OP]
    if code == OP_LINEAR:
        tiles = (op[F_COUNT] + LANES - 1) // LANES
        return (tiles + op[F_UNIT] - 1) // op[F_UNIT]
    if code in (OP_QUANT, OP_ACT):
        chunk = GROUP * _CHUNK
        return tokens * ((op[F_COUNT] + chunk - 1) // chunk)
    return tokens


@kernel
def _embed(op: Any, factor: float, token_id: int, out: int) -> None:
    """Row `token_id` of the table, which lies in the weight layout, times factor; the padding is 0."""
    tile, lane, count, kind = token_id // LANES, token_id % LANES, op[F_COUNT], op[F_KIND]
    for index in range(count, op[F_DST_STEP]):
        store_f32(out + 4 * index, np.float32(0.0))
    if kind == KIND_INT8:
        groups = (count + GROUP - 1) // GROUP
        for index in range(count):
            group, quad, byte = index // GROUP, index % GROUP // 4, index % 4
            at = op[F_WEIGHT] + (tile * groups + group) * (LANES * GROUP) + quad * (4 * LANES) + lane * 4 + byte
            scale = load_scalar(op[F_SCALE] + 2 * ((tile * groups + group) * LANES + lane), 1)
            value = np.float32(_load_byte(at) - 128) * scale
            store_f32(out + 4 * index, value * factor)
    else:
        size = 4 if kind == KIND_F32 else 2
        for index in range(count):
            at = op[F_WEIGHT] + ((tile * count + index) * LANES + lane) * size
            store_f32(out + 4 * index, load_scalar(at, kind) * factor)


@kernel
def _quantize(job: ProgramJob, source: int, count: int, token: int, first: int, groups: int) -> None:
    """Groups [first, first + groups) of a token's row of `count`, starting at address `source`."""
    total = (count + GROUP - 1) // GROUP
    codes = job.buffers[B_CODES] + (token * total + first) * GROUP
    at = 4 * (token * total + first)
    quantize_groups(source, groups, codes, job.buffers[B_SCALES] + at, job.buffers[B_SUMS] + at)


@kernel
def _norm(job: ProgramJob, op: Any, eps: float, token: int) -> None:
    row = token
    if op[F_GATHER] >= 0:
        row = _load_i64(job.buffers[op[F_GATHER]] + 8 * token)
    count, step = op[F_COUNT], op[F_DST_STEP]
    out = job.buffers[op[F_DST]] + 4 * token * step
    norm_row(job.buffers[op[F_SRC]] + 4 * row * op[F_SRC_STEP], op[F_WEIGHT], count, eps, out)
    for index in range(count, step):
        store_f32(out + 4 * index, np.float32(0.0))
    if op[F_QUANT] > 0:
        _quantize(job, out, count, token, 0, (count + GROUP - 1) // GROUP)


@kernel
def _add_norm(job: ProgramJob, op: Any, params: Any, token: int) -> None:
    """destination += factor * norm(source)."""
    count = op[F_COUNT]
    source = job.buffers[op[F_SRC]] + 4 * token * op[F_SRC_STEP]
    out = job.buffers[op[F_DST]] + 4 * token * op[F_DST_STEP]
    norm_row(source, op[F_WEIGHT], count, params[P_EPS], source)
    for index in range(count):
        value = fma_f32(load_f32(source + 4 * index), params[P_FACTOR], load_f32(out + 4 * index))
        store_f32(out + 4 * index, value)


@kernel
def _elementwise(job: ProgramJob, op: Any, unit: int) -> None:
    """One chunk of 1024 elements of one token: the activation if the operation has one, then quantization."""
    count, chunk = op[F_COUNT], GROUP * _CHUNK
    chunks = (count + chunk - 1) // chunk
    token, first = unit // chunks, unit % chunks * _CHUNK
    groups = min(_CHUNK, (count + GROUP - 1) // GROUP - first)
    source = job.buffers[op[F_SRC]] + 4 * (token * op[F_SRC_STEP] + first * GROUP)
    if op[F_OP] == OP_ACT:
        out = job.buffers[op[F_DST]] + 4 * (token * op[F_DST_STEP] + first * GROUP)
        left = count - first * GROUP
        activate_vectors(source, source + 4 * count, op[F_KIND], left, 2 * groups, out)
        source = out
    if op[F_QUANT] > 0:
        _quantize(job, source, count, token, first, groups)


@kernel
def _heads(source: int, num: int, dim: int, norm: int, mode: int, eps: float) -> None:
    """Norm of the heads in place: none (mode 0), each head (1), all heads as one row (2)."""
    if mode == 1:
        for head in range(num):
            norm_row(source + 4 * head * dim, norm, dim, eps, source + 4 * head * dim)
    elif mode == 2:
        norm_row(source, norm, num * dim, eps, source)


@kernel
def _rope(job: ProgramJob, op: Any, eps: float, token: int) -> None:
    """Split a row of queries, keys and values; norm and rotate queries and keys; write the three buffers."""
    heads, kv_heads, dim, half = op[F_HEADS], op[F_KV_HEADS], op[F_DIM], op[F_HALF]
    source = job.buffers[op[F_SRC]] + 4 * token * op[F_SRC_STEP]
    keys = source + 4 * heads * dim
    values = keys + 4 * kv_heads * dim
    _heads(source, heads, dim, op[F_Q_NORM], op[F_NORM_ALL], eps)
    _heads(keys, kv_heads, dim, op[F_K_NORM], op[F_NORM_ALL], eps)
    position = _load_i64(job.buffers[B_POSITIONS] + 8 * token)
    cos = job.buffers[op[F_TABLE]] + 4 * position * half
    sin = job.buffers[op[F_TABLE] + 1] + 4 * position * half
    for head in range(heads):
        out = job.buffers[B_QUERY] + 4 * (token * heads + head) * dim
        rotate_head(source + 4 * head * dim, cos, sin, half, dim, out)
    for head in range(kv_heads):
        out = job.buffers[B_KEY] + 4 * (token * kv_heads + head) * dim
        rotate_head(keys + 4 * head * dim, cos, sin, half, dim, out)
    out = job.buffers[B_VALUE] + 4 * token * kv_heads * dim
    for index in range(kv_heads * dim):
        store_f32(out + 4 * index, load_f32(values + 4 * index))


@kernel
def _cap(job: ProgramJob, op: Any, cap: float, token: int) -> None:
    """In place: x -> cap * tanh(x / cap), through exp(-2 |x / cap|)."""
    row = job.buffers[op[F_SRC]] + 4 * token * op[F_SRC_STEP]
    one = np.float32(1.0)
    for index in range(op[F_COUNT]):
        x = load_f32(row + 4 * index) / cap
        decay = exp_f32(np.float32(-2.0) * abs(x))
        tanh = (one - decay) / (one + decay)
        store_f32(row + 4 * index, cap * (tanh if x >= 0 else -tanh))


@kernel
def _linear(job: ProgramJob, op: Any, factor: float, unit: int) -> None:
    """A run of tiles against all tokens; a tile's weights are read once from memory and then from the cache."""
    kind, inputs = op[F_KIND], op[F_INPUTS]
    tiles = (op[F_COUNT] + LANES - 1) // LANES
    groups = (inputs + GROUP - 1) // GROUP
    step = 4 * op[F_DST_STEP]
    for tile in range(unit * op[F_UNIT], min(tiles, unit * op[F_UNIT] + op[F_UNIT])):
        bias = op[F_BIAS] + 4 * LANES * tile if op[F_BIAS] != 0 else 0
        token = 0
        while token < job.tokens:
            n = tokens_at_once(job.tokens - token)
            out = job.buffers[op[F_DST]] + token * step + 4 * LANES * tile
            if kind in (KIND_INT8, KIND_INT4):
                per_group = LANES * GROUP if kind == KIND_INT8 else LANES * GROUP // 2
                weights = op[F_WEIGHT] + tile * groups * per_group
                scales = op[F_SCALE] + tile * groups * 2 * LANES
                x = job.buffers[B_CODES] + token * groups * GROUP
                at = 4 * token * groups
                xs, sums = job.buffers[B_SCALES] + at, job.buffers[B_SUMS] + at
                int_block(kind, n, weights, scales, groups, x, xs, sums, out, step, bias, factor, op[F_ADD])
            else:
                size = 4 if kind == KIND_F32 else 2
                weights = op[F_WEIGHT] + tile * inputs * LANES * size
                x = job.buffers[op[F_SRC]] + 4 * token * op[F_SRC_STEP]
                float_block(kind, n, weights, inputs, x, 4 * op[F_SRC_STEP], out, step, bias, factor, op[F_ADD])
            token += n


@kernel
def _run_unit(job: ProgramJob, op: Any, params: Any, unit: int) -> None:
    code = op[F_OP]
    if code == OP_LINEAR:
        _linear(job, op, params[P_FACTOR], unit)
    elif code == OP_NORM:
        _norm(job, op, params[P_EPS], unit)
    elif code in (OP_QUANT, OP_ACT):
        _elementwise(job, op, unit)
    elif code == OP_ROPE:
        _rope(job, op, params[P_EPS], unit)
    elif code == OP_ADD_NORM:
        _add_norm(job, op, params, unit)
    elif code == OP_EMBED:
        token_id = _load_i64(job.buffers[B_TOKENS] + 8 * unit)
        _embed(op, params[P_FACTOR], token_id, job.buffers[op[F_DST]] + 4 * unit * op[F_DST_STEP])
    else:
        _cap(job, op, params[P_CAP], unit)


@kernel
def _take_units(job: ProgramJob, spins: int) -> bool:
    """Run operations [first, last); False if another thread held up an operation for `spins` looks at its counter."""
    counters = address_of(job.counters)
    for index in range(job.first, job.last):
        op, params = job.ops[index], job.params[index]
        units = _units_of(op, job.tokens)
        at = counters + 8 * COUNTERS_PER_OP * (index - job.first)
        while True:
            unit = fetch_add(at + 8 * _NEXT, 1)
            if unit >= units:
                break
            _run_unit(job, op, params, unit)
            fetch_add(at + 8 * _DONE, 1)
        left = spins
        while _peek(at + 8 * _DONE) < units:
            _relax()
            left -= 1
            if left == 0:
                return False
    # Whoever gets here has seen every unit done, so one thread is enough to end the call for all.
    fetch_add(counters + 8 * COUNTERS_PER_OP * (job.last - job.first), _WHOLE)
    return True


def run_program(job: ProgramJob) -> None:
    """Run operations [first, last). Every thread of a team calls this on the same job; a thread that waits long for
    another, whose core was taken away, gives up its own for a moment."""
    while not _take_units(job, _SPINS):
        time.sleep(_NAP_S)
