"""The integer dot product of the linear kernels: 16 sums of 4 products of a stored and a signed
byte.

Five forms that give the same integers. Which one is compiled is decided by the feature flags that
Numba compiles for: 512-bit VNNI, 256-bit VNNI, AVX2, the dot product instruction of ARM, and plain
vectors. A form first prepares the weights of a quad, once for all tokens, and turns the running
state into sums when a group of 32 inputs is complete.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from kvboost_edge.kernels.integers import (
    V16I,
    dot_form,
    emit_byte_halves,
    emit_each,
    emit_pair_sums,
)
from kvboost_edge.kernels.linear.weight_formats import FORMAT_OF, GROUP
from kvboost_edge.kernels.vectors import LANES

__all__ = ["GroupDot"]

I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
_V64B = ir.VectorType(I8, 64)
_V4I = ir.VectorType(I32, 4)
_V8I = ir.VectorType(I32, 8)
_V16B = ir.VectorType(I8, 16)
_V32B = ir.VectorType(I8, 32)
_V16S = ir.VectorType(I16, 16)
_V32S = ir.VectorType(I16, 32)
_SHORT_MOST = 32767

Value = Any
Builder = Any


class _Short(NamedTuple):
    """Sums in 16 bits, <32 x i16>, of so many quads; `wide`: those of quads before, <16 x i32>, or
    None.
    """

    wide: Value | None
    sums: Value
    quads: int


class GroupDot:
    """How one group of 32 inputs, or a part of it, is summed, for weights of a kind, in one of the
    forms.

    start(seed)            the state of a group; seed: <16 x i32>, minus the offset times the sum of
                           the token's codes
    prepare(quad)          4 stored bytes of each row, <16 x i32>, made ready for any number of
                           tokens
    add(state, quad, x)    plus the products of a prepared quad with the token's 4 codes, <16 x i32>
                           in every lane
    sums(state, seed)      the exact sums of (weight - offset) * code, <16 x i32>
    seeded                 whether weights are summed as they are stored, so that the seed belongs
                           to the sums
    """

    def __init__(self, b: Builder, kind: int, form: str | None = None) -> None:
        self._b = b
        self._format = FORMAT_OF[kind]
        self.form = form or dot_form()
        # Which forms sum codes of less than 8 bits in 16 bits, and of how many quads: all 8 of a
        # group of 4-bit codes, at most 8 * 2 * 15 * 127 = 30,480; 4 and 2 of 5- and 6-bit codes.
        self._short = self.form in ("avx2", "plain") and not self._format.is_wide
        self._quads = _SHORT_MOST // (2 * ((1 << self._format.bits) - 1) * 127)
        # Which forms sum weights as they are stored, so that the seed is in the sums. Codes of 6
        # bits are signed bytes.
        self.seeded = (
            self.form in ("vnni512", "vnni256")
            or self._short
            or (self.form, self._format.bits) == ("neon", 6)
        )

    def start(self, seed: Value) -> Any:
        if self._short:
            return _Short(None, ir.Constant(_V32S, [0] * 32), 0)
        return seed if self.seeded else ir.Constant(V16I, [0] * LANES)

    def prepare(self, quad: Value) -> Any:
        b = self._b
        if self.seeded:
            return quad if self.form != "plain" else emit_byte_halves(b, quad, signed=False)
        # Bytes of a table are signed, but where weights are summed as they are stored.
        offset = 0 if self._format.table else self._format.offset
        signed = b.bitcast(
            b.sub(b.bitcast(quad, _V64B), ir.Constant(_V64B, [offset - 256 * (offset > 127)] * 64)),
            V16I,
        )
        if self.form == "plain":
            return emit_byte_halves(b, signed, signed=True)
        if self.form != "avx2":
            return signed
        # 255 * 127 twice would not fit vpmaddubsw's 16 bits: it multiplies the magnitude, and the
        # token gets the sign.
        wide = b.bitcast(signed, _V64B)
        zeros = ir.Constant(_V64B, [0] * 64)
        magnitude = b.select(b.icmp_signed("<", wide, zeros), b.sub(zeros, wide), wide)
        return b.bitcast(magnitude, V16I), signed

    def add(self, state: Any, quad: Any, x: Value) -> Any:
        b = self._b
        if self._short:
            if state.quads == self._quads:
                state = _Short(self._widened(state), ir.Constant(_V32S, [0] * 32), 0)
            return state._replace(sums=self._add_short(state.sums, quad, x), quads=state.quads + 1)
        if self.form == "vnni512":
            kind = ir.FunctionType(V16I, [V16I, _V64B, _V64B])
            function = cgutils.get_or_insert_function(
                b.module, kind, "llvm.x86.avx512.vpdpbusd.512"
            )
            return b.call(function, [state, b.bitcast(quad, _V64B), b.bitcast(x, _V64B)])
        if self.form == "vnni256":
            name = "llvm.x86.avx512.vpdpbusd.256"
            return emit_each(b, 2, name, _V8I, [(state, _V8I), (quad, _V32B), (x, _V32B)])
        if self.form == "neon":
            name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
            return emit_each(b, 4, name, _V4I, [(state, _V4I), (quad, _V16B), (x, _V16B)])
        if self.form == "avx2":
            return self._add_avx2(state, quad, x)
        return self._add_plain(state, quad, x)

    def _add_short(self, sums: Value, quad: Any, x: Value) -> Value:
        """Sums of two products each, in 16 bits. On ARM a program's kernels are 17,400 instructions
        so, with 32-bit products 68,400 and 4 times as long in the code generator.
        """
        b = self._b
        if self.form == "avx2":
            return b.add(
                sums,
                emit_each(b, 2, "llvm.x86.avx2.pmadd.ub.sw", _V16S, [(quad, _V32B), (x, _V32B)]),
            )
        (low, high) = quad
        (first, second) = emit_byte_halves(b, x, signed=True)
        return b.add(b.add(sums, b.mul(low, first)), b.mul(high, second))

    def _widened(self, state: _Short) -> Value:
        pairs = self._pairs(state.sums)
        return pairs if state.wide is None else self._b.add(state.wide, pairs)

    # The same in steps, for sums in loops of the machine: a sum starts as `zero`, takes
    # `quads_at_once` quads by `add_to`, and is `widened` to <16 x i32>. The seed is to be added
    # where sums are `seeded`.

    @property
    def zero(self) -> ir.Constant:
        return ir.Constant(_V32S, [0] * 32) if self._short else ir.Constant(V16I, [0] * LANES)

    @property
    def quads_at_once(self) -> int:
        return self._quads if self._short else GROUP // 4

    def add_to(self, sums: Value, quad: Any, x: Value) -> Value:
        return self._add_short(sums, quad, x) if self._short else self.add(sums, quad, x)

    def widened(self, sums: Value) -> Value:
        return self._pairs(sums) if self._short else sums

    def _add_avx2(self, state: Value, quad: Any, x: Value) -> Value:
        """int8: sums of two products, at most 2 * 128 * 127, fit 16 bits."""
        b = self._b
        magnitude, signed = quad
        turned = b.bitcast(
            emit_each(b, 2, "llvm.x86.avx2.psign.b", _V32B, [(x, _V32B), (signed, _V32B)]), V16I
        )
        products = emit_each(
            b, 2, "llvm.x86.avx2.pmadd.ub.sw", _V16S, [(magnitude, _V32B), (turned, _V32B)]
        )
        return b.add(state, self._pairs(products))

    def _pairs(self, products: Value) -> Value:
        """Sums of neighbouring 16-bit numbers, <16 x i32>."""
        if self.form == "plain":
            return emit_pair_sums(self._b, products)
        ones = ir.Constant(_V32S, [1] * 32)
        return emit_each(
            self._b, 2, "llvm.x86.avx2.pmadd.wd", _V8I, [(products, _V16S), (ones, _V16S)]
        )

    def _add_plain(self, state: Value, quad: Any, x: Value) -> Value:
        """Products and sums of two stay in 16 bits, as in the form for AVX2."""
        b = self._b
        (low, high) = quad
        (first, second) = emit_byte_halves(b, x, signed=True)
        return b.add(state, self._pairs(b.add(b.mul(low, first), b.mul(high, second))))

    def sums(self, state: Any, seed: Value) -> Value:
        if self._short:
            return self._b.add(self._widened(state), seed)
        return state
