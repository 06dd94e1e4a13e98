"""Microkernels for integer weights: one or two tiles of 16 output rows x a panel of few tokens.

They are built around the dot product of weight_dot.py (`vpdpbusd`, `vpmaddubsw`, `sdot`, or
`smmla` for pairs of tokens). Each lane is an output row, so there is no horizontal sum. The sum
over a group of 32 inputs is an exact integer, and a single float epilogue adds the groups in order.
An output therefore depends only on its row and token, not on the other tokens or tiles of the call.

Decode (1 token) is bound by reading the weights from memory, prefill by the rate of dot products.
benchmarks/bench/bench_linear.py compares decode with a plain read of the same bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from llvmlite import ir

from kvboost_edge.kernels.integers import (
    V16I,
    dot_form,
    emit_loop,
    emit_splat_int,
    follows_pages,
    int_constant,
)
from kvboost_edge.kernels.lazy import cgutils
from kvboost_edge.kernels.linear.grids import GridPairs
from kvboost_edge.kernels.linear.panel import FINE_BASE, bytes_of_cell
from kvboost_edge.kernels.linear.simd_loads import (
    emit_block_scales,
    emit_code_scales,
    emit_load_pair,
    emit_scaled_pair,
    emit_scales,
    emit_table,
    emit_table_pair,
    emit_values,
)
from kvboost_edge.kernels.linear.weight_dot import GroupDot, PairDot, scales_codes
from kvboost_edge.kernels.linear.weight_formats import (
    FORMAT_OF,
    GROUP,
    HALF_OFFSET,
    TABLE_OFFSET,
)
from kvboost_edge.kernels.vectors import (
    F32,
    LANES,
    V16,
    emit_fma,
    emit_load,
    emit_prefetch,
    emit_splat,
    emit_store,
)

__all__ = [
    "AHEAD",
    "IntTiles",
    "LoadPair",
    "Scales",
    "Target",
    "Tile",
    "emit_place",
    "emit_slots",
    "emit_target",
    "emit_zeros",
    "splat_f32_at",
    "splat_i32_at",
]

_QUADS = GROUP // 4
_LINE = 64
_PAGE = 4096
_LONG = 3  # tokens from which on all lines are prefetched
_WHOLE = 2  # index of the whole group's seed, after the seeds of its halves
AHEAD = 8192
"""Prefetch distance in bytes. With weights in DRAM, 4 and 16 KB perform equally well; 1 KB or no
prefetch is slower.
"""

Value = Any
Builder = Any
LoadPair = Callable[[int], tuple[Value, Value]]
Scales = tuple[Value, Sequence[Value]]  # of 16 rows: scales, and minima of the group or its halves
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)


class Tile(NamedTuple):
    """Addresses of the weights of a run of tiles.

    Attributes:
        weights: address of the codes in quads, or of floats.
        scales: address of float16 [groups, 16]; for block formats see weight_formats.py.
        minima: address of float16 [groups, 16]; for formats with blocks or a table see
            weight_formats.py.
        weights_step: bytes from one tile's weights to the next tile's.
        scales_step: bytes from one tile's scales to the next tile's.
        minima_step: bytes from one tile's minima to the next tile's.
        groups: groups of 32 inputs; for float formats, inputs.
        runs: number of tiles, or of pairs if the microkernel takes two tiles; 1 for float formats.
        panel_step: 0, or the bytes from one panel to the next. If it is not 0, the runs are panels
            for one tile (or pair) instead of tiles.
    """

    weights: int
    scales: int
    minima: int
    weights_step: int
    scales_step: int
    minima_step: int
    groups: int
    runs: int
    panel_step: int


class Target(NamedTuple):
    """Destination of the results: out = factor * (result + bias), added to `out` if `add` is set.

    Attributes:
        out: address of float32 [tokens, 16].
        out_step: bytes from one token to the next.
        tile_step: bytes to the next tile's outputs. It is 0 if the steps of the `Tile` are 0, which
            makes a pair of the same tile.
        bias: address of float32 [16], or 0. The next tile's bias follows after `tile_step` bytes.
        add: nonzero to add to `out`.
        factor: float32 factor.
    """

    out: int
    out_step: int
    tile_step: int
    bias: int
    add: int
    factor: Any


def emit_place(b: Builder, address: Value, index: Value, size: int, offset: int = 0) -> Value:
    """Return the IR value of address + index * size + offset."""
    return b.add(b.add(address, b.mul(index, int_constant(size))), int_constant(offset))


def splat_i32_at(b: Builder, address: Value) -> Value:
    return emit_splat_int(b, b.load(b.inttoptr(address, ir.PointerType()), align=4, typ=_I32))


def load_i64(b: Builder, address: Value) -> Value:
    return b.load(b.inttoptr(address, ir.PointerType()), align=4, typ=_I64)


def splat_f32_at(b: Builder, address: Value) -> Value:
    return emit_splat(b, emit_load(b, F32, address))


def emit_slots(b: Builder, start: Value, count: int) -> list[Value]:
    """Return `count` stack variables that are initialized to a value."""
    slots = [cgutils.alloca_once(b, start.type) for _ in range(count)]
    for slot in slots:
        b.store(start, slot)
    return slots


def emit_zeros(b: Builder, count: int) -> list[Value]:
    """Return `count` stack variables of 16 float32 that are initialized to 0."""
    return emit_slots(b, ir.Constant(V16, [0.0] * LANES), count)


def _place(b: Builder, target: Target, tile: int, token: int) -> Value:
    """Return the address of a tile's 16 outputs for one token."""
    at = b.add(target.out, b.mul(target.tile_step, int_constant(tile)))
    return b.add(at, b.mul(target.out_step, int_constant(token)))


def emit_target(b: Builder, sums: Sequence[Sequence[Value]], target: Target) -> None:
    """Add the bias to sums[tile][token], then store the sums or add them to the outputs."""
    factors = emit_splat(b, target.factor)
    zero = int_constant(0)
    for tile, slots in enumerate(sums):
        offset = b.mul(target.tile_step, int_constant(tile))
        with b.if_then(b.icmp_signed("!=", target.bias, zero)):
            bias = emit_load(b, V16, b.add(target.bias, offset))
            for slot in slots:
                b.store(b.fadd(b.load(slot), bias), slot)
    places = [
        [_place(b, target, tile, token) for token in range(len(slots))]
        for tile, slots in enumerate(sums)
    ]
    flat = [
        (slot, place)
        for slots, row in zip(sums, places, strict=True)
        for slot, place in zip(slots, row, strict=True)
    ]
    with b.if_else(b.icmp_signed("!=", target.add, zero)) as (adds, stores):
        with adds:
            # Read all outputs before writing any. Without a second tile, both writes store the same
            # numbers at the same address.
            results = [
                emit_fma(b, b.load(slot), factors, emit_load(b, V16, place)) for slot, place in flat
            ]
            for (_, place), result in zip(flat, results, strict=True):
                emit_store(b, result, place)
        with stores:
            for slot, place in flat:
                emit_store(b, b.fmul(b.load(slot), factors), place)


class IntTiles:
    """Emitter for `tiles` tiles x a panel of `tokens` tokens.

    Args:
        kind: number of the weight format.
        tiles: 1 or 2.
        tokens: number of tokens in the panel.
        fine: True for 16-bit activation codes, stored in two planes of bytes.
        form: dot-product variant; None selects that of this process.
    """

    def __init__(
        self, kind: int, tiles: int, tokens: int, fine: bool, form: str | None = None
    ) -> None:
        self.kind = kind
        self.format = FORMAT_OF[kind]
        self.tiles = tiles
        self.tokens = tokens
        self.fine = fine
        self.form = form or dot_form()
        self.group_bytes = self.format.group_bytes
        self.planes = 2 if fine else 1
        self.scales_codes = scales_codes(self.format, self.form)
        # A part is a group or half a group, with its own sums. Halves share a sum if codes are
        # scaled before they are multiplied.
        self.parts = 1 if self.scales_codes else self.format.parts
        self.quads = _QUADS // self.parts
        # `smmla` multiplies pairs of tokens. With sums of half groups, ordering them takes more
        # instructions than it saves.
        self.takes_pairs = self.form == "i8mm" and tokens % 2 == 0 and self.parts == 1
        self.cell = tokens * bytes_of_cell(fine, kind)

    def emit(self, b: Builder, tile: Tile, panel: Value, target: Target) -> None:
        """Emit the loop over all runs of tiles or panels."""
        tile = self._with_scales(tile)
        # A single loop without calls between runs keeps memory reads in flight.
        over_tokens = b.icmp_signed("!=", tile.panel_step, int_constant(0))
        with emit_loop(b, tile.runs) as run:
            index = b.select(over_tokens, int_constant(0), b.mul(run, int_constant(self.tiles)))
            tokens = b.select(over_tokens, b.mul(run, int_constant(self.tokens)), int_constant(0))
            weights = b.add(tile.weights, b.mul(index, tile.weights_step))
            scales = b.add(tile.scales, b.mul(index, tile.scales_step))
            minima = b.add(tile.minima, b.mul(index, tile.minima_step))
            here = tile._replace(weights=weights, scales=scales, minima=minima)
            behind = b.mul(index, target.tile_step)
            bias = b.select(
                b.icmp_signed("!=", target.bias, int_constant(0)),
                b.add(target.bias, behind),
                target.bias,
            )
            out = b.add(b.add(target.out, behind), b.mul(tokens, target.out_step))
            at = b.add(panel, b.mul(run, tile.panel_step))
            self._emit_one(b, here, at, target._replace(out=out, bias=bias))

    def _with_scales(self, tile: Tile) -> Tile:
        """Return the tile with the address of its codes as that of its scales, if they contain the
        scales.
        """
        if not self.format.scales_in_codes:
            return tile
        return tile._replace(scales=tile.weights, scales_step=tile.weights_step)

    def _emit_one(self, b: Builder, tile: Tile, panel: Value, target: Target) -> None:
        """Emit the product of one panel with `tiles` tiles; the sums stay in registers."""
        weights = [
            b.add(tile.weights, b.mul(tile.weights_step, int_constant(t)))
            for t in range(self.tiles)
        ]
        scales = [
            b.add(tile.scales, b.mul(tile.scales_step, int_constant(t))) for t in range(self.tiles)
        ]
        minima = [
            b.add(tile.minima, b.mul(tile.minima_step, int_constant(t))) for t in range(self.tiles)
        ]
        tables = [self._table(b, at) for at in minima]
        sums = [emit_zeros(b, self.tokens) for _ in range(self.tiles)]
        for index in range(self.tiles):
            for token in range(self.tokens):
                emit_prefetch(b, _place(b, target, index, token), write=True)
        with emit_loop(b, tile.groups) as group:
            here = emit_place(b, panel, group, self.cell)
            places = [emit_place(b, at, group, self.group_bytes) for at in weights]
            if self.tiles == 1 and follows_pages():
                # One line of a group is enough, except with many instructions for each group, so
                # that fewer groups are in flight: with 3 or more tokens, and with codes of 5 bits,
                # because of unpacking. With all lines, 8 tokens take 20 to 40% less time.
                is_long = self.tokens >= _LONG or self.format.bits == 5
                lines = self.group_bytes // _LINE if is_long else 1
                for line in range(lines):
                    emit_prefetch(
                        b, b.add(places[0], int_constant(_PAGE + _LINE * line)), near=False
                    )
            else:
                self._prefetch(b, tile, places, [self._scales_at(b, at, group) for at in scales])
            own = [self._scales_at(b, at, group) for at in scales]
            loaders = [
                self._pairs(b, self._parts_of(b, place), table, at)
                for place, table, at in zip(places, tables, own, strict=True)
            ]
            for part, totals in enumerate(self._totals(b, here, loaders, own)):
                factors = [
                    self._scales(b, *at, group, part) for at in zip(scales, minima, strict=True)
                ]
                self._add_group(b, here, sums, totals, factors)
        emit_target(b, sums, target)

    def _totals(
        self, b: Builder, here: Value, loaders: Sequence[LoadPair], scales: Sequence[Value]
    ) -> Iterator[list[list[Value]]]:
        """Yield the sums of a group, or of each half with a scale of its own, in float32.

        They are indexed [tile][token].

        Args:
            b: the builder.
            here: address of the group's cell in the panel.
            loaders: result of `_pairs` for the group of each tile.
            scales: address of the group's scales in each tile.
        """
        if self.format.scaled_codes and not self.scales_codes:
            halves = [self._dots(b, here, loaders, part) for part in range(self.parts)]
            yield [
                [self._scaled(b, factors, sums) for sums in zip(*of_tile, strict=True)]
                for factors, *of_tile in zip(
                    [emit_code_scales(b, self.format, at) for at in scales], *halves, strict=True
                )
            ]
            return
        for part in range(self.parts):
            dots = self._dots(b, here, loaders, part)
            yield [[b.sitofp(dot, V16) for dot in of_tile] for of_tile in dots]

    def _scaled(self, b: Builder, scales: Sequence[Value], halves: Sequence[Value]) -> Value:
        """Return the sums of both halves of a group times their integer scales, as float32."""
        if self.fine:
            products = [b.mul(dots, scale) for dots, scale in zip(halves, scales, strict=True)]
            return b.sitofp(b.add(*products), V16)
        # These float32 operations are exact and faster than integer ones: the sum is below 2 ** 24.
        first, second = (
            (b.sitofp(dots, V16), b.sitofp(scale, V16))
            for dots, scale in zip(halves, scales, strict=True)
        )
        return emit_fma(b, *second, b.fmul(*first))

    def _scales(
        self, b: Builder, scales: Value, minima: Value, group: Value, part: Value | int
    ) -> Scales:
        """Load the scales and minima of a group, or of a half with a scale of its own.

        Args:
            b: the builder.
            scales: address of the tile's scales.
            minima: address of the tile's minima.
            group: index of the group.
            part: index of the part in the group.
        """
        if self.format.scaled_codes:
            at = self._scales_at(b, scales, group)
            is_negated = self.scales_codes and self.format.offset > 0
            return emit_block_scales(b, self.format, at, minima, group, negated=is_negated)
        if isinstance(part, int):
            part = int_constant(part)
        index = b.add(b.mul(group, int_constant(self.parts)), part)
        scale, low = emit_scales(b, self.format, scales, minima, index)
        return scale, [] if low is None else [low]

    def _prefetch(
        self, b: Builder, tile: Tile, places: Sequence[Value], scales: Sequence[Value]
    ) -> None:
        """Prefetch weights and scales for later iterations.

        With one tile, the distance is fixed. With two tiles, the same group of the next two tiles
        is prefetched.
        """
        ahead = int_constant(AHEAD)
        scales_ahead = int_constant(
            AHEAD * self.format.scale_size // (self.group_bytes * self.format.scale_groups)
        )
        if self.tiles > 1:
            ahead = b.mul(tile.weights_step, int_constant(self.tiles))
            scales_ahead = b.mul(tile.scales_step, int_constant(self.tiles))
        for place, scale in zip(places, scales, strict=True):
            start = b.add(place, ahead)
            for line in range(-(-self.group_bytes // _LINE)):
                emit_prefetch(b, b.add(start, int_constant(_LINE * line)))
            if self.format.scale_size:
                emit_prefetch(b, b.add(scale, scales_ahead))

    def _scales_at(self, b: Builder, scales: Value, index: Value, parts: int = 1) -> Value:
        """Return the address of the scales of a group, or of a part of it."""
        if self.format.scale_log:
            index = b.lshr(index, int_constant(self.format.scale_log))
        return emit_place(b, scales, index, self.format.scale_size // parts)

    def _term(self, b: Builder, here: Value, token: int) -> Value:
        return b.add(here, int_constant(self.tokens * GROUP * self.planes + 4 * token))

    def _seed(self, b: Builder, here: Value, token: int, part: int) -> Value:
        """Return the address of the dot product's initial value, -(offset * sum of the codes)."""
        term = self._term(b, here, token)
        if not self.format.shares_panel:
            return term
        if self.parts == 1:
            part = _WHOLE
        return b.add(term, int_constant(4 * self.tokens * (2 + part)))

    def _seed_at(self, b: Builder, address: Value) -> Value:
        """Load a seed, and scale it to the offset of the format."""
        if self.format.has_deltas:
            seed = b.load(b.inttoptr(address, ir.PointerType()), align=4, typ=_I32)
            log = (TABLE_OFFSET if self.parts == 1 else HALF_OFFSET).bit_length() - 1
            return emit_splat_int(b, b.mul(b.ashr(seed, _I32(log)), _I32(self.format.offset)))
        seed = splat_i32_at(b, address)
        shift = 0 if self.scales_codes else self.format.seed_shift
        by = ir.Constant(V16I, [abs(shift)] * LANES)
        if shift < 0:
            return b.shl(seed, by)
        return b.ashr(seed, by) if shift else seed

    def _table(self, b: Builder, minima: Value) -> Value | None:
        """Return the lookup table in the form that `GroupDot` expects, or None."""
        signed = not GroupDot(b, self.kind, self.form).seeded
        if self.format.values:
            return emit_values(self.format, signed=signed)
        return emit_table(b, minima, signed=signed) if self.format.table else None

    def _parts_of(self, b: Builder, group: Value) -> list[Value]:
        """Return the addresses of a group's parts."""
        size = self.group_bytes // self.parts
        return [b.add(group, int_constant(size * part)) for part in range(self.parts)]

    def _pairs(
        self, b: Builder, places: Sequence[Value], table: Value | None, scales: Value
    ) -> LoadPair:
        """Return the function that loads a pair of quads like `emit_load_pair`.

        Codes of a table or grid are looked up, and others multiplied by their scales if
        `scales_codes`.

        Args:
            b: the builder.
            places: addresses of a group's parts, or of one of them.
            table: the result of `_table`.
            scales: address of the group's scales.
        """
        dot = GroupDot(b, self.kind, self.form)
        if self.format.grid is not None:
            return GridPairs(b, self.format, dot.form, places, signed=not dot.seeded).pair
        if self.scales_codes:
            factors = emit_code_scales(b, self.format, scales)
            return functools.partial(emit_scaled_pair, b, self.format, places[0], factors)

        def load(pair: int) -> tuple[Value, Value]:
            part, own = divmod(pair, self.quads // 2)
            if table is None:
                return emit_load_pair(b, self.format, places[part], own)
            return emit_table_pair(b, dot.form, table, places[part], own)

        return load

    def _dots(
        self,
        b: Builder,
        here: Value,
        loaders: Sequence[LoadPair],
        part: int,
    ) -> list[list[Value]]:
        """Return the integer sums of one part of a group, indexed [tile][token].

        Args:
            b: the builder.
            here: address of the group's cell in the panel.
            loaders: result of `_pairs` for the group of each tile.
            part: index of the part.
        """
        zero = ir.Constant(V16I, [0] * LANES)
        seeds = [zero] * self.tokens
        if self.format.offset:
            seeds = [
                self._seed_at(b, self._seed(b, here, token, part)) for token in range(self.tokens)
            ]
        # A fine code is FINE_BASE * first + second, so the seed belongs to the second plane.
        starts = [[zero] * self.tokens, seeds] if self.fine else [seeds]
        multiply = self._in_pairs if self.takes_pairs else self._one_by_one
        return [
            [self._joined(b, [plane[token] for plane in planes]) for token in range(self.tokens)]
            for planes in multiply(b, here, loaders, part, starts)
        ]

    def _codes_at(self, b: Builder, here: Value, plane: int, token: int, quad: int) -> Value:
        """Return the address of a token's 4 codes."""
        return b.add(here, int_constant((plane * self.tokens + token) * GROUP + 4 * quad))

    def _one_by_one(
        self,
        b: Builder,
        here: Value,
        loaders: Sequence[LoadPair],
        part: int,
        starts: Sequence[Sequence[Value]],
    ) -> list[list[list[Value]]]:
        """Return the sums [tile][plane][token] of one part of a group, for each token alone."""
        dot = GroupDot(b, self.kind, self.form)
        states = [
            [[dot.start(seed) for seed in plane] for plane in starts] for _ in range(self.tiles)
        ]
        for pair in range(self.quads // 2):
            loaded = [load(part * self.quads // 2 + pair) for load in loaders]
            for half in range(2):
                quads = [dot.prepare(two[half]) for two in loaded]
                number = part * self.quads + 2 * pair + half
                for plane in range(self.planes):
                    for token in range(self.tokens):
                        x = splat_i32_at(b, self._codes_at(b, here, plane, token, number))
                        for state, quad in zip(states, quads, strict=True):
                            state[plane][token] = dot.add(state[plane][token], quad, x)
        return [
            [
                [dot.sums(one, seed) for one, seed in zip(*both, strict=True)]
                for both in zip(state, starts, strict=True)
            ]
            for state in states
        ]

    def _in_pairs(
        self,
        b: Builder,
        here: Value,
        loaders: Sequence[LoadPair],
        part: int,
        starts: Sequence[Sequence[Value]],
    ) -> list[list[list[Value]]]:
        """Return the same sums as `_one_by_one`, for pairs of tokens."""
        dot = PairDot(b, self.kind)
        firsts = range(0, self.tokens, 2)
        states = [[[dot.start() for _ in firsts] for _ in starts] for _ in range(self.tiles)]
        for pair in range(self.quads // 2):
            quads = [dot.prepare(*load(part * self.quads // 2 + pair)) for load in loaders]
            number = part * self.quads + 2 * pair
            for plane in range(self.planes):
                for index, first in enumerate(firsts):
                    codes = [
                        load_i64(b, self._codes_at(b, here, plane, token, number))
                        for token in (first, first + 1)
                    ]
                    x = dot.tokens(*codes)
                    for state, rows in zip(states, quads, strict=True):
                        state[plane][index] = dot.add(state[plane][index], rows, x)
        return [
            [
                [
                    one
                    for first, sums in zip(firsts, plane, strict=True)
                    for one in dot.sums(sums, seeds[first : first + 2])
                ]
                for plane, seeds in zip(state, starts, strict=True)
            ]
            for state in states
        ]

    def _joined(self, b: Builder, planes: Sequence[Value]) -> Value:
        """Combine two planes to FINE_BASE * first + second, or return the only plane."""
        if not self.fine:
            return planes[0]
        shifted = b.shl(planes[0], ir.Constant(V16I, [(FINE_BASE + 1).bit_length() - 1] * LANES))
        return b.add(b.sub(shifted, planes[0]), planes[1])

    def _add_group(
        self,
        b: Builder,
        here: Value,
        sums: Sequence[Sequence[Value]],
        totals: Sequence[Sequence[Value]],
        scales: Sequence[Scales],
    ) -> None:
        """Add a group, or half of it, to the float32 sums, [tile][token].

        Args:
            b: the builder.
            here: address of the group's cell in the panel.
            sums: stack slots of <16 x float>.
            totals: <16 x float>, integer sums of the group.
            scales: scales of each tile's rows.
        """
        for token in range(self.tokens):
            term = self._term(b, here, token)
            minima_terms = self._minima_terms(b, term)
            for tile, slots in enumerate(sums):
                result = self._epilogue(
                    b, totals[tile][token], term, minima_terms, scales[tile], b.load(slots[token])
                )
                b.store(result, slots[token])

    def _epilogue(
        self,
        b: Builder,
        total: Value,
        term: Value,
        minima_terms: Sequence[Value],
        scales: Scales,
        sums: Value,
    ) -> Value:
        """Add the sums of a group, or of half of it, to the float outputs.

        All integer weights use this epilogue. `reference.linear.linear_int` is its NumPy
        equivalent.

        Args:
            b: the builder.
            total: sums of 16 rows for one token, integers in float32.
            term: address of the token's term, which the scales follow.
            minima_terms: the token's factor of each of the minima; see `_minima_terms`.
            scales: scales and minima of 16 rows.
            sums: outputs accumulated so far.
        """
        factors, minima = scales
        scale = splat_f32_at(b, b.add(term, int_constant(4 * self.tokens)))
        result = emit_fma(b, b.fmul(total, scale), factors, sums)
        for minima_term, low in zip(minima_terms, minima, strict=True):
            result = emit_fma(b, minima_term, low, result)
        return result

    def _minima_terms(self, b: Builder, term: Value) -> list[Value]:
        """Return a token's factors of the minima of a group, or of its halves, in all lanes.

        Args:
            b: the builder.
            term: address of the token's term.
        """
        if not self.format.minima:
            return []
        if not self.format.minima_in_halves:
            return [splat_f32_at(b, term)]
        scale = splat_f32_at(b, b.add(term, int_constant(4 * self.tokens)))
        seeds = [
            splat_i32_at(b, b.add(term, int_constant((8 + 4 * half) * self.tokens)))
            for half in range(2)
        ]
        return [b.fmul(b.sitofp(seed, V16), scale) for seed in seeds]
