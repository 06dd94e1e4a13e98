"""Rows of blocks decoded separately equal those of the `gguf` package to the bit."""

import gguf
import numpy as np
import pytest

from kvboost_edge.kernels import block_rows
from kvboost_edge.kernels.block_rows import DECODED, decode_rows, decode_rows_entry
from kvboost_edge.models.gguf.blocks import BLOCKS


def _random(name, rows, width):
    block = BLOCKS[name]
    rng = np.random.default_rng(len(name) + rows)
    raw = rng.integers(0, 256, (rows * width // block.weights, block.nbytes), dtype=np.uint8)
    for at in block.halves or (0,):
        scales = rng.normal(size=(len(raw), 1)) * rng.choice(
            [1e-7, 0.01, 300.0, 0.0], (len(raw), 1)
        )
        raw[:, at : at + 2] = scales.astype(np.float16).view(
            np.uint8
        )  # includes subnormal numbers, zeros and negative numbers
    if name == "MXFP4":
        raw[:, 0] = np.arange(len(raw)) % 252  # with larger ones a weight may be infinite
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("name", DECODED)
@pytest.mark.parametrize(("rows", "width"), [(1, 256), (1, 8960), (5, 1536)])
def test_decoded_rows_equal_the_gguf_package(name, rows, width):
    raw = _random(name, rows, width)
    found = np.full((rows, width), np.nan, np.float32)
    decode_rows(name, raw, found)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(
        found.view(np.uint32), np.asarray(expected, np.float32).view(np.uint32)
    )


def test_all_float16_values_decode_like_numpy():
    raw = np.arange(1 << 16, dtype=np.uint16)
    found = np.empty((1, 1 << 16), np.float32)
    decode_rows("F16", raw.view(np.uint8).reshape(1, -1), found)
    with np.errstate(invalid="ignore"):  # some processors report signaling NaNs
        expected = raw.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(found[0], expected)


def test_the_compiled_signature_is_the_called_one():
    decode_rows("Q8_0", _random("Q8_0", 1, 256), np.empty((1, 256), np.float32))
    decode_rows_entry.compile()
    assert list(block_rows._decode.dispatcher.overloads) == [decode_rows_entry.arguments]
