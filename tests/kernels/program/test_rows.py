"""Operations on rows against their NumPy specification: activations, norm and RoPE."""

from functools import partial

import numpy as np
import pytest

from helpers.kernels.linear_driver import Program
from kvboost_edge.kernels.attention.rope import RopeTable
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.activations import (
    ACT_GATED_RELU2,
    ACT_GELU_TANH,
    ACT_RELU2,
    ACT_SILU,
)
from kvboost_edge.kernels.reference import linear as reference

ACTIVATIONS = {
    ACT_SILU: reference.activate_rows,
    ACT_GELU_TANH: partial(reference.activate_rows, gelu=True),
    ACT_GATED_RELU2: lambda gate, up: reference.squared_rows(gate) * up,
}


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations_equal_the_reference(act):
    rng = np.random.default_rng(3)
    both = (8 * rng.standard_normal((3, 2 * 1100))).astype(np.float32)
    both[0, :4] = [-200, 200, 0, -88]
    program = Program(3)
    wide = np.zeros((3, 2304), np.float32)
    out = np.full((3, 1120), np.nan, np.float32)
    wide[:, :2200] = both
    program.buffer(lt.B_PROJECTED, wide)
    program.buffer(lt.B_NORMED, out)
    rows = (lt.BufferRows(lt.B_PROJECTED, 2304), lt.BufferRows(lt.B_NORMED, 1120))
    program.ops.append(lt.ActivateOp(*rows, 1100, act))
    program.run()
    expected = ACTIVATIONS[act](both[:, :1100], both[:, 1100:])
    np.testing.assert_allclose(out[:, :1100], expected, rtol=2e-6, atol=1e-5)
    np.testing.assert_array_equal(out[:, 1100:], 0)


def test_activation_without_a_gate():
    """The contents of the up buffer do not matter, NaN or not. NaN in the input stays."""
    x = (8 * np.random.default_rng(4).standard_normal((3, 1120))).astype(np.float32)
    x[0, :4] = [-200, 200, 0, -1e-30]
    x[2, 7] = np.nan
    program = Program(3)
    out = np.full((3, 1120), np.nan, np.float32)
    program.buffer(lt.B_PROJECTED, x)
    program.buffer(lt.B_BESIDE, np.full((3, 1120), np.nan, np.float32))
    program.buffer(lt.B_NORMED, out)
    source, out_rows, by = (
        lt.BufferRows(number, 1120) for number in (lt.B_PROJECTED, lt.B_NORMED, lt.B_BESIDE)
    )
    program.ops.append(lt.ActivateOp(source, out_rows, 1100, ACT_RELU2, by))
    program.run()
    np.testing.assert_array_equal(out[:, :1100], reference.squared_rows(x[:, :1100]))
    np.testing.assert_array_equal(out[:, 1100:], 0)


@pytest.mark.parametrize("count", [64, 80, 90])
def test_norm_equals_the_reference(count):
    rng = np.random.default_rng(4)
    x = rng.standard_normal((2, 96)).astype(np.float32)
    weight = rng.standard_normal(96).astype(np.float32)
    out = np.full((2, 96), np.nan, np.float32)
    program = Program(2)
    program.buffer(lt.B_HIDDEN, x)
    program.buffer(lt.B_NORMED, out)
    rows = (lt.BufferRows(lt.B_HIDDEN, 96), lt.BufferRows(lt.B_NORMED, 96))
    program.ops.append(lt.NormOp(*rows, count, weight.ctypes.data, 1e-6))
    program.run()
    expected = reference.norm_rows(x[:, :count], weight[:count], 1e-6)
    np.testing.assert_allclose(out[:, :count], expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(out[:, count:], 0)


def test_rope_splits_and_rotates():
    rng = np.random.default_rng(5)
    heads = 4
    kv_heads = 2
    dim = 20
    half = 6
    row = (heads + 2 * kv_heads) * dim
    x = rng.standard_normal((3, row)).astype(np.float32)
    positions = np.array([0, 7, 1500])
    table = RopeTable(1 / 1000 ** (np.arange(half) / half).astype(np.float32))
    table.cover(1501)
    out = [np.empty((3, n, dim), np.float32) for n in (heads, kv_heads, kv_heads)]
    program = Program(3)
    program.buffer(lt.B_PROJECTED, x)
    program.buffer(lt.B_POSITIONS, positions)
    for number, array in zip((lt.B_QUERY, lt.B_KEY, lt.B_VALUE), out, strict=True):
        program.buffer(number, array)
    program.buffer(lt.B_TABLES, table.cos)
    program.buffer(lt.B_TABLES + 1, table.sin)
    source = lt.BufferRows(lt.B_PROJECTED, row)
    program.ops.append(lt.RopeOp(source, heads, kv_heads, dim, half, lt.B_TABLES))
    program.run()
    split = np.split(x.reshape(3, -1, dim), [heads, heads + kv_heads], axis=1)
    cos = table.cos[positions]
    sin = table.sin[positions]
    for array, source, turned in zip(out, split, (True, True, False), strict=True):
        for head in range(array.shape[1]):
            expected = reference.rotate(source[:, head], cos, sin) if turned else source[:, head]
            np.testing.assert_allclose(array[:, head], expected, rtol=1e-6, atol=1e-6)


def test_rope_rows_do_not_depend_on_how_the_table_grew():
    frequencies = np.array([1.0, 0.01], np.float32)
    at_once = RopeTable(frequencies, 1.5)
    slowly = RopeTable(frequencies, 1.5)
    at_once.cover(3000)
    for positions in (1, 5, 1025, 3000):
        slowly.cover(positions)
    np.testing.assert_array_equal(at_once.cos, slowly.cos)
    np.testing.assert_array_equal(at_once.sin, slowly.sin)
