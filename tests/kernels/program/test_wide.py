"""Matrices in wide arithmetic against their specification, bit by bit, for every weight format."""

import numpy as np
import pytest

from helpers.kernels.linear_driver import Program
from helpers.kernels.weight_formats import (
    INTEGERS,
    in_blocks,
    kind_of,
    random_weights,
    unpacked,
    wide_product,
)
from kvboost_edge.kernels.attention.paged import aligned_empty
from kvboost_edge.kernels.linear.amx_choice import amx_choice
from kvboost_edge.kernels.linear.wide import WIDE, requantize_entries, wide_panel_bytes
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.activations import ACT_RELU2, ACT_SILU
from kvboost_edge.kernels.reference import wide as reference
from kvboost_edge.kernels.reference.linear import activate_rows, squared_rows

FORMS = (0, 1) if amx_choice().used else (0,)


def _panel(tokens, inputs, *, fine=False):
    return np.full(wide_panel_bytes(tokens, inputs, fine=fine), 255, np.uint8)


def _tokens(tokens, inputs):
    x = np.random.default_rng(tokens).standard_normal((tokens, inputs)).astype(np.float32)
    x[0, :32] = 1
    x[-1] = 0
    return x


@pytest.mark.parametrize("kind", INTEGERS)
def test_weights_are_quantized_again_with_one_scale_per_wide_group(kind):
    inputs = in_blocks(kind, 160)
    packed = random_weights(kind, 16, inputs)
    groups = inputs // 32
    codes = aligned_empty((-(-inputs // WIDE) * WIDE // 4, 16, 4), np.int8)
    codes[:] = 0
    scales = np.zeros((-(-inputs // WIDE), 16), np.float32)
    addresses = [array.ctypes.data for array in packed[:3]]
    run = requantize_entries[kind_of(kind)].kernel
    run(*addresses, 0, groups, codes.ctypes.data, scales.ctypes.data, 0)
    expected, factors = reference.requantize_rows(*unpacked(kind, packed, 16, inputs))
    np.testing.assert_array_equal(scales.T, factors)
    np.testing.assert_array_equal(codes.transpose(1, 0, 2).reshape(16, -1), expected)
    signed = codes.copy()
    run(*addresses, 0, groups, codes.ctypes.data, scales.ctypes.data, 0x80808080)
    used = inputs // 4
    np.testing.assert_array_equal(
        codes[:used].view(np.uint8), (signed[:used].astype(np.int16) + 128).astype(np.uint8)
    )


@pytest.mark.parametrize("tiles", FORMS)
@pytest.mark.parametrize(
    ("kind", "tokens", "rows", "inputs", "fine"),
    [
        ("int4", 1, 16, 32, False),
        ("int8", 33, 50, 96, True),
        ("q4k", 20, 130, 768, True),
        ("q6k", 70, 33, 512, False),
        ("int4-asym", 513, 24, 704, False),
    ],
)
def test_a_linear_layer_equals_its_specification(kind, tokens, rows, inputs, fine, tiles):
    x = _tokens(tokens, inputs)
    packed = random_weights(kind, rows, inputs)
    padded = -(-rows // 16) * 16
    before = np.ones((tokens, padded), np.float32)
    out = before.copy()
    bias = np.linspace(-1, 1, padded, dtype=np.float32)
    program = Program(tokens, tiles)
    program.buffer(lt.B_ATTENDED, x)
    program.buffer(lt.B_PANEL, _panel(tokens, inputs, fine=fine))
    program.buffer(lt.B_PROJECTED, out)
    source = lt.BufferRows(lt.B_ATTENDED, inputs)
    matrix = program.matrix(kind, inputs, packed, bias=bias.ctypes.data, fine=int(fine))
    program.ops += [
        lt.WidePanelOp(source, inputs, lt.PanelTarget(0, lt.B_PANEL, int(fine))),
        lt.WideLinearOp(lt.BufferRows(lt.B_PROJECTED, padded), matrix, rows, 1, 0.5),
    ]
    program.run(2)
    expected = wide_product(kind, x, packed, rows, fine=fine) + bias[:rows]
    expected = (expected.astype(np.float64) * 0.5 + before[:, :rows]).astype(np.float32)
    np.testing.assert_array_equal(out[:, :rows], expected)


@pytest.mark.parametrize("tiles", FORMS)
@pytest.mark.parametrize(("act", "inner"), [(ACT_SILU, 96), (ACT_RELU2, 160)])
def test_a_gated_mlp_equals_separate_steps(act, inner, tiles):
    tokens = 40
    hidden = 192
    parts = 1 if act == ACT_RELU2 else 2
    x = _tokens(tokens, hidden)
    way_in = random_weights("int4", parts * inner, hidden)
    down = random_weights("int8", 32, inner, seed=1)
    out = np.zeros((tokens, 32), np.float32)
    bias = np.linspace(-1, 1, parts * inner, dtype=np.float32)
    program = Program(tokens, tiles)
    program.buffer(lt.B_ATTENDED, x)
    program.buffer(lt.B_PANEL, _panel(tokens, hidden))
    program.buffer(lt.B_INNER, _panel(tokens, inner))
    program.buffer(lt.B_PROJECTED, out)
    matrix = program.matrix("int4", hidden, way_in, bias=bias.ctypes.data)
    last = program.matrix("int8", inner, down, panel=lt.B_INNER)
    program.ops += [
        lt.WidePanelOp(lt.BufferRows(lt.B_ATTENDED, hidden), hidden, lt.PanelTarget(0, lt.B_PANEL)),
        lt.WideGatedOp(matrix, lt.InnerChannels(inner, act, 0), lt.B_INNER),
        lt.WideLinearOp(lt.BufferRows(lt.B_PROJECTED, 32), last, 32),
    ]
    program.run(2)
    rows = wide_product("int4", x, way_in, parts * inner) + bias
    rows = squared_rows(rows) if parts == 1 else activate_rows(rows[:, :inner], rows[:, inner:])
    expected = wide_product("int8", rows, down, 32)
    # The activation differs in the last bit, which changes few codes.
    np.testing.assert_allclose(out, expected, atol=2e-2 * np.abs(expected).max())
    assert np.median(np.abs(out - expected)) < 1e-5 * np.abs(expected).max()
