"""Random packed weights of every format, with values and products by the NumPy specification."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from helpers.gguf.types import put_half
from kvboost_edge.kernels.linear import weight_formats as registry
from kvboost_edge.kernels.linear.k_blocks import pack_blocks
from kvboost_edge.kernels.linear.weights import PackedRows, pack_codes, pack_rows
from kvboost_edge.kernels.reference import linear as reference
from kvboost_edge.kernels.reference import wide

Floats = npt.NDArray[np.float32]
FORMATS = tuple(registry.FORMATS)
INTEGERS = tuple(name for name, form in registry.FORMATS.items() if not form.is_float)
"""Formats whose products are sums of integers."""
PACKED = tuple(name for name, form in registry.FORMATS.items() if form.packs_floats)
"""Formats that floats are packed in."""
FITTED = tuple(name for name in PACKED if name in INTEGERS)
GRIDS = tuple(name for name, form in registry.FORMATS.items() if form.grid is not None)
"""Formats whose codes are indices into a grid."""
BLOCKS = tuple(name for name, form in registry.FORMATS.items() if form.block_bytes)


def kind_of(name: str) -> int:
    """Return a format's number in kernels."""
    return registry.FORMATS[name].kind


def in_blocks(kind: str, inputs: int) -> int:
    """Return the number of inputs, rounded up to whole blocks if the format has blocks of 256."""
    return -(-inputs // 256) * 256 if kind in BLOCKS else inputs


def random_blocks(kind: str, rows: int, blocks: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Return rows of random bits with ordinary float16 numbers, uint8 [rows, bytes]. The first
    block of row 0 is extreme: the largest codes, and scales of the largest magnitude.
    """
    rng = np.random.default_rng(seed)
    nbytes = registry.FORMATS[kind].block_bytes
    raw = rng.integers(0, 256, (rows * blocks, nbytes), dtype=np.uint8)
    raw[0] = 255
    if kind == "q6k":
        raw[0, 192:208] = 128
    places = {"q2k": (80, 82), "q3k": (108,), "q6k": (208,)} | dict.fromkeys(GRIDS, (0,))
    places["iq1m"] = ((49, 51, 53, 55),)
    for at in places.get(kind, (0, 2)):
        put_half(raw, at, 0.01 * rng.standard_normal(len(raw)))
    return raw.reshape(rows, -1)


def random_weights(
    kind: str, rows: int, inputs: int, seed: int = 0, spread: float = 1.0
) -> PackedRows:
    """Return a packed matrix: random codes for file formats, otherwise normal numbers times
    `spread`.
    """
    if kind in BLOCKS:
        return pack_blocks(random_blocks(kind, rows, inputs // 256, seed), kind)
    if registry.FORMATS[kind].table:
        return _table_rows(rows, inputs, seed)
    if registry.FORMATS[kind].float8:
        return _float8_rows(rows, inputs, seed)
    if kind not in PACKED:
        return _code_rows(kind, rows, inputs, seed)
    weights = spread * np.random.default_rng(seed).standard_normal((rows, inputs))
    return pack_rows(weights.astype(np.float32), kind)


def _code_rows(kind: str, rows: int, inputs: int, seed: int) -> PackedRows:
    """Return random codes. Row 0 has only the smallest code and row 1 only the largest."""
    form = registry.FORMATS[kind]
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << form.bits, (rows, inputs)).astype(np.uint8) * form.code_step
    codes[0] = 0
    codes[1] = form.largest_code
    count = -(-inputs // form.scale_inputs)
    halves = (0.01 * rng.standard_normal((2, rows, count))).astype(np.float16)
    return pack_codes(codes, halves[0], halves[1] if form.minima else None, kind)


def _table_rows(rows: int, inputs: int, seed: int) -> PackedRows:
    """Return random codes of int4t, with a different table for each tile that contains both
    extremes of a byte.
    """
    rng = np.random.default_rng(seed)
    parts = []
    for start in range(0, rows, 16):
        count = min(16, rows - start)
        table = rng.integers(-128, 128, 16).astype(np.int8)
        table[rng.permutation(16)[:2]] = -128, 127
        codes = rng.integers(0, 16, (count, inputs)).astype(np.uint8)
        scales = (0.01 * rng.standard_normal((count, -(-inputs // 32)))).astype(np.float16)
        parts.append(pack_codes(codes, scales, None, "int4t", table))
    return PackedRows(*(np.concatenate([part[index] for part in parts]) for index in range(3)))


def _float8_rows(rows: int, inputs: int, seed: int) -> PackedRows:
    """Return random codes of nvfp4. Row 0 has only the largest weight, with the largest scales."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (rows, inputs)).astype(np.uint8)
    codes[0] = 7
    scales = rng.integers(0, 127, (rows, -(-inputs // 32) * 2)).astype(np.uint16)
    scales[0] = 126
    halves = (scales << np.uint16(7)).view(np.float16) * np.float16(128)
    factors = (0.0001 * rng.standard_normal(rows)).astype(np.float32)
    return pack_codes(codes, halves, None, "nvfp4", factors=factors)


def product(kind: str, x: Floats, packed: PackedRows, rows: int, *, fine: bool = False) -> Floats:
    """Multiply tokens by a packed matrix as the specification does, float32 [tokens, rows]."""
    inputs = x.shape[1]
    if kind not in INTEGERS:
        stored = packed.codes.view(np.float32 if kind == "f32" else np.uint16)
        return reference.linear_float(x, reference.unpack_floats(stored, rows, inputs))
    quantized, token_scales, _ = reference.quantize_rows(x, fine=fine)
    codes, scales, minima = unpacked(kind, packed, rows, inputs)
    weights: npt.NDArray[np.signedinteger[Any]] = codes
    if registry.FORMATS[kind].scaled_codes:
        halves = packed.minima.view(np.float16)
        weights, scales = reference.scale_codes(codes, packed.scales, halves, kind)
    return reference.linear_int(quantized, token_scales, weights, scales, minima)[:, :rows]


def wide_product(
    kind: str, x: Floats, packed: PackedRows, rows: int, *, fine: bool = False
) -> Floats:
    """Multiply like `product`, in wide arithmetic."""
    quantized, token_scales = wide.quantize_wide_rows(x, fine=fine)
    weights = wide.requantize_rows(*unpacked(kind, packed, rows, x.shape[1]))
    return wide.linear_wide(quantized, token_scales, *weights)[:, :rows]


def unpacked(
    kind: str, packed: PackedRows, rows: int, inputs: int
) -> tuple[npt.NDArray[np.int8], Floats, Floats | None]:
    """Return the codes, scales and minima (or None) of an integer matrix, with padding."""
    minima = None
    if kind in BLOCKS:
        halves = packed.minima.view(np.float16)
        codes = reference.unpack_block_codes(packed.codes, rows, inputs, kind)
        stored = packed.codes if registry.FORMATS[kind].scales_in_codes else packed.scales
        scales, minima = reference.unpack_block_scales(stored, halves, rows, inputs, kind)
    elif registry.FORMATS[kind].float8:
        codes = reference.unpack_e2m1_codes(packed.codes, rows, inputs)
        factors = packed.minima.view(np.float32)
        scales = reference.unpack_float8_scales(packed.scales, factors, rows, inputs)
    else:
        runs = registry.FORMATS[kind].scale_groups
        scales = reference.unpack_scales(packed.scales.view(np.float16), rows, inputs, runs)
        if registry.FORMATS[kind].table:
            codes = reference.unpack_table_codes(packed.codes, packed.minima, rows, inputs)
        else:
            codes = reference.unpack_codes(packed.codes, rows, inputs, registry.FORMATS[kind].bits)
        if registry.FORMATS[kind].minima:
            minima = reference.unpack_scales(packed.minima.view(np.float16), rows, inputs)
            codes = codes + (1 << registry.FORMATS[kind].bits - 1)
    return codes, scales, minima
