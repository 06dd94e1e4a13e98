"""The formats of packed weights, and their layout in memory. What differs between formats is said
in `FORMATS` alone: kernels, packing and plans are derived from it.

A row is cut into groups of 32 inputs, of which each has a scale. A stored weight is

    scale * code - minimum           where the format has minima
    scale * (code - offset)
    scale * table[code]              where it has a table

Tiles are 16 rows; a quad is 4 inputs of 16 rows, a line of 64 bytes. Codes of 8 bits: 8 lines for a
group, a quad each. Others: lines of two quads, the low nibbles quad 2j, the high ones quad 2j + 1;
then, of codes of more than 4 bits, a line with the bits above the nibbles, quad k in the (bits - 4)
bits from (4 + (bits - 4) * k) % 8 on of a byte. Where the two halves of a group have scales of
their own (`parts`), each half has its lines of nibbles and then its line of the bits above.

Scales are float16 [tile][group][16], and minima likewise. Formats with blocks of 256 inputs have 32
bytes of scales a group, and float16 numbers for every 8 groups where others have minima:

    with minima   uint8 scales [16], uint8 minima [16]   float16 d [16], dmin [16]
                  weight: d * scale * code - dmin * minimum
    two parts     int8 scales [2][16], one a half        float16 d [16]
                  weight: d * scale * (code - offset)

The products of d and a scale, and of dmin and a minimum, are exact in float32. A table is 16 signed
bytes, once for each tile where others have minima: rows of one matrix may have different tables.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.vectors import KIND_BF16, KIND_F32, LANES

__all__ = [
    "BLOCK_GROUPS",
    "FORMATS",
    "FORMAT_OF",
    "GROUP",
    "HALF_OFFSET",
    "INT_KINDS",
    "SCALE_BYTES",
    "TABLE_BYTES",
    "TABLE_OFFSET",
    "QuantizationFit",
    "WeightFormat",
    "group_bytes",
    "high_shift",
    "high_shift_kernel",
    "minima_bytes",
    "per_kind",
]

GROUP = 32
_BLOCK_LOG = 3
BLOCK_GROUPS = 1 << _BLOCK_LOG
"""Groups of a block of 256 inputs."""
SCALE_BYTES = 2 * LANES
"""Bytes of a group's scales, of every quantized format."""
TABLE_BYTES = 16
"""Bytes of a tile's table."""
HALF_OFFSET = 32
TABLE_OFFSET = 128
"""Offsets of formats with two parts and of those with a table: their panels have seeds for these,
see panel.py.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class QuantizationFit:
    """How floats are fitted to a format.

    Attributes:
        deltas: first scales: symmetric -largest / (offset + delta), where largest is the signed
            weight of the greatest magnitude, so that it takes the code without a twin; with a
            minimum (max - min) / (highest code + delta).
        rounds: times each of them is rounded and fitted.
    """

    deltas: tuple[float, ...]
    rounds: int


@dataclasses.dataclass(frozen=True, slots=True)
class WeightFormat:
    """A format of packed weights.

    Attributes:
        kind: its number in kernels, below 16.
        bits: of a stored code; 16 and 32: floats.
        offset: added to signed weights, so that codes are unsigned.
        parts: of a group with scales of their own.
        minima: whether a scaled code has a minimum taken off; such codes have no offset.
        table: whether codes are looked up in a table.
        block_bytes: of a block of 256 inputs in a file; 0: scales are float16.
        fit: how floats are fitted; None: weights come from files that hold them already.
        exact_in: other formats in which every weight keeps its value.
    """

    name: str
    kind: int
    bits: int
    offset: int = 0
    parts: int = 1
    minima: bool = False
    table: bool = False
    block_bytes: int = 0
    fit: QuantizationFit | None = None
    exact_in: tuple[str, ...] = ()

    @property
    def is_float(self) -> bool:
        return self.bits > 8

    @property
    def packs_floats(self) -> bool:
        """Whether float weights can be packed in it."""
        return self.is_float or self.fit is not None

    @property
    def is_wide(self) -> bool:
        """Whether unpacked weights are bytes of any value."""
        return self.bits == 8 or self.table

    @property
    def shares_panel(self) -> bool:
        """Whether its matrices read panels with seeds: those of all these formats read one."""
        return self.block_bytes > 0 or self.table

    @property
    def lowest(self) -> int:
        """The lowest code, without the offset."""
        return -self.offset

    @property
    def highest(self) -> int:
        """The highest code, without the offset."""
        return (1 << self.bits) - 1 - self.offset

    @property
    def largest(self) -> float:
        """The largest magnitude of a weight that it can hold: scales and minima must be finite
        float16, and bfloat16 rounds what is above its largest number to infinity.
        """
        if self.bits == 16:
            return float.fromhex("0x1.fep127")
        if self.fit is None:  # what a file holds
            return float(np.finfo(np.float32).max)
        return 65504.0 if self.minima else 65504.0 * self.highest

    @property
    def group_bytes(self) -> int:
        """Bytes of the codes of a group."""
        return GROUP * LANES * self.bits // 8

    @property
    def minima_size(self) -> int:
        """Bytes of 16 rows in the place of minima."""
        if self.table:
            return TABLE_BYTES
        return 2 * LANES * (self.minima + (self.block_bytes > 0))

    @property
    def minima_log(self) -> int:
        """The binary logarithm of how many groups they are for; of a table it is all."""
        if self.table:
            return 62
        return _BLOCK_LOG if self.block_bytes else 0

    def minima_bytes(self, groups: int) -> int:
        """Bytes of what a tile has in the place of minima."""
        return -(-groups >> self.minima_log) * self.minima_size


# From narrow to wide: a matrix of several tensors takes the first format that holds all of them.
# More first scales or rounds of a fit lower the error by less than 1% of itself.
FORMATS = {
    form.name: form
    for form in (
        WeightFormat(
            "int4",
            kind=4,
            bits=4,
            offset=8,
            fit=QuantizationFit((-1.2, -0.6, 0.0, 0.6, 1.2), 3),
            exact_in=("int4t", "int4-asym", "int8"),
        ),
        WeightFormat("int4t", kind=9, bits=4, offset=TABLE_OFFSET, table=True, exact_in=("int8",)),
        WeightFormat(
            "int4-asym",
            kind=5,
            bits=4,
            minima=True,
            fit=QuantizationFit((-0.5, 0.375, 1.25, 2.125, 3.0), 3),
        ),
        WeightFormat("q4k", kind=6, bits=4, minima=True, block_bytes=144, exact_in=("q5k",)),
        WeightFormat("q5k", kind=7, bits=5, minima=True, block_bytes=176),
        WeightFormat("q6k", kind=8, bits=6, offset=HALF_OFFSET, parts=2, block_bytes=210),
        WeightFormat(
            "int8",
            kind=3,
            bits=8,
            offset=128,
            fit=QuantizationFit((-1.5, -1.0, -0.5, 0.0, 0.5, 1.0), 2),
        ),
        WeightFormat("bf16", kind=KIND_BF16, bits=16),
        WeightFormat("f32", kind=KIND_F32, bits=32),
    )
}
"""By name."""
FORMAT_OF = {form.kind: form for form in FORMATS.values()}
"""By kind."""
INT_KINDS = tuple(kind for kind, form in FORMAT_OF.items() if not form.is_float)


def per_kind(name: str) -> npt.NDArray[np.int64]:
    """Return a property of every kind, for kernels that get the kind with a matrix."""
    values = [getattr(FORMAT_OF.get(kind), name, 0) for kind in range(max(FORMAT_OF) + 1)]
    return np.array(values, dtype=np.int64)


_GROUP_BYTES = per_kind("group_bytes")
_MINIMA_SIZE = per_kind("minima_size")
_MINIMA_LOG = per_kind("minima_log")


def high_shift(bits: int, quad: int) -> Any:
    """How far right the bits above a quad's nibbles are shifted to stand above them; negative: to
    the left. `quad`: of the group, or of a part of it.
    """
    return (4 + (bits - 4) * quad) % 8 - 4


@kernel
def group_bytes(kind: int) -> Any:
    """Bytes of the codes of a group."""
    return _GROUP_BYTES[kind]


@kernel
def minima_bytes(kind: int, groups: int) -> Any:
    """Bytes of what a tile has in the place of minima."""
    return -(-groups >> _MINIMA_LOG[kind]) * _MINIMA_SIZE[kind]


high_shift_kernel = kernel(high_shift)
"""The same inside kernels."""
