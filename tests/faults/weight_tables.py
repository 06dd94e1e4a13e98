"""Faults in weight formats with lookup tables and grids, in codes of 1, 2 and 5 bits, in Q2_K and
Q3_K.
"""

from __future__ import annotations

from faults.fault import faults

_MXFP4 = "models/weights/mxfp4.py"
_BLOCKS = "models/gguf/blocks.py"
_FILE = "models/gguf/file.py"
_SOURCE = "models/gguf/source.py"
_LOADS = "kernels/linear/simd_loads.py"
_TILES = "kernels/linear/int_tiles.py"
_TOKENS = "kernels/program/tokens.py"
_PLAN = "models/packed/pack_plan.py"
_STREAM = "models/packed/stream.py"
_HALVED = "models/weights/reordered.py"
_GRIDS = "kernels/linear/grids.py"
_GRID_BLOCKS = "kernels/linear/grid_blocks.py"
_OF_FORMS = "tests/kernels/linear/test_every_form.py"
_OF_BLOCKS = "tests/models/gguf/test_blocks.py"
_OF_FILES = "tests/models/gguf/test_four_bits.py"
_OF_STREAM = "tests/models/packed/test_stream.py"
_OF_HALVED = "tests/models/weights/test_halved.py"
_OF_KERNELS = "tests/kernels/program/test_linear.py::test_linear_equals_the_reference"
_OF_EMBED = "tests/kernels/program/test_embed.py"
_OF_FORMS = "tests/kernels/linear/test_every_form.py"

FAULTS = faults(
    (
        "table: decodes IQ4_XS with the table of MXFP4",
        _BLOCKS,
        "_iq4_xs_codes, _NL,",
        "_iq4_xs_codes, mxfp4.TABLE,",
        _OF_BLOCKS,
    ),
    (
        "table: swaps the nibbles of codes in a GGUF file",
        _BLOCKS,
        "[packed & np.uint8(15), packed >> np.uint8(4)]",
        "[packed >> np.uint8(4), packed & np.uint8(15)]",
        _OF_BLOCKS,
    ),
    (
        "table: swaps the nibbles of IQ4_XS scales",
        _BLOCKS,
        "& np.uint8(15), blocks[:, 4:8] >> np.uint8(4)]",
        ">> np.uint8(4), blocks[:, 4:8] & np.uint8(15)]",
        _OF_BLOCKS,
    ),
    (
        "table: keeps scales below the range of float16",
        _MXFP4,
        "_LEAST_EXPONENT = 104",
        "_LEAST_EXPONENT = 102",
        _OF_BLOCKS,
    ),
    (
        "table: counts zeros of MXFP4 as weights",
        _MXFP4,
        "np.uint8(0x77)",
        "np.uint8(0xFF)",
        _OF_BLOCKS,
    ),
    (
        "table: accepts scales above the range of float16",
        _SOURCE,
        "if not np.isfinite(found.scales).all():",
        "if tensor.type == 'Q8_0':",
        _OF_FILES,
    ),
    (
        "q2k: both halves take the minima of the first",
        _LOADS,
        "b.add(scales, int_constant(LANES * half))",
        "b.add(scales, int_constant(0))",
        _OF_KERNELS,
    ),
    (
        "q2k: both halves take the sum of the first",
        _TILES,
        "int_constant((8 + 4 * half) * self.tokens)",
        "int_constant(8 * self.tokens)",
        _OF_KERNELS,
    ),
    (
        "q2k: minima are not divided by the factor of the seeds",
        _LOADS,
        "shared = b.fmul(shared, ir.Constant(V16, [1 / HALF_OFFSET] * LANES))",
        "pass",
        _OF_KERNELS,
    ),
    (
        "q2k: embedding rows take the minimum of the next half",
        _TOKENS,
        "least = scale >> 4",
        "pass",
        _OF_EMBED,
    ),
    (
        "q3k: sums of half groups take the seeds of q6k",
        "kernels/linear/weight_formats.py",
        "has_halves = self.shares_panel and self.parts > 1",
        "has_halves = False",
        _OF_FORMS,
    ),
    (
        "q3k: the scale of negated codes is not negated",
        _TILES,
        "is_negated = self.scales_codes and self.format.offset > 0",
        "is_negated = False",
        _OF_FORMS,
    ),
    (
        "q3k: scaled codes have the wrong offset",
        _LOADS,
        "ir.Constant(_V32S, [TABLE_OFFSET] * 2 * LANES)",
        "ir.Constant(_V32S, [TABLE_OFFSET - 1] * 2 * LANES)",
        _OF_FORMS,
    ),
    (
        "q3k: sums of half groups are not scaled",
        _TILES,
        "products = [b.mul(dots, scale) for dots, scale in zip(halves, scales, strict=True)]",
        "products = list(halves)",
        _OF_FORMS,
    ),
    (
        "q3k: leaves the offset of scales out",
        "kernels/linear/k_blocks.py",
        "np.uint8(scale + np.uint32(224))",
        "np.uint8(scale)",
        _OF_BLOCKS,
    ),
    (
        "Q3_K: codes are off by one",
        _BLOCKS,
        "codes + np.uint8(28)",
        "codes + np.uint8(27)",
        _OF_BLOCKS,
    ),
    (
        "Q5_1: minima have the wrong sign",
        _BLOCKS,
        "(_fives(b, 4), _half(b, 0), -_half(b, 2))",
        "(_fives(b, 4), _half(b, 0), _half(b, 2))",
        _OF_BLOCKS,
    ),
    (
        "int5-asym: drops the minima of 4-bit codes",
        _STREAM,
        "        if stored.minima:\n            return rows\n",
        "",
        _OF_STREAM,
    ),
    (
        "TQ1_0: unpacks the digits of 16 bytes with those of 32",
        _BLOCKS,
        "((0, 32, 5), (32, 48, 5), (48, 52, 4))",
        "((0, 48, 5), (48, 52, 4))",
        _OF_BLOCKS,
    ),
    (
        "Q2_0: reads early files in the later layout",
        _FILE,
        "EARLY_TYPES.get(info.type, info.type)",
        "info.type",
        "tests/models/gguf/test_ternary.py",
    ),
    (
        "narrow: reads a separate scale for each group",
        _LOADS,
        "run = b.lshr(part, int_constant(form.scale_log)) if form.scale_log else part",
        "run = part",
        _OF_KERNELS,
    ),
    (
        "narrow: embedding rows use the first scale",
        _TOKENS,
        "(group >> _SCALE_LOG[kind])",
        "(group >> 8)",
        _OF_EMBED,
    ),
    (
        "narrow: tiles scales instead of repeating them",
        _STREAM,
        "rows.scales.repeat(times, axis=1)[:, :count]",
        "np.tile(rows.scales, times)[:, :count]",
        _OF_STREAM,
    ),
    (
        "narrow: padding of 1-bit codes spills into its neighbours",
        "kernels/linear/weights.py",
        "0 if form.is_looked_up or form.code_step > 1 else form.offset",
        "0 if form.is_looked_up else form.offset",
        _OF_STREAM,
    ),
    (
        "table: swaps the quads of a line",
        _LOADS,
        "    return first, second\n",
        "    return second, first\n",
        _OF_KERNELS,
    ),
    (
        "table: does not mask the bits above a code",
        _LOADS,
        "        low = b.and_(both, mask)\n",
        "        low = both\n",
        _OF_FORMS,
    ),
    (
        "table: uses the first tile's table for all tiles",
        _TILES,
        "[self._table(b, at) for at in minima]",
        "[self._table(b, minima[0]) for _ in minima]",
        _OF_KERNELS,
    ),
    ("table: starts the sums from half a group", _TILES, "part = _WHOLE", "part = 0", _OF_KERNELS),
    (
        "table: embedding rows lose the sign of their codes",
        _TOKENS,
        "code -= 256 if code > 127 else 0",
        "code -= 0",
        _OF_EMBED,
    ),
    (
        "table: lets tensors with different tables share a tile",
        _PLAN,
        "if in_tiles or not FORMATS[kind].table]",
        "if True]",
        _OF_STREAM,
    ),
    (
        "table: does not add the offset to int8 codes",
        _STREAM,
        "[rows.codes] + np.uint8(form.offset)",
        "[rows.codes]",
        _OF_STREAM,
    ),
    (
        "grid: negates no weight",
        _GRIDS,
        "b.select(is_negative, b.sub(zeros, quad), quad)",
        "quad",
        _OF_KERNELS,
    ),
    (
        "grid: drops the bits of an index above 8",
        _GRIDS,
        "    above = weight_format.index_bits - 8\n",
        "    above = 0\n",
        _OF_KERNELS,
    ),
    (
        "grid: swaps the halves of entries of 8 weights",
        _GRIDS,
        "range(half, 2 * LANES, 2)",
        "range(1 - half, 2 * LANES, 2)",
        _OF_KERNELS,
    ),
    (
        "grid: starts the sums of half a group from too small seeds",
        _TILES,
        "return b.shl(seed, by)",
        "return seed",
        _OF_KERNELS,
    ),
    (
        "grid: takes the first scale for both halves of a group",
        _LOADS,
        "four = b.mul(b.and_(part, one), int_constant(4))",
        "four = int_constant(0)",
        _OF_KERNELS,
    ),
    (
        "grid: packs seven of eight signs",
        _GRID_BLOCKS,
        "return signs | (odd & 1) << 7",
        "return signs",
        _OF_BLOCKS,
    ),
    (
        "grid: reads seven of eight signs",
        _BLOCKS,
        "signs | odd << 7",
        "signs",
        _OF_BLOCKS,
    ),
    (
        "grid: embedding rows lose the sign of their weights",
        _TOKENS,
        "return -weight if sign & 1 else weight",
        "return weight",
        _OF_EMBED,
    ),
    (
        "IQ1: applies no deltas",
        _GRIDS,
        "found = b.select(is_lower, b.xor(found, _splat(0x11111111)), found)",
        "pass",
        _OF_KERNELS,
    ),
    (
        "IQ1: subtracts 8 instead of 9 from codes",
        _TILES,
        "_I32(self.format.offset)",
        "_I32(8)",
        _OF_KERNELS,
    ),
    (
        "IQ1_M: packs the nibbles of the float16 in reverse order",
        _GRID_BLOCKS,
        "half |= bits >> 12 << (4 * word)",
        "half |= bits >> 12 << (12 - 4 * word)",
        _OF_BLOCKS,
    ),
    (
        "IQ1_M: looks for NaN in the nibbles of the float16 in reverse order",
        _BLOCKS,
        "np.uint16(4 * index)",
        "np.uint16(12 - 4 * index)",
        "tests/models/gguf/test_finite.py",
    ),
    (
        "IQ1: embedding rows have no deltas",
        _TOKENS,
        "return found - 2 * is_lower - _OFFSET[kind]",
        "return found - _OFFSET[kind]",
        _OF_EMBED,
    ),
    (
        "grid: reuses compiled kernels after a change of the grids",
        "kernels/sources.py",
        '[*room.rglob("*.py"), *room.rglob("*.npz")]',
        'room.rglob("*.py")',
        "tests/kernels/test_jit.py",
    ),
    (
        "nvfp4: scales are those of the first half of a group",
        _LOADS,
        "_emit_float8_as_f32(b, _at(b, scales, part, LANES))",
        "_emit_float8_as_f32(b, _at(b, scales, int_constant(0), LANES))",
        _OF_KERNELS,
    ),
    (
        "nvfp4: embedding rows lose the factor",
        _TOKENS,
        "return scale * load_f32(minima_at + 2 * lane), minimum",
        "return scale, minimum",
        _OF_EMBED,
    ),
    (
        "nvfp4: all experts take the factor of the first",
        _SOURCE,
        "tensor.start + 4 * number",
        "tensor.start",
        "tests/models/gguf/test_nvfp4.py",
    ),
    (
        "nvfp4: multiplies by the factor of compressed-tensors",
        "models/weights/nvfp4_parts.py",
        "1 / stored if divides else stored",
        "stored",
        "tests/models/weights/test_nvfp4.py",
    ),
    (
        "nvfp4: accepts negative scales",
        "models/weights/nvfp4_parts.py",
        "(bits == _NAN) | (bits > _MINUS_ZERO)",
        "bits == _NAN",
        "tests/models/weights/test_nvfp4.py",
    ),
    (
        "nvfp4: applies rotated weights to activations that are not rotated",
        "models/config/quant_config.py",
        "    if found:",
        "    if False:",
        "tests/models/weights/test_nvfp4.py",
    ),
    (
        "table of rows: loses the factor of NVFP4",
        _SOURCE,
        "return values if factor == 1 else values * factor",
        "return values",
        "tests/models/weights/test_row_table.py",
    ),
    (
        "nvfp4: accepts NaN as a scale",
        "models/gguf/tensor_check.py",
        "if bits.max() == _FLOAT8_NAN",
        "if False",
        "tests/models/gguf/test_finite.py",
    ),
    (
        "table: lost where rows are reordered",
        _HALVED,
        "        pick = stored - first\n"
        "        minima = None if found.minima is None else found.minima[pick]\n"
        "        return found._replace(codes=found.codes[pick], scales=found.scales[pick], "
        "minima=minima)",
        "        pick = stored - first\n"
        "        minima = None if found.minima is None else found.minima[pick]\n"
        "        return found._replace(codes=found.codes[pick], scales=found.scales[pick], "
        "minima=minima, table=None)",
        _OF_HALVED,
    ),
)
