"""Faults in codes that are looked up in a table, in codes of 1, 2 and 5 bits, and in Q3_K."""

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
_OF_BLOCKS = "tests/models/gguf/test_blocks.py"
_OF_FILES = "tests/models/gguf/test_four_bits.py"
_OF_STREAM = "tests/models/packed/test_stream.py"
_OF_HALVED = "tests/models/weights/test_halved.py"
_OF_KERNELS = "tests/kernels/program/test_linear.py::test_linear_equals_the_specification"
_OF_EMBED = "tests/kernels/program/test_embed.py"
_OF_FORMS = "tests/kernels/linear/test_every_form.py"

FAULTS = faults(
    (
        "table of another type",
        _BLOCKS,
        "_iq4_xs_codes, _NL,",
        "_iq4_xs_codes, mxfp4.TABLE,",
        _OF_BLOCKS,
    ),
    (
        "table: nibbles of a file in the other order",
        _BLOCKS,
        "[packed & np.uint8(15), packed >> np.uint8(4)]",
        "[packed >> np.uint8(4), packed & np.uint8(15)]",
        _OF_BLOCKS,
    ),
    (
        "table: scales of IQ4_XS in the other order",
        _BLOCKS,
        "& np.uint8(15), blocks[:, 4:8] >> np.uint8(4)]",
        ">> np.uint8(4), blocks[:, 4:8] & np.uint8(15)]",
        _OF_BLOCKS,
    ),
    (
        "table: scales below float16 are kept",
        _MXFP4,
        "_LEAST_EXPONENT = 104",
        "_LEAST_EXPONENT = 102",
        _OF_BLOCKS,
    ),
    (
        "table: zeros of MXFP4 count as weights",
        _MXFP4,
        "np.uint8(0x77)",
        "np.uint8(0xFF)",
        _OF_BLOCKS,
    ),
    (
        "table: scales above float16 are taken",
        _SOURCE,
        "if not np.isfinite(found.scales).all():",
        "if tensor.type == 'Q8_0':",
        _OF_FILES,
    ),
    ("Q3_K: codes off by one", _BLOCKS, "codes + np.uint8(28)", "codes + np.uint8(27)", _OF_BLOCKS),
    (
        "Q5_1: minima of the other sign",
        _BLOCKS,
        "(_fives(b, 4), _half(b, 0), -_half(b, 2))",
        "(_fives(b, 4), _half(b, 0), _half(b, 2))",
        _OF_BLOCKS,
    ),
    (
        "int5-asym: minima of 4-bit codes are lost",
        _STREAM,
        "        if stored.minima:\n            return rows\n",
        "",
        _OF_STREAM,
    ),
    (
        "TQ1_0: digits of 16 bytes as of 32",
        _BLOCKS,
        "((0, 32, 5), (32, 48, 5), (48, 52, 4))",
        "((0, 48, 5), (48, 52, 4))",
        _OF_BLOCKS,
    ),
    (
        "Q2_0: early files are read as later ones",
        _FILE,
        "EARLY_TYPES.get(info.type, info.type)",
        "info.type",
        "tests/models/gguf/test_ternary.py",
    ),
    (
        "narrow: each group has its own scale",
        _LOADS,
        "run = b.lshr(part, int_constant(form.scale_log)) if form.scale_log else part",
        "run = part",
        _OF_KERNELS,
    ),
    (
        "narrow: embedding rows take the first scale",
        _TOKENS,
        "(group >> _SCALE_LOG[kind])",
        "(group >> 8)",
        _OF_EMBED,
    ),
    (
        "narrow: scales are not repeated in a wider format",
        _STREAM,
        "rows.scales.repeat(times, axis=1)[:, :count]",
        "np.tile(rows.scales, times)[:, :count]",
        _OF_STREAM,
    ),
    (
        "narrow: padding of 1-bit codes runs into its neighbours",
        "kernels/linear/weights.py",
        "0 if form.table or form.code_step > 1 else form.offset",
        "0 if form.table else form.offset",
        _OF_STREAM,
    ),
    (
        "table: quads of a line in the other order",
        _LOADS,
        "    return first, second\n",
        "    return second, first\n",
        _OF_KERNELS,
    ),
    (
        "table: bits above a code are looked at",
        _LOADS,
        "        low = b.and_(both, mask)\n",
        "        low = both\n",
        _OF_FORMS,
    ),
    (
        "table of another tile",
        _TILES,
        "[self._table(b, at) for at in minima]",
        "[self._table(b, minima[0]) for _ in minima]",
        _OF_KERNELS,
    ),
    ("table: seed of half a group", _TILES, "part = _WHOLE", "part = 0", _OF_KERNELS),
    (
        "table: embedding rows without a sign",
        _TOKENS,
        "code -= 256 if code > 127 else 0",
        "code -= 0",
        _OF_EMBED,
    ),
    (
        "table: tensors share a tile",
        _PLAN,
        "if in_tiles or not FORMATS[kind].table]",
        "if True]",
        _OF_STREAM,
    ),
    (
        "table: bytes of int8 without their offset",
        _STREAM,
        "[rows.codes] + np.uint8(form.offset)",
        "[rows.codes]",
        _OF_STREAM,
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
