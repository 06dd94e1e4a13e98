"""Attention inside a layer program, with one row of int64 per layer that describes the call.

With attention inside the program, a whole forward pass is one kernel call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.attention.call import UNITS_DONE, AttentionCall, Job, RotationPointers
from kvboost_edge.kernels.attention.float_attend import attend_units
from kvboost_edge.kernels.attention.rope import copy_floats
from kvboost_edge.kernels.attention.sparse_attend import SparseJob, attend_sparse_units
from kvboost_edge.kernels.entry import KernelEntry, caller
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.program.table import B_ROWS, ProgramJob
from kvboost_edge.kernels.quantized_kv.code_attend import CodedJob, attend_coded_units
from kvboost_edge.kernels.quantized_kv.code_write import quantize_block
from kvboost_edge.kernels.quantized_kv.sparse_code_attend import (
    SparseCodedJob,
    attend_sparse_coded_units,
)
from kvboost_edge.kernels.signature import INT64
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
    "R_SPARSE",
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
    """Inputs and outputs of one layer's attention in a pass, stored as described in tuples.py.

    Attributes:
        job: the attention call. If the pool is not quantized, only its `plain` field is used.
        turn: queries before RoPE; zeros if no segment has a delta.
        slots: address of int64 [tokens], the slot of each token.
        continued: address of int64 pairs (from, to) of buffers that are copied before any write.
        num_continued: number of these pairs.
        closed: address of int64 pairs (buffer, block) of blocks that are quantized after all
            writes.
        num_closed: number of these pairs.
        stage: address of float32 [num_threads, dim * block], scratch for quantization.
        sparse: address of int32 [num_seqs, 2], the sparse ranges; 0 without any. Only the entries
            for sparse prefill read it.
    """

    job: CodedJob
    turn: RotationPointers
    slots: int
    continued: int
    num_continued: int
    closed: int
    num_closed: int
    stage: int
    sparse: int


def _at(path: str) -> int:
    return number_at(AttentionRow, path)


ROW_NUMBERS = -(-num_numbers(AttentionRow) // 8) * 8  # rounded up to whole cache lines
_PLAIN = _at("job.plain")
_TURN = _at("turn")
# Indices of the numbers that differ between layers or are known only during a pass.
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
R_SPARSE = _at("sparse")
R_CONTINUED = _at("continued")
R_NUM_CONTINUED = _at("num_continued")
R_CLOSED = _at("closed")
R_NUM_CLOSED = _at("num_closed")


def row_of(call: AttentionCall) -> npt.NDArray[np.int64]:
    """Return the attention row of a call, int64 [ROW_NUMBERS].

    The row holds addresses of the call's arrays, which must outlive it.
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
    """Return the address of the attention row of a layer."""
    return job.buffers[B_ROWS] + 8 * ROW_NUMBERS * layer


attend_row = caller(INT64)
"""Call an entry of `attend_entries` with the address of an attention row to run its units."""


@kernel
def _attend_floats(at: int) -> None:
    row = load_row(AttentionRow, at)
    attend_units(row.job.plain, row.turn, row.job.plain)


@kernel
def _attend_codes(at: int) -> None:
    row = load_row(AttentionRow, at)
    attend_coded_units(row.job.plain, row.turn, row.job)


@kernel
def _attend_sparse_floats(at: int) -> None:
    row = load_row(AttentionRow, at)
    attend_sparse_units(row.job.plain, row.turn, SparseJob(row.job.plain, row.sparse))


@kernel
def _attend_sparse_codes(at: int) -> None:
    row = load_row(AttentionRow, at)
    attend_sparse_coded_units(row.job.plain, row.turn, SparseCodedJob(row.job, row.sparse))


@kernel
def is_attended(at: int) -> Any:
    """Return whether all units of the attention call are done."""
    job = load_row(AttentionRow, at).job.plain
    return load_acquire(job.counters + 8 * UNITS_DONE) >= job.num_items * job.shape.num_kv_heads


@kernel
def store_token(at: int, keys: int, values: int, token: int) -> None:
    """Write a token's keys and values to the token's slot in the call's pool.

    Args:
        at: address of the layer's attention row.
        keys: address of float32 [num_kv_heads, head_dim].
        values: address of float32 [num_kv_heads, head_dim].
        token: index of the token in the pass.
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
    """Return the number of units of `continue_block`."""
    return load_row(AttentionRow, at).num_continued


@kernel
def continue_block(at: int, index: int) -> None:
    """Copy a partial float16 block, which this pass continues, into its new buffer."""
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
    """Return the number of units of `close_blocks`.

    Each unit needs its own scratch, so there is at most one unit per thread.
    """
    row = load_row(AttentionRow, at)
    return min(row.job.plain.num_threads, row.num_closed * row.job.plain.shape.num_kv_heads)


@kernel
def _close_blocks(at: int, unit: int) -> None:
    """Quantize the completed blocks that are assigned to this unit."""
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


close_blocks = caller(INT64, INT64)
"""Call `close_entry` with (at, unit)."""
close_entry = KernelEntry(_close_blocks, INT64, INT64)
attend_entries = {
    (False, False): KernelEntry(_attend_floats, INT64),
    (True, False): KernelEntry(_attend_codes, INT64),
    (False, True): KernelEntry(_attend_sparse_floats, INT64),
    (True, True): KernelEntry(_attend_sparse_codes, INT64),
}
"""Attention entry by whether the pool is quantized, and whether prompts may have sparse ranges."""
