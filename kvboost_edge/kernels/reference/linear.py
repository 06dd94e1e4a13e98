"""Linear layers in plain NumPy: the oracle of the kernels and the specification of weight layouts.

A matrix [rows, inputs] is stored in tiles of 16 rows:

- integer formats: groups of 32 inputs; a quad of 4 inputs of 16 rows is 64 bytes;
- int4: quad 2j is in the low nibbles, quad 2j + 1 in the high nibbles of the same 64 bytes;
- int2: four quads are in the same 64 bytes, quad 4j in the lowest two bits;
- int1: all quads of a group are in 64 bytes, quad k in bit k; a bit is a weight of -1 or 1;
- int5: as int4, and then 64 bytes with the fifth bits: that of quad k is bit (4 + k) % 8;
- float formats: [tile][input][16];
- block formats (q2k to q6k, iq1s to iq3s), nvfp4 and int4t: see linear/weight_formats.py.

Rows and groups are padded with zero weights (any codes in int4t) and zero scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.linear.grids import grid_of

__all__ = [
    "activate_rows",
    "group_sums",
    "linear_float",
    "linear_int",
    "norm_rows",
    "pack_panel",
    "quantize_rows",
    "rotate",
    "scale_codes",
    "unpack_block_codes",
    "unpack_block_scales",
    "unpack_codes",
    "unpack_e2m1_codes",
    "unpack_float8_scales",
    "unpack_floats",
    "unpack_scales",
    "unpack_table_codes",
]

Floats = npt.NDArray[np.float32]
_LANES = 16
_GROUP = 32
_FINE_BASE = 255
_BLOCK_GROUPS = 8
# Format with a grid -> parts of a group, weights of an entry, bits of an index and eighths.
_GRIDS = {
    "iq1s": (1, 8, 11, 1),
    "iq1m": (2, 8, 11, 1),
    "iq2xxs": (1, 8, 8, 1),
    "iq2xs": (2, 8, 9, 1),
    "iq2s": (2, 8, 10, 1),
    "iq3xxs": (1, 4, 8, 2),
    "iq3s": (1, 4, 9, 8),
}
_OFFSETS = {"int8": 128, "int5": 16, "int4": 8, "int2": 1, "int1": 1}


def quantize_rows(
    x: Floats, *, fine: bool = False
) -> tuple[npt.NDArray[np.int16], Floats, npt.NDArray[np.int32]]:
    """Quantize float32 [tokens, count] to codes, scales and sums of codes.

    Codes are within +-127, or within +-127 * 255 if `fine`.

    Returns:
        (codes [tokens, groups * 32], float32 scales [tokens, groups], int32 sums [tokens, groups]).
    """
    tokens, count = x.shape
    groups = -(-count // _GROUP)
    padded = np.zeros((tokens, groups, _GROUP), dtype=np.float32)
    padded.reshape(tokens, -1)[:, :count] = x
    levels = np.float32(127.0 * _FINE_BASE if fine else 127.0)
    top = np.abs(padded).max(axis=2)
    empty = top < np.float32(1e-30)
    safe = np.where(empty, np.float32(1.0), top)
    inverse = np.where(empty, np.float32(0.0), levels / safe)
    # an infinite `top` gives a NaN scale, because inf - inf is NaN
    with np.errstate(invalid="ignore"):
        scales = np.where(empty, np.float32(0.0), top / levels + (top - top)).astype(np.float32)
    codes = np.rint(padded * inverse[:, :, None]).astype(np.int16)
    return codes.reshape(tokens, -1), scales, codes.sum(axis=2, dtype=np.int32)


def pack_panel(
    x: Floats, kind: str, sizes: Sequence[int], *, fine: bool = False
) -> npt.NDArray[np.uint8]:
    """Return the bytes of panels with `sizes` tokens each for a weight format; see panel.py."""
    codes, scales, sums = quantize_rows(x, fine=fine)
    planes = [codes]
    if fine:
        first = np.rint(codes / _FINE_BASE).astype(np.int16)
        planes = [first, codes - np.int16(_FINE_BASE) * first]
    in_blocks = kind in ("q2k", "q3k", "q4k", "q5k", "q6k", "int4t", "nvfp4", *_GRIDS)
    if in_blocks or kind in ("int4-asym", "int5-asym"):
        terms = (-(sums.astype(np.float32) * scales)).view(np.int32)
    else:
        terms = sums * np.int32(-_OFFSETS[kind.partition("-")[0]])
    cells = []
    start = 0
    for size in sizes:
        rows = slice(start, start + size)
        for group in range(scales.shape[1]):
            inputs = slice(group * _GROUP, (group + 1) * _GROUP)
            parts: list[npt.NDArray[Any]] = [
                plane[rows, inputs].astype(np.int8) for plane in planes
            ]
            parts += [terms[rows, group].astype(np.int32), scales[rows, group]]
            if in_blocks:
                halves = codes[rows, inputs].reshape(-1, 2, _GROUP // 2).sum(axis=2, dtype=np.int32)
                parts += [np.int32(-32) * halves.T, np.int32(-128) * sums[rows, group]]
            cells += [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts]
        start += size
    return np.concatenate(cells)


def unpack_codes(
    packed: npt.NDArray[np.uint8], rows: int, inputs: int, bits: int
) -> npt.NDArray[np.int8]:
    """Return the signed weights of an int8, int5, int4, int2 or int1 matrix.

    Returns:
        int8 [padded rows, padded inputs].
    """
    tiles = -(-rows // _LANES)
    groups = -(-inputs // _GROUP)
    lines = packed.reshape(tiles, groups, -1, _LANES, 4)
    if bits == 8:
        quads = lines
    elif bits < 4:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None, None]
        quads = lines[:, :, :, None] >> shifts & np.uint8((1 << bits) - 1)
        quads = quads.reshape(tiles, groups, 8, _LANES, 4) * np.uint8(2 if bits == 1 else 1)
    else:
        nibbles = lines[:, :, :4]
        quads = np.stack([nibbles & 15, nibbles >> 4], axis=3).reshape(tiles, groups, 8, _LANES, 4)
    if bits == 5:
        shifts = (4 + np.arange(8, dtype=np.uint8)) % 8
        fifths = lines[:, :, 4:] >> shifts[:, None, None] & np.uint8(1)
        quads = quads | fifths << np.uint8(4)
    signed = quads.astype(np.int16) - _OFFSETS[f"int{bits}"]
    ordered = signed.transpose(0, 3, 1, 2, 4).reshape(tiles * _LANES, groups * _GROUP)
    return ordered.astype(np.int8)


def unpack_table_codes(
    packed: npt.NDArray[np.uint8], tables: npt.NDArray[np.uint8], rows: int, inputs: int
) -> npt.NDArray[np.int8]:
    """Return the signed weights of an int4t matrix, int8 [padded rows, padded inputs].

    `tables` is int8 [tiles][16] as bytes.
    """
    codes = unpack_codes(packed, rows, inputs, 4).astype(np.int64) + 8
    wide = tables.view(np.int8).reshape(-1, 16).repeat(_LANES, axis=0)
    found: npt.NDArray[np.int8] = np.take_along_axis(wide, codes, axis=1)
    return found


def unpack_e2m1_codes(
    packed: npt.NDArray[np.uint8], rows: int, inputs: int
) -> npt.NDArray[np.int8]:
    """Return twice the 4-bit floats of an nvfp4 matrix, int8 [padded rows, padded inputs]."""
    bits = unpack_codes(packed, rows, inputs, 4).astype(np.int64) + 8
    exponent, mantissa = bits >> 1 & 3, bits & 1
    twice = np.where(exponent == 0, mantissa, (2 + mantissa) << np.maximum(exponent, 1) - 1)
    return np.where(bits >= 8, -twice, twice).astype(np.int8)


def unpack_float8_scales(
    packed: npt.NDArray[np.uint8], factors: Floats, rows: int, inputs: int
) -> Floats:
    """Return half the 8-bit scales of an nvfp4 matrix times the factor of each row.

    Args:
        packed: uint8 [tiles][groups][2][16].
        factors: float32 [padded rows], times 2 ** 7.
        rows: number of rows.
        inputs: number of inputs.

    Returns:
        float32 [padded rows, 2 * groups].
    """
    tiles = -(-rows // _LANES)
    bits = packed.reshape(tiles, -1, _LANES).transpose(0, 2, 1).reshape(tiles * _LANES, -1)
    exponent, mantissa = bits >> 3 & 15, (bits & 7).astype(np.float64)
    scales = np.where(
        exponent == 0,
        mantissa / 2**9,
        (1 + mantissa / 8) * 2.0 ** (exponent.astype(np.float64) - 7),
    )
    own = (factors.astype(np.float64) / 2**7)[:, None]
    found: Floats = (scales / 2 * own).astype(np.float32)
    return found[:, : 2 * -(-inputs // _GROUP)]


def unpack_block_codes(
    packed: npt.NDArray[np.uint8], rows: int, inputs: int, kind: str
) -> npt.NDArray[np.int8]:
    """Return the codes of a block format, int8 [padded rows, padded inputs].

    They are signed for q3k, q6k and formats with a grid.
    """
    tiles = -(-rows // _LANES)
    groups = -(-inputs // _GROUP)
    if kind == "q2k":
        halves = packed.reshape(tiles, groups, 2, 1, _LANES, 4)
        twos = halves >> np.arange(0, 8, 2, dtype=np.uint8)[:, None, None] & np.uint8(3)
        ordered = twos.transpose(0, 4, 1, 2, 3, 5).astype(np.int8)
        return ordered.reshape(tiles * _LANES, groups * _GROUP)
    if kind in _GRIDS:
        return _unpack_grid(packed, tiles, groups, kind)
    if kind == "q3k":
        ordered = _unpack_threes(packed.reshape(tiles, groups, 2, 96))
        return ordered.reshape(tiles * _LANES, groups * _GROUP) - np.int8(4)
    parts = 2 if kind == "q6k" else 1
    quads = 8 // parts
    bits = {"q4k": 0, "q5k": 1, "q6k": 2}[kind]
    lines = packed.reshape(tiles, groups, parts, -1, _LANES, 4)
    nibbles = lines[:, :, :, : quads // 2]
    codes = np.stack([nibbles & 15, nibbles >> 4], axis=4).reshape(
        tiles, groups, parts, quads, _LANES, 4
    )
    if bits:
        shifts = (4 + bits * np.arange(quads, dtype=np.uint8)) % 8
        above = lines[:, :, :, quads // 2 :] >> shifts[:, None, None] & ((1 << bits) - 1)
        codes = codes | above << 4
    ordered = codes.transpose(0, 4, 1, 2, 3, 5).reshape(tiles * _LANES, groups * _GROUP)
    return ordered.astype(np.int8) - np.int8(32 if kind == "q6k" else 0)


def _unpack_grid(
    packed: npt.NDArray[np.uint8], tiles: int, groups: int, kind: str
) -> npt.NDArray[np.int8]:
    """Return the signed weights of a format with a grid, before scaling."""
    parts, each, index_bits, _ = _GRIDS[kind]
    entries = _GROUP // parts // each
    quads = _GROUP // 4 // parts
    above = index_bits - 8
    found = packed.reshape(tiles, groups, parts, -1)
    index = found[..., : entries * _LANES].reshape(tiles, groups, parts, entries, _LANES)
    index = index.astype(np.int64)
    shape = (tiles * _LANES, groups * _GROUP)
    if kind in ("iq1s", "iq1m"):
        more = np.ascontiguousarray(found[..., entries * _LANES :]).view(f"<u{2 // parts}")
        places = np.arange(entries)[:, None] * (3 if parts == 1 else 4)
        index |= (more[..., None, :] >> places & 7).astype(np.int64) << 8
        is_lower = more[..., None, :] >> (15 if parts == 1 else places + 3) & 1
        codes = grid_of(kind)[index].astype(np.int8) - (2 * is_lower[..., None] + 9).astype(np.int8)
        return codes.transpose(0, 4, 1, 2, 3, 5).reshape(shape)
    bits = np.unpackbits(found[..., entries * _LANES :], axis=-1, bitorder="little")
    signs = bits[..., : quads * _LANES * 4].reshape(tiles, groups, parts, quads, _LANES, 4)
    high = bits[..., quads * _LANES * 4 :].reshape(tiles, groups, parts, entries, above, _LANES)
    for bit in range(above):
        index |= high[..., bit, :].astype(np.int64) << (8 + bit)
    weights = grid_of(kind)[index].astype(np.int8).transpose(0, 4, 1, 2, 3, 5)
    is_negative = signs.transpose(0, 4, 1, 2, 3, 5)
    flat = weights.reshape(shape)
    return np.where(is_negative.reshape(shape) != 0, -flat, flat)


def _unpack_threes(parts: npt.NDArray[np.uint8]) -> npt.NDArray[np.int8]:
    """Return codes of q3k from 0 to 7, [tiles, 16, groups, 32], of bytes [tiles, groups, 2, 96]."""
    shape = parts.shape[:3]
    low = parts[..., :64].reshape(*shape, 1, _LANES, 4)
    low = low >> np.arange(0, 8, 2, dtype=np.uint8)[:, None, None] & np.uint8(3)
    bits = np.unpackbits(parts[..., 64:], axis=-1, bitorder="little")
    # Bit q of a nibble is that of quad q. The nibbles of a row belong to inputs 0, 2, 1 and 3.
    nibbles = bits.reshape(*shape, _LANES, 4, 4)[..., [0, 2, 1, 3], :]
    high = nibbles.transpose(0, 1, 2, 5, 3, 4)
    codes = (low | high << np.uint8(2)).transpose(0, 4, 1, 2, 3, 5)
    return codes.reshape(shape[0], _LANES, shape[1], _GROUP).astype(np.int8)


def unpack_block_scales(
    scales: npt.NDArray[np.uint8],
    blocks: npt.NDArray[np.float16],
    rows: int,
    inputs: int,
    kind: str,
) -> tuple[Floats, Floats | None]:
    """Return the scales and minima (or None) of a block format; the products are exact.

    Both are float32 [padded rows, groups], or [padded rows, 2 * groups] for formats with two scales
    per group. The scales of iq1s are in its codes, which are passed as `scales`.
    """
    tiles = -(-rows // _LANES)
    groups = -(-inputs // _GROUP)
    if kind in _GRIDS:
        return _unpack_grid_scales(scales, blocks, tiles, groups, kind), None
    factors = (
        scales.reshape(tiles, groups, 2, _LANES)
        .transpose(2, 0, 3, 1)
        .reshape(2, tiles * _LANES, groups)
    )
    in_halves = kind in ("q2k", "q3k", "q6k")
    numbers = 1 if kind in ("q3k", "q6k") else 2
    halves = (
        blocks.reshape(tiles, -1, numbers, _LANES)
        .transpose(2, 0, 3, 1)
        .reshape(numbers, tiles * _LANES, -1)
    )
    wide = halves.astype(np.float32).repeat(_BLOCK_GROUPS, axis=2)[:, :, :groups]
    if in_halves:
        shape = (tiles * _LANES, 2 * groups)
        if kind == "q2k":
            low, high = (factors & 15) * wide[0], (factors >> 4) * wide[1]
            return low.transpose(1, 2, 0).reshape(shape), high.transpose(1, 2, 0).reshape(shape)
        signed = factors.view(np.int8).astype(np.float32) * wide
        return signed.transpose(1, 2, 0).reshape(shape), None
    return factors[0].astype(np.float32) * wide[0], factors[1].astype(np.float32) * wide[1]


def _unpack_grid_scales(
    scales: npt.NDArray[np.uint8],
    blocks: npt.NDArray[np.float16],
    tiles: int,
    groups: int,
    kind: str,
) -> Floats:
    """Return the scales of a format with a grid, float32 [padded rows, parts * groups]."""
    parts, _, _, eighths = _GRIDS[kind]
    nibbles = np.stack([scales & np.uint8(15), scales >> np.uint8(4)], axis=-1)
    if kind == "iq1s":
        more = scales.reshape(tiles, groups, -1)[..., 4 * _LANES :].view("<u2")
        nibbles = more >> np.uint16(12) & np.uint16(7)
    ordered = nibbles.reshape(tiles, groups, _LANES, parts).transpose(0, 2, 1, 3)
    factors = (2 * ordered.astype(np.float32) + 1) * np.float32(eighths / 8)
    wide = blocks.reshape(tiles, -1, _LANES).transpose(0, 2, 1).astype(np.float32)
    wide = wide.repeat(_BLOCK_GROUPS * parts, axis=2)[:, :, : groups * parts]
    return (factors.reshape(wide.shape) * wide).reshape(tiles * _LANES, -1)


def scale_codes(
    codes: npt.NDArray[np.int8],
    scales: npt.NDArray[np.uint8],
    blocks: npt.NDArray[np.float16],
    kind: str,
) -> tuple[npt.NDArray[np.int16], Floats]:
    """Return the codes of q2k or q3k times their integer scales, and the scales of these products.

    Args:
        codes: the result of `unpack_block_codes`.
        scales: the stored scales.
        blocks: the stored float16 numbers.
        kind: "q2k" or "q3k".

    Returns:
        (weights [padded rows, padded inputs], float32 scales [padded rows, groups]).
    """
    rows, inputs = codes.shape
    groups = inputs // _GROUP
    bytes_of_row = scales.reshape(-1, 2 * groups, _LANES).transpose(0, 2, 1).reshape(rows, -1)
    factors = bytes_of_row & np.uint8(15) if kind == "q2k" else bytes_of_row.view(np.int8)
    weights = codes.astype(np.int16) * factors.astype(np.int16).repeat(_GROUP // 2, axis=1)
    numbers = 2 if kind == "q2k" else 1
    own = blocks.reshape(rows // _LANES, -1, numbers, _LANES)[:, :, 0]
    wide = own.transpose(0, 2, 1).reshape(rows, -1).astype(np.float32)
    return weights, wide.repeat(_BLOCK_GROUPS, axis=1)[:, :groups]


def unpack_scales(
    packed: npt.NDArray[np.float16], rows: int, inputs: int, scale_groups: int = 1
) -> Floats:
    """Return the scales of a matrix, float32 [padded rows, groups].

    Args:
        packed: float16 [tiles][scales][16].
        rows: number of rows.
        inputs: number of inputs.
        scale_groups: number of groups that share a scale.
    """
    tiles = -(-rows // _LANES)
    groups = -(-inputs // _GROUP)
    ordered = packed.reshape(tiles, -1, _LANES).transpose(0, 2, 1).reshape(tiles * _LANES, -1)
    return ordered.repeat(scale_groups, axis=1)[:, :groups].astype(np.float32)


def unpack_floats(packed: npt.NDArray[Any], rows: int, inputs: int) -> Floats:
    """Return float32 [rows, inputs] from a packed matrix of float32 or bfloat16 bits."""
    if packed.dtype == np.uint16:
        packed = (packed.astype(np.uint32) << np.uint32(16)).view(np.float32)
    tiles = -(-rows // _LANES)
    return packed.reshape(tiles, inputs, _LANES).transpose(0, 2, 1).reshape(-1, inputs)[:rows]


def group_sums(
    codes: npt.NDArray[np.signedinteger[Any]],
    weights: npt.NDArray[np.signedinteger[Any]],
    size: int = _GROUP,
) -> npt.NDArray[np.int64]:
    """Return exact integer sums over groups of `size` inputs, [tokens, rows, groups]."""
    groups = codes.shape[1] // size
    x = codes.reshape(len(codes), groups, size).astype(np.int64)
    w = weights.reshape(len(weights), groups, size).astype(np.int64)
    sums: npt.NDArray[np.int64] = np.einsum("tgi,rgi->trg", x, w)
    return sums


def _fma(x: Floats, y: Floats, z: Floats) -> Floats:
    """Return x * y + z with one rounding (twice in the rare case of a float64 tie)."""
    return (x.astype(np.float64) * y + z).astype(np.float32)


def linear_int(
    codes: npt.NDArray[np.signedinteger[Any]],
    scales: Floats,
    weights: npt.NDArray[np.signedinteger[Any]],
    weight_scales: Floats,
    minima: Floats | None = None,
) -> Floats:
    """Return a product with integer weights, float32 [tokens, rows].

    Groups are added in order: out = fma(sum * token scale, weight scale, out). With minima, each
    group also adds out = fma(-(sum of the token's codes * token scale), minimum, out), whose inner
    product is rounded once. Each half of a group with two scales or two minima is a separate step.

    Args:
        codes: activations [tokens, padded inputs].
        scales: float32 [tokens, groups].
        weights: integers [rows, padded inputs]; unsigned codes if the format has minima.
        weight_scales: float32 [rows, groups], or [rows, 2 * groups] for formats with two scales per
            group.
        minima: float32 [rows, groups], or [rows, 2 * groups], for int4-asym, int5-asym, q2k, q4k
            and q5k.
    """
    groups = scales.shape[1]
    parts = weight_scales.shape[1] // groups
    sums = group_sums(codes, weights, _GROUP // parts).astype(np.float32)
    out = np.zeros(sums.shape[:2], dtype=np.float32)
    for group in range(groups):
        scale = scales[:, group, None]
        for part in range(parts * group, parts * (group + 1)):
            out = _fma(sums[:, :, part] * scale, weight_scales[None, :, part], out)
        if minima is None:
            continue
        halves = minima.shape[1] // groups
        own = codes[:, _GROUP * group : _GROUP * (group + 1)].reshape(len(codes), halves, -1)
        token_sums = own.sum(axis=2, dtype=np.int32).astype(np.float32)
        for half in range(halves):
            term = -(token_sums[:, half, None] * scale)
            out = _fma(term, minima[None, :, halves * group + half], out)
    return out


def linear_float(x: Floats, weights: Floats) -> Floats:
    """Return a product with float weights, float32 [tokens, rows]: one fma chain in input order."""
    out = np.zeros((len(x), len(weights)), dtype=np.float32)
    for index in range(x.shape[1]):
        out = _fma(np.broadcast_to(weights[None, :, index], out.shape), x[:, index, None], out)
    return out


def norm_rows(x: Floats, weight: Floats, eps: float) -> Floats:
    """Return the RMS norm of each row, computed in float64."""
    wide = x.astype(np.float64)
    normed: Floats = (wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + eps) * weight).astype(
        np.float32
    )
    return normed


def activate_rows(gate: Floats, up: Floats, *, gelu: bool = False, clamped: bool = False) -> Floats:
    """Return act(gate) * up, computed in float64.

    The activation is silu, or GELU in its tanh form. If `clamped`, the result is gate *
    sigmoid(1.702 * gate) * (up + 1), with gate <= 7 and -7 <= up <= 7.
    """
    x = gate.astype(np.float64)
    if clamped:
        x = np.minimum(x, 7.0)
        behind = np.clip(up.astype(np.float64), -7.0, 7.0) + 1.0
        return (x / (1.0 + np.exp(np.minimum(-1.702 * x, 700.0))) * behind).astype(np.float32)
    inner = 2.0 * 0.7978845608028654 * (x + 0.044715 * x**3) if gelu else x
    return (x / (1.0 + np.exp(np.minimum(-inner, 700.0))) * up).astype(np.float32)


def squared_rows(x: Floats) -> Floats:
    """Return max(x, 0) squared, the activation of MLPs without a gate."""
    return np.square(np.maximum(x, 0))


def rotate(x: Floats, cos: Floats, sin: Floats) -> Floats:
    """Rotate pairs (i, i + half) of rows [tokens, dim] by tables [tokens, half].

    Channels from 2 * half on are copied.
    """
    half = cos.shape[1]
    out = x.copy()
    a = x[:, :half]
    b = x[:, half : 2 * half]
    out[:, :half] = a * cos - b * sin
    out[:, half : 2 * half] = b * cos + a * sin
    return out
