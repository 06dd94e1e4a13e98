"""The integer dot product of the linear kernels: 16 sums of 4 products of a stored and a signed byte.

Five forms that give the same integers. Which one is compiled is decided by the feature flags that Numba compiles for:
512-bit VNNI, 256-bit VNNI, AVX2, the dot product instruction of ARM, and plain vectors. A form first prepares the
weights of a quad, once for all tokens, and turns the running state into sums when a group of 32 inputs is complete.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Sequence
from typing import Any

import numba
from llvmlite import binding, ir
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features

from kvboost_edge.kernels.vectors import I64, LANES

__all__ = [
    "GROUP",
    "KIND_INT4",
    "KIND_INT4_ASYM",
    "KIND_INT8",
    "OFFSET",
    "V16I",
    "GroupDot",
    "dot_form",
    "emit_byte_halves",
    "emit_load_bytes",
    "emit_pair_sums",
    "emit_splat_int",
    "has_tile_registers",
    "int_constant",
]

KIND_INT8, KIND_INT4, KIND_INT4_ASYM = 3, 4, 5
GROUP = 32
# Stored weights are unsigned: the signed weight plus this. int4-asym: the code itself, its minimum is taken off later.
OFFSET = {KIND_INT8: 128, KIND_INT4: 8, KIND_INT4_ASYM: 0}

I8, I16, I32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)
V16I = ir.VectorType(I32, LANES)
_V64B = ir.VectorType(I8, 64)
_V4I, _V8I, _V16B, _V32B = ir.VectorType(I32, 4), ir.VectorType(I32, 8), ir.VectorType(I8, 16), ir.VectorType(I8, 32)
_V8S, _V16S, _V32S = ir.VectorType(I16, 8), ir.VectorType(I16, 16), ir.VectorType(I16, 32)
_POINTER = ir.PointerType()

Value = Any
Builder = Any


def _feature_text() -> str:
    """Feature flags Numba compiles for, "+one,-other": its own setting, or the host's; empty if LLVM cannot tell."""
    text = numba.config.CPU_FEATURES
    return str(get_host_cpu_features() if text is None else text)


@functools.cache
def _features() -> frozenset[str]:
    return frozenset(flag[1:] for flag in _feature_text().split(",") if flag.startswith("+"))


@functools.cache
def dot_form() -> str:
    """ "vnni512", "vnni256", "avx2", "neon" or "plain": the form that kernels of this process use."""
    features = _features()
    if {"avx512vnni", "avx512bw", "avx512f"} <= features:
        return "vnni512"
    if "avxvnni" in features or {"avx512vnni", "avx512vl"} <= features:
        return "vnni256"
    if "avx2" in features:
        return "avx2"
    if platform.machine().lower() in ("aarch64", "arm64") and _has_sdot():
        return "neon"
    return "plain"


@functools.cache
def has_tile_registers() -> bool:
    """Whether kernels of this process are compiled with Intel's AMX, beside 512-bit VNNI."""
    return dot_form() == "vnni512" and {"amx-tile", "amx-int8"} <= _features()


_PROBE = """
declare <4 x i32> @llvm.vector.partial.reduce.add.v4i32.v16i32(<4 x i32>, <16 x i32>)
define <4 x i32> @probe(<4 x i32> %sums, <16 x i8> %x, <16 x i8> %y) {
  %a = sext <16 x i8> %x to <16 x i32>
  %b = sext <16 x i8> %y to <16 x i32>
  %p = mul <16 x i32> %a, %b
  %r = call <4 x i32> @llvm.vector.partial.reduce.add.v4i32.v16i32(<4 x i32> %sums, <16 x i32> %p)
  ret <4 x i32> %r
}
"""


def _has_sdot() -> bool:
    """Whether the code generator may use ARM's dot product. The processor's name alone can allow it, so it is asked to
    compile sums that become `sdot` where that exists and something longer elsewhere."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_triple(binding.get_process_triple())
    name = numba.config.CPU_NAME or binding.get_host_cpu_name()
    machine = target.create_target_machine(cpu=name, features=_feature_text())
    return "sdot" in machine.emit_assembly(binding.parse_assembly(_PROBE))


def int_constant(value: int) -> ir.Constant:
    """An i64 constant."""
    return ir.Constant(I64, value)


def emit_load_bytes(b: Builder, address: Value) -> Value:
    """64 bytes as <16 x i32>."""
    return b.load(b.inttoptr(address, _POINTER), align=4, typ=V16I)


def emit_splat_int(b: Builder, scalar: Value) -> Value:
    """An i32 in every one of 16 lanes."""
    undefined = ir.Constant(V16I, ir.Undefined)
    return b.shuffle_vector(b.insert_element(undefined, scalar, I32(0)), undefined, ir.Constant(V16I, [0] * LANES))


def _parts(b: Builder, x: Value, count: int) -> list[Value]:
    """A vector cut into so many of equal length."""
    size = x.type.count // count
    undefined = ir.Constant(x.type, ir.Undefined)
    lanes = [ir.Constant(ir.VectorType(I32, size), list(range(at, at + size))) for at in range(0, x.type.count, size)]
    return [b.shuffle_vector(x, undefined, order) for order in lanes]


def _joined(b: Builder, parts: Sequence[Value]) -> Value:
    """The vectors one behind the other."""
    parts = list(parts)
    while len(parts) > 1:
        order = ir.Constant(ir.VectorType(I32, 2 * parts[0].type.count), list(range(2 * parts[0].type.count)))
        parts = [b.shuffle_vector(parts[i], parts[i + 1], order) for i in range(0, len(parts), 2)]
    return parts[0]


def _each(b: Builder, count: int, name: str, result: ir.Type, arguments: Sequence[tuple[Value, ir.Type]]) -> Value:
    """Call an intrinsic on `count` equal parts of the arguments, each part taken as the type given with it."""
    function = cgutils.get_or_insert_function(b.module, ir.FunctionType(result, [kind for _, kind in arguments]), name)
    cut = [[b.bitcast(part, kind) for part in _parts(b, value, count)] for value, kind in arguments]
    return _joined(b, [b.call(function, list(part)) for part in zip(*cut, strict=True)])


def emit_byte_halves(b: Builder, x: Value, *, signed: bool) -> tuple[Value, Value]:
    """Bytes 0 and 2 of each lane of <16 x i32>, then bytes 1 and 3, as <32 x i16>."""
    eight, pairs = ir.Constant(_V32S, [8] * 32), b.bitcast(x, _V32S)
    if signed:
        return b.ashr(b.shl(pairs, eight), eight), b.ashr(pairs, eight)
    return b.and_(pairs, ir.Constant(_V32S, [255] * 32)), b.lshr(pairs, eight)


def emit_pair_sums(b: Builder, x: Value) -> Value:
    """Sums of neighbouring numbers of <32 x i16>, <16 x i32>."""
    if b.module.triple.startswith(("aarch64", "arm64")):
        return _each(b, 4, "llvm.aarch64.neon.saddlp.v4i32.v8i16", _V4I, [(x, _V8S)])
    sixteen = ir.Constant(V16I, [16] * LANES)
    both = b.bitcast(x, V16I)
    return b.add(b.ashr(b.shl(both, sixteen), sixteen), b.ashr(both, sixteen))


class GroupDot:
    """How one group of 32 inputs is summed, for weights of a kind, in one of the forms.

    start(seed)            the state of a group; seed: <16 x i32>, minus OFFSET times the sum of the token's 32 codes
    prepare(quad)          4 stored bytes of each row, <16 x i32>, made ready for any number of tokens
    add(state, quad, x)    plus the products of a prepared quad with the token's 4 codes, <16 x i32> in every lane
    sums(state, seed)      the exact sums of (weight - OFFSET) * code, <16 x i32>
    """

    def __init__(self, b: Builder, kind: int, form: str | None = None) -> None:
        self._b, self._kind, self.form = b, kind, form or dot_form()
        # Which forms sum 4-bit codes of a whole group in 16 bits: 8 quads are at most 8 * 2 * 15 * 127 = 30,480.
        self._short = self.form in ("avx2", "plain") and kind != KIND_INT8
        # Which forms sum weights as they are stored, so that the seed is in the sums.
        self._seeded = self.form in ("vnni512", "vnni256") or self._short

    def start(self, seed: Value) -> Value:
        if self._short:
            return ir.Constant(_V32S, [0] * 32)
        return seed if self._seeded else ir.Constant(V16I, [0] * LANES)

    def prepare(self, quad: Value) -> Any:
        b = self._b
        if self._seeded:
            return quad if self.form != "plain" else emit_byte_halves(b, quad, signed=False)
        offset = OFFSET[self._kind]
        signed = b.bitcast(
            b.sub(b.bitcast(quad, _V64B), ir.Constant(_V64B, [offset - 256 * (offset > 127)] * 64)), V16I
        )
        if self.form == "plain":
            return emit_byte_halves(b, signed, signed=True)
        if self.form != "avx2":
            return signed
        # 255 * 127 twice would not fit vpmaddubsw's 16 bits: it multiplies the magnitude, and the token gets the sign.
        wide, zeros = b.bitcast(signed, _V64B), ir.Constant(_V64B, [0] * 64)
        magnitude = b.select(b.icmp_signed("<", wide, zeros), b.sub(zeros, wide), wide)
        return b.bitcast(magnitude, V16I), signed

    def add(self, state: Value, quad: Any, x: Value) -> Value:
        b = self._b
        if self.form == "vnni512":
            kind = ir.FunctionType(V16I, [V16I, _V64B, _V64B])
            function = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512.vpdpbusd.512")
            return b.call(function, [state, b.bitcast(quad, _V64B), b.bitcast(x, _V64B)])
        if self.form == "vnni256":
            name = "llvm.x86.avx512.vpdpbusd.256"
            return _each(b, 2, name, _V8I, [(state, _V8I), (quad, _V32B), (x, _V32B)])
        if self.form == "neon":
            return _each(b, 4, "llvm.aarch64.neon.sdot.v4i32.v16i8", _V4I, [(state, _V4I), (quad, _V16B), (x, _V16B)])
        if self.form == "avx2":
            return self._add_avx2(state, quad, x)
        return self._add_plain(state, quad, x)

    def _add_avx2(self, state: Value, quad: Any, x: Value) -> Value:
        """int8: sums of two products, at most 2 * 128 * 127, fit 16 bits."""
        b = self._b
        if self._short:
            products = _each(b, 2, "llvm.x86.avx2.pmadd.ub.sw", _V16S, [(quad, _V32B), (x, _V32B)])
            return b.add(state, products)
        magnitude, signed = quad
        turned = b.bitcast(_each(b, 2, "llvm.x86.avx2.psign.b", _V32B, [(x, _V32B), (signed, _V32B)]), V16I)
        products = _each(b, 2, "llvm.x86.avx2.pmadd.ub.sw", _V16S, [(magnitude, _V32B), (turned, _V32B)])
        return b.add(state, self._pairs(products))

    def _pairs(self, products: Value) -> Value:
        """Sums of neighbouring 16-bit numbers, <16 x i32>."""
        if self.form == "plain":
            return emit_pair_sums(self._b, products)
        ones = ir.Constant(_V32S, [1] * 32)
        return _each(self._b, 2, "llvm.x86.avx2.pmadd.wd", _V8I, [(products, _V16S), (ones, _V16S)])

    def _add_plain(self, state: Value, quad: Any, x: Value) -> Value:
        """Products and sums of two stay in 16 bits, as in the form for AVX2. On ARM a program's kernels are 17,400
        instructions so, with 32-bit products 68,400 and 4 times as long in the code generator."""
        b = self._b
        (low, high), (first, second) = quad, emit_byte_halves(b, x, signed=True)
        if self._short:
            return b.add(b.add(state, b.mul(low, first)), b.mul(high, second))
        return b.add(state, self._pairs(b.add(b.mul(low, first), b.mul(high, second))))

    def sums(self, state: Value, seed: Value) -> Value:
        if self._short:
            return self._b.add(self._pairs(state), seed)
        return state
