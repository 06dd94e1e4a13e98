"""Products in wide arithmetic: int8 weights and activations with one scale per 128 inputs.

Weights of any packed integer format are unpacked exactly and quantized again to 8 bits with one
scale per row and wide group of WIDE inputs. The integer sums therefore run over WIDE inputs instead
of 32, and the float epilogue is a quarter as long. `reference.wide` is the NumPy equivalent. All
variants, AMX included, give the same integers and the same bits.

A panel has LINES lines of codes: LINES tokens, or half as many tokens in two planes with fine codes
(all first planes, then all second planes). It consists of one block of GROUP_BYTES per wide group:

    section  type and shape        content
    codes    int8 [2][LINES][64]   64 inputs of each line; groups of up to 64 inputs use the first
    terms    int32 [LINES]         -128 * sum of the line's codes
    scales   float32 [LINES]       scale of each token in this group

A slab is the part of a pair of weight tiles that is multiplied at once. Its codes are
[2 tiles][inputs / 4][16 rows][4], and its scales float32 [2 tiles][wide groups][16].
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from llvmlite import ir

from kvboost_edge.kernels.entry import KernelEntry, caller
from kvboost_edge.kernels.integers import (
    V16I,
    dot_form,
    emit_load_bytes,
    emit_loop,
    emit_splat_int,
    has_tile_registers,
    int_constant,
)
from kvboost_edge.kernels.jit import intrinsic, named_kernel
from kvboost_edge.kernels.lazy import types
from kvboost_edge.kernels.linear.amx import emit_on_tile, emit_tile_call, tile_configuration
from kvboost_edge.kernels.linear.grids import GridPairs
from kvboost_edge.kernels.linear.int_tiles import (
    LoadPair,
    emit_place,
    emit_slots,
    splat_f32_at,
    splat_i32_at,
)
from kvboost_edge.kernels.linear.panel import FINE_BASE
from kvboost_edge.kernels.linear.simd_loads import (
    emit_load_pair,
    emit_scales,
    emit_table,
    emit_table_pair,
    emit_values,
)
from kvboost_edge.kernels.linear.weight_dot import GroupDot
from kvboost_edge.kernels.linear.weight_formats import (
    FORMAT_OF,
    FORMATS,
    GROUP,
    INT_KINDS,
)
from kvboost_edge.kernels.signature import INT64
from kvboost_edge.kernels.vectors import (
    LANES,
    V16,
    emit_fma,
    emit_load,
    emit_max,
    emit_scratch,
    emit_shuffle,
    emit_store,
)

__all__ = [
    "GROUP_BYTES",
    "LINES",
    "SLAB_BYTES",
    "SLAB_GROUPS",
    "SLAB_SCALES",
    "WIDE",
    "multiply_slab",
    "quantize_wide",
    "requantize",
    "requantize_entries",
    "wide_panel_bytes",
]

WIDE = 128
"""Inputs that share a scale."""
CELL = 64
"""Inputs of one tile register."""
LINES = 32
"""Lines of codes in a panel."""
SLAB_GROUPS = 4
"""Wide groups in a slab. The codes of a slab, 16 KB, stay in the L1 cache."""
_LINE = 64
_CELL_BYTES = LINES * CELL
_CODES = LINES * WIDE
_TERMS_AT = _CODES
_SCALES_AT = _CODES + 4 * LINES
GROUP_BYTES = _CODES + 8 * LINES
_TILE_BYTES = SLAB_GROUPS * WIDE * LANES
_TILE_SCALES = SLAB_GROUPS * _LINE
SLAB_BYTES = 2 * _TILE_BYTES
SLAB_SCALES = 2 * _TILE_SCALES
_GROUPS = WIDE // GROUP
_QUADS = CELL // 4  # quads per cell
_TINY = 1e-30
_ROUNDER = 12582912.0  # 1.5 * 2^23, which rounds to the nearest integer, ties to even
_ROUNDER_BITS = 0x4B400000
_LEVELS = 127.0
_INT8 = FORMATS["int8"].kind
# Variant -> tiles and lines multiplied at once, so that the sums fit in registers.
_SHAPES = {
    "vnni512": (2, 8),
    "vnni256": (1, 4),
    "avx2": (1, 2),
    "i8mm": (1, 4),
    "neon": (1, 4),
    "plain": (1, 2),
}

Value = Any
Builder = Any
_I8 = ir.IntType(8)
_I32 = ir.IntType(32)
_V64B = ir.VectorType(_I8, 64)
_V16B = ir.VectorType(_I8, LANES)
_POINTER = ir.PointerType()


def wide_panel_bytes(tokens: int, inputs: int, *, fine: bool) -> int:
    """Return the size of the panels of some tokens with `inputs` inputs."""
    panels = -(-tokens // (LINES // 2 if fine else LINES))
    return panels * -(-inputs // WIDE) * GROUP_BYTES


def _splat(value: float) -> ir.Constant:
    return ir.Constant(V16, [value] * LANES)


def _ints(value: int) -> ir.Constant:
    return ir.Constant(V16I, [value - 2**32 * (value >= 2**31)] * LANES)


def _absolute(b: Builder, x: Value) -> Value:
    return b.bitcast(b.and_(b.bitcast(x, V16I), _ints(0x7FFFFFFF)), V16)


def _byte(b: Builder, quads: Value, index: int) -> Value:
    """Return byte `index` of each lane as a signed integer."""
    left = b.shl(quads, _ints(24 - 8 * index)) if index < 3 else quads
    return b.ashr(left, _ints(24))


class _Weights(NamedTuple):
    """Addresses of a tile's codes, scales and minima; see weight_formats.py."""

    codes: Value
    scales: Value
    minima: Value


class _Requantizer:
    """Emitter that quantizes up to WIDE inputs of a weight tile again."""

    def __init__(self, kind: int) -> None:
        self.format = FORMAT_OF[kind]
        self.parts = self.format.parts
        self.quads = GROUP // 4 // self.parts

    def emit(
        self,
        b: Builder,
        tile: _Weights,
        first: Value,
        count: Value,
        out: Value,
        scales: Value,
        flip: Value,
    ) -> None:
        """Emit the quantization of groups [first, first + count).

        Args:
            b: the builder.
            tile: the tile.
            first: first group.
            count: number of groups, at most WIDE / 32.
            out: address of the codes, written; aligned to 64.
            scales: address of 16 float32, written.
            flip: i64, 0 for signed codes, or 0x80808080 to add 128 to each code.
        """
        factors = emit_scratch(b, _GROUPS * self.parts * 2 * _LINE)
        (top,) = emit_slots(b, _splat(0.0), 1)
        table = None
        if self.format.table:
            table = emit_table(b, tile.minima, signed=True)
        elif self.format.values:
            table = emit_values(self.format, signed=True)
        with emit_loop(b, count) as group:
            number = b.add(first, group)
            for part in range(self.parts):
                here, low_at = self._places(b, factors, group, part)
                scale, minus = self._factors(b, tile, number, part)
                emit_store(b, scale, here)
                emit_store(b, minus, low_at)
                at = emit_place(b, tile.codes, number, self.format.group_bytes)
                at = b.add(at, int_constant(part * self.format.group_bytes // self.parts))
                place = self._lines(b, out, group, part)
                for extreme in self._unpack(b, at, table, place):
                    value = _absolute(b, emit_fma(b, extreme, scale, minus))
                    b.store(emit_max(b, value, b.load(top)), top)
        largest = b.load(top)
        empty = b.fcmp_ordered("<", largest, _splat(_TINY))
        zero = _splat(0.0)
        emit_store(b, b.select(empty, zero, b.fdiv(largest, _splat(_LEVELS))), scales)
        inverse = b.select(empty, zero, b.fdiv(_splat(_LEVELS), largest))
        flips = emit_splat_int(b, b.trunc(flip, _I32))
        with emit_loop(b, count) as group:
            for part in range(self.parts):
                here, low_at = self._places(b, factors, group, part)
                scale = b.fmul(emit_load(b, V16, here), inverse)
                minus = b.fmul(emit_load(b, V16, low_at), inverse)
                place = self._lines(b, out, group, part)
                for quad in range(self.quads):
                    line = b.add(place, int_constant(_LINE * quad))
                    found = self._quantized(b, emit_load_bytes(b, line), scale, minus)
                    b.store(b.xor(found, flips), b.inttoptr(line, _POINTER), align=_LINE)

    def _places(self, b: Builder, factors: Value, group: Value, part: int) -> tuple[Value, Value]:
        """Return the scratch addresses of a part's scales and of its negated minima."""
        here = emit_place(b, factors, group, 2 * _LINE * self.parts, 2 * _LINE * part)
        return here, b.add(here, int_constant(_LINE))

    def _lines(self, b: Builder, out: Value, group: Value, part: int) -> Value:
        return emit_place(b, out, group, GROUP // 4 * _LINE, part * self.quads * _LINE)

    def _factors(self, b: Builder, tile: _Weights, number: Value, part: int) -> tuple[Value, Value]:
        """Return the scales of a part and its minima times -1."""
        index = b.add(b.mul(number, int_constant(self.parts)), int_constant(part))
        scales = tile.codes if self.format.scales_in_codes else tile.scales
        scale, low = emit_scales(b, self.format, scales, tile.minima, index)
        if low is None:
            return scale, _splat(0.0)
        return scale, b.fneg(low)

    def _unpack(
        self, b: Builder, at: Value, table: Value | None, place: Value
    ) -> tuple[Value, Value]:
        """Store a part's codes as signed bytes, and return the lowest and highest of each row."""
        least = most = None
        load = self._pairs(b, at, table)
        for pair in range(self.quads // 2):
            for half, quad in enumerate(load(pair)):
                codes = b.bitcast(quad, _V64B)
                if not (self.format.is_looked_up or self.format.minima):
                    offset = self.format.offset
                    wrapped = offset - 256 * (offset > 127)
                    codes = b.sub(codes, ir.Constant(_V64B, [wrapped] * 64))
                line = b.add(place, int_constant(_LINE * (2 * pair + half)))
                b.store(codes, b.inttoptr(line, _POINTER), align=_LINE)
                if least is None:
                    least = most = codes
                else:
                    least = b.select(b.icmp_signed("<", codes, least), codes, least)
                    most = b.select(b.icmp_signed(">", codes, most), codes, most)
        return self._of_row(b, least, "<"), self._of_row(b, most, ">")

    def _pairs(self, b: Builder, at: Value, table: Value | None) -> LoadPair:
        if self.format.grid is not None:
            return GridPairs(b, self.format, dot_form(), [at], signed=True).pair
        if table is not None:
            return functools.partial(emit_table_pair, b, dot_form(), table, at)
        return functools.partial(emit_load_pair, b, self.format, at)

    def _of_row(self, b: Builder, codes: Value, sign: str) -> Value:
        """Return the extreme of each lane's four bytes as float32."""
        quads = b.bitcast(codes, V16I)
        found = _byte(b, quads, 0)
        for index in range(1, 4):
            other = _byte(b, quads, index)
            found = b.select(b.icmp_signed(sign, other, found), other, found)
        return b.sitofp(found, V16)

    def _quantized(self, b: Builder, quads: Value, scale: Value, minus: Value) -> Value:
        """Return rint(code * scale + minus) of four bytes of each lane, as bytes."""
        found = None
        for index in range(4):
            code = b.sitofp(_byte(b, quads, index), V16)
            value = emit_fma(b, code, scale, minus)
            shifted = b.bitcast(b.fadd(value, _splat(_ROUNDER)), V16I)
            if index < 3:
                shifted = b.and_(shifted, _ints(255))
            moved = b.shl(shifted, _ints(8 * index)) if index else shifted
            found = moved if found is None else b.or_(found, moved)
        return found


def _requantize_tile(kind: int) -> Any:
    emitter = _Requantizer(kind)

    @intrinsic
    def quantize(
        typing: Any,
        codes: Any,
        scales: Any,
        minima: Any,
        first: Any,
        count: Any,
        out: Any,
        factors: Any,
        flip: Any,
    ) -> Any:
        """Quantize up to WIDE inputs of a tile again; see `_Requantizer.emit`."""

        def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
            emitter.emit(b, _Weights(*arguments[:3]), *arguments[3:])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return quantize


def _requantize_kernel(kind: int) -> Any:
    quantize = _requantize_tile(kind)

    @named_kernel(f"requantize_{kind}")
    def run(
        codes: int,
        scales: int,
        minima: int,
        first: int,
        count: int,
        out: int,
        factors: int,
        flip: int,
    ) -> None:
        done = 0
        while done < count:
            here = min(_GROUPS, count - done)
            lines = out + done * GROUP * LANES
            at = factors + done // _GROUPS * _LINE
            quantize(codes, scales, minima, first + done, here, lines, at, flip)
            done += here

    return run


requantize_entries = {
    kind: KernelEntry(_requantize_kernel(kind), *[INT64] * 8) for kind in INT_KINDS
}
"""Weight format number -> kernel that quantizes groups of a tile again."""
requantize = caller(*[INT64] * 8)
"""Call an entry of `requantize_entries`.

The arguments are (codes, scales, minima, first group, number of groups, codes to write, scales to
write, flip). The first three are addresses of a tile. See `_Requantizer.emit`.
"""


class _Slab(NamedTuple):
    """Operands of `multiply_slab`; see there."""

    weights: Value
    scales: Value
    panel: Value
    panel_step: Value
    panels: Value
    groups: Value
    cells: Value
    sums: Value
    sums_step: Value


class _Product:
    """Emitter for the product of a slab with panels.

    Args:
        b: the builder.
        slab: the operands.
        fine: True if codes have two planes.
    """

    def __init__(self, b: Builder, slab: _Slab, *, fine: bool) -> None:
        self.b = b
        self.slab = slab
        self.planes = 2 if fine else 1
        self.tokens = LINES // self.planes

    def _cells_in(self, group: Value) -> Value:
        """Return the number of cells of a wide group, 1 or 2."""
        b = self.b
        left = b.sub(self.slab.cells, b.mul(group, int_constant(WIDE // CELL)))
        most = int_constant(WIDE // CELL)
        return b.select(b.icmp_signed("<", left, most), left, most)

    def _add(
        self, sums: Sequence[Value], here: Value, token: Value, tile: int, group: Value, at: Value
    ) -> None:
        """Add the integer sums of a token's planes to the float sums at an address."""
        b = self.b
        total = sums[0]
        if len(sums) > 1:
            shifted = b.shl(total, _ints((FINE_BASE + 1).bit_length() - 1))
            total = b.add(b.sub(shifted, total), sums[1])
        scale = splat_f32_at(b, emit_place(b, here, token, 4, _SCALES_AT))
        factors = emit_place(b, self.slab.scales, group, _LINE, tile * _TILE_SCALES)
        product = b.fmul(b.sitofp(total, V16), scale)
        emit_store(b, emit_fma(b, product, emit_load(b, V16, factors), emit_load(b, V16, at)), at)

    def emit_dots(self) -> None:
        """Emit the product with the dot-product variant of this process."""
        b = self.b
        slab = self.slab
        tiles, lines = _SHAPES[dot_form()]
        tokens = lines // self.planes
        with emit_loop(b, slab.panels) as number:
            panel = b.add(slab.panel, b.mul(number, slab.panel_step))
            first = b.mul(number, int_constant(self.tokens))
            with emit_loop(b, int_constant(self.tokens // tokens)) as part:
                start = b.mul(part, int_constant(tokens))
                sums = b.mul(b.add(first, start), slab.sums_step)
                sums = b.add(slab.sums, sums)
                for tile in range(0, 2, tiles):
                    with emit_loop(b, slab.groups) as group:
                        self._emit_group(
                            panel, start, tokens, range(tile, tile + tiles), group, sums
                        )

    def _emit_group(
        self, panel: Value, start: Value, tokens: int, tiles: range, group: Value, sums: Value
    ) -> None:
        """Emit the product of a wide group of some tiles with `tokens` tokens from `start` on."""
        b = self.b
        dot = GroupDot(b, _INT8)
        here = emit_place(b, panel, group, GROUP_BYTES)
        lines = emit_place(b, here, start, CELL)
        weights = emit_place(b, self.slab.weights, group, WIDE * LANES)
        slots = {
            (tile, plane, token): emit_slots(b, dot.zero, 1)[0]
            for tile in tiles
            for plane in range(self.planes)
            for token in range(tokens)
        }
        with emit_loop(b, self._cells_in(group)) as cell:
            codes = emit_place(b, lines, cell, _CELL_BYTES)
            quads = emit_place(b, weights, cell, CELL * LANES)
            with emit_loop(b, int_constant(_QUADS)) as quad:
                x_at = emit_place(b, codes, quad, 4)
                at = emit_place(b, quads, quad, _LINE)
                loaded = {
                    tile: dot.prepare(
                        emit_load_bytes(b, b.add(at, int_constant(tile * _TILE_BYTES)))
                    )
                    for tile in tiles
                }
                for plane in range(self.planes):
                    for token in range(tokens):
                        line = plane * self.tokens + token
                        x = splat_i32_at(b, b.add(x_at, int_constant(CELL * line)))
                        for tile in tiles:
                            slot = slots[tile, plane, token]
                            b.store(dot.add_to(b.load(slot), loaded[tile], x), slot)
        for token in range(tokens):
            number = b.add(start, int_constant(token))
            for tile in tiles:
                found = []
                for plane in range(self.planes):
                    total = dot.widened(b.load(slots[tile, plane, token]))
                    if dot.seeded:
                        line = b.add(number, int_constant(plane * self.tokens))
                        total = b.add(
                            total, splat_i32_at(b, emit_place(b, here, line, 4, _TERMS_AT))
                        )
                    found.append(total)
                place = b.add(sums, b.mul(self.slab.sums_step, int_constant(token)))
                at = b.add(place, int_constant(tile * _LINE))
                self._add(found, here, number, tile, group, at)

    def emit_tiles(self) -> None:
        """Emit the product with AMX, for signed weights.

        While the tiles of a wide group are multiplied, the sums of the previous one are added.
        """
        b = self.b
        slab = self.slab
        one = int_constant(1)
        size = 2 * LINES * _LINE
        scratch = emit_scratch(b, 2 * size + _LINE)
        config = b.inttoptr(b.add(scratch, int_constant(2 * size)), _POINTER)
        b.store(tile_configuration(_QUADS), config, align=_LINE)
        emit_tile_call(b, "ldtilecfg", config)
        total = b.mul(slab.panels, slab.groups)
        with emit_loop(b, total) as index:
            self._multiply(index)
            with b.if_then(b.icmp_signed(">", index, int_constant(0))):
                before = b.sub(index, one)
                self._add_tiles(before, emit_place(b, scratch, b.and_(before, one), size))
            out = emit_place(b, scratch, b.and_(index, one), size)
            for tile in range(2):
                for half in range(2):
                    at = b.add(out, int_constant((tile * LINES + half * LANES) * _LINE))
                    emit_on_tile(b, "tilestored64", 2 * tile + half, at, _LINE)
        last = b.sub(total, one)
        self._add_tiles(last, emit_place(b, scratch, b.and_(last, one), size))
        # Release the tiles, so the OS need not save them at a context switch.
        emit_tile_call(b, "tilerelease")

    def _block(self, index: Value) -> tuple[Value, Value, Value]:
        """Return the panel, the wide group and the block's address of an iteration."""
        b = self.b
        number = b.udiv(index, self.slab.groups)
        group = b.urem(index, self.slab.groups)
        panel = b.add(self.slab.panel, b.mul(number, self.slab.panel_step))
        return number, group, emit_place(b, panel, group, GROUP_BYTES)

    def _multiply(self, index: Value) -> None:
        """Multiply the tiles of a wide group, which leaves sums in registers 0 to 3."""
        b = self.b
        _, group, here = self._block(index)
        weights = emit_place(b, self.slab.weights, group, WIDE * LANES)
        for register in range(4):
            emit_tile_call(b, "tilezero", register)
        with emit_loop(b, self._cells_in(group)) as cell:
            codes = emit_place(b, here, cell, _CELL_BYTES)
            quads = emit_place(b, weights, cell, CELL * LANES)
            for half in range(2):
                at = b.add(codes, int_constant(half * LANES * CELL))
                emit_on_tile(b, "tileloadd64", 4 + half, at, CELL)
            for tile in range(2):
                at = b.add(quads, int_constant(tile * _TILE_BYTES))
                emit_on_tile(b, "tileloadd64", 6 + tile, at, _LINE)
            for tile in range(2):
                for half in range(2):
                    emit_tile_call(b, "tdpbssd", 2 * tile + half, 4 + half, 6 + tile)

    def _add_tiles(self, index: Value, scratch: Value) -> None:
        """Add the sums of an iteration, stored at `scratch`, to the float sums."""
        b = self.b
        slab = self.slab
        number, group, here = self._block(index)
        first = b.mul(number, int_constant(self.tokens))
        sums = b.add(slab.sums, b.mul(first, slab.sums_step))
        each = 4
        with emit_loop(b, int_constant(self.tokens // each)) as part:
            for offset in range(each):
                token = b.add(b.mul(part, int_constant(each)), int_constant(offset))
                at = b.add(sums, b.mul(token, slab.sums_step))
                line = emit_place(b, scratch, token, _LINE)
                for tile in range(2):
                    found = [
                        emit_load_bytes(
                            b,
                            b.add(line, int_constant((tile * LINES + plane * self.tokens) * _LINE)),
                        )
                        for plane in range(self.planes)
                    ]
                    place = b.add(at, int_constant(tile * _LINE))
                    self._add(found, here, token, tile, group, place)


@intrinsic
def multiply_slab(
    typing: Any,
    weights: Any,
    scales: Any,
    panel: Any,
    panel_step: Any,
    panels: Any,
    groups: Any,
    cells: Any,
    sums: Any,
    sums_step: Any,
    fine: Any,
    tiles: Any,
) -> Any:
    """Add the product of a slab with panels to float sums.

    Args:
        weights: address of the codes: signed with AMX, else plus 128.
        scales: address of their scales.
        panel: address of the slab's first wide group in the first panel.
        panel_step: bytes from one panel to the next.
        panels: number of panels.
        groups: number of wide groups in the slab.
        cells: number of cells of 64 inputs in the slab.
        sums: address of the sums, float32 [tokens of all panels][2 tiles][16].
        sums_step: bytes from one token's sums to the next.
        fine: nonzero if codes have two planes.
        tiles: nonzero to use AMX.
    """

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        slab = _Slab(*arguments[:9])
        fine, tiles = (b.icmp_signed("!=", one, int_constant(0)) for one in arguments[9:])
        with b.if_else(fine) as (two, one):
            for branch, is_fine in ((two, True), (one, False)):
                with branch:
                    product = _Product(b, slab, fine=is_fine)
                    if not has_tile_registers():
                        product.emit_dots()
                        continue
                    with b.if_else(tiles) as (amx, dots):
                        with amx:
                            product.emit_tiles()
                        with dots:
                            product.emit_dots()
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11), codegen


def _fold(b: Builder, vector: Value, combine: Any) -> Value:
    """Combine all 16 lanes, in every lane of the result."""
    for half in (8, 4, 2, 1):
        order = [(lane + half) % LANES for lane in range(LANES)]
        vector = combine(vector, emit_shuffle(b, vector, vector, order))
    return vector


def _larger_bits(b: Builder, x: Value, y: Value) -> Value:
    """Return the larger of non-negative floats given as bits; NaN counts as the largest."""
    return b.select(b.icmp_unsigned(">", x, y), x, y)


def _emit_quantize(
    b: Builder, x: Value, vectors: Value, here: Value, token: Value, *, fine: bool
) -> None:
    """Quantize one token's wide group; see `quantize_wide`."""
    planes = 2 if fine else 1
    levels = _LEVELS * FINE_BASE if fine else _LEVELS
    (top,) = emit_slots(b, _ints(0), 1)
    with emit_loop(b, vectors) as index:
        value = b.bitcast(_absolute(b, emit_load(b, V16, emit_place(b, x, index, _LINE))), V16I)
        b.store(_larger_bits(b, b.load(top), value), top)
    largest = b.bitcast(_fold(b, b.load(top), lambda p, q: _larger_bits(b, p, q)), V16)
    empty = b.fcmp_ordered("<", largest, _splat(_TINY))
    # The scale of an infinite number is NaN, as in norms.py.
    ratio = b.fadd(b.fdiv(largest, _splat(levels)), b.fsub(largest, largest))
    scale = b.select(empty, _splat(0.0), ratio)
    inverse = b.select(empty, _splat(0.0), b.fdiv(_splat(levels), largest))
    totals = [emit_slots(b, _ints(0), 1)[0] for _ in range(planes)]
    lines = [b.add(token, int_constant(plane * LINES // 2)) for plane in range(planes)]

    def place(index: Value, line: Value) -> Value:
        cell = b.lshr(index, int_constant(2))
        at = emit_place(b, here, cell, _CELL_BYTES)
        at = emit_place(b, at, line, CELL)
        return emit_place(b, at, b.and_(index, int_constant(3)), LANES)

    def store(codes: Value, at: Value) -> None:
        b.store(b.trunc(codes, _V16B), b.inttoptr(at, _POINTER), align=1)

    with emit_loop(b, vectors) as index:
        value = b.fmul(emit_load(b, V16, emit_place(b, x, index, _LINE)), inverse)
        shifted = b.fadd(value, _splat(_ROUNDER))
        codes = [b.sub(b.bitcast(shifted, V16I), _ints(_ROUNDER_BITS))]
        if fine:
            rounded = b.fsub(shifted, _splat(_ROUNDER))
            high = b.fadd(b.fmul(rounded, _splat(1.0 / FINE_BASE)), _splat(_ROUNDER))
            first = b.sub(b.bitcast(high, V16I), _ints(_ROUNDER_BITS))
            codes = [first, b.sub(codes[0], b.mul(first, _ints(FINE_BASE)))]
        for one, line, total in zip(codes, lines, totals, strict=True):
            store(one, place(index, line))
            b.store(b.add(b.load(total), one), total)
    # Zero the rest of the last cell, so that the weights there do not matter.
    missing = b.and_(b.sub(int_constant(0), vectors), int_constant(CELL // LANES - 1))
    with emit_loop(b, missing) as index:
        for line in lines:
            store(_ints(0), place(b.add(vectors, index), line))
    for line, total in zip(lines, totals, strict=True):
        sums = _fold(b, b.load(total), b.add)
        term = b.extract_element(b.mul(sums, _ints(2**32 - 128)), _I32(0))
        at = b.inttoptr(emit_place(b, here, line, 4, _TERMS_AT), _POINTER)
        b.store(term, at, align=4)
    emit_store(b, b.extract_element(scale, _I32(0)), emit_place(b, here, token, 4, _SCALES_AT))


@intrinsic
def quantize_wide(typing: Any, x: Any, vectors: Any, here: Any, token: Any, fine: Any) -> Any:
    """Quantize the inputs of one token in one wide group into a panel.

    Args:
        x: address of float32 [16 * vectors].
        vectors: number of vectors, an even number from 2 to WIDE / 16.
        here: address of the wide group's block in the panel.
        token: index of the token in the panel.
        fine: nonzero if codes have two planes.
    """

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        x, vectors, here, token, fine = arguments
        with b.if_else(b.icmp_signed("!=", fine, int_constant(0))) as (two, one):
            for branch, is_fine in ((two, True), (one, False)):
                with branch:
                    _emit_quantize(b, x, vectors, here, token, fine=is_fine)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen
