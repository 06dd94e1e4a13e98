"""Quantization of full KV blocks, from float16 buffers to codes (layout in code_layout.py).

Each rounding step is the same as in reference/quantized_kv.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from kvboost_edge.kernels.attention.float_tiles import fill, stage_rows
from kvboost_edge.kernels.attention.paged import KVPool, aligned_empty
from kvboost_edge.kernels.integers import V16I, emit_load_bytes
from kvboost_edge.kernels.jit import intrinsic, kernel
from kvboost_edge.kernels.lazy import cgutils, types
from kvboost_edge.kernels.quantized_kv.code_layout import STEP_BIAS, CodeLayout
from kvboost_edge.kernels.vectors import (
    I64,
    KIND_F16,
    LANES,
    V16,
    address_of,
    emit_fma,
    emit_lanes_in,
    emit_load,
    emit_max,
    emit_reduce_rows,
    emit_shuffle,
    load_scalar,
    store_f32,
)

__all__ = ["quantize_block", "quantize_blocks"]

_ROUNDER = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer in the low bits of the mantissa
_ROUNDER_BITS = 0x4B400000
# Added to scales before rounding to float16. They exceed half of float16's smallest step and half
# of its precision, so a scale never rounds down below the value that it must cover.
_SCALE_FLOOR = 6e-8
_SCALE_SLACK = 1.0 + 2.0**-10
_QUAD = 4
_I8 = ir.IntType(8)
_I32 = ir.IntType(32)
_HALF = ir.HalfType()
_V4H = ir.VectorType(_HALF, _QUAD)
_V4B = ir.VectorType(_I8, _QUAD)
_POINTER = ir.PointerType()

Longs = npt.NDArray[np.int64]
Value = Any
Builder = Any


def _int(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def _floats(value: float) -> ir.Constant:
    return ir.Constant(V16, [float(np.float32(value))] * LANES)


def _ints(value: int) -> ir.Constant:
    return ir.Constant(V16I, [value] * LANES)


def _largest(b: Builder, x: Value, y: Value) -> Value:
    return emit_max(b, x, y)


def _smallest(b: Builder, x: Value, y: Value) -> Value:
    return b.select(b.fcmp_ordered("<", x, y), x, y)


def _fold(
    b: Builder, rows: Value, row_bytes: Value, vectors: Value, start: Any, combine: Any
) -> Value:
    """Fold each of four rows to one float32; lanes 4r to 4r + 3 of the result hold that of row r.

    Args:
        b: the builder.
        rows: address of float32 [4, 16 * vectors].
        row_bytes: bytes from one row to the next.
        vectors: vectors of 16 per row, at least 1.
        start: function that maps a loaded vector to an operand of `combine`.
        combine: function that emits the fold of two vectors.
    """
    slots = [cgutils.alloca_once(b, V16) for _ in range(_QUAD)]
    at = [b.add(rows, b.mul(row_bytes, _int(row))) for row in range(_QUAD)]
    for row, slot in enumerate(slots):
        b.store(start(emit_load(b, V16, at[row])), slot)
    with cgutils.for_range(b, b.sub(vectors, _int(1)), intp=I64) as loop:
        offset = b.mul(b.add(loop.index, _int(1)), _int(4 * LANES))
        for row, slot in enumerate(slots):
            b.store(
                combine(b, b.load(slot), start(emit_load(b, V16, b.add(at[row], offset)))), slot
            )
    return emit_reduce_rows(b, [b.load(slot) for slot in slots], lambda x, y: combine(b, x, y))


def _broken(b: Builder, rows: Value, row_bytes: Value, vectors: Value) -> Value:
    """Return 0 for each of four rows, or NaN if the row has a number that is not finite."""
    return _fold(
        b, rows, row_bytes, vectors, lambda x: b.fmul(x, _floats(0.0)), lambda b, x, y: b.fadd(x, y)
    )


def _own(b: Builder, x: Value, row: int) -> Value:
    return emit_shuffle(b, x, x, [_QUAD * row] * LANES)


def _four(b: Builder, x: Value) -> Value:
    """Return lanes 0, 4, 8 and 12 of a vector."""
    undefined = ir.Constant(x.type, ir.Undefined)
    return b.shuffle_vector(x, undefined, ir.Constant(ir.VectorType(_I32, _QUAD), [0, 4, 8, 12]))


def _store_any(b: Builder, value: Value, address: Value) -> None:
    b.store(value, b.inttoptr(address, _POINTER), align=1)


def _codes(b: Builder, scaled: Value, low: int, high: int, add: int) -> Value:
    """Return round(scaled) clipped to [low, high], plus `add`, as an unsigned byte in an i32."""
    bits = b.bitcast(b.fadd(scaled, _floats(_ROUNDER)), V16I)
    code = b.sub(bits, _ints(_ROUNDER_BITS))
    code = b.select(b.icmp_signed("<", code, _ints(low)), _ints(low), code)
    code = b.select(b.icmp_signed(">", code, _ints(high)), _ints(high), code)
    return b.and_(b.add(code, _ints(add)), _ints(255))


def _store_quad(b: Builder, codes: Sequence[Value], place: Value, shift: Value, bits: int) -> None:
    """Store four codes as the bytes of each lane; 4-bit codes are or-ed into nibbles at `shift`."""
    joined = codes[0]
    for index in range(1, _QUAD):
        joined = b.or_(joined, b.shl(codes[index], _ints(8 * index)))
    if bits == 4:
        undefined = ir.Constant(V16I, ir.Undefined)
        first = b.insert_element(undefined, b.trunc(shift, _I32), _I32(0))
        joined = b.shl(joined, b.shuffle_vector(first, undefined, ir.Constant(V16I, [0] * LANES)))
        joined = b.or_(joined, emit_load_bytes(b, place))
    b.store(joined, b.inttoptr(place, _POINTER), align=4)


def _encode_keys(bits: int) -> Any:
    top = 2**bits - 1

    @intrinsic
    def encode(
        typing: Any, keys: Any, size: Any, codes: Any, shift: Any, zeros: Any, steps: Any
    ) -> Any:
        """Quantize one quad of channels.

        Args:
            keys: address of float32 [4, size].
            size: tokens per block, a multiple of 16.
            codes: address of a row of codes; 4-bit codes are or-ed into it.
            shift: number of bits that 4-bit codes are shifted by, 0 or 4.
            zeros: address of float16 [4], written.
            steps: address of uint8 [4], written.
        """

        def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
            keys, size, codes, shift, zeros, steps = arguments
            row_bytes = b.mul(size, _int(4))
            vectors = b.udiv(size, _int(LANES))
            low = _fold(b, keys, row_bytes, vectors, lambda x: x, _smallest)
            high = _fold(b, keys, row_bytes, vectors, lambda x: x, _largest)
            zero = b.fadd(low, _broken(b, keys, row_bytes, vectors))
            _store_any(b, b.fptrunc(_four(b, zero), _V4H), zeros)
            step = emit_max(b, b.fdiv(b.fsub(high, low), _floats(top)), _floats(2.0**-STEP_BIAS))
            code = b.lshr(b.add(b.bitcast(step, V16I), _ints((1 << 20) - 1)), _ints(20))
            code = b.sub(code, _ints((127 - STEP_BIAS) << 3))
            code = b.select(b.icmp_signed("<", code, _ints(0)), _ints(0), code)
            code = b.select(b.icmp_signed(">", code, _ints(255)), _ints(255), code)
            _store_any(b, b.trunc(_four(b, code), _V4B), steps)
            step = b.bitcast(b.shl(b.add(code, _ints((127 - STEP_BIAS) << 3)), _ints(20)), V16)
            inverse = b.fdiv(_floats(1.0), step)
            with cgutils.for_range(b, vectors, intp=I64) as loop:
                offset = b.mul(loop.index, _int(4 * LANES))
                rows = []
                for row in range(_QUAD):
                    x = emit_load(b, V16, b.add(keys, b.add(b.mul(row_bytes, _int(row)), offset)))
                    scaled = b.fmul(b.fsub(x, _own(b, low, row)), _own(b, inverse, row))
                    rows.append(_codes(b, scaled, 0, top, 0))
                _store_quad(b, rows, b.add(codes, offset), shift, bits)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return encode


def _value_scales(
    b: Builder, bits: int, values: Value, row_bytes: Value, vectors: Value
) -> tuple[Value, Value]:
    """Return the scales and middles of four tokens, in lanes 4r, rounded to float16 values.

    With 8 bits, the middles are 0.
    """

    def short(x: Value) -> Value:
        return b.fpext(b.fptrunc(x, ir.VectorType(_HALF, LANES)), V16)

    def size(x: Value) -> Value:
        zero = _floats(0.0)
        return b.select(b.fcmp_ordered("<", x, zero), b.fsub(zero, x), x)

    if bits == 8:
        top = _fold(b, values, row_bytes, vectors, size, _largest)
        slack = float(np.float32(_SCALE_SLACK) / np.float32(127))
        return short(emit_fma(b, top, _floats(slack), _floats(_SCALE_FLOOR))), _floats(0.0)
    low = _fold(b, values, row_bytes, vectors, lambda x: x, _smallest)
    high = _fold(b, values, row_bytes, vectors, lambda x: x, _largest)
    slack = float(np.float32(_SCALE_SLACK) / np.float32(15))
    scale = short(emit_fma(b, b.fsub(high, low), _floats(slack), _floats(_SCALE_FLOOR)))
    return scale, short(emit_fma(b, _floats(8.0), scale, low))


def _encode_values(bits: int) -> Any:
    @intrinsic
    def encode(
        typing: Any,
        values: Any,
        dim: Any,
        head_dim: Any,
        codes: Any,
        shift: Any,
        scales: Any,
        middles: Any,
    ) -> Any:
        """Quantize one quad of tokens.

        Args:
            values: address of float32 [4, dim]; channels from head_dim on repeat others and get
                code 0.
            dim: padded number of channels, a multiple of 16.
            head_dim: number of channels.
            codes: address of a row of codes; 4-bit codes are or-ed into it.
            shift: number of bits that 4-bit codes are shifted by, 0 or 4.
            scales: address of float16 [4], written.
            middles: address of float16 [4], written with 4 bits only.
        """

        def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
            values, dim, head_dim, codes, shift, scales, middles = arguments
            row_bytes = b.mul(dim, _int(4))
            vectors = b.udiv(dim, _int(LANES))
            scale, middle = _value_scales(b, bits, values, row_bytes, vectors)
            stored = b.fadd(scale, _broken(b, values, row_bytes, vectors))
            _store_any(b, b.fptrunc(_four(b, stored), _V4H), scales)
            if bits == 4:
                _store_any(b, b.fptrunc(_four(b, middle), _V4H), middles)
            inverse = b.fdiv(_floats(1.0), scale)
            low, high, add = (-127, 127, 0) if bits == 8 else (-8, 7, 8)
            with cgutils.for_range(b, vectors, intp=I64) as loop:
                offset = b.mul(loop.index, _int(4 * LANES))
                rows = []
                real = emit_lanes_in(b, 0, _int(0), b.sub(head_dim, b.mul(loop.index, _int(LANES))))
                for row in range(_QUAD):
                    x = emit_load(b, V16, b.add(values, b.add(b.mul(row_bytes, _int(row)), offset)))
                    x = b.fsub(x, _own(b, middle, row)) if bits == 4 else x
                    code = _codes(b, b.fmul(x, _own(b, inverse, row)), low, high, add)
                    rows.append(b.select(real, code, _ints(0)))
                _store_quad(b, rows, b.add(codes, offset), shift, bits)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return encode


_KEYS_8 = _encode_keys(8)
_KEYS_4 = _encode_keys(4)
_VALUES_8 = _encode_values(8)
_VALUES_4 = _encode_values(4)


@kernel
def _quantize_keys(keys: int, stage: int, out: int, layout: CodeLayout) -> None:
    """Quantize the keys of one block and KV head.

    Args:
        keys: address of float16 [head_dim, block].
        stage: address of float32 [dim, block], scratch.
        out: address of the block's codes.
        layout: sizes and offsets of the codes.
    """
    size = layout.block_size
    for start in range(0, size, LANES):
        for channel in range(layout.head_dim):
            at = keys + 2 * (channel * size + start)
            stage_rows(stage + 4 * (channel * size + start), at, at, 1, 0, 0, LANES, KIND_F16)
    fill(stage + 4 * layout.head_dim * size, (layout.dim - layout.head_dim) * size, np.float32(0.0))
    for quad in range(layout.dim // _QUAD):
        rows = stage + 4 * quad * _QUAD * size
        zeros = out + layout.key_zeros + 2 * _QUAD * quad
        steps = out + layout.key_steps + _QUAD * quad
        if layout.k_bits == 8:
            _KEYS_8(rows, size, out + quad * size * _QUAD, 0, zeros, steps)
        else:
            _KEYS_4(rows, size, out + quad // 2 * size * _QUAD, quad % 2 * 4, zeros, steps)


@kernel
def _quantize_values(values: int, stage: int, out: int, layout: CodeLayout) -> None:
    """Quantize the values of one block and KV head.

    Args:
        values: address of float16 [block, head_dim].
        stage: address of float32 [block, dim], scratch.
        out: address of the block's codes.
        layout: sizes and offsets of the codes.
    """
    size = layout.block_size
    dim = layout.dim
    head_dim = layout.head_dim
    whole = head_dim // LANES
    for token in range(size):
        source = values + 2 * token * head_dim
        row = stage + 4 * token * dim
        stage_rows(row, source, source, whole, 2 * LANES, 0, LANES, KIND_F16)
        for channel in range(whole * LANES, dim):
            store_f32(
                row + 4 * channel, load_scalar(source + 2 * min(channel, head_dim - 1), KIND_F16)
            )
    for quad in range(size // _QUAD):
        rows = stage + 4 * quad * _QUAD * dim
        first = 2 * _QUAD * quad
        scales = out + layout.value_scales + first
        middles = out + layout.value_middles + first
        if layout.v_bits == 8:
            _VALUES_8(
                rows, dim, head_dim, out + layout.values + quad * dim * _QUAD, 0, scales, middles
            )
        else:
            codes = out + layout.values + quad // 2 * dim * _QUAD
            _VALUES_4(rows, dim, head_dim, codes, quad % 2 * 4, scales, middles)


@kernel
def quantize_block(keys: int, values: int, stage: int, out: int, layout: CodeLayout) -> None:
    """Quantize the keys and values of one block and KV head.

    Args:
        keys: address of float16 [head_dim, block].
        values: address of float16 [block, head_dim].
        stage: address of float32 [dim * block], scratch.
        out: address of uint8 [layout.nbytes], written.
        layout: sizes and offsets of the codes.
    """
    fill(out, layout.nbytes // 4, np.float32(0.0))
    _quantize_keys(keys, stage, out, layout)
    _quantize_values(values, stage, out, layout)


@kernel
def _quantize(
    keys: int,
    values: int,
    pairs: npt.NDArray[np.int64],
    codes: int,
    layout: CodeLayout,
    num_heads: int,
    stage: npt.NDArray[np.float32],
) -> None:
    """Quantize some blocks of all KV heads.

    Args:
        keys: address of float16 [blocks, num_heads, head_dim, block].
        values: address of float16 [blocks, num_heads, block, head_dim].
        pairs: int64 [n, 2], (source, target) blocks.
        codes: address of uint8 [num_blocks, num_heads, layout.nbytes], written.
        layout: sizes and offsets of the codes.
        num_heads: number of KV heads.
        stage: float32 [dim * block], scratch.
    """
    block_bytes = 2 * layout.head_dim * layout.block_size
    at = address_of(stage)
    for pair in range(pairs.shape[0]):
        for head in range(num_heads):
            source = (pairs[pair, 0] * num_heads + head) * block_bytes
            out = codes + (pairs[pair, 1] * num_heads + head) * layout.nbytes
            quantize_block(keys + source, values + source, at, out, layout)


def quantize_blocks(
    own: KVPool, sources: Longs, codes: npt.NDArray[np.uint8], targets: Longs, layout: CodeLayout
) -> None:
    """Quantize float16 blocks into a quantized pool. Block ids are not checked.

    Args:
        own: float16 buffers.
        sources: int64 [n], indices of blocks in `own`.
        codes: uint8 [num_blocks, num_kv_heads, layout.nbytes], written.
        targets: int64 [n], indices of blocks in `codes`.
        layout: sizes and offsets.
    """
    pairs = np.stack([sources, targets], axis=1)
    stage = aligned_empty((layout.dim * layout.block_size,), np.float32)
    keys = own.keys.ctypes.data
    values = own.values.ctypes.data
    _quantize(keys, values, pairs, codes.ctypes.data, layout, codes.shape[1], stage)
