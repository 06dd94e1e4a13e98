"""Lookups in grids by byte permutations, for processors with AVX512-VBMI.

A gather loads 8 or 16 entries of a grid, one by one, and takes most of the time of a decode step.
Here, each weight of an entry has the number of its magnitude: 2 bits for each of 8 weights, or 3
bits for each of 4. An entry then has two bytes. Each byte has a table of 256 or 512 bytes, which
`vpermb` looks up in parts of 64, so 64 entries take 4 or 8 permutations per byte. `vpmultishiftqb`
moves the numbers of a quad's weights to bytes, and another `vpermb` looks up their magnitudes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from kvboost_edge.kernels.integers import has_byte_permute, int_constant
from kvboost_edge.kernels.lazy import cgutils
from kvboost_edge.kernels.linear.weight_formats import TABLE_OFFSET, WeightFormat
from kvboost_edge.kernels.vectors import I64, LANES

__all__ = ["PermutedGrid", "permutes_grid"]

_I1, _I8, _I32 = (ir.IntType(bits) for bits in (1, 8, 32))
_V64B = ir.VectorType(_I8, 64)
_POINTER = ir.PointerType()
_TABLE = 64  # bytes that `vpermb` looks up
_EACH = _TABLE // LANES  # entries of 16 rows in a vector of indices
_MOST = 512  # entries; with more, a gather takes no longer

Value = Any
Builder = Any


def permutes_grid(weight_format: WeightFormat, form: str) -> bool:
    """Return whether a variant looks up a format's grid by permutations."""
    return (
        form in ("vnni512", "amx")
        and has_byte_permute()
        and not weight_format.has_deltas
        and 1 << weight_format.index_bits <= _MOST
    )


def _numbered(
    grid: npt.NDArray[np.uint8],
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Return the two bytes of each entry, uint8 [2, entries], and the magnitudes by number."""
    magnitudes = np.unique(grid)
    numbers = np.searchsorted(magnitudes, grid).astype(np.uint8)
    half = grid.shape[1] // 2
    shifts = np.arange(half, dtype=np.uint8) * np.uint8(_bits(2 * half))
    both = numbers.reshape(len(grid), 2, half) << shifts
    return np.ascontiguousarray(np.bitwise_or.reduce(both, axis=2).T), magnitudes


def _bits(weights: int) -> int:
    """Return the bits of a magnitude's number in a grid whose entries have 4 or 8 weights."""
    return 2 if weights == 8 else 3


def _bytes(values: Sequence[int]) -> ir.Constant:
    return ir.Constant(_V64B, [int(value) for value in values])


class PermutedGrid:
    """Quads of weights of a group or a part of it, looked up by permutations.

    Args:
        b: the builder.
        weight_format: a format that `permutes_grid`.
        grid: magnitudes of the weights, uint8 [entries, weights of an entry].
        places: addresses of the group's parts, or of one of them.
        signed: False to add TABLE_OFFSET to the weights.
    """

    def __init__(
        self,
        b: Builder,
        weight_format: WeightFormat,
        grid: npt.NDArray[np.uint8],
        places: Sequence[Value],
        *,
        signed: bool,
    ) -> None:
        self._b = b
        self._format = weight_format
        self._places = places
        self._planes, magnitudes = _numbered(grid)
        values = magnitudes.astype(int) + (0 if signed else TABLE_OFFSET)
        count = 1 << _bits(weight_format.entry_weights)
        # Only the low bits of a byte are a number. The others that `vpermb` reads do not matter.
        self._values = _bytes([values[min(i % count, len(values) - 1)] for i in range(_TABLE)])
        self._found: dict[int, list[Value]] = {}

    def quad(self, number: int) -> Value:
        """Return the magnitudes of a quad in 16 rows, <64 x i8>."""
        if self._format.entry_weights == 8:
            entry, plane = divmod(number, 2)
            source = self._looked_up(entry // _EACH)[plane]
            places = [LANES * (entry % _EACH) + row for row in range(LANES)]
            order = [places[2 * (at // 8) + at % 2] for at in range(_TABLE)]
            shifts = [2 * (at % 8) for at in range(_TABLE)]
        else:
            first, last = self._looked_up(number // _EACH)
            # The bytes of the two planes are in different halves; see `_looked_up`.
            half = number % _EACH // 2
            own = [_I1(int(at // 32 == half)) for at in range(_TABLE)]
            source = self._b.select(ir.Constant(ir.VectorType(_I1, _TABLE), own), first, last)
            start = LANES * (number % _EACH)
            order = [
                (start + 2 * (at // 8) + at % 4 // 2 + 32 * (at % 2)) % _TABLE
                for at in range(_TABLE)
            ]
            shifts = [8 * (at % 8 // 2) + 3 * (at % 2) for at in range(_TABLE)]
        spread = self._permuted(source, _bytes(order))
        numbers = self._call("llvm.x86.avx512.pmultishift.qb.512", _bytes(shifts), spread)
        return self._permuted(self._values, numbers)

    def _looked_up(self, vector: int) -> list[Value]:
        """Return the two bytes of 64 entries, each as <64 x i8>.

        With 4 weights per entry, the halves of the second vector are exchanged.
        """
        found = self._found.get(vector)
        if found is None:
            indices = self._indices(vector)
            bits = self._high_bits(vector)
            found = [self._plane(0, indices, bits)]
            if self._format.entry_weights == 4:
                order = [*range(32, 64), *range(32)]
                indices = self._exchanged(indices, order)
                bits = [self._exchanged(bit, order) for bit in bits]
            found.append(self._plane(1, indices, bits))
            self._found[vector] = found
        return found

    def _exchanged(self, vector: Value, order: Sequence[int]) -> Value:
        places = ir.Constant(ir.VectorType(_I32, _TABLE), list(order))
        return self._b.shuffle_vector(vector, vector, places)

    def _indices(self, vector: int) -> Value:
        """Load the low bytes of 64 indices. Those of one of two parts are repeated."""
        b = self._b
        if self._format.parts == 1:
            place = b.add(self._places[0], int_constant(_TABLE * vector))
            return b.load(b.inttoptr(place, _POINTER), align=1, typ=_V64B)
        half = ir.VectorType(_I8, _TABLE // 2)
        parts = [b.load(b.inttoptr(at, _POINTER), align=1, typ=half) for at in self._places]
        order = ir.Constant(ir.VectorType(_I32, _TABLE), list(range(_TABLE)))
        return b.shuffle_vector(parts[0], parts[-1], order)

    def _high_bits(self, vector: int) -> list[Value]:
        """Return bit 8 of 64 indices as <64 x i1>, if the format has it."""
        if self._format.index_bits == 8:
            return []
        b = self._b
        size = self._format.group_bytes // self._format.parts
        above = LANES // 8 * (self._format.part_entries - _EACH * vector)
        kind = ir.IntType(_TABLE // self._format.parts)
        words = [
            b.load(b.inttoptr(b.add(at, int_constant(size - above)), _POINTER), align=1, typ=kind)
            for at in self._places
        ]
        word = b.zext(words[0], I64) if self._format.parts > 1 else words[0]
        if len(words) > 1:
            word = b.or_(word, b.shl(b.zext(words[1], I64), int_constant(_TABLE // 2)))
        return [b.bitcast(word, ir.VectorType(_I1, _TABLE))]

    def _plane(self, plane: int, indices: Value, high: Sequence[Value]) -> Value:
        """Look up one byte of the entries at 64 indices, whose bits above 7 are `high`."""
        b = self._b
        table = self._planes[plane]
        found = [
            self._permuted(_bytes(table[start : start + _TABLE]), indices)
            for start in range(0, len(table), _TABLE)
        ]
        none = _bytes([0] * _TABLE)
        sixth = b.icmp_signed("!=", b.and_(indices, _bytes([64] * _TABLE)), none)
        for bit in (sixth, b.icmp_signed("<", indices, none), *high):
            found = [
                b.select(bit, upper, lower)
                for lower, upper in zip(found[::2], found[1::2], strict=True)
            ]
        return found[0]

    def _permuted(self, table: Value, indices: Value) -> Value:
        return self._call("llvm.x86.avx512.permvar.qi.512", table, indices)

    def _call(self, name: str, first: Value, second: Value) -> Value:
        kind = ir.FunctionType(_V64B, [_V64B, _V64B])
        function = cgutils.get_or_insert_function(self._b.module, kind, name)
        return self._b.call(function, [first, second])
