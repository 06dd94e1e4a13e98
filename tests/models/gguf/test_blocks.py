"""Block formats of GGUF against the `gguf` package: float32 to the bit, codes exact where they are said to be."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from kvboost_edge.kernels.linear.blocks import pack_blocks
from kvboost_edge.kernels.linear.weights import BLOCK_FORMATS
from kvboost_edge.kernels.reference.weights import unpack_rows
from kvboost_edge.models.gguf.blocks import BLOCKS, TYPE_NAMES, dequantize, quant_rows_of, scales_of

QUANTIZED = [name for name, block in BLOCKS.items() if block.kind is not None]
IN_BLOCKS = [name for name in QUANTIZED if BLOCKS[name].kind in BLOCK_FORMATS]
EXACT = [name for name in QUANTIZED if BLOCKS[name].exact and name not in IN_BLOCKS]


def _random(name: str, rows: int = 9, blocks: int = 4) -> np.ndarray:
    """Random codes with ordinary scales: uint8 [rows, bytes]."""
    block, rng = BLOCKS[name], np.random.default_rng(3)
    raw = rng.integers(0, 256, (rows * blocks * (256 // block.weights), block.nbytes), dtype=np.uint8)
    for at in block.halves:
        raw[:, at : at + 2] = (0.01 * rng.normal(size=(len(raw), 1))).astype(np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


def _values(rows: object, kind: str) -> np.ndarray:
    codes, scales, minima = rows.codes.astype(np.float32), rows.scales, rows.minima
    values = np.repeat(scales.astype(np.float32), 32, 1) * (codes - {"int8": 128, "int4": 8, "int4-asym": 0}[kind])
    return values if minima is None else values - np.repeat(minima.astype(np.float32), 32, 1)


def test_sizes_and_numbers_are_those_of_the_format() -> None:
    for name, block in BLOCKS.items():
        assert GGML_QUANT_SIZES[GGMLQuantizationType[name]] == (block.weights, block.nbytes)
    assert {int(kind): kind.name for kind in GGMLQuantizationType} == TYPE_NAMES


@pytest.mark.parametrize("name", QUANTIZED)
def test_floats_equal_the_package(name: str) -> None:
    raw = _random(name)
    np.testing.assert_array_equal(dequantize(name, raw), quants.dequantize(raw, GGMLQuantizationType[name]))
    assert scales_of(name, raw).shape == (raw.size // BLOCKS[name].nbytes, len(BLOCKS[name].halves))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_float_types(name: str) -> None:
    values = np.random.default_rng(4).normal(size=(5, 7)).astype(np.float32)
    raw = quants.quantize(values, GGMLQuantizationType[name]).view(np.uint8).reshape(5, -1)
    expected = quants.dequantize(quants.quantize(values, GGMLQuantizationType[name]), GGMLQuantizationType[name])
    np.testing.assert_array_equal(dequantize(name, raw), expected)


@pytest.mark.parametrize("name", EXACT)
def test_codes_are_exact(name: str) -> None:
    raw = _random(name)
    rows = quant_rows_of(name, raw)
    assert rows.kind == BLOCKS[name].kind
    assert rows.codes.dtype == np.uint8
    assert rows.scales.dtype == np.float16
    np.testing.assert_array_equal(_values(rows, rows.kind), dequantize(name, raw))


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_blocks_are_taken_over_and_packed_exactly(name: str) -> None:
    assert IN_BLOCKS == ["Q4_K", "Q5_K", "Q6_K"]
    raw = _random(name)
    rows = quant_rows_of(name, raw)
    assert rows.kind == BLOCKS[name].kind
    np.testing.assert_array_equal(rows.codes, raw)
    np.testing.assert_array_equal(rows.scales.reshape(-1), scales_of(name, raw).reshape(-1))
    packed = pack_blocks(rows.codes, BLOCK_FORMATS[rows.kind])
    expected = quants.dequantize(raw, GGMLQuantizationType[name])
    np.testing.assert_array_equal(unpack_rows(packed, *expected.shape, rows.kind), expected)


def test_error_of_the_others() -> None:
    assert set(QUANTIZED) - set(EXACT) - set(IN_BLOCKS) == {"Q5_1"}
    raw = _random("Q5_1")
    rows, stored = quant_rows_of("Q5_1", raw), dequantize("Q5_1", raw)
    assert rows.kind == "int8"
    assert 0 < np.linalg.norm(_values(rows, "int8") - stored) / np.linalg.norm(stored) < 6e-3
    largest = np.abs(stored.reshape(len(stored), -1, 32)).max(axis=2)
    difference = np.abs(_values(rows, "int8") - stored).reshape(len(stored), -1, 32).max(axis=2)
    assert (difference <= 0.51 / 127 * largest + 1e-9).all()


def test_zero_and_huge_groups() -> None:
    raw = np.zeros((1, BLOCKS["Q5_1"].nbytes), dtype=np.uint8)
    rows = quant_rows_of("Q5_1", raw)
    assert (rows.codes == 128).all()
    assert (rows.scales == 0).all()
    raw[0, 4:] = 255
    raw[0, :2] = np.array([60000.0], dtype=np.float16).view(np.uint8)
    assert np.isfinite(quant_rows_of("Q5_1", raw).scales).all()
