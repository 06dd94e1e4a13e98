"""Matrices into the tile layouts of the linear kernels: float32, bfloat16, and int8, int4,
int4-asym in groups of 32.

The layouts are specified in weight_layout.py and reference/weights.py. Scales and minima are
float16. A stored weight is scale * code for the signed codes of int8 and int4, and scale * code -
minimum for the codes 0..15 of int4-asym. Of int4t it is scale * table[code]; that format, as the
block formats, comes from files alone.

Another format has its place in: KIND_* and OFFSET in weight_dot.py, INT_KINDS in weight_tiles.py,
FITS in least_squares.py, weight_layout.py, dispatch.py, amx.py, program/tokens.py and
program/norms.py (what tokens are multiplied with it), reference/weights.py and reference/linear.py
(first of all), then models/packed/plan.py, stream.py and conversions.py, which decide what is
packed so, and config.py for its name.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba.core import types

from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.entry import KernelEntry
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.linear.least_squares import FITS, fit_group
from kvboost_edge.kernels.linear.weight_dot import CODE_BITS
from kvboost_edge.kernels.linear.weight_layout import (
    SCALE_BYTES,
    TABLE_BYTES,
    group_bytes,
    minima_bytes,
)
from kvboost_edge.kernels.linear.weight_tiles import (
    GROUP,
    INT_KINDS,
    KIND_INT4,
    KIND_INT4_ASYM,
    KIND_INT4T,
    KIND_INT8,
    KIND_Q4K,
    KIND_Q5K,
    KIND_Q6K,
)
from kvboost_edge.kernels.vectors import (
    KIND_BF16,
    KIND_F32,
    LANES,
    address_of,
    load_f32,
    load_scalar,
    store_f32,
    store_scalar,
)

__all__ = [
    "BLOCK_FORMATS",
    "KINDS",
    "LARGEST",
    "NUMBERS",
    "QUANTIZED",
    "TABLE_FORMATS",
    "PackedRows",
    "codes_entry",
    "fit_entry",
    "floats_entry",
    "pack_codes",
    "pack_rows",
    "packed_sizes",
]

KINDS: dict[str, int] = {
    "f32": KIND_F32,
    "bf16": KIND_BF16,
    "int8": KIND_INT8,
    "int4": KIND_INT4,
    "int4-asym": KIND_INT4_ASYM,
}
"""Weight format that floats can be packed in -> number of its kind in the kernels."""

QUANTIZED = ("int8", "int4", "int4-asym")
BLOCK_FORMATS: dict[str, int] = {"q4k": KIND_Q4K, "q5k": KIND_Q5K, "q6k": KIND_Q6K}
"""Formats of blocks that a file holds already, see k_blocks.py: floats are never packed in them."""
TABLE_FORMATS: dict[str, int] = {"int4t": KIND_INT4T}
"""Formats of codes that are looked up in a table, from files alone too."""
NUMBERS: dict[str, int] = {**KINDS, **BLOCK_FORMATS, **TABLE_FORMATS}
"""Every packed format -> number of its kind."""

# The scale, or the minimum, must be a finite float16; bfloat16 rounds what lies above its largest
# number to infinity.
LARGEST: dict[str, float] = {
    "f32": float(np.finfo(np.float32).max),
    "bf16": float.fromhex("0x1.fep127"),
    "int8": 127.0 * 65504.0,
    "int4": 7.0 * 65504.0,
    "int4-asym": 65504.0,
}
"""Weight format -> the largest magnitude of a weight that it can hold."""

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
_fit_int8, _fit_int4, _fit_int4_asym = (
    fit_group[kind] for kind in (KIND_INT8, KIND_INT4, KIND_INT4_ASYM)
)


class PackedRows(NamedTuple):
    """Packed rows as bytes, of the lengths `packed_sizes` says; empty where the format has none.

    error, energy: sums of (weight - stored weight)^2 and of weight^2; 0 for what is stored exactly.
    """

    codes: Bytes
    scales: Bytes
    minima: Bytes
    error: float = 0.0
    energy: float = 0.0


def packed_sizes(rows: int, inputs: int, kind: int) -> tuple[int, int, int]:
    """Bytes of the packed codes (or floats), of the scales and of the minima of a matrix [rows,
    inputs].
    """
    tiles = -(-rows // LANES)
    groups = -(-inputs // GROUP)
    if kind in (KIND_F32, KIND_BF16):
        return tiles * LANES * inputs * (4 if kind == KIND_F32 else 2), 0, 0
    if kind not in INT_KINDS:
        raise ConfigError(f"weight kind {kind} is not one of {sorted(NUMBERS.values())}")
    return (
        tiles * groups * group_bytes(kind),
        tiles * groups * SCALE_BYTES,
        tiles * minima_bytes(kind, groups),
    )


def pack_rows(weights: Floats, kind: int) -> PackedRows:
    """Pack float32 [rows, inputs] of finite weights no larger than `LARGEST`. ConfigError for a
    block format.
    """
    if kind not in KINDS.values():
        raise ConfigError(
            f"floats are not packed as weight kind {kind}, only as one of {sorted(KINDS.values())}"
        )
    packed = _empty(weights.shape[0], weights.shape[1], kind)
    weights = np.ascontiguousarray(weights, dtype=np.float32)
    if kind in (KIND_F32, KIND_BF16):
        error, energy = _store_floats(weights, packed.codes, kind)
    else:
        error, energy = _fit_rows(weights, packed.codes, packed.scales, packed.minima, kind)
    return packed._replace(error=error, energy=energy)


def pack_codes(
    codes: Bytes,
    scales: npt.NDArray[np.float16],
    minima: npt.NDArray[np.float16] | None,
    kind: int,
    table: npt.NDArray[np.int8] | None = None,
) -> PackedRows:
    """Pack rows that are quantized already, as they are: codes uint8 [rows, inputs] with the kind's
    offset (128, 8 or
    0) in them, scales and minima float16 [rows, groups], of KIND_INT4T the weights int8 [16] that
      its codes stand for. ConfigError where they do not fit the kind.
    """
    rows, inputs = codes.shape
    tiles = -(-rows // LANES)
    groups = -(-inputs // GROUP)
    if kind not in (*FITS, KIND_INT4T) or (minima is not None) != (kind == KIND_INT4_ASYM):
        raise ConfigError(
            f"codes of weight kind {kind} cannot be packed "
            f"{'with' if minima is not None else 'without'} minima"
        )
    if (table is not None) != (kind == KIND_INT4T) or (
        table is not None and table.shape != (TABLE_BYTES,)
    ):
        shape = "without a table" if table is None else f"with a table of shape {table.shape}"
        raise ConfigError(f"codes of weight kind {kind} cannot be packed {shape}")
    bits, offset = (
        (CODE_BITS[kind], 0) if kind == KIND_INT4T else (FITS[kind].bits, FITS[kind].offset)
    )
    limit = (1 << bits) - 1
    if codes.size and int(codes.max()) > limit:
        raise ConfigError(f"code {int(codes.max())} of weight kind {kind} is above {limit}")
    packed = _empty(rows, inputs, kind)
    padded = np.ascontiguousarray(codes)
    if padded.shape != (tiles * LANES, groups * GROUP):
        padded = np.full((tiles * LANES, groups * GROUP), offset, dtype=np.uint8)
        padded[:rows, :inputs] = codes
    _store_words(padded.view(np.uint32), packed.codes.view(np.uint32), bits)
    if table is not None:
        packed.minima.reshape(tiles, TABLE_BYTES)[:] = table.astype(np.int8).view(np.uint8)
    for target, values in ((packed.scales, scales), (packed.minima, minima)):
        if values is not None:
            if values.shape != (rows, groups):
                raise ConfigError(
                    f"scales or minima have shape {values.shape}, expected {(rows, groups)}"
                )
            wide = np.zeros((tiles * LANES, groups), dtype=np.float16)
            wide[:rows] = values
            target[:] = (
                np.ascontiguousarray(wide.reshape(tiles, LANES, groups).transpose(0, 2, 1))
                .reshape(-1)
                .view(np.uint8)
            )
    return packed


def _empty(rows: int, inputs: int, kind: int) -> PackedRows:
    codes, scales, minima = (
        np.empty(size, dtype=np.uint8) for size in packed_sizes(rows, inputs, kind)
    )
    return PackedRows(codes, scales, minima)


@kernel
def _fit_rows(
    weights: Floats, codes: Bytes, scales: Bytes, minima: Bytes, kind: int
) -> tuple[float, float]:
    """Quantize all rows; the squared error and the squared weights in all."""
    rows, inputs = weights.shape
    groups = (inputs + GROUP - 1) // GROUP
    lines = GROUP * LANES if kind == KIND_INT8 else GROUP * LANES // 2
    buffer = np.zeros(GROUP * LANES, np.float32)
    totals = np.zeros(2 * LANES, np.float32)
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
            at = code_at + place * lines
            s = scale_at + place * 2 * LANES
            m = minimum_at + place * 2 * LANES
            if kind == KIND_INT8:
                _fit_int8(values, count, at, s, m, sums)
            elif kind == KIND_INT4:
                _fit_int4(values, count, at, s, m, sums)
            else:
                _fit_int4_asym(values, count, at, s, m, sums)
        for lane in range(lanes):
            error += totals[lane]
            energy += totals[LANES + lane]
    return error, energy


@kernel
def _store_floats(weights: Floats, out: Bytes, kind: int) -> tuple[float, float]:
    """Tiles [input][16] of float32 or bfloat16; the squared error and the squared weights in
    all.
    """
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
def _store_words(words: npt.NDArray[np.uint32], out: npt.NDArray[np.uint32], bits: int) -> None:
    """words: uint32 [rows, inputs / 4], four codes of a row each, which are one word of a line of
    the tile.
    """
    rows, count = words.shape
    step = 8 // bits
    at = 0
    for tile in range(rows // LANES):
        for first in range(0, count, step):
            for lane in range(LANES):
                row = tile * LANES + lane
                word = words[row, first]
                if bits == 4:
                    word |= words[row, first + 1] << np.uint32(4)
                out[at] = word
                at += 1


_BYTES = types.Array(types.uint8, 1, "C")
_FLOATS = types.Array(types.float32, 2, "C")
fit_entry = KernelEntry(_fit_rows, _FLOATS, _BYTES, _BYTES, _BYTES, types.int64)
floats_entry = KernelEntry(_store_floats, _FLOATS, _BYTES, types.int64)
codes_entry = KernelEntry(
    _store_words, types.Array(types.uint32, 2, "C"), types.Array(types.uint32, 1, "C"), types.int64
)
"""What `pack_rows` runs for integer formats and for floats, and what `pack_codes` runs."""
