"""Attention inside a layer program: a layer's call as one row of int64, so that a whole pass is one
kernel call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba.core import types

from kvboost_edge.kernels.attention.call import UNITS_DONE, AttentionCall, Job, RotationPointers
from kvboost_edge.kernels.attention.float_attend import attend_units
from kvboost_edge.kernels.attention.rope import copy_floats
from kvboost_edge.kernels.entry import KernelEntry, caller
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.program.table import B_ROWS, ProgramJob
from kvboost_edge.kernels.quantized_kv.code_attend import CodedJob, attend_coded_units
from kvboost_edge.kernels.quantized_kv.code_write import quantize_block
from kvboost_edge.kernels.tuples import load_row, num_numbers, number_at, numbers_of
from kvboost_edge.kernels.vectors import KIND_F32, load_acquire, load_f32, load_i64, store_scalar

__all__ = [
    "ROW_NUMBERS",
    "R_BLOCK_TABLES",
    "R_CLOSED",
    "R_CODED_TABLES",
    "R_CODES",
    "R_CONTINUED",
    "R_COS",
    "R_COUNTERS",
    "R_CU_SEQLENS",
    "R_FIRST",
    "R_HALF",
    "R_KEYS",
    "R_LAYOUT",
    "R_LSE",
    "R_MAX_BLOCKS",
    "R_NUM_CLOSED",
    "R_NUM_CONTINUED",
    "R_OUT",
    "R_SEQ_LENS",
    "R_SIN",
    "R_SINKS",
    "R_SLOTS",
    "R_STAGE",
    "R_TABLE_WIDTH",
    "R_UNROTATED",
    "R_UNROTATED_STEP",
    "R_VALUES",
    "AttentionRow",
    "attend_entries",
    "attend_row",
    "attention_row",
    "close_blocks",
    "close_entry",
    "closing_units",
    "continue_block",
    "continuing_units",
    "is_attended",
    "row_of",
    "store_token",
]


class AttentionRow(NamedTuple):
    """What attention of one layer reads and writes in a pass; kept in memory as tuples.py has it.

    Attributes:
        job: where the pool is not quantized nothing but `plain` and `slots` counts.
        turn: zeros in a pass whose parts have no delta.
        slots: address of the tokens' slots, int64.
        continued: address of pairs (from, to) of buffers, int64, copied before anything is written.
        closed: address of pairs (buffer, block), int64, quantized when all is written.
        stage: address of float32 [num_threads, dim * block], where threads quantize.
    """

    job: CodedJob
    turn: RotationPointers
    slots: int
    continued: int
    num_continued: int
    closed: int
    num_closed: int
    stage: int


def _at(path: str) -> int:
    return number_at(AttentionRow, path)


ROW_NUMBERS = -(-num_numbers(AttentionRow) // 8) * 8  # whole cache lines
_PLAIN = _at("job.plain")
_TURN = _at("turn")
# Columns of rows that differ from layer to layer, or that only a pass knows.
R_KEYS = _at("job.plain.keys")
R_VALUES = _at("job.plain.values")
R_SINKS = _at("job.plain.sinks")
R_COUNTERS = _at("job.plain.counters")
R_OUT = _at("job.plain.out")
R_LSE = _at("job.plain.lse")
R_CU_SEQLENS = _at("job.plain.cu_seqlens_q")
R_SEQ_LENS = _at("job.plain.seq_lens")
R_BLOCK_TABLES = _at("job.plain.block_tables")
R_TABLE_WIDTH = _at("job.plain.max_blocks")
R_UNROTATED = _at("turn.unrotated")
R_UNROTATED_STEP = _at("turn.unrotated_step")
R_COS = _at("turn.cos")
R_SIN = _at("turn.sin")
R_HALF = _at("turn.half")
R_CODES = _at("job.codes")
R_LAYOUT = _at("job.layout")
R_FIRST = _at("job.first")
R_CODED_TABLES = _at("job.block_tables")
R_MAX_BLOCKS = _at("job.max_blocks")
R_SLOTS = _at("slots")
R_STAGE = _at("stage")
R_CONTINUED = _at("continued")
R_NUM_CONTINUED = _at("num_continued")
R_CLOSED = _at("closed")
R_NUM_CLOSED = _at("num_closed")


def row_of(call: AttentionCall) -> npt.NDArray[np.int64]:
    """int64 [ROW_NUMBERS], the call alone. It holds addresses of the call's arrays, which must
    outlive it.
    """
    row = np.zeros(ROW_NUMBERS, dtype=np.int64)
    for first, kind in (
        ((_PLAIN, Job), (_TURN, RotationPointers)) if call.half else ((_PLAIN, Job),)
    ):
        numbers = numbers_of(kind, call)
        row[first : first + numbers.size] = numbers
    return row


@kernel
def attention_row(job: ProgramJob, layer: int) -> Any:
    """Address of a layer's attention row."""
    return job.buffers[B_ROWS] + 8 * ROW_NUMBERS * layer


attend_row = caller(types.int64)
"""(at): take units of the attention call whose row is at this address until none is left. Of an
entry of:
"""


@kernel
def _attend_floats(at: int) -> None:
    row = load_row(AttentionRow, at)
    attend_units(row.job.plain, row.turn, row.job.plain)


@kernel
def _attend_codes(at: int) -> None:
    row = load_row(AttentionRow, at)
    attend_coded_units(row.job.plain, row.turn, row.job)


@kernel
def is_attended(at: int) -> Any:
    """Whether all units of the call are done."""
    job = load_row(AttentionRow, at).job.plain
    return load_acquire(job.counters + 8 * UNITS_DONE) >= job.num_items * job.shape.num_kv_heads


@kernel
def store_token(at: int, keys: int, values: int, token: int) -> None:
    """Write a token's keys and values, float32 [num_kv_heads, head_dim] each, at its slot of the
    call's pool.
    """
    row = load_row(AttentionRow, at)
    job = row.job.plain
    shape = row.job.plain.shape
    heads = shape.num_kv_heads
    dim = shape.head_dim
    size = shape.block_size
    kind = shape.kind
    width = 4 if kind == KIND_F32 else 2
    slot = load_i64(row.slots + 8 * token)
    block = slot // size
    offset = slot % size
    for head in range(heads):
        start = (block * heads + head) * dim * size
        key_at = job.keys + (start + offset) * width
        value_at = job.values + (start + offset * dim) * width
        source = 4 * head * dim
        for index in range(dim):
            store_scalar(key_at + index * size * width, load_f32(keys + source + 4 * index), kind)
            store_scalar(value_at + index * width, load_f32(values + source + 4 * index), kind)


@kernel
def continuing_units(at: int) -> Any:
    """Units of `continue_block`."""
    return load_row(AttentionRow, at).num_continued


@kernel
def continue_block(at: int, index: int) -> None:
    """Copy what a block that this pass fills held before into its buffer of this pass; float16."""
    row = load_row(AttentionRow, at)
    job = row.job.plain
    shape = row.job.plain.shape
    floats = shape.num_kv_heads * shape.head_dim * shape.block_size // 2
    pair = row.continued + 16 * index
    source = 4 * floats * load_i64(pair)
    target = 4 * floats * load_i64(pair + 8)
    copy_floats(job.keys + source, floats, job.keys + target)
    copy_floats(job.values + source, floats, job.values + target)


@kernel
def closing_units(at: int) -> Any:
    """Units of `close_blocks`: not more than there are threads, because each works in a place of
    its own.
    """
    row = load_row(AttentionRow, at)
    return min(row.job.plain.num_threads, row.num_closed * row.job.plain.shape.num_kv_heads)


@kernel
def _close_blocks(at: int, unit: int) -> None:
    """Quantize this unit's share of the blocks that are full now."""
    row = load_row(AttentionRow, at)
    job = row.job.plain
    layout = row.job.layout
    heads = row.job.plain.shape.num_kv_heads
    stage = row.stage + 4 * unit * layout.dim * layout.block_size
    block_bytes = 2 * layout.head_dim * layout.block_size
    for index in range(unit, row.num_closed * heads, closing_units(at)):
        pair = row.closed + 16 * (index // heads)
        head = index % heads
        source = (load_i64(pair) * heads + head) * block_bytes
        out = row.job.codes + (load_i64(pair + 8) * heads + head) * layout.nbytes
        quantize_block(job.keys + source, job.values + source, stage, out, layout)


close_blocks = caller(types.int64, types.int64)
"""(at, unit): quantize this unit's share of the blocks that are full now. Of the entry:"""
close_entry = KernelEntry(_close_blocks, types.int64, types.int64)
attend_entries = {
    False: KernelEntry(_attend_floats, types.int64),
    True: KernelEntry(_attend_codes, types.int64),
}
"""Whether the pool is quantized -> attention."""
