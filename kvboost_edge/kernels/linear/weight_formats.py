"""Formats of packed weights and their layouts; kernels, packing and plans derive from `FORMATS`.

Each row consists of groups of 32 inputs, and each group has a scale. A weight is one of

    scale * (code - offset)
    scale * code - minimum           format with minima
    scale * table[code]              format with a table

A tile is 16 rows. A quad is 4 inputs of 16 rows, stored as a line of 64 bytes. Each lane's 4 bytes
are the operand of `vpdpbusd` or `sdot`. 8-bit codes have 8 lines per group, one per quad. For codes
of 4 to 6 bits, a line holds two quads: quad 2j in the low nibbles, quad 2j + 1 in the high nibbles.
A line of 2-bit codes holds four quads, from the lowest to the highest bits of its bytes, and a line
of 1-bit codes holds all eight quads of a group.

3-bit codes have a line of their low bits per half of a group, like 2-bit codes, and then 32 bytes
with their high bits: 2 bytes of each row. Byte 0 has the high bits of inputs 0 of the four quads in
its low nibble, and those of inputs 2 in its high nibble. Byte 1 has those of inputs 1 and 3.

Codes of more than 4 bits have one more line per part, which holds the bits above the nibbles. Quad
k has the (bits - 4) bits from bit (4 + (bits - 4) * k) % 8 of a byte. In formats with two `parts`,
each half of a group has its own scales, lines of nibbles and line of high bits.

1-bit codes are widened to 0 and 2, so with an offset of 1 a weight is -scale or scale.

Scales and minima are float16 [tile][group][16]. If `scale_groups` groups share a scale, there is
one scale for each run of that many groups, of which the last may be shorter. Block formats (256
inputs per block) have 32 bytes of scales per group. Instead of minima, they have float16 numbers
per 8 groups:

    with minima   uint8 scales [16], uint8 minima [16]   float16 d [16], dmin [16]
                  weight: d * scale * code - dmin * minimum
    two parts     int8 scales [2][16], one per half      float16 d [16]
                  weight: d * scale * (code - offset)
    both          uint8 [2][16], one per half: scale     float16 d [16], dmin [16]
                  in the low nibble, minimum in the
                  high nibble
                  weight: d * scale * code - dmin * minimum

The products d * scale and dmin * minimum are exact in float32. For codes of 2 and 3 bits, kernels
sum scale * (code - offset) times the inputs over a whole group as integers, which is then
multiplied by d.

Formats with a table have 16 signed bytes per tile instead of minima, so rows of one matrix may have
different tables.

Formats with a grid are block formats too. An index of 8 to 10 bits selects an entry of the grid,
the magnitudes of 4 or 8 consecutive inputs, and each input has a sign:

    float16 d [16] per 8 groups, 4-bit scales
    weight: d * eighths / 8 * (2 * scale + 1) * magnitude, or minus that

A group, or each of its two parts, consists of

    uint8 [entries][16]           the low 8 bits of the indices
    bits [quads][16][4]           1 for a negative weight
    bits [entries][bits above][16]   the bits of the indices above the low 8

In formats with deltas, the entries of the grid are codes, and each entry has a delta instead of
signs. It adds 0 to all codes of the entry, or -2. `offset` is subtracted from the sum:

    weight: d / 8 * (2 * scale + 1) * (code + delta - offset)

A group of iq1s, or a part of iq1m, consists of

    uint8 [entries][16]           the low 8 bits of the indices
    iq1s: uint16 [16]             bits 8 to 10 of each index, the scale (3 bits), and 1 bit that is
                                  set if all deltas of the group are -2
    iq1m: uint8 [16]              for each entry bits 8 to 10 of the index, and a bit that is set if
                                  the delta is -2

Bits start with the lowest of a byte. A scale is a nibble. If a group has one scale, those of two
rows share a byte, the first row in the low nibble. If it has two, those of a row share a byte.
The scales of iq1s are in its codes, and no others are stored.

nvfp4 stores codes like int4, and has two scales per group, 8-bit floats without a sign (E4M3: 4
bits of exponent, 3 bits of mantissa). Instead of minima, each row has a factor:

    float8 scales [2][16], one per half     float32 factors [16] per tile, times 2 ** 7
    weight: factor * scale / 2 * E2M1[code]

A scale's bits, shifted left by 7, are the float16 number scale / 2 ** 8.

Packed files align the codes, scales and minima of each matrix to 64 bytes.
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
    "E2M1",
    "FACTOR_SCALE",
    "FORMATS",
    "FORMAT_OF",
    "GROUP",
    "HALF_OFFSET",
    "INT_KINDS",
    "MAX_KINDS",
    "SCALE_BYTES",
    "TABLE_BYTES",
    "TABLE_OFFSET",
    "GridCodes",
    "QuantizationFit",
    "WeightFormat",
    "code_shift",
    "code_shift_kernel",
    "group_bytes",
    "high_shift",
    "high_shift_kernel",
    "minima_bytes",
    "per_kind",
    "scale_bytes",
]

GROUP = 32
_BLOCK_LOG = 3
BLOCK_GROUPS = 1 << _BLOCK_LOG
"""Groups per block of 256 inputs."""
SCALE_BYTES = 2 * LANES
"""Size of the scales of 16 rows in bytes, equal for all quantized formats without a grid."""
TABLE_BYTES = 16
"""Size of a tile's lookup table in bytes."""
MAX_KINDS = 32
"""Bound of the numbers of weight formats in kernels."""
HALF_OFFSET = 32
TABLE_OFFSET = 128
"""Code offsets of formats with two parts and with a table; see panel.py for their seeds."""


E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the value of each 4-bit float (E2M1), by its bits."""
FACTOR_SCALE = 2.0**7
"""Stored factor of a row over its own, in formats with 8-bit float scales."""


@dataclasses.dataclass(frozen=True, slots=True)
class QuantizationFit:
    """Parameters for fitting floats to a format; see least_squares.py.

    Attributes:
        deltas: offsets of the initial scales. For symmetric formats, an initial scale is -largest /
            (offset + delta), where `largest` is the signed weight with the largest magnitude. It
            then gets the code that has no counterpart of the opposite sign. For formats with
            minima, an initial scale is (max - min) / (highest code + delta).
        rounds: iterations per initial scale.
    """

    deltas: tuple[float, ...]
    rounds: int


@dataclasses.dataclass(frozen=True, slots=True)
class GridCodes:
    """Codes that are indices into a grid.

    Attributes:
        weights: number of weights of an entry, 4 or 8.
        bits: bits per index.
        eighths: scale of a weight in eighths of the block's float16 number.
        deltas: True if entries have a delta instead of signs.
    """

    weights: int
    bits: int
    eighths: int
    deltas: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class WeightFormat:
    """A format of packed weights.

    Attributes:
        name: the format's name.
        kind: number of the format in kernels, below MAX_KINDS.
        bits: bits per stored code; 16 and 32 are float formats.
        offset: added to signed weights to make codes unsigned.
        scale_groups: number of groups that share a scale, a power of two.
        parts: number of parts of a group that have their own scales, 1 or 2.
        minima: True if a minimum is subtracted from the scaled code; such codes have no offset.
        table: True if codes are looked up in a table.
        values: weights of all codes before scaling, if they are the same for all matrices.
        float8: True if scales are 8-bit floats, and each row has a float32 factor.
        grid: the indices, if codes are looked up in a grid; `bits` are those of a looked up code.
        scaled_codes: True if a code, without its offset, times the integer scale of its half of a
            group fits in a byte. A group then has one sum, of products with these scaled codes.
        block_bytes: bytes per block of 256 inputs in the file, or 0 if scales are float16.
        fit: parameters for quantizing floats; None if weights can only come from files in this
            format.
        exact_in: other formats that can represent every weight exactly.
    """

    name: str
    kind: int
    bits: int
    offset: int = 0
    scale_groups: int = 1
    parts: int = 1
    minima: bool = False
    table: bool = False
    values: tuple[int, ...] = ()
    float8: bool = False
    grid: GridCodes | None = None
    scaled_codes: bool = False
    block_bytes: int = 0
    fit: QuantizationFit | None = None
    exact_in: tuple[str, ...] = ()

    @property
    def is_float(self) -> bool:
        return self.bits > 8

    @property
    def packs_floats(self) -> bool:
        """True if float weights can be packed in this format."""
        return self.is_float or self.fit is not None

    @property
    def uses_whole_byte(self) -> bool:
        """True if unpacked weights use the full range of a byte."""
        return self.bits == 8 or self.table

    @property
    def minima_in_halves(self) -> bool:
        """True if each half of a group has its own minima."""
        return self.minima and self.parts > 1

    @property
    def shares_panel(self) -> bool:
        """True if matrices of this format read panels with seeds, which all such formats share."""
        return self.block_bytes > 0 or self.is_looked_up

    @property
    def is_looked_up(self) -> bool:
        """True if signed weights come from a table or a grid, where they have no offset."""
        has_signed = self.grid is not None and not self.has_deltas
        return self.table or bool(self.values) or has_signed

    @property
    def has_deltas(self) -> bool:
        """True if the entries of the grid have deltas."""
        return self.grid is not None and self.grid.deltas

    @property
    def scales_in_codes(self) -> bool:
        """True if a group's scales are stored behind the indices, and nowhere else."""
        return self.has_deltas and self.parts == 1

    @property
    def index_bits(self) -> int:
        """Bits per index into a grid; 0 without a grid."""
        return 0 if self.grid is None else self.grid.bits

    @property
    def entry_weights(self) -> int:
        """Number of weights of a grid's entry; 0 without a grid."""
        return 0 if self.grid is None else self.grid.weights

    @property
    def eighths(self) -> int:
        """`eighths` of the grid; 0 without a grid."""
        return 0 if self.grid is None else self.grid.eighths

    @property
    def part_entries(self) -> int:
        """Number of indices in a part of a group; 0 without a grid."""
        return 0 if self.grid is None else GROUP // self.parts // self.grid.weights

    @property
    def code_step(self) -> int:
        """Difference between neighbouring codes."""
        return 2 if self.bits == 1 else 1

    @property
    def largest_code(self) -> int:
        """Largest code, before subtracting the offset."""
        return ((1 << self.bits) - 1) * self.code_step

    @property
    def largest_operand(self) -> int:
        """Largest unsigned byte that kernels multiply; not meaningful if `uses_whole_byte`."""
        return self.offset + max(self.values) if self.values else self.largest_code

    @property
    def seed_shift(self) -> int:
        """Binary logarithm of the seeds in a panel over those of the format; see panel.py.

        It is negative if those of the format are larger.
        """
        has_halves = self.shares_panel and self.parts > 1
        if not (has_halves and self.offset) or self.has_deltas:
            return 0
        return HALF_OFFSET.bit_length() - self.offset.bit_length()

    @property
    def lowest(self) -> int:
        """Lowest code after subtracting the offset."""
        return -self.offset

    @property
    def highest(self) -> int:
        """Highest code after subtracting the offset."""
        return self.largest_code - self.offset

    @property
    def largest(self) -> float:
        """Largest magnitude of a weight that the format can hold."""
        # Scales and minima must be finite in float16. bfloat16 rounds numbers above its largest to
        # infinity.
        if self.bits == 16:
            return float.fromhex("0x1.fep127")
        if self.fit is None:  # values as stored in a file
            return float(np.finfo(np.float32).max)
        return 65504.0 if self.minima else 65504.0 * self.highest

    @property
    def group_bytes(self) -> int:
        """Size of a group's codes in bytes."""
        if self.grid is None:
            return GROUP * LANES * self.bits // 8
        entries = GROUP // self.grid.weights
        signs = entries if self.has_deltas else GROUP  # of iq1s, 1 for deltas and 3 for the scale
        return (entries * self.grid.bits + signs) * LANES // 8

    @property
    def scale_size(self) -> int:
        """Size in bytes of the scales of 16 rows that a group, or a run of groups, has."""
        if self.scales_in_codes:
            return 0
        return SCALE_BYTES if self.grid is None else LANES * self.parts // 2

    @property
    def scale_inputs(self) -> int:
        """Number of inputs that share a scale."""
        return GROUP * self.scale_groups // self.parts

    @property
    def scale_log(self) -> int:
        """Binary logarithm of `scale_groups`."""
        return self.scale_groups.bit_length() - 1

    def scale_bytes(self, groups: int) -> int:
        """Return the size in bytes of a tile's scales."""
        return -(-groups >> self.scale_log) * self.scale_size

    @property
    def minima_size(self) -> int:
        """Bytes of the minima, block scales, factors or table of 16 rows."""
        if self.table:
            return TABLE_BYTES
        if self.float8:
            return 4 * LANES
        return 2 * LANES * (self.minima + (self.block_bytes > 0))

    @property
    def minima_log(self) -> int:
        """Binary logarithm of the number of groups that share `minima_size` bytes.

        It is 62 for a table or factors, which all groups share.
        """
        if self.table or self.float8:
            return 62
        return _BLOCK_LOG if self.block_bytes else 0

    def minima_bytes(self, groups: int) -> int:
        """Return the size in bytes of a tile's minima, block scales, factors or table."""
        return -(-groups >> self.minima_log) * self.minima_size


# int1-g128 holds GGUF's Q1_0, int2-g64 holds Q2_0, and int2-g256 holds TQ1_0 and TQ2_0. Their names
# end with the number of weights that share a scale. int4 holds Q4_0 exactly. int4-asym holds Q4_1,
# AWQ (Lin et al., 2023) and asymmetric GPTQ. int4t holds IQ4_NL, and IQ4_XS and MXFP4 with scales
# as float16. int5 holds Q5_0, and int5-asym Q5_1. nvfp4 holds NVFP4. q2k to q6k hold GGUF's
# k-quants, and iq1s to iq3s its types of these names.
# Formats are ordered from narrow to wide, because a matrix made of several tensors takes the first
# format that holds all of them. More initial scales or rounds would reduce the error by less than
# 1%.
_HOLD_TERNARY = ("int4", "int4-asym", "int5", "int5-asym", "int8")
_GRID_FORMATS = [
    WeightFormat(
        name,
        kind,
        bits=5,
        offset=9,
        parts=parts,
        grid=GridCodes(8, 11, 1, deltas=True),
        block_bytes=nbytes,
    )
    for name, kind, parts, nbytes in (("iq1s", 23, 1, 50), ("iq1m", 24, 2, 56))
]
_GRID_FORMATS += [
    WeightFormat(
        name,
        kind,
        bits=8,
        offset=TABLE_OFFSET,
        parts=parts,
        grid=GridCodes(*grid),
        block_bytes=nbytes,
    )
    for name, kind, parts, grid, nbytes in (
        ("iq2xxs", 19, 1, (8, 8, 1), 66),
        ("iq2xs", 20, 2, (8, 9, 1), 74),
        ("iq2s", 21, 2, (8, 10, 1), 82),
        ("iq3xxs", 18, 1, (4, 8, 2), 98),
        ("iq3s", 17, 1, (4, 9, 8), 110),
    )
]
FORMATS = {
    form.name: form
    for form in (
        WeightFormat(
            "int1-g128",
            kind=12,
            bits=1,
            offset=1,
            scale_groups=4,
            exact_in=("int2-g64", *_HOLD_TERNARY),
        ),
        WeightFormat(
            "int2-g256",
            kind=13,
            bits=2,
            offset=1,
            scale_groups=8,
            exact_in=("int2-g64", *_HOLD_TERNARY),
        ),
        WeightFormat(
            "int2-g64",
            kind=14,
            bits=2,
            offset=1,
            scale_groups=2,
            exact_in=_HOLD_TERNARY,
        ),
        *_GRID_FORMATS,
        WeightFormat(
            "q2k", kind=16, bits=2, parts=2, minima=True, scaled_codes=True, block_bytes=84
        ),
        WeightFormat(
            "q3k",
            kind=15,
            bits=3,
            offset=4,
            parts=2,
            scaled_codes=True,
            block_bytes=110,
            exact_in=("q6k",),
        ),
        WeightFormat(
            "int4",
            kind=4,
            bits=4,
            offset=8,
            fit=QuantizationFit((-1.2, -0.6, 0.0, 0.6, 1.2), 3),
            exact_in=("int4t", "int4-asym", "int5", "int5-asym", "int8"),
        ),
        WeightFormat("int4t", kind=9, bits=4, offset=TABLE_OFFSET, table=True, exact_in=("int8",)),
        WeightFormat(
            "int4-asym",
            kind=5,
            bits=4,
            minima=True,
            fit=QuantizationFit((-0.5, 0.375, 1.25, 2.125, 3.0), 3),
            exact_in=("int5-asym",),
        ),
        WeightFormat("nvfp4", kind=22, bits=4, offset=16, parts=2, values=E2M1, float8=True),
        WeightFormat("q4k", kind=6, bits=4, minima=True, block_bytes=144, exact_in=("q5k",)),
        WeightFormat("int5", kind=10, bits=5, offset=16, exact_in=("int5-asym", "int8")),
        WeightFormat("int5-asym", kind=11, bits=5, minima=True),
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
"""Weight formats by name, from narrow to wide."""
FORMAT_OF = {form.kind: form for form in FORMATS.values()}
"""Weight formats by number."""
INT_KINDS = tuple(kind for kind, form in FORMAT_OF.items() if not form.is_float)


def per_kind(name: str) -> npt.NDArray[np.int64]:
    """Return a property as an array indexed by format number, for use in kernels."""
    values = [getattr(FORMAT_OF.get(kind), name, 0) for kind in range(max(FORMAT_OF) + 1)]
    return np.array(values, dtype=np.int64)


_GROUP_BYTES = per_kind("group_bytes")
_MINIMA_SIZE = per_kind("minima_size")
_MINIMA_LOG = per_kind("minima_log")
_SCALE_LOG = per_kind("scale_log")
_SCALE_SIZE = per_kind("scale_size")


def high_shift(bits: int, quad: int) -> Any:
    """Return the right shift that moves a quad's high bits above its nibbles; negative shifts left.

    `quad` is the index of the quad in the group, or in the part.
    """
    return (4 + (bits - 4) * quad) % 8 - 4


def code_shift(bits: int, quad: int) -> Any:
    """Return the right shift that moves a quad's 1-bit or 2-bit codes to their place in a byte;
    negative shifts left.

    1-bit codes become 0 and 2, so their place is bit 1.
    """
    return quad - 1 if bits == 1 else 2 * (quad % 4)


@kernel
def group_bytes(kind: int) -> Any:
    """Return the size in bytes of a group's codes."""
    return _GROUP_BYTES[kind]


@kernel
def scale_bytes(kind: int, groups: int) -> Any:
    """Return the size in bytes of a tile's scales."""
    return -(-groups >> _SCALE_LOG[kind]) * _SCALE_SIZE[kind]


@kernel
def minima_bytes(kind: int, groups: int) -> Any:
    """Return the size in bytes of a tile's minima, block scales, factors or table."""
    return -(-groups >> _MINIMA_LOG[kind]) * _MINIMA_SIZE[kind]


high_shift_kernel = kernel(high_shift)
"""`high_shift` as a kernel."""
code_shift_kernel = kernel(code_shift)
"""`code_shift` as a kernel."""
