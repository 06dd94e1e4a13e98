"""Integer dot product of the linear kernels: 16 sums of 4 products of weights and codes.

The feature flags that Numba compiles for select the variant. All variants give equal integers:

    variant  instruction
    vnni512  vpdpbusd, 512 bits
    vnni256  vpdpbusd, 256 bits
    avx2     vpmaddubsw; int8 weights: with vpsignb and vpmaddwd
    i8mm     smmla for pairs of tokens, sdot for one token
    neon     sdot
    plain    16-bit multiply-adds of plain vectors
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from llvmlite import ir

from kvboost_edge.kernels.integers import (
    V16I,
    dot_form,
    emit_byte_halves,
    emit_each,
    emit_joined,
    emit_pair_sums,
)
from kvboost_edge.kernels.lazy import cgutils
from kvboost_edge.kernels.linear.weight_formats import (
    FORMAT_OF,
    GROUP,
    TABLE_OFFSET,
    WeightFormat,
)
from kvboost_edge.kernels.vectors import LANES

__all__ = ["GroupDot", "PairDot", "scales_codes"]

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
_V2L = ir.VectorType(ir.IntType(64), 2)
_SHORT_MOST = 32767

Value = Any
Builder = Any


def scales_codes(weight_format: WeightFormat, form: str) -> bool:
    """Return whether a variant multiplies codes by their scales before the dot product.

    Variants with sums in 16 bits would have to widen them more often. They multiply the sums of
    halves of groups instead, which gives the same integers.
    """
    return weight_format.scaled_codes and form not in ("avx2", "plain")


class _Short(NamedTuple):
    """Sums in 16 bits that are widened before they can overflow.

    Attributes:
        widened: sums of the quads widened so far, <16 x i32>, or None.
        sums: sums of the latest quads, <32 x i16>.
        quads: number of quads in `sums`.
    """

    widened: Value | None
    sums: Value
    quads: int


class GroupDot:
    """Emitter for the dot product of one group of 32 inputs, or of a part of it.

    Call `start`, then `prepare` and `add` for each quad, then `sums`. To keep sums in a loop of the
    generated code, begin with `zero`, call `add_to` for up to `quads_at_once` quads, and then
    `widened`. In that case the caller adds the seed if `seeded`.

    Args:
        b: the builder.
        kind: number of the weight format.
        form: dot-product variant; None selects that of this process.

    Attributes:
        form: the variant, where "neon" also stands for "i8mm".
        seeded: True if weights are summed as stored, in which case the seed belongs to the sums.
    """

    def __init__(self, b: Builder, kind: int, form: str | None = None) -> None:
        self._b = b
        self._format = FORMAT_OF[kind]
        form = form or dot_form()
        self.form = "neon" if form == "i8mm" else form  # `PairDot` takes pairs of tokens
        # Variants "avx2" and "plain" sum codes of less than 8 bits in 16 bits. All 8 quads of a
        # group of codes up to 4 bits fit, because their sum is at most 8 * 2 * 15 * 127 = 30,480.
        # With 5-bit codes and the values of nvfp4 4 quads fit, with 6-bit codes 2.
        self._short = self.form in ("avx2", "plain") and not self._format.uses_whole_byte
        is_scaled = scales_codes(self._format, self.form)
        self._offset = TABLE_OFFSET if is_scaled and self._format.offset else self._format.offset
        self._quads = _SHORT_MOST // (2 * self._format.largest_operand * 127)
        # These variants sum weights as stored. `sdot` can take codes of less than 8 bits because
        # they are valid signed bytes. With 4-bit codes, subtracting the offset is as fast.
        self.seeded = (
            self.form in ("vnni512", "vnni256")
            or self._short
            or (
                self.form == "neon"
                and self._format.bits in (1, 2, 3, 5, 6)
                and self._offset < TABLE_OFFSET
            )
        )

    def start(self, seed: Value) -> Any:
        """Return the initial state for the sums of a group.

        Args:
            seed: <16 x i32>, -(offset * sum of the token's codes).
        """
        if self._short:
            return _Short(None, ir.Constant(_V32S, [0] * 32), 0)
        return seed if self.seeded else ir.Constant(V16I, [0] * LANES)

    def prepare(self, quad: Value) -> Any:
        """Prepare 4 stored bytes of each row, <16 x i32>, for use with any number of tokens."""
        b = self._b
        if self.seeded:
            return quad if self.form != "plain" else emit_byte_halves(b, quad, signed=False)
        # Entries of tables and grids are signed bytes, except in seeded variants.
        offset = 0 if self._format.is_looked_up else self._offset
        signed = b.bitcast(
            b.sub(b.bitcast(quad, _V64B), ir.Constant(_V64B, [offset - 256 * (offset > 127)] * 64)),
            V16I,
        )
        if self.form == "plain":
            return emit_byte_halves(b, signed, signed=True)
        if self.form != "avx2":
            return signed
        # Two products of 255 * 127 do not fit in the 16 bits of `vpmaddubsw`. It therefore
        # multiplies magnitudes, and `vpsignb` moves the sign to the token's codes.
        weights = b.bitcast(signed, _V64B)
        zeros = ir.Constant(_V64B, [0] * 64)
        negative = b.icmp_signed("<", weights, zeros)
        magnitude = b.select(negative, b.sub(zeros, weights), weights)
        return b.bitcast(magnitude, V16I), signed

    def add(self, state: Any, quad: Any, x: Value) -> Any:
        """Add the products of a prepared quad with a token's 4 codes (<16 x i32>, equal lanes)."""
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
        """Add products in 16 bits, in pairs."""
        # On ARM without `sdot`, the kernels of a program have 17,400 instructions this way. With
        # 32-bit products they would have 68,400, and code generation would take 4 times as long.
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
        return pairs if state.widened is None else self._b.add(state.widened, pairs)

    # The following methods keep sums in a loop of the generated code.

    @property
    def zero(self) -> ir.Constant:
        """Initial value of the sums for `add_to`."""
        return ir.Constant(_V32S, [0] * 32) if self._short else ir.Constant(V16I, [0] * LANES)

    @property
    def quads_at_once(self) -> int:
        """Number of quads that `add_to` may add before `widened` must be called."""
        return self._quads if self._short else GROUP // 4

    def add_to(self, sums: Value, quad: Any, x: Value) -> Value:
        """Add a prepared quad's products to sums that began as `zero`."""
        return self._add_short(sums, quad, x) if self._short else self.add(sums, quad, x)

    def widened(self, sums: Value) -> Value:
        """Convert the sums of `add_to` to <16 x i32>."""
        return self._pairs(sums) if self._short else sums

    def _add_avx2(self, state: Value, quad: Any, x: Value) -> Value:
        """Add the products of int8 weights in pairs, at most 2 * 128 * 127, which fits 16 bits."""
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
        """Add adjacent pairs of 16-bit integers, giving <16 x i32>."""
        if self.form == "plain":
            return emit_pair_sums(self._b, products)
        ones = ir.Constant(_V32S, [1] * 32)
        return emit_each(
            self._b, 2, "llvm.x86.avx2.pmadd.wd", _V8I, [(products, _V16S), (ones, _V16S)]
        )

    def _add_plain(self, state: Value, quad: Any, x: Value) -> Value:
        """Add products with plain vectors, in pairs that fit 16 bits as with AVX2."""
        b = self._b
        (low, high) = quad
        (first, second) = emit_byte_halves(b, x, signed=True)
        return b.add(state, self._pairs(b.add(b.mul(low, first), b.mul(high, second))))

    def sums(self, state: Any, seed: Value) -> Value:
        """Return the exact sums of (weight - offset) * code, <16 x i32>."""
        if self._short:
            return self._b.add(self._widened(state), seed)
        return state


class PairDot:
    """Emitter for the dot products of one group, or of a part of it, with two tokens ("i8mm").

    `smmla` multiplies 2 rows x 8 bytes by 8 bytes x 2 tokens, which is twice the products of
    `sdot`. Eight vectors of 4 sums hold 16 rows x 2 tokens. In each, the lanes are row 0 with both
    tokens, then row 1 with both tokens.

    Call `start`, then `prepare` and `add` for each pair of quads, then `sums`.

    Args:
        b: the builder.
        kind: number of the weight format.
    """

    def __init__(self, b: Builder, kind: int) -> None:
        self._b = b
        self._quads = GroupDot(b, kind, "neon")

    def start(self) -> list[Value]:
        """Return the initial state for the sums of a group."""
        return [ir.Constant(_V4I, [0] * 4)] * (LANES // 2)

    def prepare(self, first: Value, second: Value) -> list[Value]:
        """Prepare two consecutive quads of 16 rows for use with any number of tokens."""
        b = self._b
        quads = [self._quads.prepare(quad) for quad in (first, second)]
        return [
            b.bitcast(
                b.shuffle_vector(
                    *quads, ir.Constant(_V4I, [row, LANES + row, row + 1, LANES + row + 1])
                ),
                _V16B,
            )
            for row in range(0, LANES, 2)
        ]

    def tokens(self, first: Value, second: Value) -> Value:
        """Return the operand for 8 codes of each of two tokens, i64."""
        b = self._b
        both = ir.Constant(_V2L, ir.Undefined)
        for lane, codes in enumerate((first, second)):
            both = b.insert_element(both, codes, I32(lane))
        return b.bitcast(both, _V16B)

    def add(self, state: Sequence[Value], quads: Sequence[Value], tokens: Value) -> list[Value]:
        """Add the products of prepared quads with the codes of two tokens."""
        b = self._b
        function = cgutils.get_or_insert_function(
            b.module,
            ir.FunctionType(_V4I, [_V4I, _V16B, _V16B]),
            "llvm.aarch64.neon.smmla.v4i32.v16i8",
        )
        return [
            b.call(function, [sums, rows, tokens]) for sums, rows in zip(state, quads, strict=True)
        ]

    def sums(self, state: Sequence[Value], seeds: Sequence[Value]) -> list[Value]:
        """Return the exact sums of (weight - offset) * code for each token, <16 x i32>.

        Args:
            state: the state after all quads.
            seeds: <16 x i32> for each token, see `GroupDot.start`.
        """
        b = self._b
        result = []
        for token, seed in enumerate(seeds):
            parts = [
                b.shuffle_vector(
                    state[at], state[at + 1], ir.Constant(_V4I, [token + 2 * i for i in range(4)])
                )
                for at in range(0, len(state), 2)
            ]
            found = emit_joined(b, parts)
            result.append(b.add(found, seed) if self._quads.seeded else found)
        return result
