"""Packing of matrices into tiles; floats are quantized, codes from a file are only rearranged.

The layout is in weight_formats.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.entry import KernelEntry
from kvboost_edge.kernels.jit import kernel, named_kernel
from kvboost_edge.kernels.linear.least_squares import fit_group
from kvboost_edge.kernels.linear.weight_formats import (
    FACTOR_SCALE,
    FORMATS,
    GROUP,
    TABLE_BYTES,
    WeightFormat,
    code_shift_kernel,
    high_shift_kernel,
)
from kvboost_edge.kernels.signature import FLOAT64, INT64, Tuple, array
from kvboost_edge.kernels.vectors import (
    KIND_F32,
    LANES,
    address_of,
    load_f32,
    load_scalar,
    store_f32,
    store_scalar,
)

__all__ = [
    "PackedRows",
    "codes_entry",
    "fit_entries",
    "floats_entry",
    "pack_codes",
    "pack_rows",
    "packed_sizes",
    "store_lines",
]

_NIBBLES = np.uint32(0x0F0F0F0F)
# Bits of 8-bit floats without a sign, by the bits of the float16 number that is half of one.
_NO_FLOAT8 = np.uint8(255)
_FLOAT8_BITS = np.full(1 << 16, _NO_FLOAT8)
_FLOAT8_BITS[
    (
        (np.arange(128, dtype=np.uint16) << np.uint16(7)).view(np.float16)
        * np.float16(FACTOR_SCALE)
    ).view(np.uint16)
] = np.arange(128, dtype=np.uint8)
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]


class PackedRows(NamedTuple):
    """Packed rows as bytes.

    The arrays have the lengths that `packed_sizes` returns, 0 for sections that the format lacks.

    Attributes:
        codes: codes, or floats.
        scales: scales.
        minima: minima, block scales, factors or tables.
        error: sum of (weight - stored weight)^2; 0 if stored exactly.
        energy: sum of weight^2; 0 if stored exactly.
    """

    codes: Bytes
    scales: Bytes
    minima: Bytes
    error: float = 0.0
    energy: float = 0.0


def packed_sizes(rows: int, inputs: int, name: str) -> tuple[int, int, int]:
    """Return the bytes of codes (or floats), scales and minima for a matrix [rows, inputs]."""
    if name not in FORMATS:
        raise ConfigError(f"weight format {name!r} is not one of {sorted(FORMATS)}")
    form = FORMATS[name]
    tiles = -(-rows // LANES)
    if form.is_float:
        return tiles * LANES * inputs * form.bits // 8, 0, 0
    groups = -(-inputs // GROUP)
    return (
        tiles * groups * form.group_bytes,
        tiles * form.scale_bytes(groups),
        tiles * form.minima_bytes(groups),
    )


def pack_rows(weights: Floats, name: str) -> PackedRows:
    """Pack float32 [rows, inputs] in a weight format.

    Args:
        weights: finite numbers, with magnitudes up to the format's `largest`.
        name: name of the weight format.

    Raises:
        ConfigError: floats cannot be packed in this format.
    """
    form = FORMATS[name]
    if not form.packs_floats:
        known = [other.name for other in FORMATS.values() if other.packs_floats]
        raise ConfigError(f"floats cannot be packed as {name!r}; choose one of {known}")
    packed = _empty(weights.shape[0], weights.shape[1], name)
    weights = np.ascontiguousarray(weights, dtype=np.float32)
    if form.is_float:
        error, energy = _store_floats(weights, packed.codes, form.kind)
    else:
        room = np.empty(GROUP * LANES, np.float32), np.empty(2 * LANES, np.float32)
        parts = (packed.codes, packed.scales, packed.minima)
        error, energy = _fit_rows[name](weights, *parts, *room)
    return packed._replace(error=error, energy=energy)


def pack_codes(
    codes: Bytes,
    scales: npt.NDArray[np.float16],
    minima: npt.NDArray[np.float16] | None,
    name: str,
    table: npt.NDArray[np.int8] | None = None,
    factors: Floats | None = None,
) -> PackedRows:
    """Pack rows that are already quantized, without changing them.

    Args:
        codes: uint8 [rows, inputs], including the format's offset, if it has codes with an offset.
        scales: float16 [rows, scales], one for each `scale_inputs` inputs.
        minima: float16 [rows, groups], or None.
        name: name of the weight format.
        table: int8 [16], the values of the codes; only for formats with a table.
        factors: float32 [rows]; only for formats with 8-bit float scales.

    Raises:
        ConfigError: the arrays do not match the format.
    """
    rows, inputs = codes.shape
    form = FORMATS[name]
    tiles = -(-rows // LANES)
    groups = -(-inputs // GROUP)
    if form.is_float or form.block_bytes:
        right = "pack_rows" if form.is_float else "pack_blocks"
        raise ConfigError(f"{name!r} has no groups of codes and scales; pack it with {right}")
    if (minima is not None) != form.minima:
        given = "with" if minima is not None else "without"
        raise ConfigError(f"codes of {name!r} cannot be packed {given} minima")
    if (table is not None) != form.table or (table is not None and table.shape != (TABLE_BYTES,)):
        shape = "without a table" if table is None else f"with a table of shape {table.shape}"
        raise ConfigError(f"codes of {name!r} cannot be packed {shape}")
    if (factors is not None) != form.float8:
        given = "with" if factors is not None else "without"
        raise ConfigError(f"codes of {name!r} cannot be packed {given} factors")
    limit = form.largest_code
    if codes.size and int(codes.max()) > limit:
        raise ConfigError(
            f"code {int(codes.max())} of {name!r} exceeds {limit}, the largest {form.bits}-bit code"
        )
    if form.code_step > 1 and (codes & np.uint8(form.code_step - 1)).any():
        raise ConfigError(f"codes of {name!r} must be multiples of {form.code_step}")
    packed = _empty(rows, inputs, name)
    padded = np.ascontiguousarray(codes)
    if padded.shape != (tiles * LANES, groups * GROUP):
        zero = 0 if form.is_looked_up or form.code_step > 1 else form.offset
        padded = np.full((tiles * LANES, groups * GROUP), zero, dtype=np.uint8)
        padded[:rows, :inputs] = codes
    room = np.empty(GROUP // 4 * LANES, np.uint32)
    _store_words(padded.view(np.uint32), packed.codes.view(np.uint32), form.bits, room)
    if table is not None:
        packed.minima.reshape(tiles, TABLE_BYTES)[:] = table.astype(np.int8).view(np.uint8)
    if factors is not None:
        packed.minima.view(np.float32)[:] = 0
        packed.minima.view(np.float32)[:rows] = factors * np.float32(FACTOR_SCALE)
    count = -(-groups // form.scale_groups) * form.parts
    for target, values in ((packed.scales, scales), (packed.minima, minima)):
        if values is not None:
            if values.shape != (rows, count):
                raise ConfigError(
                    f"scales or minima have shape {values.shape}, expected {(rows, count)}"
                )
            wide = np.zeros((tiles * LANES, count), dtype=np.float16)
            wide[:rows] = values
            halves = np.ascontiguousarray(wide.reshape(tiles, LANES, count).transpose(0, 2, 1))
            target[:] = (
                _float8_bits(halves, name) if form.float8 else halves.view(np.uint8)
            ).reshape(-1)
    return packed


def _float8_bits(halves: npt.NDArray[np.float16], name: str) -> Bytes:
    """Return the bits of 8-bit floats whose halves are given.

    Raises:
        ConfigError: a number is not half an 8-bit float without a sign.
    """
    found = np.take(_FLOAT8_BITS, halves.view(np.uint16))
    if (found == _NO_FLOAT8).any():
        raise ConfigError(f"scales of {name!r} must be half of 8-bit floats (E4M3) without a sign")
    return found


def _empty(rows: int, inputs: int, name: str) -> PackedRows:
    codes, scales, minima = (
        np.empty(size, dtype=np.uint8) for size in packed_sizes(rows, inputs, name)
    )
    return PackedRows(codes, scales, minima)


def _fitting(form: WeightFormat) -> Any:
    """Return the kernel that quantizes all rows and sums the squared errors and weights."""
    fit = fit_group[form.name]
    group_bytes = form.group_bytes

    @named_kernel(f"fit_rows_{form.kind}")
    def fit_rows(
        weights: Floats, codes: Bytes, scales: Bytes, minima: Bytes, buffer: Floats, totals: Floats
    ) -> tuple[float, float]:
        rows, inputs = weights.shape
        groups = (inputs + GROUP - 1) // GROUP
        buffer[:] = 0
        values = address_of(buffer)
        sums = address_of(totals)
        source = address_of(weights)
        code_at = address_of(codes)
        scale_at = address_of(scales)
        minimum_at = address_of(minima)
        error = 0.0
        energy = 0.0
        for tile in range((rows + LANES - 1) // LANES):
            lanes = min(LANES, rows - tile * LANES)
            if lanes < LANES:
                buffer[:] = 0
            totals[:] = 0
            for group in range(groups):
                count = min(GROUP, inputs - group * GROUP)
                if count < GROUP:
                    buffer[:] = 0
                for lane in range(lanes):
                    row_at = source + 4 * ((tile * LANES + lane) * inputs + group * GROUP)
                    for i in range(count):
                        store_f32(values + 4 * (i * LANES + lane), load_f32(row_at + 4 * i))
                place = tile * groups + group
                at = code_at + place * group_bytes
                s = scale_at + place * 2 * LANES
                m = minimum_at + place * 2 * LANES
                fit(values, count, at, s, m, sums)
            for lane in range(lanes):
                error += totals[lane]
                energy += totals[LANES + lane]
        return error, energy

    return fit_rows


_fit_rows = {name: _fitting(FORMATS[name]) for name in fit_group}


@kernel
def _store_floats(weights: Floats, out: Bytes, kind: int) -> tuple[float, float]:
    """Store tiles [input][16] of float32 or bfloat16; return the squared errors and weights."""
    rows, inputs = weights.shape
    size = 4 if kind == KIND_F32 else 2
    source = address_of(weights)
    at = address_of(out)
    error = 0.0
    energy = 0.0
    for tile in range((rows + LANES - 1) // LANES):
        for i in range(inputs):
            for lane in range(LANES):
                row = tile * LANES + lane
                value = np.float32(0.0)
                if row < rows:
                    value = load_f32(source + 4 * (row * inputs + i))
                store_scalar(at, value, kind)
                off = float(value) - float(load_scalar(at, kind))
                error += off * off
                energy += float(value) * float(value)
                at += size
    return error, energy


@kernel
def store_lines(codes: Words, first: int, quads: int, bits: int, out: Words, at: int) -> None:
    """Store the quads of a group, or of a part of it, as lines.

    Args:
        codes: words of four codes of one row; word w of lane l is at index w * LANES + l.
        first: first word to store.
        quads: number of quads to store.
        bits: bits per code, 1 to 6 or 8.
        out: words, written.
        at: index of the first word to write.
    """
    if bits == 8:
        for index in range(quads * LANES):
            out[at + index] = codes[first * LANES + index]
        return
    if bits == 3:
        _store_threes(codes, first, quads, out, at)
        return
    if bits < 4:
        _store_narrow(codes, first, quads, bits, out, at)
        return
    for quad in range(0, quads, 2):
        for lane in range(LANES):
            low = codes[(first + quad) * LANES + lane]
            high = codes[(first + quad + 1) * LANES + lane]
            word = (low & _NIBBLES) | (high & _NIBBLES) << np.uint32(4)
            out[at + quad // 2 * LANES + lane] = word
    if bits == 4:
        return
    last = at + quads // 2 * LANES
    for lane in range(LANES):
        out[last + lane] = 0
    for quad in range(quads):
        shift = np.uint32(4 + high_shift_kernel(bits, quad))
        for lane in range(LANES):
            above = codes[(first + quad) * LANES + lane] >> np.uint32(4) & _NIBBLES
            out[last + lane] |= above << shift


@kernel
def _store_narrow(codes: Words, first: int, quads: int, bits: int, out: Words, at: int) -> None:
    """Store quads of 1-bit or 2-bit codes; see `store_lines`."""
    each = 8 // bits
    for quad in range(quads):
        shift = code_shift_kernel(bits, quad)
        line = at + quad // each * LANES
        for lane in range(LANES):
            word = codes[(first + quad) * LANES + lane]
            word = word >> np.uint32(-shift) if shift < 0 else word << np.uint32(shift)
            out[line + lane] = word if quad % each == 0 else out[line + lane] | word


@kernel
def _store_threes(codes: Words, first: int, quads: int, out: Words, at: int) -> None:
    """Store four quads of 3-bit codes; see `store_lines`."""
    for lane in range(LANES):
        low = np.uint32(0)
        high = np.uint32(0)
        for quad in range(quads):
            word = codes[(first + quad) * LANES + lane]
            low |= (word & np.uint32(0x03030303)) << np.uint32(2 * quad)
            bits = word >> np.uint32(2)
            bits = bits & np.uint32(0x0101) | bits >> np.uint32(12) & np.uint32(0x1010)
            high |= bits << np.uint32(quad)
        out[at + lane] = low
        place = at + LANES + lane // 2
        out[place] = high if lane % 2 == 0 else out[place] | high << np.uint32(16)


@kernel
def _store_words(words: Words, out: Words, bits: int, codes: Words) -> None:
    """Store `words`, uint32 [rows, inputs / 4] with four codes each, as tiles.

    `codes` is room for the words of a group in 16 rows.
    """
    rows, count = words.shape
    quads = GROUP // 4
    at = 0
    for tile in range(rows // LANES):
        for first in range(0, count, quads):
            for lane in range(LANES):
                for quad in range(quads):
                    codes[quad * LANES + lane] = words[tile * LANES + lane, first + quad]
            store_lines(codes, 0, quads, bits, out, at)
            at += GROUP * LANES * bits // 32


_BYTES = array("uint8")
_WORDS = array("uint32")
_FLOATS = array("float32", 2)
_ROOM = array("float32")
_ERRORS = Tuple(tuple, (FLOAT64, FLOAT64))
fit_entries = {
    name: KernelEntry(fit_rows, _FLOATS, *[_BYTES] * 3, _ROOM, _ROOM, returns=_ERRORS)
    for name, fit_rows in _fit_rows.items()
}
"""Format name -> kernel that `pack_rows` runs for that format."""
floats_entry = KernelEntry(_store_floats, _FLOATS, _BYTES, INT64, returns=_ERRORS)
codes_entry = KernelEntry(_store_words, array("uint32", 2), _WORDS, INT64, _WORDS)
"""Entries of `pack_rows` for float formats and of `pack_codes`."""
