"""Paged attention of a sparse prefill over quantized blocks; see attention/sparse_attend.py.

Key blocks are selected by their decoded keys. The kept ones are attended to in integers, like all
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from llvmlite import ir

from kvboost_edge.kernels.attention.block_selection import (
    BlockSelection,
    dense_start,
    kept_position,
    kept_unit,
    no_selection,
    selector,
)
from kvboost_edge.kernels.attention.call import RotationPointers, Unit
from kvboost_edge.kernels.attention.float_tiles import STRIPS
from kvboost_edge.kernels.attention.paged import PARTITION, Ints
from kvboost_edge.kernels.attention.units import after, clear_state, unit_loop
from kvboost_edge.kernels.jit import intrinsic, kernel
from kvboost_edge.kernels.lazy import cgutils, types
from kvboost_edge.kernels.quantized_kv.code_attend import (
    CodedCall,
    CodedJob,
    CodedScratch,
    add_own,
    attend_coded_tiles,
    coded_tile,
    codes_at,
    lay_out_coded,
    place_coded,
)
from kvboost_edge.kernels.quantized_kv.code_rows import V16B, decode_key_scales, prefetch_lines
from kvboost_edge.kernels.tuples import addresses_of
from kvboost_edge.kernels.vectors import (
    F32,
    I64,
    LANES,
    V16,
    emit_fma,
    emit_load,
    emit_shuffle,
    emit_store,
)

__all__ = [
    "SparseCodedCall",
    "SparseCodedJob",
    "attend_sparse_coded",
    "attend_sparse_coded_units",
]

_QUAD = ir.VectorType(F32, 4)

Value = Any
Builder = Any


class SparseCodedCall(NamedTuple):
    """Arguments of a call on a quantized pool with sparse ranges.

    Attributes:
        coded: the call.
        sparse: int32 [num_seqs, 2]; see `PagedBatch`.
    """

    coded: CodedCall
    sparse: Ints


class SparseCodedJob(NamedTuple):
    """A SparseCodedCall with addresses; `sparse` is 0 without sparse ranges."""

    coded: CodedJob
    sparse: int


def _spread_quad(b: Builder, address: Value) -> Value:
    """Load four floats and repeat them in the four quads of a vector."""
    four = emit_load(b, _QUAD, address)
    return emit_shuffle(b, four, four, [0, 1, 2, 3] * 4)


@intrinsic
def _decode_block(
    typing: Any, codes: Any, step: Any, dim: Any, bits: Any, zeros: Any, steps: Any, out: Any
) -> Any:
    """Decode the key codes of 16 tokens to float32 [dim / 4, 16 tokens, 4 channels].

    Args:
        codes: address of the codes of the first quad of channels.
        step: bytes from one row of codes to the next.
        dim: number of channels, a multiple of 16.
        bits: bits per code, 8 or 4. With 4 bits, a row holds two quads.
        zeros: address of float32 [dim].
        steps: address of float32 [dim].
        out: address of float32 [dim * 16], written.
    """

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        codes, step, dim, bits, zeros, steps, out = arguments

        def emit_quad(row: Value, quad: Value, shift: int, mask: int) -> None:
            here = b.mul(quad, ir.Constant(I64, 16))
            zero = _spread_quad(b, b.add(zeros, here))
            factor = _spread_quad(b, b.add(steps, here))
            to = b.add(out, b.mul(quad, ir.Constant(I64, 4 * 4 * LANES)))
            for part in range(4):
                place = b.inttoptr(b.add(row, ir.Constant(I64, LANES * part)), ir.PointerType())
                values = b.load(place, align=1, typ=V16B)
                values = b.lshr(values, ir.Constant(V16B, [shift] * LANES))
                values = b.and_(values, ir.Constant(V16B, [mask] * LANES))
                values = emit_fma(b, b.uitofp(values, V16), factor, zero)
                emit_store(b, values, b.add(to, ir.Constant(I64, 4 * LANES * part)))

        quads = b.udiv(dim, ir.Constant(I64, 4))
        with b.if_else(b.icmp_signed("==", bits, ir.Constant(I64, 8))) as (bytes_, nibbles):
            with bytes_, cgutils.for_range(b, quads, intp=I64) as loop:
                emit_quad(b.add(codes, b.mul(loop.index, step)), loop.index, 0, 0xFF)
            with (
                nibbles,
                cgutils.for_range(b, b.udiv(quads, ir.Constant(I64, 2)), intp=I64) as loop,
            ):
                row = b.add(codes, b.mul(loop.index, step))
                first = b.mul(loop.index, ir.Constant(I64, 2))
                emit_quad(row, first, 0, 0x0F)
                emit_quad(row, b.add(first, ir.Constant(I64, 1)), 4, 0x0F)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), codegen


@kernel
def _stage(
    job: SparseCodedJob, unit: Unit, position: int, out: int, zeros: int, steps: int
) -> None:
    layout = job.coded.layout
    here = codes_at(job.coded, unit, position)
    decode_key_scales(here + layout.key_zeros, here + layout.key_steps, layout.dim, zeros, steps)
    codes = here + 4 * (position % layout.block_size)
    _decode_block(codes, 4 * layout.block_size, layout.dim, layout.k_bits, zeros, steps, out)


_select = selector("select_coded_blocks", True, _stage)


@kernel
def _lay_out(job: SparseCodedJob, unit: Unit) -> Any:
    coded = lay_out_coded(job.coded, unit)
    start = dense_start(job.sparse, job.coded.plain.shape, unit)
    if start == 0:
        return no_selection(coded)
    scratch = after(coded.blank, job.coded.layout.dim)
    return _select(job, job.coded.plain.shape, unit, coded, start, scratch)


@kernel
def _attend_kept(
    job: CodedJob, unit: Unit, coded: CodedScratch, selection: BlockSelection, state: int
) -> None:
    """Add the kept key blocks to the softmax state, four per tile."""
    index = 0
    while index < selection.num_kept:
        count = min(STRIPS, selection.num_kept - index)
        for strip in range(STRIPS):
            position = kept_position(selection, index + strip, unit)
            place_coded(job, unit, coded, strip, position, unit.high)
            later = kept_position(selection, index + STRIPS + strip, unit)
            if later < unit.high:
                prefetch_lines(codes_at(job, unit, later), job.layout.nbytes)
        coded_tile(job, kept_unit(unit, count), coded, 0, state)
        index += STRIPS


@kernel
def _attend_partition(
    job: SparseCodedJob, unit: Unit, selection: BlockSelection, partition: int, state: int
) -> None:
    """Compute the softmax state of one partition; its first tile may follow the kept blocks."""
    clear_state(job.coded.plain.shape, unit.num_rows, state)
    if selection.num_kept > 0 and partition == selection.dense_from // PARTITION:
        _attend_kept(job.coded, unit, selection.more, selection, state)
    start = max(unit.low, selection.dense_from)
    attend_coded_tiles(job.coded, unit, selection.more, partition, start, state)


@kernel
def _add_own(
    job: SparseCodedJob, unit: Unit, selection: BlockSelection, merged: int, state: int
) -> None:
    """Merge the softmax state of the own blocks, after the last partition."""
    add_own(job.coded, unit, selection.more, merged, state)


attend_sparse_coded_units = unit_loop(
    "attend_sparse_coded_units", _lay_out, _attend_partition, _add_own
)


@kernel
def attend_sparse_coded(call: SparseCodedCall) -> None:
    """Process units until all are taken, as `attend_coded` does."""
    job = addresses_of(SparseCodedJob, call)
    attend_sparse_coded_units(
        job.coded.plain, addresses_of(RotationPointers, call.coded.plain), job
    )
