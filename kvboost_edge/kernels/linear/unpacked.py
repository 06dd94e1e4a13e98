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
    Scales,
    Target,
    Tile,
    emit_place,
    emit_slots,
    emit_target,
    splat_i32_at,
)
from kvboost_edge.kernels.linear.simd_loads import emit_code_scales
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
        scales: float32 [groups][tiles][parts, then minima][16], then int32 scales of codes [2][16]
            for formats with `scaled_codes`.
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
        # Lines of scales of a group: those of its parts, then minima, then scales of codes.
        self.minima_lines = 2 if self.format.minima_in_halves else int(self.format.minima)
        if self.format.scaled_codes:
            self.scale_lines = 1
            self.scale_bytes = _LINE * (3 + self.minima_lines)
        else:
            self.scale_lines = self.parts
            self.scale_bytes = _LINE * (self.parts + self.minima_lines)
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
                if not self.format.scaled_codes:
                    found = self._scales(b, scales, minima, number, part)
                    self._store_scales(b, found, emit_place(b, floats, part, _LINE))
            if self.format.scaled_codes:
                self._store_scales(b, self._scales(b, scales, minima, number, 0), floats)
                at = self._scales_at(b, scales, number)
                for half, own in enumerate(emit_code_scales(b, self.format, at)):
                    b.store(own, self._code_scales_at(b, floats, half), align=_LINE)

    def _store_scales(self, b: Builder, scales: Scales, place: Value) -> None:
        """Store the scales of a part and, after them, the minima of its group."""
        factors, minima = scales
        for line, values in enumerate((factors, *minima)):
            emit_store(b, values, b.add(place, int_constant(_LINE * line)))

    def _code_scales_at(self, b: Builder, floats: Value, half: int) -> Value:
        """Return the pointer to the scales of a half's codes in a slot of the buffer of scales."""
        line = self.scale_lines + self.minima_lines + half
        return b.inttoptr(b.add(floats, int_constant(_LINE * line)), ir.PointerType())

    def _unpack_part(self, b: Builder, at: Value, place: Value, table: Value | None) -> None:
        """Unpack the codes of a group, or of a part of it, from address `at` to `place`."""
        # Pairs with the same layout are unpacked in a loop, which compiles faster than unrolled
        # code.
        alike = self.format.bits in (4, 8) and self.format.grid is None
        pairs = self.quads // 2
        with emit_loop(b, int_constant(pairs if alike else 1)) as pair:
            here = emit_place(b, at, pair, self.group_bytes // self.parts // pairs)
            out = emit_place(b, place, pair, 2 * _LINE)
            load = self._pairs(b, [here], table, int_constant(0))
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
        if self.format.scaled_codes:
            halves = [self._unpacked_dots(b, here, codes, int_constant(half)) for half in range(2)]
            for t in range(self.tiles):
                own = b.add(floats, int_constant(t * self.scale_bytes))
                here_sums = b.add(sums, int_constant(t * self.sums_bytes))
                scales = [
                    b.load(self._code_scales_at(b, own, half), align=_LINE, typ=V16I)
                    for half in range(2)
                ]
                pairs = zip(*(half[t] for half in halves), strict=True)
                totals = [self._scaled(b, scales, pair) for pair in pairs]
                self._add_totals(b, here, totals, own, here_sums)
            return
        with emit_loop(b, int_constant(self.parts)) as part:
            dots = self._unpacked_dots(b, here, codes, part)
            for t, of_tile in enumerate(dots):
                own = emit_place(b, floats, part, _LINE, t * self.scale_bytes)
                here_sums = b.add(sums, int_constant(t * self.sums_bytes))
                totals = [b.sitofp(dot, V16) for dot in of_tile]
                self._add_totals(b, here, totals, own, here_sums)

    def _add_totals(
        self, b: Builder, here: Value, totals: Sequence[Value], scales: Value, sums: Value
    ) -> None:
        """Add the sums of a tile's group, or of half of it, to its float sums.

        Args:
            b: the builder.
            here: address of the group's cell in the panel.
            totals: sums of each token.
            scales: address of the scales, which the minima follow.
            sums: address of the tile's float sums.
        """
        factors, *minima = (
            emit_load(b, V16, b.add(scales, int_constant(_LINE * line)))
            for line in range(1 + self.minima_lines)
        )
        for token, total in enumerate(totals):
            place = b.add(sums, int_constant(_LINE * token))
            term = self._term(b, here, token)
            before = emit_load(b, V16, place)
            terms = self._minima_terms(b, term)
            result = self._epilogue(b, total, term, terms, (factors, minima), before)
            emit_store(b, result, place)

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
