"""Vectors of 16 float32 lanes for Numba kernels, emitted as LLVM IR.

A `<16 x float>` is one AVX-512 register, two AVX2 registers or four NEON registers. Results are
bit-identical on all of them: every multiply-add is an explicit `llvm.fma`, every reduction has a
fixed order, and nothing depends on auto-vectorization.

The `emit_*` functions write IR at the position of a builder. Kernels call the intrinsics at the end
of this module. Addresses are int64, in bytes. Loads and stores assume the alignment of an element,
not of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from kvboost_edge.kernels.jit import intrinsic
from kvboost_edge.kernels.lazy import cgutils, types

__all__ = [
    "F32",
    "I32",
    "I64",
    "KIND_BF16",
    "KIND_F16",
    "KIND_F32",
    "LANES",
    "V16",
    "address_of",
    "emit_exp",
    "emit_exp2",
    "emit_exp2s",
    "emit_fma",
    "emit_lanes_in",
    "emit_load",
    "emit_load_as_f32",
    "emit_max",
    "emit_prefetch",
    "emit_reduce_rows",
    "emit_scratch",
    "emit_shuffle",
    "emit_splat",
    "emit_store",
    "exp2_f32",
    "exp_f32",
    "fetch_add",
    "fma_f32",
    "load_acquire",
    "load_f32",
    "load_i32",
    "load_i64",
    "load_scalar",
    "relax",
    "store_f32",
    "store_i32",
    "store_i64",
    "store_scalar",
]

LANES = 16
KIND_F32 = 0
KIND_F16 = 1
KIND_BF16 = 2

F32 = ir.FloatType()
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
V16 = ir.VectorType(F32, LANES)
_VI16 = ir.VectorType(I16, LANES)
_VI32 = ir.VectorType(I32, LANES)
_VHALF = ir.VectorType(ir.HalfType(), LANES)
_POINTER = ir.PointerType()

Value = Any  # an ir.Value
Builder = Any  # an ir.IRBuilder


def emit_load(b: Builder, kind: ir.Type, address: Value) -> Value:
    """Load a scalar or vector from a byte address, aligned to its element size (at most 8)."""
    element = kind.element if isinstance(kind, ir.VectorType) else kind
    align = {I16: 2, I64: 8}.get(element, 4) if not isinstance(element, ir.HalfType) else 2
    return b.load(b.inttoptr(address, _POINTER), align=align, typ=kind)


def emit_store(b: Builder, value: Value, address: Value) -> None:
    """Store a float32 scalar or vector at a byte address aligned to 4."""
    b.store(value, b.inttoptr(address, _POINTER), align=4)


def emit_scratch(b: Builder, size: int) -> Value:
    """Return the address of `size` uninitialized bytes on the kernel's stack, aligned to 64."""
    # `cgutils.alloca_once` would zero them on every call of the kernel, which takes 65 ns for 20
    # KB.
    with b.goto_entry_block():
        place = b.alloca(ir.ArrayType(ir.IntType(8), size))
        place.align = 64
        return b.ptrtoint(place, I64)


def emit_splat(b: Builder, scalar: Value, kind: ir.VectorType = V16) -> Value:
    """Broadcast a scalar to every lane."""
    first = b.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(I32, 0))
    return emit_shuffle(b, first, first, [0] * LANES)


def _constant(kind: ir.Type, value: float) -> ir.Constant:
    return (
        ir.Constant(kind, [value] * LANES)
        if isinstance(kind, ir.VectorType)
        else ir.Constant(kind, value)
    )


def _integers_like(kind: ir.Type) -> ir.Type:
    return _VI32 if isinstance(kind, ir.VectorType) else I32


def emit_fma(b: Builder, x: Value, y: Value, z: Value) -> Value:
    """Return x * y + z with one rounding, for float32 scalars or vectors."""
    kind = x.type
    name = "llvm.fma.v16f32" if isinstance(kind, ir.VectorType) else "llvm.fma.f32"
    return b.call(
        cgutils.get_or_insert_function(b.module, ir.FunctionType(kind, [kind] * 3), name), [x, y, z]
    )


def emit_max(b: Builder, x: Value, y: Value) -> Value:
    """Return the larger of x and y in each lane; y if they are unordered."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def emit_shuffle(b: Builder, x: Value, y: Value, lanes: Sequence[int]) -> Value:
    """Return the given lanes of two vectors: 0 to 15 are those of x, 16 to 31 those of y."""
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))


def emit_reduce_rows(b: Builder, rows: Sequence[Value], combine: Any) -> Value:
    """Reduce the lanes of four vectors; lanes 4r to 4r + 3 of the result hold the total of row r.

    The order is 8 + 8, 4 + 4, 2 + 2, 1 + 1 for every row, independent of its place among the four.
    """
    low = [*range(8), *range(16, 24)]
    high = [*range(8, 16), *range(24, 32)]
    pairs = [
        combine(emit_shuffle(b, x, y, low), emit_shuffle(b, x, y, high))
        for x, y in (rows[:2], rows[2:])
    ]
    low = [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27]
    quads = combine(
        emit_shuffle(b, pairs[0], pairs[1], low),
        emit_shuffle(b, pairs[0], pairs[1], [lane + 4 for lane in low]),
    )
    for step in (2, 1):
        quads = combine(
            quads, emit_shuffle(b, quads, quads, [lane ^ step for lane in range(LANES)])
        )
    return quads


# exp(x) follows Cephes' expf: 2^n * p(r) with |r| <= ln2 / 2. The relative error is below 2e-7, and
# exp(0) is exactly 1.
_EXP_COEFFICIENTS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    0.5,
)
_LOG2_E = 1.44269504088896341
_LN2_HIGH = 0.693359375
_LN2_LOW = -2.12194440e-4
_EXP_LOWEST = -87.0  # exp(x) of smaller x is 0
_ROUNDER = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer in the low bits of the mantissa
# 2^x = 2^n * p(r) with |r| <= 1/2. The coefficients minimize the largest relative error of p among
# the polynomials of degree 5 with p(0) = 1. Their error is 9.2e-8,
# that of 2^x with rounding below 2e-7, and 2^0 is exactly 1.
_EXP2_COEFFICIENTS = (
    0.0013264729,
    0.009671513,
    0.055507337,
    0.24022242,
    0.69314698,
    1.0,
)
_EXP2_LOWEST = -126.0  # 2^x of smaller x is 0, so no result is subnormal
# Adding it leaves n + 127, the exponent's bits, in the low bits of the mantissa.
_EXPONENT_ROUNDER = _ROUNDER + 127.0


def emit_exp(b: Builder, x: Value) -> Value:
    """Return exp(x) of a scalar or vector for x <= 88.

    The result is exactly 1 at 0, exactly 0 below -87 and at -inf, and NaN for NaN.
    """
    kind = x.type
    integers = _integers_like(kind)
    too_low = b.fcmp_ordered("<", x, _constant(kind, _EXP_LOWEST))
    shifted = emit_fma(b, x, _constant(kind, _LOG2_E), _constant(kind, _ROUNDER))
    n = b.fsub(shifted, _constant(kind, _ROUNDER))
    r = emit_fma(b, n, _constant(kind, -_LN2_HIGH), x)
    r = emit_fma(b, n, _constant(kind, -_LN2_LOW), r)
    p = _constant(kind, _EXP_COEFFICIENTS[0])
    for coefficient in _EXP_COEFFICIENTS[1:]:
        p = emit_fma(b, p, r, _constant(kind, coefficient))
    p = b.fadd(emit_fma(b, b.fmul(r, r), p, r), _constant(kind, 1.0))
    exponent = b.shl(b.bitcast(shifted, integers), _constant(integers, 23))
    power = b.bitcast(b.add(exponent, _constant(integers, 127 << 23)), kind)
    return b.select(too_low, _constant(kind, 0.0), b.fmul(p, power))


def emit_exp2(b: Builder, x: Value) -> Value:
    """Return 2^x of a scalar or vector for x <= 127.

    The result is exactly 1 at 0, exactly 0 below -126 and at -inf, and NaN for NaN.
    """
    return emit_exp2s(b, [x])[0]


def emit_exp2s(b: Builder, xs: Sequence[Value]) -> list[Value]:
    """Return `emit_exp2` of several values of one type, one operation for all values at a time."""
    # LLVM keeps this order. Consecutive operations do not depend on each other, so the processor
    # need not look far ahead to keep its multipliers busy.
    kind = xs[0].type
    integers = _integers_like(kind)
    rounder = _constant(kind, _EXPONENT_ROUNDER)
    too_low = [b.fcmp_ordered("<", x, _constant(kind, _EXP2_LOWEST)) for x in xs]
    shifted = [b.fadd(x, rounder) for x in xs]
    whole = [b.fsub(one, rounder) for one in shifted]
    r = [b.fsub(x, one) for x, one in zip(xs, whole, strict=True)]
    p = [_constant(kind, _EXP2_COEFFICIENTS[0])] * len(xs)
    for coefficient in _EXP2_COEFFICIENTS[1:]:
        p = [emit_fma(b, *two, _constant(kind, coefficient)) for two in zip(p, r, strict=True)]
    exponents = [b.shl(b.bitcast(one, integers), _constant(integers, 23)) for one in shifted]
    products = [b.fmul(one, b.bitcast(two, kind)) for one, two in zip(p, exponents, strict=True)]
    zero = _constant(kind, 0.0)
    return [b.select(low, zero, one) for low, one in zip(too_low, products, strict=True)]


def emit_lanes_in(b: Builder, first: int, low: Value, high: Value) -> Value:
    """Return the mask of lanes with low <= first + lane < high (both int64 scalars)."""
    index = ir.Constant(_VI32, [first + lane for lane in range(LANES)])
    above = b.icmp_signed(">=", index, emit_splat(b, b.trunc(low, I32), _VI32))
    below = b.icmp_signed("<", index, emit_splat(b, b.trunc(high, I32), _VI32))
    return b.and_(above, below)


def emit_load_as_f32(b: Builder, kind: int, address: Value) -> Value:
    """Load 16 values of KIND_F32, KIND_F16 or KIND_BF16 and widen them exactly to float32."""
    if kind == KIND_F32:
        return emit_load(b, V16, address)
    if kind == KIND_F16:
        return b.fpext(emit_load(b, _VHALF, address), V16)
    bits = b.zext(emit_load(b, _VI16, address), _VI32)
    return b.bitcast(b.shl(bits, _constant(_VI32, 16)), V16)


def emit_prefetch(b: Builder, address: Value, *, write: bool = False, near: bool = True) -> None:
    """Prefetch the cache line at a byte address.

    Args:
        write: True if the line is going to be written.
        near: True prefetches into all cache levels, False into all but the first.
    """
    how = (int(write), 3 if near else 2, 1)
    arguments = [b.inttoptr(address, _POINTER), *(ir.Constant(I32, number) for number in how)]
    kind = ir.FunctionType(ir.VoidType(), [a.type for a in arguments])
    b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0"), arguments)


@intrinsic
def exp_f32(typing: Any, x: Any) -> Any:
    """Return exp(x) of a float32, bit-identical to the vector variant."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        return emit_exp(b, arguments[0])

    return types.float32(types.float32), codegen


@intrinsic
def exp2_f32(typing: Any, x: Any) -> Any:
    """Return 2^x of a float32, bit-identical to the vector variant."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        return emit_exp2(b, arguments[0])

    return types.float32(types.float32), codegen


@intrinsic
def fma_f32(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """Return x * y + z in float32 with one rounding."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        return emit_fma(b, *arguments)

    return types.float32(types.float32, types.float32, types.float32), codegen


@intrinsic
def load_f32(typing: Any, address: Any) -> Any:
    """Load the float32 at a byte address."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        return emit_load(b, F32, arguments[0])

    return types.float32(types.int64), codegen


@intrinsic
def load_i32(typing: Any, address: Any) -> Any:
    """Load the int32 at a byte address as int64."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        return b.sext(emit_load(b, I32, arguments[0]), I64)

    return types.int64(types.int64), codegen


@intrinsic
def load_i64(typing: Any, address: Any) -> Any:
    """Load the int64 at a byte address."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        return emit_load(b, I64, arguments[0])

    return types.int64(types.int64), codegen


@intrinsic
def store_f32(typing: Any, address: Any, value: Any) -> Any:
    """Store a float32 at a byte address."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        emit_store(b, arguments[1], arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen


@intrinsic
def store_i32(typing: Any, address: Any, value: Any) -> Any:
    """Store the lower 32 bits of an int64 at a byte address."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        b.store(b.trunc(arguments[1], I32), b.inttoptr(arguments[0], _POINTER), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def store_i64(typing: Any, address: Any, value: Any) -> Any:
    """Store an int64 at a byte address."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        b.store(arguments[1], b.inttoptr(arguments[0], _POINTER), align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def address_of(typing: Any, array: Any) -> Any:
    """Return the byte address of an array's first element as int64."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        structure = context.make_array(signature.args[0])(context, b, arguments[0])
        return b.ptrtoint(structure.data, I64)

    return types.int64(array), codegen


@intrinsic
def fetch_add(typing: Any, address: Any, amount: Any) -> Any:
    """Add to the int64 at a byte address and return its previous value (acquire-release)."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        pointer = b.inttoptr(arguments[0], I64.as_pointer())
        return b.atomic_rmw("add", pointer, arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def load_acquire(typing: Any, address: Any) -> Any:
    """Load the int64 at a byte address atomically, with acquire ordering."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        return b.load_atomic(b.inttoptr(arguments[0], I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def relax(typing: Any) -> Any:
    """Emit a spin-loop hint: `pause` on x86, `yield` on ARM, nothing elsewhere."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        if b.module.triple.startswith(("x86_64", "i686", "amd64")):
            kind = ir.FunctionType(ir.VoidType(), [])
            b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.x86.sse2.pause"), [])
        elif b.module.triple.startswith(("aarch64", "arm64")):
            kind = ir.FunctionType(ir.VoidType(), [I32])
            give_way = ir.Constant(I32, 1)
            b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.aarch64.hint"), [give_way])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def load_scalar(typing: Any, address: Any, kind: Any) -> Any:
    """Load one value as float32; its dtype, a KIND_* number, is known only at run time."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        address, kind = arguments
        result = cgutils.alloca_once(b, F32)
        with b.if_else(b.icmp_signed("==", kind, ir.Constant(I64, KIND_F32))) as (full, short):
            with full:
                b.store(emit_load(b, F32, address), result)
            with short:
                bits = emit_load(b, I16, address)
                half = b.fpext(b.bitcast(bits, ir.HalfType()), F32)
                brain = b.bitcast(b.shl(b.zext(bits, I32), ir.Constant(I32, 16)), F32)
                is_half = b.icmp_signed("==", kind, ir.Constant(I64, KIND_F16))
                b.store(b.select(is_half, half, brain), result)
        return b.load(result)

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def store_scalar(typing: Any, address: Any, value: Any, kind: Any) -> Any:
    """Store a float32 in a dtype, a KIND_* number, that is known only at run time.

    Values are rounded to nearest, ties to even; NaN stays NaN.
    """

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        address, value, kind = arguments
        with b.if_else(b.icmp_signed("==", kind, ir.Constant(I64, KIND_F32))) as (full, short):
            with full:
                emit_store(b, value, address)
            with short:
                half = b.bitcast(b.fptrunc(value, ir.HalfType()), I16)
                bits = b.bitcast(value, I32)
                odd = b.and_(b.lshr(bits, ir.Constant(I32, 16)), ir.Constant(I32, 1))
                rounded = b.add(bits, b.add(odd, ir.Constant(I32, 0x7FFF)))
                quiet = b.or_(bits, ir.Constant(I32, 0x400000))
                bits = b.select(b.fcmp_unordered("uno", value, value), quiet, rounded)
                brain = b.trunc(b.lshr(bits, ir.Constant(I32, 16)), I16)
                is_half = b.icmp_signed("==", kind, ir.Constant(I64, KIND_F16))
                b.store(b.select(is_half, half, brain), b.inttoptr(address, _POINTER), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64), codegen
