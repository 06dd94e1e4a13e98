"""Microkernel for many tokens, which unpacks the weights of a tile once for up to 32 panels.

On AVX2, all formats use it. The kernel is built around `vpmaddubsw`. Sixteen 256-bit registers hold
the 16-bit sums of 16 rows x 4 tokens and the weights of two quads. Groups of a tile are unpacked
into the L1 cache and multiplied by up to 32 panels.

Formats with a grid use it with every dot-product variant, because looking up an index takes longer
than multiplying the weights by a few tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from llvmlite import ir

from kvboost_edge.kernels.integers import V16I, emit_load_bytes, emit_loop, int_constant
from kvboost_edge.kernels.linear.int_tiles import (
    IntTiles,
    Target,
    Tile,
    emit_place,
    emit_slots,
    emit_target,
    splat_i32_at,
)
from kvboost_edge.kernels.linear.simd_loads import emit_scales
from kvboost_edge.kernels.linear.weight_dot import GroupDot
from kvboost_edge.kernels.linear.weight_formats import GROUP
from kvboost_edge.kernels.vectors import LANES, V16, emit_load, emit_scratch, emit_store

__all__ = ["UnpackedTiles"]

_LINE = 64
_QUADS = GROUP // 4
# All buffers fit in the L1 cache: 18 KB with the sums of 4 tokens per panel and, with AVX512-VNNI,
# 42 KB with those of two tiles and 6 tokens. Loops are not unrolled (`emit_loop`), because LLVM
# would hoist loads and spill the other values to the stack.
_GROUPS = 16
_PANELS = 32

Value = Any
Builder = Any


def _lesser(b: Builder, x: Value, y: Value) -> Value:
    return b.select(b.icmp_signed("<", x, y), x, y)


class _Places(NamedTuple):
    """Stack addresses of the unpacked groups of tiles, and of the sums of some panels.

    Attributes:
        codes: uint8 [groups][tiles][8 quads][64].
        scales: float32 [groups][tiles][parts, then minima][16].
        sums: float32 [tiles][panels][tokens][16].
    """

    codes: Value
    scales: Value
    sums: Value


class UnpackedTiles(IntTiles):
    """Variant of `IntTiles` that unpacks groups before it multiplies them."""

    def __init__(
        self, kind: int, tokens: int, fine: bool, form: str = "avx2", tiles: int = 1
    ) -> None:
        super().__init__(kind, tiles, tokens, fine, form)
        self.scale_bytes = _LINE * self.parts * (1 + self.format.minima)
        self.sums_bytes = _PANELS * tokens * _LINE

    def emit(self, b: Builder, tile: Tile, panel: Value, target: Target) -> None:
        """Emit the loop over all runs: tiles with one panel each, or one tile with many panels."""
        tile = self._with_scales(tile)
        places = _Places(
            emit_scratch(b, _GROUPS * self.tiles * _QUADS * _LINE),
            emit_scratch(b, _GROUPS * self.tiles * self.scale_bytes),
            emit_scratch(b, self.tiles * self.sums_bytes),
        )
        zero = int_constant(0)
        one = int_constant(1)
        most = int_constant(_PANELS)
        over_tokens = b.icmp_signed("!=", tile.panel_step, zero)
        rounds = b.select(
            over_tokens, b.sdiv(b.add(tile.runs, int_constant(_PANELS - 1)), most), tile.runs
        )
        with emit_loop(b, rounds) as index:
            number = b.select(over_tokens, zero, b.mul(index, int_constant(self.tiles)))
            first = b.select(over_tokens, b.mul(index, most), zero)
            count = b.select(over_tokens, _lesser(b, most, b.sub(tile.runs, first)), one)
            behind = b.mul(number, target.tile_step)
            bias = b.select(
                b.icmp_signed("!=", target.bias, zero), b.add(target.bias, behind), zero
            )
            tokens = b.mul(first, int_constant(self.tokens))
            out = b.add(b.add(target.out, behind), b.mul(tokens, target.out_step))
            here = tile._replace(
                weights=b.add(tile.weights, b.mul(number, tile.weights_step)),
                scales=b.add(tile.scales, b.mul(number, tile.scales_step)),
                minima=b.add(tile.minima, b.mul(number, tile.minima_step)),
            )
            at = b.add(panel, b.mul(first, tile.panel_step))
            self._emit_panels(b, here, at, count, target._replace(out=out, bias=bias), places)

    def _emit_panels(
        self, b: Builder, tile: Tile, panel: Value, count: Value, target: Target, places: _Places
    ) -> None:
        """Emit code that multiplies `tiles` tiles by `count` panels."""
        lines = b.mul(count, int_constant(self.tokens))
        with emit_loop(b, lines) as line:
            for t in range(self.tiles):
                place = emit_place(b, places.sums, line, _LINE, t * self.sums_bytes)
                emit_store(b, ir.Constant(V16, [0.0] * LANES), place)
        most = int_constant(_GROUPS)
        with emit_loop(b, b.sdiv(b.add(tile.groups, int_constant(_GROUPS - 1)), most)) as index:
            first = b.mul(index, most)
            groups = _lesser(b, most, b.sub(tile.groups, first))
            with emit_loop(b, groups) as group:
                self._unpack(b, tile, first, group, places)
            cells = emit_place(b, panel, first, self.cell)
            with emit_loop(b, count) as number:
                at = b.add(cells, b.mul(number, tile.panel_step))
                sums = emit_place(b, places.sums, number, _LINE * self.tokens)
                with emit_loop(b, groups) as group:
                    self._add_unpacked(b, group, at, sums, places)
        with emit_loop(b, lines) as line:
            slots = [
                [
                    b.inttoptr(
                        emit_place(b, places.sums, line, _LINE, t * self.sums_bytes),
                        V16.as_pointer(),
                    )
                ]
                for t in range(self.tiles)
            ]
            out = b.add(target.out, b.mul(line, target.out_step))
            emit_target(b, slots, target._replace(out=out))

    def _unpack(self, b: Builder, tile: Tile, first: Value, group: Value, places: _Places) -> None:
        """Unpack group `first + group` of the tiles into slot `group` of the buffers."""
        number = b.add(first, group)
        for t in range(self.tiles):
            at, scales, minima = (
                b.add(start, b.mul(step, int_constant(t)))
                for start, step in (
                    (tile.weights, tile.weights_step),
                    (tile.scales, tile.scales_step),
                    (tile.minima, tile.minima_step),
                )
            )
            weights = emit_place(b, at, number, self.group_bytes)
            self._prefetch(b, tile, [weights], [self._scales_at(b, scales, number)])
            slot = b.add(b.mul(group, int_constant(self.tiles)), int_constant(t))
            codes = emit_place(b, places.codes, slot, _QUADS * _LINE)
            floats = emit_place(b, places.scales, slot, self.scale_bytes)
            table = self._table(b, minima)
            with emit_loop(b, int_constant(self.parts)) as part:
                place = emit_place(b, codes, part, _LINE * self.quads)
                self._unpack_part(
                    b, emit_place(b, weights, part, self.group_bytes // self.parts), place, table
                )
                index = b.add(b.mul(number, int_constant(self.parts)), part)
                factors, low = emit_scales(b, self.format, scales, minima, index)
                emit_store(b, factors, emit_place(b, floats, part, _LINE))
                if low is not None:
                    emit_store(b, low, self._minima_at(b, floats, part))

    def _unpack_part(self, b: Builder, at: Value, place: Value, table: Value | None) -> None:
        """Unpack the codes of a group, or of a part of it, from address `at` to `place`."""
        # Pairs with the same layout are unpacked in a loop, which compiles faster than unrolled
        # code.
        alike = self.format.bits in (4, 8) and self.format.grid is None
        pairs = self.quads // 2
        with emit_loop(b, int_constant(pairs if alike else 1)) as pair:
            here = emit_place(b, at, pair, self.group_bytes // self.parts // pairs)
            out = emit_place(b, place, pair, 2 * _LINE)
            load = self._pairs(b, [here], table)
            for first_pair in range(1 if alike else pairs):
                for half, quad in enumerate(load(first_pair)):
                    to = b.add(out, int_constant(_LINE * (2 * first_pair + half)))
                    b.store(quad, b.inttoptr(to, ir.PointerType()), align=_LINE)

    def _add_unpacked(
        self, b: Builder, group: Value, panel: Value, sums: Value, places: _Places
    ) -> None:
        """Multiply the group in slot `group` by the panel whose cells start at `panel`."""
        slot = b.mul(group, int_constant(self.tiles))
        floats = emit_place(b, places.scales, slot, self.scale_bytes)
        codes = emit_place(b, places.codes, slot, _QUADS * _LINE)
        here = emit_place(b, panel, group, self.cell)
        with emit_loop(b, int_constant(self.parts)) as part:
            dots = self._unpacked_dots(b, here, codes, part)
            for t, of_tile in enumerate(dots):
                own = b.add(floats, int_constant(t * self.scale_bytes))
                scale = emit_load(b, V16, emit_place(b, own, part, _LINE))
                low = (
                    emit_load(b, V16, self._minima_at(b, own, part)) if self.format.minima else None
                )
                for token, dot in enumerate(of_tile):
                    place = b.add(sums, int_constant(t * self.sums_bytes + _LINE * token))
                    term = self._term(b, here, token)
                    before = emit_load(b, V16, place)
                    minima_term = self._minima_term(b, term, part)
                    result = self._epilogue(b, dot, term, minima_term, (scale, low), before)
                    emit_store(b, result, place)

    def _minima_at(self, b: Builder, floats: Value, part: Value) -> Value:
        """Return the address of a part's minima in a tile's slot of the buffer of scales."""
        return emit_place(b, floats, part, _LINE, _LINE * self.parts)

    def _unpacked_dots(
        self, b: Builder, here: Value, codes: Value, part: Value
    ) -> list[list[Value]]:
        """Return the integer sums of one part of a group, indexed [tile][token]."""
        dot = GroupDot(b, self.kind, self.form)
        each = self.planes * self.tokens
        count = self.tiles * each
        codes = emit_place(b, codes, part, _LINE * self.quads)
        x_codes = emit_place(b, here, part, 4 * self.quads)
        run = min(dot.quads_at_once, self.quads)
        totals: list[Value] = [ir.Constant(V16I, [0] * LANES)] * count
        for start in range(0, self.quads, run):
            at = b.add(codes, int_constant(_LINE * start))
            x_at = b.add(x_codes, int_constant(4 * start))
            sums = self._add_pair(b, dot, [dot.zero] * count, at, x_at)
            if run > 2:
                slots = [emit_slots(b, one, 1)[0] for one in sums]
                at = b.add(at, int_constant(2 * _LINE))
                x_at = b.add(x_at, int_constant(8))
                with emit_loop(b, int_constant(run // 2 - 1)) as pair:
                    place = emit_place(b, at, pair, 2 * _LINE)
                    x_place = emit_place(b, x_at, pair, 8)
                    sums = self._add_pair(b, dot, [b.load(slot) for slot in slots], place, x_place)
                    for one, slot in zip(sums, slots, strict=True):
                        b.store(one, slot)
                sums = [b.load(slot) for slot in slots]
            totals = [
                b.add(total, dot.widened(one)) for total, one in zip(totals, sums, strict=True)
            ]
        if self.format.offset and dot.seeded:
            for token in range(self.tokens):
                seed = self._seed_at(
                    b, emit_place(b, self._seed(b, here, token, 0), part, 4 * self.tokens)
                )
                for last in range(each - self.tokens, count, each):  # of the last plane
                    totals[last + token] = b.add(totals[last + token], seed)
        tiles = [totals[start : start + each] for start in range(0, count, each)]
        return [
            [self._joined(b, of_tile[token :: self.tokens]) for token in range(self.tokens)]
            for of_tile in tiles
        ]

    def _add_pair(
        self, b: Builder, dot: GroupDot, sums: Sequence[Value], codes: Value, here: Value
    ) -> list[Value]:
        """Add the products of the two quads at `codes` with the tokens' codes at `here`.

        Returns:
            The updated sums, [tiles * planes * tokens].
        """
        sums = list(sums)
        each = self.planes * self.tokens
        for half in range(2):
            quads = [
                dot.prepare(
                    emit_load_bytes(b, b.add(codes, int_constant(_LINE * (_QUADS * t + half))))
                )
                for t in range(self.tiles)
            ]
            for index in range(each):
                x = splat_i32_at(b, b.add(here, int_constant(GROUP * index + 4 * half)))
                for t, quad in enumerate(quads):
                    sums[each * t + index] = dot.add_to(sums[each * t + index], quad, x)
        return sums
