"""Grids of GGUF's lattice types: magnitudes or codes of 4 or 8 weights for each index.

`grids.npz` holds them as bytes, by the name of the weight format; iq1s and iq1m have the same grid.
The layout of indices and signs is in weight_formats.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from kvboost_edge.kernels.integers import V16I, int_constant
from kvboost_edge.kernels.lazy import cgutils
from kvboost_edge.kernels.linear.grid_permutes import PermutedGrid, permutes_grid
from kvboost_edge.kernels.linear.weight_formats import GROUP, TABLE_OFFSET, WeightFormat
from kvboost_edge.kernels.vectors import I32, I64, LANES

__all__ = ["GridPairs", "grid_of"]

_I8 = ir.IntType(8)
_V64B = ir.VectorType(_I8, 64)
_V16B = ir.VectorType(_I8, LANES)
_POINTER = ir.PointerType()
_QUAD_SIGNS = LANES // 2  # bytes of the signs of a quad in 16 rows
_512_BIT_FORMS = ("vnni512", "amx")

Value = Any
Builder = Any


class _Gather:
    """Instruction that loads entries of a grid from addresses that differ from lane to lane.

    Attributes:
        name: LLVM name of the intrinsic.
        lanes: number of entries of one call.
        entry: type of an entry.
    """

    def __init__(self, name: str, lanes: int, bits: int) -> None:
        self.name = name
        self.lanes = lanes
        self.entry = ir.IntType(bits)


# Bytes of an entry -> gather for AVX-512.
_GATHERS = {
    4: _Gather("llvm.x86.avx512.mask.gather.dpi.512", 16, 32),
    8: _Gather("llvm.x86.avx512.mask.gather.dpq.512", 8, 64),
}


@functools.cache
def grid_of(name: str) -> npt.NDArray[np.uint8]:
    """Return the grid of a weight format, uint8 [entries, weights of an entry]."""
    if name == "iq1m":
        return grid_of("iq1s")
    with np.load(Path(__file__).with_name("grids.npz")) as grids:
        found: npt.NDArray[np.uint8] = grids[name]
    return found


class GridPairs:
    """Weights of a group, or of a part of it, in pairs of quads, before scaling.

    Weights of formats with deltas are unsigned codes.

    Args:
        b: the builder.
        weight_format: a format with a grid.
        form: dot-product variant, which selects the instructions.
        places: addresses of the group's parts, or of one of them.
        signed: False to add TABLE_OFFSET to the weights.
    """

    def __init__(
        self,
        b: Builder,
        weight_format: WeightFormat,
        form: str,
        places: Sequence[Value],
        *,
        signed: bool,
    ) -> None:
        self._b = b
        self._format = weight_format
        self._form = form
        self._places = places
        self._signed = signed
        self._permuted = None
        if permutes_grid(weight_format, form):
            grid = grid_of(weight_format.name)
            self._permuted = PermutedGrid(b, weight_format, grid, places, signed=signed)

    def pair(self, pair: int) -> tuple[Value, Value]:
        """Load quads 2 * pair and 2 * pair + 1 of the places, as <16 x i32> each."""
        b = self._b
        part, own = divmod(pair, GROUP // 8 // self._format.parts)
        at = self._places[part]
        if self._format.has_deltas:
            return _emit_delta_pair(b, self._format, self._form, at, own)
        if self._permuted is not None:
            magnitudes = [self._permuted.quad(2 * pair + half) for half in range(2)]
        else:
            magnitudes = self._gathered(at, own)
        signs = b.add(at, int_constant(LANES * self._format.part_entries))
        quads = [
            _emit_signed(
                b, quad, b.add(signs, int_constant(_QUAD_SIGNS * (2 * own + half))), self._form
            )
            for half, quad in enumerate(magnitudes)
        ]
        return quads[0], quads[1]

    def _gathered(self, at: Value, pair: int) -> list[Value]:
        """Return the entries of two quads of the part at an address, <64 x i8> each."""
        b = self._b
        size = self._format.entry_weights
        table = _table(b, self._format, signed=self._signed)
        if size == 4:
            return [
                b.bitcast(self._entries(table, at, entry), _V64B)
                for entry in (2 * pair, 2 * pair + 1)
            ]
        entries = b.bitcast(self._entries(table, at, pair), ir.VectorType(I32, 2 * LANES))
        halves = [ir.Constant(V16I, list(range(half, 2 * LANES, 2))) for half in range(2)]
        return [b.bitcast(b.shuffle_vector(entries, entries, half), _V64B) for half in halves]

    def _entries(self, table: Value, at: Value, entry: int) -> Value:
        indices = _emit_indices(self._b, self._format, self._form, at, entry)
        return _emit_entries(self._b, table, indices, self._form, self._format.entry_weights)


def _emit_delta_pair(
    b: Builder, weight_format: WeightFormat, form: str, at: Value, entry: int
) -> tuple[Value, Value]:
    """Load the codes of one entry of a format with deltas, as two quads."""
    # In the module's copy of the grid, an entry has 4 bytes with half of the codes in nibbles.
    halves = grid_of(weight_format.name) // np.uint8(2)
    nibbles = halves[:, :4] | halves[:, 4:] << np.uint8(4)
    table = _constant(b, ".grid.iq1", nibbles)
    entries = weight_format.part_entries
    is_whole = weight_format.parts == 1
    bits = 3 if is_whole else 4  # of an entry, behind the low bits of the indices
    rows = ir.VectorType(ir.IntType(16 if is_whole else 8), LANES)
    place = b.inttoptr(b.add(at, int_constant(LANES * entries)), _POINTER)
    more = b.zext(b.load(place, align=1, typ=rows), V16I)
    low = b.load(b.inttoptr(b.add(at, int_constant(LANES * entry)), _POINTER), align=1, typ=_V16B)
    shift = 8 - bits * entry
    above = _shifted(b, more, -shift)
    indices = b.or_(b.zext(low, V16I), b.and_(above, _splat(0x700)))
    found = _emit_entries(b, table, indices, form, 4)
    sign = 1 << (15 if is_whole else bits * entry + 3)
    is_lower = b.icmp_signed("!=", b.and_(more, _splat(sign)), _splat(0))
    # All nibbles are odd, and this subtracts 1 from each.
    found = b.select(is_lower, b.xor(found, _splat(0x11111111)), found)
    mask = _splat(0x1E1E1E1E)
    return b.and_(_shifted(b, found, -1), mask), b.and_(_shifted(b, found, 3), mask)


def _splat(value: int) -> ir.Constant:
    return ir.Constant(V16I, [value] * LANES)


def _shifted(b: Builder, values: Value, by: int) -> Value:
    """Shift right, or left if `by` is negative."""
    return b.lshr(values, _splat(by)) if by >= 0 else b.shl(values, _splat(-by))


def _table(b: Builder, weight_format: WeightFormat, *, signed: bool) -> Value:
    """Return the module's copy of a grid as a pointer, with TABLE_OFFSET added unless `signed`."""
    name = f".grid.{weight_format.name}{'.signed' if signed else ''}"
    return _constant(b, name, grid_of(weight_format.name) + np.uint8(0 if signed else TABLE_OFFSET))


def _constant(b: Builder, name: str, values: npt.NDArray[np.uint8]) -> Value:
    """Return a pointer to the module's copy of an array, which is added if it is missing."""
    if name in b.module.globals:
        return b.module.globals[name]
    text = ir.Constant(ir.ArrayType(_I8, values.size), bytearray(values.tobytes()))
    table = ir.GlobalVariable(b.module, text.type, name)
    table.initializer = text
    table.linkage = "internal"
    table.global_constant = True
    table.align = 64
    return table


def _emit_indices(
    b: Builder, weight_format: WeightFormat, form: str, at: Value, entry: int
) -> Value:
    """Return the indices of one entry in 16 rows, <16 x i32>."""
    low = b.load(b.inttoptr(b.add(at, int_constant(LANES * entry)), _POINTER), align=1, typ=_V16B)
    found = b.zext(low, V16I)
    above = weight_format.index_bits - 8
    start = weight_format.group_bytes // weight_format.parts
    start -= LANES // 8 * above * (weight_format.part_entries - entry)
    for bit in range(above):
        place = b.add(at, int_constant(start + LANES // 8 * bit))
        is_set = _emit_bits(b, place, LANES, form)
        more = b.or_(found, ir.Constant(V16I, [256 << bit] * LANES))
        found = b.select(is_set, more, found)
    return found


def _emit_entries(b: Builder, table: Value, indices: Value, form: str, size: int) -> Value:
    """Return the entries of `size` bytes at 16 indices, as 16 integers."""
    gather = _GATHERS[size]
    if form in _512_BIT_FORMS:
        lanes = ir.VectorType(gather.entry, gather.lanes)
        arguments = [lanes, _POINTER, ir.VectorType(I32, gather.lanes)]
        arguments += [ir.VectorType(ir.IntType(1), gather.lanes), I32]
        function = cgutils.get_or_insert_function(
            b.module, ir.FunctionType(lanes, arguments), gather.name
        )
        pointer = b.bitcast(table, _POINTER)
        every = ir.Constant(arguments[3], [1] * gather.lanes)
        found = []
        for first in range(0, LANES, gather.lanes):
            order = ir.Constant(arguments[2], list(range(first, first + gather.lanes)))
            some = b.shuffle_vector(indices, indices, order)
            none = ir.Constant(lanes, [0] * gather.lanes)
            found.append(b.call(function, [none, pointer, some, every, I32(size)]))
        if len(found) == 1:
            return found[0]
        return b.shuffle_vector(*found, ir.Constant(V16I, list(range(LANES))))
    start = b.ptrtoint(table, I64)
    entries = ir.Constant(ir.VectorType(gather.entry, LANES), ir.Undefined)
    for lane in range(LANES):
        index = b.zext(b.extract_element(indices, I32(lane)), I64)
        place = b.inttoptr(b.add(start, b.mul(index, int_constant(size))), _POINTER)
        entry = b.load(place, align=size, typ=gather.entry)
        entries = b.insert_element(entries, entry, I32(lane))
    return entries


def _emit_signed(b: Builder, quad: Value, place: Value, form: str) -> Value:
    """Negate the bytes of <64 x i8> whose bit at an address is set, and return <16 x i32>."""
    is_negative = _emit_bits(b, place, 64, form)
    zeros = ir.Constant(_V64B, [0] * 64)
    return b.bitcast(b.select(is_negative, b.sub(zeros, quad), quad), V16I)


def _emit_bits(b: Builder, place: Value, count: int, form: str) -> Value:
    """Return `count` bits at an address, lowest first, as a vector of i1."""
    pointer = b.inttoptr(place, _POINTER)
    if form in _512_BIT_FORMS:
        bits = b.load(pointer, align=1, typ=ir.IntType(count))
        return b.bitcast(bits, ir.VectorType(ir.IntType(1), count))
    # Without mask registers, each byte is repeated for its bits.
    few = b.load(pointer, align=1, typ=ir.VectorType(_I8, count // 8))
    order = ir.Constant(ir.VectorType(I32, count), [lane // 8 for lane in range(count)])
    many = b.shuffle_vector(few, few, order)
    own = ir.Constant(many.type, [1 << lane % 8 for lane in range(count)])
    return b.icmp_unsigned("==", b.and_(many, own), own)
