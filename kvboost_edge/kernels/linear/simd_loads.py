"""Loads of codes and scales from the layouts of weight_formats.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from llvmlite import ir

from kvboost_edge.kernels.integers import (
    V16I,
    emit_each,
    emit_load_bytes,
    emit_splat_int,
    has_byte_permute,
    has_byte_shuffle,
    int_constant,
)
from kvboost_edge.kernels.linear.weight_formats import (
    BLOCK_GROUPS,
    GROUP,
    HALF_OFFSET,
    SCALE_BYTES,
    TABLE_OFFSET,
    WeightFormat,
    code_shift,
    high_shift,
)
from kvboost_edge.kernels.vectors import KIND_F16, LANES, V16, emit_load, emit_load_as_f32

__all__ = [
    "emit_block_scales",
    "emit_code_scales",
    "emit_load_pair",
    "emit_scaled_pair",
    "emit_scales",
    "emit_table",
    "emit_table_pair",
    "emit_values",
]

_LINE = 64
_LINES = GROUP // 8  # lines of nibbles per group

_V16S = ir.VectorType(ir.IntType(16), LANES)
_V32S = ir.VectorType(ir.IntType(16), 2 * LANES)
_V16H = ir.VectorType(ir.HalfType(), LANES)
_FLOAT8_SHIFT = 7  # from the mantissa of an 8-bit float to that of a float16
_V16B, _V32B, _V64B = (ir.VectorType(ir.IntType(8), count) for count in (16, 32, 64))


class _Lookup(NamedTuple):
    """An instruction that looks up bytes in a table of 16 entries.

    Attributes:
        name: LLVM name of the intrinsic.
        parts: number of calls for 64 bytes.
        type: operand type of one call.
    """

    name: str
    parts: int
    type: ir.Type


# Lookup instruction for each dot-product variant.
_LOOKUPS = {
    "vnni512": _Lookup("llvm.x86.avx512.pshuf.b.512", 1, _V64B),
    "amx": _Lookup("llvm.x86.avx512.pshuf.b.512", 1, _V64B),
    "vnni256": _Lookup("llvm.x86.avx2.pshuf.b", 2, _V32B),
    "avx2": _Lookup("llvm.x86.avx2.pshuf.b", 2, _V32B),
    "neon": _Lookup("llvm.aarch64.neon.tbl1.v16i8", 4, _V16B),
}
_SSSE3 = _Lookup("llvm.x86.ssse3.pshuf.b.128", 4, _V16B)
_PERMUTE = _Lookup("llvm.x86.avx512.permvar.qi.512", 1, _V64B)

Value = Any
Builder = Any


def _at(b: Builder, address: Value, index: Value, size: int) -> Value:
    return b.add(address, b.mul(index, int_constant(size)))


def emit_load_pair(b: Builder, form: WeightFormat, at: Value, pair: int) -> tuple[Value, Value]:
    """Load quads 2 * pair and 2 * pair + 1 as unsigned bytes, <16 x i32> each.

    For formats with a table or values, use `emit_table_pair`, and with a grid, `GridPairs`.

    Args:
        form: the weight format.
        at: address of a group, or of a part of it.
        pair: index of the pair.
    """
    if form.bits == 8:
        first = b.add(at, int_constant(2 * _LINE * pair))
        return emit_load_bytes(b, first), emit_load_bytes(b, b.add(first, int_constant(_LINE)))
    if form.bits == 3:
        return _emit_threes(b, at, pair)
    if form.bits < 4:
        line = emit_load_bytes(b, b.add(at, int_constant(_LINE * (2 * pair * form.bits // 8))))
        return _emit_narrow(b, form, line, 2 * pair), _emit_narrow(b, form, line, 2 * pair + 1)
    both = emit_load_bytes(b, b.add(at, int_constant(_LINE * pair)))
    mask = ir.Constant(V16I, [0x0F0F0F0F] * LANES)
    four = ir.Constant(V16I, [4] * LANES)
    low = b.and_(both, mask)
    high = b.and_(b.lshr(both, four), mask)
    if form.bits == 4:
        return low, high
    above = emit_load_bytes(b, b.add(at, int_constant(_LINE * (_LINES // form.parts))))
    first, second = (_emit_above(b, form.bits, above, 2 * pair + index) for index in range(2))
    return b.or_(low, first), b.or_(high, second)


def emit_table(b: Builder, address: Value, *, signed: bool) -> Value:
    """Load a tile's 16-byte table and repeat it four times, as <64 x i8>.

    TABLE_OFFSET is added unless `signed`.
    """
    table = b.load(b.inttoptr(address, ir.PointerType()), align=1, typ=_V16B)
    if not signed:
        table = b.xor(table, ir.Constant(_V16B, [-128] * 16))
    return b.shuffle_vector(
        table, table, ir.Constant(ir.VectorType(ir.IntType(32), 64), list(range(16)) * 4)
    )


def emit_values(form: WeightFormat, *, signed: bool) -> Value:
    """Return the weights of a format's codes in the form of `emit_table`.

    The offset of the format is added unless `signed`.
    """
    offset = 0 if signed else form.offset
    return ir.Constant(_V64B, [value + offset for value in form.values] * 4)


def emit_table_pair(
    b: Builder, form: str, table: Value, at: Value, pair: int
) -> tuple[Value, Value]:
    """Load two quads like `emit_load_pair` and look their codes up; the bytes are <16 x i32> each.

    Args:
        form: dot-product variant, which selects the lookup instruction.
        table: the result of `emit_table` or `emit_values`.
        at: address of a group.
        pair: index of the pair.
    """
    both = b.bitcast(emit_load_bytes(b, b.add(at, int_constant(_LINE * pair))), _V64B)
    mask = ir.Constant(_V64B, [15] * 64)
    four = ir.Constant(_V64B, [4] * 64)
    found = _lookup_of(b, form)
    if found is _PERMUTE:
        # `vpermb` uses 6 bits of an index. The table is repeated four times, so the two bits above
        # a code do not matter.
        low = both
        high = b.bitcast(b.lshr(b.bitcast(both, V16I), ir.Constant(V16I, [4] * LANES)), _V64B)
    else:
        low = b.and_(both, mask)
        high = b.lshr(both, four)
    if found is None:
        return _emit_selected(b, table, low), _emit_selected(b, table, high)
    name, count, kind = found
    parts = [
        [(b.bitcast(table, V16I), kind), (b.bitcast(codes, V16I), kind)] for codes in (low, high)
    ]
    first, second = (b.bitcast(emit_each(b, count, name, kind, one), V16I) for one in parts)
    return first, second


def _lookup_of(b: Builder, form: str) -> _Lookup | None:
    """Return the byte lookup instruction of a variant, or None."""
    if form in ("vnni512", "amx") and has_byte_permute():
        return _PERMUTE
    if form == "plain":
        if b.module.triple.startswith(("aarch64", "arm64")):
            return _LOOKUPS["neon"]
        return _SSSE3 if has_byte_shuffle() else None
    return _LOOKUPS[form]


def _emit_selected(b: Builder, table: Value, codes: Value) -> Value:
    """Look codes up with selects only: each bit of a code halves the candidates."""
    orders = [ir.Constant(ir.VectorType(ir.IntType(32), 64), [code] * 64) for code in range(16)]
    left = [b.shuffle_vector(table, table, order) for order in orders]
    for bit in (8, 4, 2, 1):
        is_set = b.icmp_signed(
            "!=", b.and_(codes, ir.Constant(_V64B, [bit] * 64)), ir.Constant(_V64B, [0] * 64)
        )
        left = [b.select(is_set, left[bit + code], left[code]) for code in range(bit)]
    return b.bitcast(left[0], V16I)


def _emit_above(b: Builder, bits: int, plane: Value, quad: int) -> Value:
    """Return the bits of a quad's codes above the nibbles, shifted into place."""
    return _emit_moved(b, plane, high_shift(bits, quad), (1 << bits) - 16)


def _emit_threes(b: Builder, at: Value, pair: int) -> tuple[Value, Value]:
    """Load two quads of 3-bit codes, like `emit_load_pair`."""
    line = emit_load_bytes(b, at)
    place = b.inttoptr(b.add(at, int_constant(_LINE)), ir.PointerType())
    high = b.zext(b.load(place, align=4, typ=_V16S), V16I)
    # Each byte then has the high bits of its input in the low nibble.
    high = b.or_(high, b.shl(high, ir.Constant(V16I, [12] * LANES)))
    quads = [
        b.or_(_emit_moved(b, line, 2 * quad, 3), _emit_moved(b, high, quad - 2, 4))
        for quad in (2 * pair, 2 * pair + 1)
    ]
    return quads[0], quads[1]


def _emit_narrow(b: Builder, form: WeightFormat, line: Value, quad: int) -> Value:
    """Return a quad's codes of 1 or 2 bits as bytes."""
    return _emit_moved(b, line, code_shift(form.bits, quad), form.largest_code)


def _emit_moved(b: Builder, line: Value, shift: int, mask: int) -> Value:
    """Shift a line right, or left if `shift` is negative, and apply a mask to each byte."""
    by = ir.Constant(V16I, [abs(shift)] * LANES)
    moved = b.shl(line, by) if shift < 0 else b.lshr(line, by) if shift else line
    return b.and_(moved, ir.Constant(V16I, [mask * 0x01010101] * LANES))


def emit_scales(
    b: Builder, form: WeightFormat, scales: Value, minima: Value, part: Value
) -> tuple[Value, Value | None]:
    """Load the scales of 16 rows, and their minima or None, as float32.

    Args:
        form: the weight format.
        scales: address of the tile's scales, or of its codes if they contain the scales.
        minima: address of the tile's minima.
        part: index of the part among all parts of the tile.
    """
    if form.float8:
        return b.fmul(
            _emit_float8_as_f32(b, _at(b, scales, part, LANES)), emit_load(b, V16, minima)
        ), None
    if not form.block_bytes:
        low = (
            emit_load_as_f32(b, KIND_F16, _at(b, minima, part, 2 * LANES)) if form.minima else None
        )
        run = b.lshr(part, int_constant(form.scale_log)) if form.scale_log else part
        return emit_load_as_f32(b, KIND_F16, _at(b, scales, run, SCALE_BYTES)), low
    block = b.udiv(part, int_constant(BLOCK_GROUPS * form.parts))
    block = _at(b, minima, block, form.minima_size)
    if form.grid is not None:
        half = emit_load_as_f32(b, KIND_F16, block)
        return b.fmul(half, _emit_grid_factors(b, form, scales, part)), None
    at = _at(b, scales, part, SCALE_BYTES // form.parts)
    if form.minima_in_halves:
        factors = _emit_nibbles_as_f32(b, at)
    else:
        factors = [_emit_bytes_as_f32(b, at, signed=not form.minima)]
        if form.minima:
            factors.append(_emit_bytes_as_f32(b, b.add(at, int_constant(LANES)), signed=False))
    halves = [
        emit_load_as_f32(b, KIND_F16, b.add(block, int_constant(2 * LANES * i)))
        for i in range(len(factors))
    ]
    products = [b.fmul(half, factor) for half, factor in zip(halves, factors, strict=True)]
    return products[0], products[1] if form.minima else None


def emit_code_scales(b: Builder, form: WeightFormat, address: Value) -> list[Value]:
    """Load the integer scales of the halves of a group, <16 x i32> each.

    Args:
        b: the builder.
        form: a format with `scaled_codes`.
        address: address of the group's scales.
    """
    halves = [_load_bytes(b, b.add(address, int_constant(LANES * half))) for half in range(2)]
    if form.minima:
        mask = ir.Constant(V16I, [15] * LANES)
        return [b.and_(b.zext(half, V16I), mask) for half in halves]
    return [b.sext(half, V16I) for half in halves]


def emit_block_scales(
    b: Builder, form: WeightFormat, scales: Value, minima: Value, group: Value, *, negated: bool
) -> tuple[Value, list[Value]]:
    """Load what the sums of scaled codes are multiplied by, and the minima, float32 of 16 rows.

    The minima of the two halves of a group are divided by HALF_OFFSET, because they are multiplied
    by the seeds of a panel.

    Args:
        b: the builder.
        form: a format with `scaled_codes`.
        scales: address of the group's scales.
        minima: address of the tile's minima.
        group: index of the group.
        negated: whether the scaled codes are negated.
    """
    block = b.lshr(group, int_constant(BLOCK_GROUPS.bit_length() - 1))
    block = _at(b, minima, block, form.minima_size)
    own = emit_load_as_f32(b, KIND_F16, block)
    if negated:
        own = b.fneg(own)
    if not form.minima:
        return own, []
    shared = emit_load_as_f32(b, KIND_F16, b.add(block, int_constant(2 * LANES)))
    shared = b.fmul(shared, ir.Constant(V16, [1 / HALF_OFFSET] * LANES))
    halves = [_load_bytes(b, b.add(scales, int_constant(LANES * half))) for half in range(2)]
    four = ir.Constant(_V16B, [4] * LANES)
    return own, [b.fmul(b.uitofp(b.lshr(half, four), V16), shared) for half in halves]


def emit_scaled_pair(
    b: Builder, form: WeightFormat, at: Value, scales: Sequence[Value], pair: int
) -> tuple[Value, Value]:
    """Load two quads like `emit_load_pair`, as codes times the scale of their half of the group.

    With an offset, the bytes are TABLE_OFFSET - scale * (code - offset). Weights are negated,
    because the largest product, -32 * -4, would not fit in a signed byte.

    Args:
        b: the builder.
        form: a format with `scaled_codes`.
        at: address of a group.
        scales: the result of `emit_code_scales`.
        pair: index of the pair in the group.
    """
    half, own = divmod(pair, 2)
    quads = emit_load_pair(b, form, b.add(at, int_constant(half * form.group_bytes // 2)), own)
    # A scale is repeated in both 16-bit numbers of a lane. One multiplication of 16 bits scales two
    # codes, because no product, after adding TABLE_OFFSET, exceeds a byte.
    low = b.and_(scales[half], ir.Constant(V16I, [0xFFFF] * LANES))
    both = b.or_(low, b.shl(scales[half], ir.Constant(V16I, [16] * LANES)))
    twice = b.bitcast(both, _V32S)
    products = [b.mul(b.bitcast(quad, _V32S), twice) for quad in quads]
    if form.offset:
        zero = b.add(
            b.mul(twice, ir.Constant(_V32S, [form.offset] * 2 * LANES)),
            ir.Constant(_V32S, [TABLE_OFFSET] * 2 * LANES),
        )
        zeros = b.add(zero, b.shl(zero, ir.Constant(_V32S, [8] * 2 * LANES)))
        products = [b.sub(zeros, product) for product in products]
    return b.bitcast(products[0], V16I), b.bitcast(products[1], V16I)


def _load_bytes(b: Builder, address: Value) -> Value:
    """Load 16 bytes."""
    return b.load(b.inttoptr(address, ir.PointerType()), align=1, typ=_V16B)


def _emit_float8_as_f32(b: Builder, address: Value) -> Value:
    """Load 16 8-bit floats without a sign, divide them by 2 ** 8 and convert them to float32."""
    loaded = b.load(b.inttoptr(address, ir.PointerType()), align=1, typ=_V16B)
    bits = b.shl(b.zext(loaded, _V16S), ir.Constant(_V16S, [_FLOAT8_SHIFT] * LANES))
    return b.fpext(b.bitcast(bits, _V16H), V16)


def _emit_nibbles_as_f32(b: Builder, address: Value) -> list[Value]:
    """Load 16 bytes and convert their low and their high nibbles to float32."""
    place = b.inttoptr(address, ir.PointerType())
    both = b.zext(b.load(place, align=1, typ=_V16B), V16I)
    low = b.and_(both, ir.Constant(V16I, [15] * LANES))
    high = b.lshr(both, ir.Constant(V16I, [4] * LANES))
    return [b.sitofp(nibbles, V16) for nibbles in (low, high)]


def _emit_bytes_as_f32(b: Builder, address: Value, *, signed: bool) -> Value:
    """Load 16 bytes and convert them to float32."""
    loaded = b.load(
        b.inttoptr(address, ir.PointerType()), align=1, typ=ir.VectorType(ir.IntType(8), LANES)
    )
    return b.sitofp(b.sext(loaded, V16I) if signed else b.zext(loaded, V16I), V16)


def _emit_grid_factors(b: Builder, form: WeightFormat, scales: Value, part: Value) -> Value:
    """Load 16 scales of a format with a grid, and return eighths / 8 * (2 * scale + 1)."""
    one = int_constant(1)
    single = ir.Constant(V16I, [1] * LANES)
    if form.scales_in_codes:
        at = b.add(_at(b, scales, part, form.group_bytes), int_constant(LANES * form.part_entries))
        more = b.zext(b.load(b.inttoptr(at, ir.PointerType()), align=1, typ=_V16S), V16I)
        twice = b.and_(
            b.lshr(more, ir.Constant(V16I, [11] * LANES)), ir.Constant(V16I, [14] * LANES)
        )
        return _times_eighths(b, form, b.or_(twice, single))
    group = b.lshr(part, one) if form.parts > 1 else part
    place = b.inttoptr(_at(b, scales, group, form.scale_size), ir.PointerType())
    loaded = b.load(place, align=1, typ=ir.VectorType(ir.IntType(8), form.scale_size))
    if form.parts > 1:
        four = b.mul(b.and_(part, one), int_constant(4))
        wide = b.zext(loaded, V16I)
        shift = emit_splat_int(b, b.trunc(four, ir.IntType(32)))
        nibbles = b.and_(b.lshr(wide, shift), ir.Constant(V16I, [15] * LANES))
    else:
        order = [row // 2 + row % 2 * form.scale_size for row in range(LANES)]
        low = b.and_(loaded, ir.Constant(loaded.type, [15] * form.scale_size))
        high = b.lshr(loaded, ir.Constant(loaded.type, [4] * form.scale_size))
        nibbles = b.zext(b.shuffle_vector(low, high, ir.Constant(V16I, order)), V16I)
    return _times_eighths(b, form, b.or_(b.shl(nibbles, single), single))


def _times_eighths(b: Builder, form: WeightFormat, factors: Value) -> Value:
    """Convert integers to float32 and multiply them by the eighths of a format with a grid."""
    return b.fmul(b.sitofp(factors, V16), ir.Constant(V16, [form.eighths / 8] * LANES))
