"""The microkernels of one tile, four rows by 64 tokens, against NumPy."""

import numpy as np
import pytest

from kvboost_edge.kernels.attention.float_tiles import (
    ROWS,
    STRIPS,
    TILE,
    fill,
    hide_row,
    mix_row,
    scale_row,
    scores_tile,
    softcap_row,
    softmax_rows,
    values_tile,
)
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.vectors import LANES, store_i64

_VALUES_4 = values_tile[4]
_VALUES_2 = values_tile[2]
_VALUES_1 = values_tile[1]


@kernel
def score(query, table, head_dim, scores):
    scores_tile(query, table, head_dim, scores)


@kernel
def weigh(weights, table, scales, out, row_bytes):
    """Compute a row of 112 channels in panels of 64, 32 and 16."""
    _VALUES_4(weights, table, 0, scales, out, row_bytes)
    _VALUES_2(weights, table, 64, scales, out, row_bytes)
    _VALUES_1(weights, table, 96, scales, out, row_bytes)


@kernel
def softmax(scores, maxima, totals, rescale):
    softmax_rows(scores, maxima, totals, rescale)


@kernel
def change_row(scores, cap, low, high):
    softcap_row(scores, np.float32(cap))
    hide_row(scores, low, high)


@kernel
def combine(out, source, count, keep, add):
    mix_row(out, source, count, np.float32(keep), np.float32(add))
    scale_row(out + 4 * count, source, count, np.float32(add))
    fill(out + 8 * count, count, np.float32(keep))
    fill(out, -1, np.float32(keep))


@kernel
def set_table(table, numbers):
    for index in range(numbers.size):
        store_i64(table + 8 * index, numbers[index])


def tile_table(keys, values):
    """Write a table with the groups in the order 2, 0, 3, 1 for keys [4, dim, 16] and values [4,
    16, channels].
    """
    order = (2, 0, 3, 1)
    table = np.zeros((6, STRIPS), np.int64)
    for column, strip in enumerate(order):
        table[:, column] = (
            keys[strip].ctypes.data,
            keys.strides[1],
            values[strip].ctypes.data,
            values.strides[1],
            keys[strip].ctypes.data,
            values[strip].ctypes.data,
        )
    out = np.empty_like(table)
    set_table(out.ctypes.data, table.ravel())
    np.testing.assert_array_equal(out, table)
    return out


def random(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("dim", [1, 16, 24, 128])
def test_tile_scores_equal_numpy(dim):
    rng = np.random.default_rng(dim)
    query = random(rng, ROWS, dim)
    keys = random(rng, STRIPS, dim, LANES)
    table = tile_table(keys, np.zeros((STRIPS, LANES, dim * LANES), np.float32))
    scores = np.full((ROWS, TILE), np.nan, np.float32)
    score(query.ctypes.data, table.ctypes.data, dim, scores.ctypes.data)
    expected = query.astype(np.float64) @ np.concatenate(
        keys[[2, 0, 3, 1]].astype(np.float64), axis=1
    )
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5)


def test_tile_values_equal_numpy():
    rng = np.random.default_rng(0)
    weights = random(rng, ROWS, TILE)
    values = random(rng, STRIPS, LANES, 112)
    scales = random(rng, ROWS)
    out = random(rng, ROWS, 112)
    tokens = np.concatenate(values[[2, 0, 3, 1]]).astype(np.float64)
    expected = out * scales[:, None].astype(np.float64) + weights @ tokens
    table = tile_table(np.zeros((STRIPS, 112, LANES), np.float32), values)
    weigh(
        weights.ctypes.data, table.ctypes.data, scales.ctypes.data, out.ctypes.data, out.strides[0]
    )
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_online_softmax_equals_softmax():
    """Three tiles, one of them invisible to row 1, accumulate to the softmax over all, whose scores
    are logarithms to base 2.
    """
    rng = np.random.default_rng(1)
    tiles = random(rng, 3, ROWS, TILE) * 5
    tiles[0, 1] = -np.inf
    tiles[1, 2, 10:] = -np.inf
    maxima = np.full(ROWS, -np.inf, np.float32)
    totals = np.zeros(ROWS, np.float32)
    sums = np.zeros(ROWS)
    for tile in tiles:
        weights = tile.copy()
        rescale = np.full(ROWS, np.nan, np.float32)
        softmax(weights.ctypes.data, maxima.ctypes.data, totals.ctypes.data, rescale.ctypes.data)
        assert (weights[np.isneginf(tile)] == 0).all()
        sums = sums * rescale + weights.astype(np.float64).sum(axis=1)
        if tile is tiles[0]:
            assert totals[1] == 0
    rows = np.concatenate(tiles, axis=1)
    np.testing.assert_array_equal(maxima, rows.max(axis=1))
    expected = np.exp2(rows.astype(np.float64) - maxima[:, None]).sum(axis=1)
    np.testing.assert_allclose(totals, expected, rtol=1e-6)
    np.testing.assert_allclose(sums, expected, rtol=1e-6)


@pytest.mark.parametrize("cap", [0.5, 30.0])
@pytest.mark.parametrize(
    ("low", "high"), [(0, 64), (5, 20), (-7, 33), (60, 200), (30, 30), (64, 70)]
)
def test_softcap_and_masking_equal_numpy(cap, low, high):
    scores = random(np.random.default_rng(2), TILE) * 40
    scores[:4] = 0.0, 1e30, -1e30, 1e-6
    out = scores.copy()
    change_row(out.ctypes.data, cap, low, high)
    at = np.arange(TILE)
    expected = np.where(
        (at >= low) & (at < high), cap * np.tanh(scores.astype(np.float64) / cap), -np.inf
    )
    np.testing.assert_allclose(out, expected, atol=cap * 2e-7)


@pytest.mark.parametrize("count", [1, 16, 37])
def test_row_operations_of_any_length(count):
    rng = np.random.default_rng(count)
    out = random(rng, 3 * count + 1)
    source = random(rng, count)
    mixed = out[:count] * np.float64(0.25) + source * np.float64(3.0)
    beyond = out[-1]
    combine(out.ctypes.data, source.ctypes.data, count, 0.25, 3.0)
    np.testing.assert_allclose(out[:count], mixed, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(out[count : 2 * count], source * np.float32(3.0))
    np.testing.assert_array_equal(out[2 * count : 3 * count], np.float32(0.25))
    assert out[-1] == beyond
