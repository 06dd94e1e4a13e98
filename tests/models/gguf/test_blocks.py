"""GGUF block formats against the `gguf` package: float32 values equal to the bit, and exact codes
for formats that declare them.
"""

import re

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from helpers.distance import distance
from helpers.gguf.grids import package_grids
from helpers.gguf.types import TYPES, dequantized, put_half
from helpers.kernels.weight_formats import GRIDS, random_blocks
from kvboost_edge.kernels.linear.grids import grid_of
from kvboost_edge.kernels.linear.k_blocks import pack_blocks
from kvboost_edge.kernels.linear.weight_formats import FORMATS
from kvboost_edge.kernels.linear.weights import pack_codes, packed_sizes
from kvboost_edge.kernels.reference.weights import unpack_rows
from kvboost_edge.models.gguf.blocks import (
    BLOCKS,
    TYPE_NAMES,
    dequantize,
    half_bits,
    q3_k_as_q6_k,
    quant_rows_of,
    refusal,
)

QUANTIZED = [name for name, block in BLOCKS.items() if block.kind is not None]
IN_BLOCKS = [name for name in QUANTIZED if FORMATS[BLOCKS[name].kind].block_bytes]
LATTICES = ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"]
EXACT = [name for name in QUANTIZED if BLOCKS[name].exact and name not in IN_BLOCKS]


def _random(name, rows=9, blocks=4):
    """Return random codes with ordinary scales: uint8 [rows, bytes]."""
    block = BLOCKS[name]
    rng = np.random.default_rng(3)
    raw = rng.integers(
        0, 256, (rows * blocks * (256 // block.weights), block.nbytes), dtype=np.uint8
    )
    for at in block.halves:
        put_half(raw, at, 0.01 * rng.normal(size=len(raw)))
    if name == "MXFP4":
        raw[:, 0] = rng.integers(104, 144, len(raw))  # the scales that are float16
    return raw.reshape(rows, -1)


def _values(rows, kind):
    codes = rows.codes.astype(np.float32)
    scales = rows.scales
    minima = rows.minima
    table = rows.table if kind == "int4t" else np.array(FORMATS[kind].values)
    signed = table[rows.codes] if len(table) else codes - FORMATS[kind].offset
    values = np.repeat(scales.astype(np.float32), FORMATS[kind].scale_inputs, 1) * signed
    return values if minima is None else values - np.repeat(minima.astype(np.float32), 32, 1)


def test_block_sizes_and_type_numbers_equal_the_gguf_package():
    for name, block in BLOCKS.items():
        assert TYPES[name][1:] == (block.weights, block.nbytes)
    # Newer than the package: llama.cpp's GGML_TYPE_Q2_0. Not in llama.cpp: I2_S of bitnet.cpp.
    others = {42: "Q2_0", 36: "I2_S"}
    assert {int(kind): kind.name for kind in GGMLQuantizationType} | others == TYPE_NAMES


@pytest.mark.parametrize("name", QUANTIZED)
def test_dequantized_floats_equal_the_gguf_package(name):
    raw = _random(name)
    np.testing.assert_array_equal(dequantize(name, raw), dequantized(name, raw))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_float_types_are_read(name):
    values = np.random.default_rng(4).normal(size=(5, 7)).astype(np.float32)
    raw = quants.quantize(values, GGMLQuantizationType[name]).view(np.uint8).reshape(5, -1)
    expected = quants.dequantize(
        quants.quantize(values, GGMLQuantizationType[name]), GGMLQuantizationType[name]
    )
    np.testing.assert_array_equal(dequantize(name, raw), expected)


@pytest.mark.parametrize("name", EXACT)
def test_codes_and_scales_are_exact(name):
    raw = _random(name)
    rows = quant_rows_of(name, raw)
    assert rows.kind == BLOCKS[name].kind
    assert rows.codes.dtype == np.uint8
    assert rows.scales.dtype == np.float16
    np.testing.assert_array_equal(_values(rows, rows.kind), dequantize(name, raw))


@pytest.mark.parametrize("rows", [16, 37])
@pytest.mark.parametrize("name", IN_BLOCKS)
def test_blocks_of_256_are_packed_exactly(name, rows):
    assert ["Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K", *LATTICES] == IN_BLOCKS
    raw = random_blocks(BLOCKS[name].kind, rows, 3)
    stored = quant_rows_of(name, raw)
    assert stored.kind == BLOCKS[name].kind
    np.testing.assert_array_equal(stored.codes, raw)
    blocks = raw.reshape(-1, BLOCKS[name].nbytes)
    bits = [half_bits(blocks, at) for at in BLOCKS[name].halves]
    scales = stored.scales.view(np.uint16).reshape(len(blocks), -1)
    np.testing.assert_array_equal(scales, np.hstack(bits))
    packed = pack_blocks(stored.codes, stored.kind)
    assert tuple(array.size for array in packed[:3]) == packed_sizes(rows, 768, stored.kind)
    expected = quants.dequantize(raw, GGMLQuantizationType[name])
    np.testing.assert_array_equal(unpack_rows(packed, rows, 768, stored.kind), expected)


def test_only_iq4_xs_rounds_its_scales():
    assert set(QUANTIZED) - set(EXACT) - set(IN_BLOCKS) == {"IQ4_XS"}


@pytest.mark.parametrize("name", ["Q5_0", "Q5_1"])
def test_five_bit_formats_at_their_extremes(name):
    """Every code is combined with extreme scales of both signs, and with minima."""
    raw = np.random.default_rng(8).integers(0, 256, (64, BLOCKS[name].nbytes), dtype=np.uint8)
    raw[:16, 2:] = 0
    raw[16:32, 2:] = 255
    for at, values in zip(BLOCKS[name].halves, ((-2047.0, 2**-24), (31.0, 0.0)), strict=False):
        raw[:, at : at + 2] = np.resize(np.array(values, np.float16), (64, 1)).view(np.uint8)
    rows = quant_rows_of(name, raw)
    assert (rows.codes.min(), rows.codes.max()) == (0, 31)
    packed = pack_codes(rows.codes, rows.scales, rows.minima, rows.kind)
    expected = quants.dequantize(raw, GGMLQuantizationType[name])
    np.testing.assert_array_equal(unpack_rows(packed, 64, 32, rows.kind), expected)


NARROW = ("TQ1_0", "TQ2_0", "Q1_0", "Q2_0", "Q2_0_g128")


@pytest.mark.parametrize("name", NARROW)
def test_one_and_two_bit_formats_at_their_extremes(name):
    """Every byte occurs at every position of a block, with the largest and smallest scales of both
    signs. Code 3, which ternary models lack, is a weight of twice the scale.
    """
    block = BLOCKS[name]
    raw = np.arange(256, dtype=np.uint8)[:, None] + np.arange(block.nbytes, dtype=np.uint8)
    (at,) = block.halves
    scales = np.resize(np.array((-65504.0, 2**-24, 1.0), np.float16), (256, 1))
    raw[:, at : at + 2] = scales.view(np.uint8)
    rows = quant_rows_of(name, raw)
    codes = {"TQ1_0": [0, 1, 2], "Q1_0": [0, 2]}.get(name, [0, 1, 2, 3])
    assert np.unique(rows.codes).tolist() == codes
    packed = pack_codes(rows.codes, rows.scales, rows.minima, rows.kind)
    found = unpack_rows(packed, 256, block.weights, rows.kind)
    np.testing.assert_array_equal(found, dequantized(name, raw))


def test_nvfp4_at_its_extremes():
    """Every byte occurs at every position of a block. As in llama.cpp, the sign of a scale does not
    count, and NaN is 0.
    """
    raw = np.arange(256, dtype=np.uint8)[:, None] + np.arange(36, dtype=np.uint8)
    rows = quant_rows_of("NVFP4", raw)
    assert (rows.scales.max(), np.min(rows.scales[rows.scales > 0])) == (240, 2**-10)
    factors = np.full(256, 0.75, np.float32)
    packed = pack_codes(rows.codes, rows.scales, None, "nvfp4", factors=factors)
    found = unpack_rows(packed, 256, 64, "nvfp4")
    expected = quants.dequantize(raw, GGMLQuantizationType.NVFP4) * np.float32(0.75)
    np.testing.assert_array_equal(found, expected)


def test_q2_k_at_its_extremes():
    """Combine every scale with every minimum, all codes, and numbers of both signs."""
    raw = np.random.default_rng(5).integers(0, 256, (64, 84), dtype=np.uint8)
    raw[:, :16] = np.arange(64 * 16).reshape(64, 16)
    raw[16:] = np.resize(raw[:16], (48, 84))
    raw[16:32, 16:80] = 0
    raw[32:48, 16:80] = 255
    numbers = np.resize(np.array([0.5, 0.25, -2047.0, 2**-24], np.float16), (64, 2))
    raw[:, 80:] = np.ascontiguousarray(numbers).view(np.uint8)
    found = unpack_rows(pack_blocks(raw, "q2k"), 64, 256, "q2k")
    assert (found.min(), found.max()) == (-2047.0 * 15 * 3, 0.5 * 15 * 3)
    np.testing.assert_array_equal(found, quants.dequantize(raw, GGMLQuantizationType.Q2_K))


def test_every_grid_entry_equals_the_gguf_package():
    grids = package_grids()
    assert list(grids) == [name for name in GRIDS if name != "iq1m"]
    assert grid_of("iq1m") is grid_of("iq1s")
    for name, grid in grids.items():
        np.testing.assert_array_equal(grid_of(name), grid)
        assert len(grid) == 1 << FORMATS[name].index_bits


@pytest.mark.parametrize("name", LATTICES)
def test_lattice_types_at_their_extremes(name):
    """Random bits, whose 65,536 indices or more include every entry, with extreme scales."""
    block = BLOCKS[name]
    raw = np.random.default_rng(5).integers(0, 256, (2048, block.nbytes), dtype=np.uint8)
    put_half(raw, block.halves[0], (-65504.0, 2**-24, 1.0))
    expected = quants.dequantize(raw, GGMLQuantizationType[name])
    np.testing.assert_array_equal(dequantize(name, raw), expected)
    found = unpack_rows(pack_blocks(raw, block.kind), len(raw), 256, block.kind)
    np.testing.assert_array_equal(found, expected)


def test_q3_k_at_its_extremes():
    """Every code is combined with every scale, both packed and converted to blocks of Q6_K."""
    raw = np.random.default_rng(5).integers(0, 256, (64, 110), dtype=np.uint8)
    raw[0] = 0
    raw[1] = 255
    raw[:, 108:] = np.array([0.5], np.float16).view(np.uint8)
    scales = np.unique(dequantize("Q3_K", raw))
    assert (scales.min(), scales.max()) == (-0.5 * 31 * 4, 0.5 * 32 * 4)
    expected = quants.dequantize(raw, GGMLQuantizationType.Q3_K)
    found = quants.dequantize(q3_k_as_q6_k(raw), GGMLQuantizationType.Q6_K)
    np.testing.assert_array_equal(found, expected)
    found = unpack_rows(pack_blocks(raw, "q3k"), 64, 256, "q3k")
    np.testing.assert_array_equal(found, expected)


def test_scales_of_iq4_xs_are_rounded_to_float16():
    raw = _random("IQ4_XS")
    rows = quant_rows_of("IQ4_XS", raw)
    stored = dequantize("IQ4_XS", raw)
    error = distance(_values(rows, "int4t"), stored)
    assert 1e-5 < error < 2**-11
    assert rows.table.tolist()[:2] == [-127, -104]


def test_mxfp4_scales_outside_float16():
    """Every exponent is combined with weights and with zeros of both signs. Values are exact, 0
    where the scale is too small, or infinite.
    """
    raw = np.random.default_rng(6).integers(0, 256, (512, 17), dtype=np.uint8)
    raw[256:, 1:] = np.random.default_rng(7).choice(
        np.array([0x00, 0x80, 0x08, 0x88], np.uint8), (256, 16)
    )
    raw[:, 0] = np.tile(np.arange(256), 2)
    with np.errstate(over="ignore"):
        expected = quants.dequantize(raw, GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(dequantize("MXFP4", raw), expected)
    rows = quant_rows_of("MXFP4", raw)
    with np.errstate(invalid="ignore"):
        found = _values(rows, "int4t")
    np.testing.assert_array_equal(found[104:144], expected[104:144])
    assert (found[:104] == 0).all()
    assert np.isinf(rows.scales[144:256]).all()
    assert (rows.scales[256:] == 0).all()
    assert (found[256:] == 0).all()
    assert (expected[256:] == 0).all()
    assert BLOCKS["MXFP4"].count_lost(raw) == 104
    assert BLOCKS["MXFP4"].count_lost(raw[104:]) == 0
    assert np.abs(expected[:104]).max() <= 12 * 2.0**-25


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("I2_S", "Microsoft's bitnet.cpp; use a TQ2_0 or TQ1_0 file"),
        ("Q8_K", "for intermediate results"),
        ("I32", "supported types are F32, F16, .*MXFP4, .*Q2_0; use a Q4_K_M"),
    ],
)
def test_unsupported_types_are_refused_with_an_alternative(name, why):
    assert name in TYPE_NAMES.values()
    assert name not in BLOCKS
    assert re.search(why, refusal(name)), refusal(name)
