"""AMX microkernel: two tiles of 16 output rows x a panel of 32 tokens (16 tokens with fine codes).

The kernel is built around `tdpbssd`. Operand B is one group of a weight tile: 8 rows of 16 x 4
signed bytes, in the stored order, minus the offset. Operand A is 16 rows of 32 bytes. They are 16
tokens of a panel or, with fine codes, the bytes of one plane of 16 tokens. One multiplication gives
the exact 16 x 16 sums of a group. The float epilogue of all linear kernels follows.

The loop is software-pipelined. An iteration processes a group, or half a group if halves have their
own sums (half the rows of B and half the bytes of A). It multiplies this part's tiles, adds the
previous part's sums in float32, and unpacks the next part's weights. Each step reads data that was
stored one iteration earlier, because tile loads and stores have a long latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from llvmlite import ir

from kvboost_edge.kernels.integers import V16I, emit_load_bytes, int_constant
from kvboost_edge.kernels.jit import intrinsic
from kvboost_edge.kernels.lazy import cgutils, types
from kvboost_edge.kernels.linear.int_tiles import Scales, emit_place, splat_f32_at
from kvboost_edge.kernels.linear.panel import MATRIX_FINE_TOKENS, MATRIX_TOKENS
from kvboost_edge.kernels.linear.weight_dot import GroupDot
from kvboost_edge.kernels.linear.weight_formats import GROUP, INT_KINDS
from kvboost_edge.kernels.linear.weight_tiles import (
    IntTiles,
    Target,
    Tile,
    fields_of,
)
from kvboost_edge.kernels.vectors import (
    I64,
    LANES,
    V16,
    emit_fma,
    emit_load,
    emit_scratch,
    emit_splat,
    emit_store,
)

__all__ = ["AmxTiles", "amx_tile", "emit_on_tile", "emit_tile_call", "tile_configuration"]

Value = Any
Builder = Any

_I8 = ir.IntType(8)
_POINTER = ir.PointerType()
_LINE = 64
_TILES = 2
_QUADS = GROUP // 4
# Tile registers: the sums of each weight tile with the first and the second half of a cell's rows,
# then these two halves, then the weights.
_SUMS = ((0, 1), (2, 3))
_ROWS = (4, 5)
_WEIGHTS = (6, 7)
_CELL_ROWS = 2 * LANES  # tokens x planes
# Byte offsets in the stack scratch: sums of a group, float sums, weights of two groups,
# configuration, the tokens' factors of the minima of both halves of a group.
_SUMS_AT = 0
_FLOATS_AT = _TILES * _CELL_ROWS * _LINE
_WEIGHTS_AT = 2 * _FLOATS_AT
_TURN = _TILES * _QUADS * _LINE
_CONFIG_AT = _WEIGHTS_AT + 2 * _TURN
_TERMS_AT = _CONFIG_AT + _LINE
_SCRATCH = _TERMS_AT + 2 * 4 * _CELL_ROWS


def tile_configuration(quads: int) -> ir.Constant:
    """Return the operand of LDTILECFG (palette 1) for parts of `quads` quads.

    The operand holds the number of rows and the bytes per row of each tile register; see Intel's
    manual.
    """
    text = bytearray(_LINE)
    text[0] = 1
    shapes = {number: (LANES, _LINE) for pair in _SUMS for number in pair}
    shapes |= dict.fromkeys(_ROWS, (LANES, 4 * quads)) | dict.fromkeys(_WEIGHTS, (quads, _LINE))
    for number, (rows, width) in shapes.items():
        text[16 + 2 * number] = width
        text[48 + number] = rows
    return ir.Constant(
        V16I, [int.from_bytes(text[at : at + 4], "little") for at in range(0, _LINE, 4)]
    )


def emit_tile_call(b: Builder, name: str, *arguments: Value) -> None:
    """Emit a tile instruction; Python ints among the arguments are tile register numbers."""
    values = [ir.Constant(_I8, value) if isinstance(value, int) else value for value in arguments]
    kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
    b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.x86.{name}"), values)


def emit_on_tile(b: Builder, name: str, number: int, address: Value, step: int) -> None:
    """Emit a load or store of a tile register whose rows are `step` bytes apart in memory."""
    emit_tile_call(b, name, number, b.inttoptr(address, _POINTER), int_constant(step))


class _Source(NamedTuple):
    """Addresses of the operands of one panel's multiplication.

    Attributes:
        weights: codes of each tile.
        scales: scales of each tile.
        minima: minima of each tile.
        panel: cells of the tokens.
        tables: lookup table of each tile's codes, or None.
    """

    weights: Sequence[Value]
    scales: Sequence[Value]
    minima: Sequence[Value]
    panel: Value
    tables: Sequence[Value | None]


class AmxTiles(IntTiles):
    """Emitter for two tiles x MATRIX_TOKENS tokens, or x MATRIX_FINE_TOKENS with fine codes."""

    def __init__(self, kind: int, fine: bool) -> None:
        super().__init__(kind, _TILES, MATRIX_FINE_TOKENS if fine else MATRIX_TOKENS, fine, "amx")
        self._scratch: Value = None  # stack scratch of the function that `emit` writes

    def emit(self, b: Builder, tile: Tile, panel: Value, target: Target) -> None:
        """Emit `ldtilecfg`, the multiplication and `tilerelease`."""
        self._scratch = emit_scratch(b, _SCRATCH)
        config = b.inttoptr(self._at(b, _CONFIG_AT), _POINTER)
        b.store(tile_configuration(self.quads), config, align=_LINE)
        emit_tile_call(b, "ldtilecfg", config)
        super().emit(b, tile, panel, target)
        # Release the tiles, so the OS need not save them at a context switch.
        emit_tile_call(b, "tilerelease")

    def _at(self, b: Builder, offset: int) -> Value:
        return b.add(self._scratch, int_constant(offset))

    def _emit_one(self, b: Builder, tile: Tile, panel: Value, target: Target) -> None:
        """Emit the pipelined product of a pair of weight tiles with one panel."""
        pairs = (
            (tile.weights, tile.weights_step),
            (tile.scales, tile.scales_step),
            (tile.minima, tile.minima_step),
        )
        weights, scales, minima = [[first, b.add(first, step)] for first, step in pairs]
        source = _Source(weights, scales, minima, panel, [self._table(b, at) for at in minima])
        with cgutils.for_range(b, int_constant(_TILES * self.tokens), intp=I64) as loop:
            emit_store(b, ir.Constant(V16, [0.0] * LANES), self._line(b, _FLOATS_AT, loop.index))
        zero = int_constant(0)
        one = int_constant(1)
        count = b.mul(tile.groups, int_constant(self.parts))
        last = b.sub(count, one)
        self._unpack(b, tile, source, zero)
        self._load(b, source, zero)
        self._unpack(b, tile, source, b.select(b.icmp_signed("<", zero, last), one, zero))
        for t in range(_TILES):
            self._multiply(b, t)
            self._store_sums(b, t)
        with cgutils.for_range_slice(b, one, count, one, I64) as (part, _):
            following = b.add(part, one)
            self._load(b, source, part)
            self._unpack(
                b, tile, source, b.select(b.icmp_signed("<", following, count), following, last)
            )
            for t in range(_TILES):
                self._multiply(b, t)
            self._add_sums(b, source, b.sub(part, one))
            for t in range(_TILES):
                self._store_sums(b, t)
        self._add_sums(b, source, last)
        self._emit_target(b, target)

    def _line(self, b: Builder, offset: int, index: Value) -> Value:
        """Return the address of a 64-byte line in the scratch section that starts at `offset`."""
        return b.add(self._at(b, offset), b.mul(index, int_constant(_LINE)))

    def _turn(self, b: Builder, part: Value) -> Value:
        """Return the scratch address of a part's unpacked weights."""
        return b.add(
            self._at(b, _WEIGHTS_AT), b.mul(b.and_(part, int_constant(1)), int_constant(_TURN))
        )

    def _unpack(self, b: Builder, tile: Tile, source: _Source, part: Value) -> None:
        """Unpack a part's weights to signed bytes and subtract their offset."""
        dot = GroupDot(b, self.kind, self.form)
        out = self._turn(b, part)
        size = int_constant(self.group_bytes // self.parts)
        places = [b.add(at, b.mul(part, size)) for at in source.weights]
        scales = [self._scales_at(b, at, part, self.parts) for at in source.scales]
        self._prefetch(b, tile, places, scales)
        for t, place in enumerate(places):
            load = self._pairs(b, [place], source.tables[t], scales[t])
            for pair in range(self.quads // 2):
                for half, quad in enumerate(load(pair)):
                    line = b.add(out, int_constant((t * _QUADS + 2 * pair + half) * _LINE))
                    b.store(dot.prepare(quad), b.inttoptr(line, _POINTER), align=_LINE)

    def _group_of(self, b: Builder, part: Value) -> tuple[Value, Value]:
        """Return a part's group, and its index in the group."""
        if self.parts == 1:
            return part, int_constant(0)
        count = int_constant(self.parts)
        return b.udiv(part, count), b.urem(part, count)

    def _here(self, b: Builder, source: _Source, part: Value) -> Value:
        """Return the address of the panel cell that holds a part."""
        group, _ = self._group_of(b, part)
        return b.add(source.panel, b.mul(group, int_constant(self.cell)))

    def _load(self, b: Builder, source: _Source, part: Value) -> None:
        """Load a part's activation codes and unpacked weights into tile registers."""
        here = self._here(b, source, part)
        weights = self._turn(b, part)
        if self.parts > 1:
            here = b.add(
                here, b.mul(b.urem(part, int_constant(self.parts)), int_constant(4 * self.quads))
            )
        for half, number in enumerate(_ROWS):
            emit_on_tile(
                b, "tileloadd64", number, b.add(here, int_constant(half * LANES * GROUP)), GROUP
            )
        for t, number in enumerate(_WEIGHTS):
            emit_on_tile(
                b, "tileloadd64", number, b.add(weights, int_constant(t * _QUADS * _LINE)), _LINE
            )

    def _multiply(self, b: Builder, t: int) -> None:
        """Emit `tdpbssd` for tile `t`, which leaves int32 sums in two tile registers."""
        for number, rows in zip(_SUMS[t], _ROWS, strict=True):
            emit_tile_call(b, "tilezero", number)
            emit_tile_call(b, "tdpbssd", number, rows, _WEIGHTS[t])

    def _store_sums(self, b: Builder, t: int) -> None:
        """Store the int32 sums of tile `t` in the scratch."""
        for half, number in enumerate(_SUMS[t]):
            offset = _SUMS_AT + (t * _CELL_ROWS + half * LANES) * _LINE
            emit_on_tile(b, "tilestored64", number, self._at(b, offset), _LINE)

    def _add_sums(self, b: Builder, source: _Source, part: Value) -> None:
        """Add a part's sums to the float sums of both weight tiles; see `IntTiles._epilogue`."""
        here = self._here(b, source, part)
        group, own = self._group_of(b, part)
        scales = [
            self._scales(b, *at, group, own)
            for at in zip(source.scales, source.minima, strict=True)
        ]
        if self.format.minima_in_halves:
            self._store_minima_terms(b, here)
        with cgutils.for_range(b, int_constant(self.tokens // 2), intp=I64) as loop:
            first = b.mul(loop.index, int_constant(2))
            term = b.add(self._term(b, here, 0), b.mul(first, int_constant(4)))
            for token in range(2):
                index = b.add(first, int_constant(token))
                self._add_token(b, index, b.add(term, int_constant(4 * token)), scales)

    def _add_token(self, b: Builder, index: Value, term: Value, scales: Sequence[Scales]) -> None:
        """Add the sums of one token.

        Args:
            b: the builder.
            index: index of the token in the panel.
            term: address of the token's term.
            scales: scales of each weight tile.
        """
        if self.format.minima_in_halves:
            stored = emit_place(b, self._at(b, _TERMS_AT), index, 4)
            minima_terms = [
                splat_f32_at(b, b.add(stored, int_constant(4 * self.tokens * half)))
                for half in range(2)
            ]
        else:
            minima_terms = self._minima_terms(b, term)
        # Both results are stored at the end, so that what is loaded for the token serves both.
        results = []
        for t in range(_TILES):
            places = [
                self._line(b, _SUMS_AT + (t * _CELL_ROWS + plane * self.tokens) * _LINE, index)
                for plane in range(self.planes)
            ]
            sums = self._joined(b, [emit_load_bytes(b, place) for place in places])
            slot = self._line(b, _FLOATS_AT + t * self.tokens * _LINE, index)
            before = emit_load(b, V16, slot)
            total = b.sitofp(sums, V16)
            results.append((self._epilogue(b, total, term, minima_terms, scales[t], before), slot))
        for result, slot in results:
            emit_store(b, result, slot)

    def _store_minima_terms(self, b: Builder, here: Value) -> None:
        """Store the factors of the minima of both halves, which both weight tiles use.

        They are float32 [halves][tokens].
        """
        size = 4 * self.tokens
        scales = b.add(self._term(b, here, 0), int_constant(size))
        seeds = b.add(scales, int_constant(size))
        for start in range(0, size, _LINE):
            own = emit_load(b, V16, b.add(scales, int_constant(start)))
            for half in range(2):
                offset = half * size + start
                values = b.sitofp(emit_load_bytes(b, b.add(seeds, int_constant(offset))), V16)
                emit_store(b, b.fmul(values, own), self._at(b, _TERMS_AT + offset))

    def _emit_target(self, b: Builder, target: Target) -> None:
        """Store the results row by row; see `emit_target`."""
        factors = emit_splat(b, target.factor)
        zero = int_constant(0)
        # Use -0.0 for a missing bias. Adding it changes no number, not even the sign of a zero.
        biases = [cgutils.alloca_once(b, V16) for _ in range(_TILES)]
        for t, slot in enumerate(biases):
            b.store(ir.Constant(V16, [-0.0] * LANES), slot)
            with b.if_then(b.icmp_signed("!=", target.bias, zero)):
                b.store(
                    emit_load(b, V16, b.add(target.bias, b.mul(target.tile_step, int_constant(t)))),
                    slot,
                )
        bias = [b.load(slot) for slot in biases]
        with b.if_else(b.icmp_signed("!=", target.add, zero)) as branches:
            for adds, branch in zip((True, False), branches, strict=True):
                with branch, cgutils.for_range(b, int_constant(self.tokens), intp=I64) as loop:
                    at = b.add(target.out, b.mul(loop.index, target.out_step))
                    # Read both outputs before writing either. Without a second tile, both writes
                    # store the same numbers at the same address.
                    results = []
                    places = [
                        b.add(at, b.mul(target.tile_step, int_constant(t))) for t in range(_TILES)
                    ]
                    for t, place in enumerate(places):
                        slot = self._line(b, _FLOATS_AT + t * self.tokens * _LINE, loop.index)
                        value = b.fadd(emit_load(b, V16, slot), bias[t])
                        is_added = (
                            emit_fma(b, value, factors, emit_load(b, V16, place)) if adds else None
                        )
                        results.append(is_added if adds else b.fmul(value, factors))
                    for place, result in zip(places, results, strict=True):
                        emit_store(b, result, place)


def _amx_tile(kind: int, fine: bool) -> Any:
    @intrinsic
    def tile(typing: Any, tile: Any, panel: Any, target: Any) -> Any:
        """Multiply pairs of weight tiles by a panel.

        Args:
            tile: `Tile` of pairs.
            panel: address of the tokens' panel; see panel.py.
            target: `Target`.
        """

        def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
            where = fields_of(b, Tile, arguments[0])
            out = fields_of(b, Target, arguments[2])
            AmxTiles(kind, fine).emit(b, where, arguments[1], out)
            return context.get_dummy_value()

        return types.void(tile, types.int64, target), codegen

    return tile


amx_tile = {(kind, fine): _amx_tile(kind, fine) for kind in INT_KINDS for fine in (False, True)}
