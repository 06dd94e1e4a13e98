"""Attention inside a layer program: a layer's call as one row of int64, so that a whole pass is one call of a kernel.

A row holds the fields of `call.Job` in order, then those of its `Shape` (the floats among them as the bits of
float64), those of `CodedJob` and its `KVRecord` where the pool is quantized, and the `R_*` numbers of what a pass
writes.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types

from kvboost_edge.kernels.attention.attend import attend_units
from kvboost_edge.kernels.attention.call import UNITS_DONE, AttentionCall, Job, Shape
from kvboost_edge.kernels.coded.attend import CodedJob, attend_coded_units
from kvboost_edge.kernels.coded.layout import KVRecord
from kvboost_edge.kernels.coded.write import quantize_block
from kvboost_edge.kernels.jit import intrinsic, kernel
from kvboost_edge.kernels.program.rope import copy_floats
from kvboost_edge.kernels.program.table import B_ROWS, F_LAYER, ProgramJob
from kvboost_edge.kernels.vectors import I64, KIND_F32, emit_load, load_acquire, load_f32, store_scalar

__all__ = [
    "RECORD",
    "R_BLOCK_TABLES",
    "R_CLOSED",
    "R_CODED_TABLES",
    "R_CONTINUED",
    "R_COUNTERS",
    "R_FIRST",
    "R_KEYS",
    "R_KV_RECORD",
    "R_MAX_BLOCKS",
    "R_NUM_CLOSED",
    "R_NUM_CONTINUED",
    "R_RECORDS",
    "R_SLOTS",
    "R_STAGE",
    "R_VALUES",
    "attend_record",
    "attention_row",
    "close_blocks",
    "closing_units",
    "continue_block",
    "continuing_units",
    "is_attended",
    "record_of",
    "store_token",
]

RECORD = 56  # whole cache lines
_JOB = len(Job._fields) - 1  # without the shape
R_KEYS, R_VALUES, R_COUNTERS, R_BLOCK_TABLES = (
    Job._fields.index(name) for name in ("keys", "values", "counters", "block_tables")
)
_ITEMS, _THREADS = Job._fields.index("num_items"), Job._fields.index("num_threads")
_HEADS, _DIM, _BLOCK, _KIND = (
    _JOB + Shape._fields.index(name) for name in ("num_kv_heads", "head_dim", "block_size", "kind")
)
_CODED = _JOB + len(Shape._fields)
# Quantized pools: address of the layer's records (0: the pool is not quantized), the block tables, see CodedJob.
R_RECORDS, R_CODED_TABLES, R_MAX_BLOCKS, R_FIRST, R_KV_RECORD = range(_CODED, _CODED + 5)
# What the pass writes: address of the tokens' slots, int64; of pairs (from, to) of buffers, int64, that are copied
# before that, and of pairs (buffer, block) that are quantized after it, with their numbers; of float32 [num_threads,
# dim * block], where threads quantize.
R_SLOTS, R_CONTINUED, R_NUM_CONTINUED, R_CLOSED, R_NUM_CLOSED, R_STAGE = range(
    R_KV_RECORD + len(KVRecord._fields), R_KV_RECORD + len(KVRecord._fields) + 6
)


def record_of(call: AttentionCall) -> npt.NDArray[np.int64]:
    """int64 [RECORD], what a pass writes left out. It holds addresses of the call's arrays, which must outlive it."""
    fields = call._asdict() | {
        "max_blocks": call.block_tables.shape[1],
        "num_items": len(call.items),
        "num_threads": len(call.scratch),
    }
    if not call.sinks.size:
        fields["sinks"] = 0
    numbers = [_number(fields[name]) for name in Job._fields[:_JOB]]
    numbers += [_number(value) for value in call.shape]
    return np.array(numbers + [0] * (RECORD - len(numbers)), dtype=np.int64)


def _number(value: Any) -> int:
    """An array's address, the bits of a float, an int as it is."""
    if isinstance(value, np.ndarray):
        return int(value.__array_interface__["data"][0])
    return int.from_bytes(struct.pack("<d", value), "little", signed=True) if isinstance(value, float) else int(value)


@intrinsic
def _load_f64(typing: Any, address: Any) -> Any:
    def codegen(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        return b.load(b.inttoptr(arguments[0], ir.PointerType()), align=8, typ=ir.DoubleType())

    return types.float64(types.int64), codegen


@intrinsic
def _load_i64(typing: Any, address: Any) -> Any:
    def codegen(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        return emit_load(b, I64, arguments[0])

    return types.int64(types.int64), codegen


@kernel
def attention_row(job: ProgramJob, op: Any) -> Any:
    """Address of the attention row of an operation's layer."""
    return job.buffers[B_ROWS] + 8 * RECORD * op[F_LAYER]


@kernel
def _at(record: int, index: int) -> Any:
    return _load_i64(record + 8 * index)


@kernel
def _kv_record(row: int) -> KVRecord:
    r = row + 8 * R_KV_RECORD
    return KVRecord(
        _at(r, 0), _at(r, 1), _at(r, 2), _at(r, 3), _at(r, 4), _at(r, 5), _at(r, 6), _at(r, 7), _at(r, 8), _at(r, 9),
        _at(r, 10),
    )  # fmt: skip


@kernel
def attend_record(record: int) -> None:
    """Take units of the attention call whose row is at this address until none is left."""
    s = record + 8 * _JOB
    shape = Shape(
        _at(s, 0), _at(s, 1), _at(s, 2), _at(s, 3), _at(s, 4), _at(s, 5), _at(s, 6), _at(s, 7), _at(s, 8), _at(s, 9),
        _load_f64(s + 80), _load_f64(s + 88),
    )  # fmt: skip
    r = record
    # By position: so many keywords are more than Numba reads.
    job = Job(
        _at(r, 0), _at(r, 1), _at(r, 2), _at(r, 3), _at(r, 4), _at(r, 5), _at(r, 6), _at(r, 7), _at(r, 8), _at(r, 9),
        _at(r, 10), _at(r, 11), _at(r, 12), _at(r, 13), _at(r, 14), _at(r, 15), shape,
    )  # fmt: skip
    records = _at(r, R_RECORDS)
    if records == 0:
        attend_units(job)
    else:
        tables, width, first = _at(r, R_CODED_TABLES), _at(r, R_MAX_BLOCKS), _at(r, R_FIRST)
        attend_coded_units(CodedJob(job, records, _kv_record(r), tables, width, first))


@kernel
def is_attended(record: int) -> Any:
    """Whether all units of the call are done."""
    done = load_acquire(_at(record, R_COUNTERS) + 8 * UNITS_DONE)
    return done >= _at(record, _ITEMS) * _at(record, _HEADS)


@kernel
def store_token(record: int, keys: int, values: int, token: int) -> None:
    """Write a token's keys and values, float32 [num_kv_heads, head_dim] each, at its slot of the call's pool."""
    heads, dim, size, kind = _at(record, _HEADS), _at(record, _DIM), _at(record, _BLOCK), _at(record, _KIND)
    width = 4 if kind == KIND_F32 else 2
    slot = _load_i64(_at(record, R_SLOTS) + 8 * token)
    block, offset = slot // size, slot % size
    for head in range(heads):
        start = (block * heads + head) * dim * size
        key_at = _at(record, R_KEYS) + (start + offset) * width
        value_at = _at(record, R_VALUES) + (start + offset * dim) * width
        source = 4 * head * dim
        for index in range(dim):
            store_scalar(key_at + index * size * width, load_f32(keys + source + 4 * index), kind)
            store_scalar(value_at + index * width, load_f32(values + source + 4 * index), kind)


@kernel
def continuing_units(record: int) -> Any:
    """Units of `continue_block`."""
    return _at(record, R_NUM_CONTINUED)


@kernel
def continue_block(record: int, index: int) -> None:
    """Copy what a block that this pass fills held before into its buffer of this pass; float16."""
    floats = _at(record, _HEADS) * _at(record, _DIM) * _at(record, _BLOCK) // 2
    pair = _at(record, R_CONTINUED) + 16 * index
    source, target = 4 * floats * _load_i64(pair), 4 * floats * _load_i64(pair + 8)
    for array in (R_KEYS, R_VALUES):
        copy_floats(_at(record, array) + source, floats, _at(record, array) + target)


@kernel
def closing_units(record: int) -> Any:
    """Units of `close_blocks`: not more than there are threads, because each works in a place of its own."""
    return min(_at(record, _THREADS), _at(record, R_NUM_CLOSED) * _at(record, _HEADS))


@kernel
def close_blocks(record: int, unit: int) -> None:
    """Quantize this unit's share of the blocks that are full now."""
    kv, heads = _kv_record(record), _at(record, _HEADS)
    stage = _at(record, R_STAGE) + 4 * unit * kv.dim * kv.block_size
    block_bytes = 2 * kv.head_dim * kv.block_size
    for index in range(unit, _at(record, R_NUM_CLOSED) * heads, closing_units(record)):
        pair, head = _at(record, R_CLOSED) + 16 * (index // heads), index % heads
        source = (_load_i64(pair) * heads + head) * block_bytes
        out = _at(record, R_RECORDS) + (_load_i64(pair + 8) * heads + head) * kv.nbytes
        quantize_block(_at(record, R_KEYS) + source, _at(record, R_VALUES) + source, stage, out, kv)
