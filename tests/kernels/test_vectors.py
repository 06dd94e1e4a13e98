"""exp and 2^x are accurate to two units in the last place, and equal in vectors, scalars and NumPy.
Conversions to and from 16 bits are exact.
"""

import numpy as np
import pytest

from helpers.kernels.paged_cases import round_to
from kvboost_edge.kernels.attention.float_tiles import TILE, softmax_rows, stage_rows
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.reference import floats
from kvboost_edge.kernels.vectors import (
    KIND_BF16,
    KIND_F16,
    KIND_F32,
    LANES,
    address_of,
    exp2_f32,
    exp_f32,
    fetch_add,
    load_f32,
    load_i32,
    load_scalar,
    store_f32,
    store_i64,
    store_scalar,
)

ALL_16_BITS = np.arange(1 << 16, dtype=np.uint16)


@kernel
def exp_each(values, out):
    for index in range(values.size):
        out[index] = exp_f32(values[index])


@kernel
def exp2_each(values, out):
    for index in range(values.size):
        out[index] = exp2_f32(values[index])


@kernel
def exp2_rows(scores, numbers, steps):
    """Apply softmax_rows to float32 [steps, 4, 64], each with an initial maximum and total of 0."""
    for step in range(steps):
        for row in range(4):
            store_f32(numbers + 4 * row, np.float32(0.0))
            store_f32(numbers + 16 + 4 * row, np.float32(0.0))
        softmax_rows(scores + step * 4 * TILE * 4, numbers, numbers + 16, numbers + 32)


@kernel
def load_each(source, size, kind, out):
    for index in range(out.size):
        out[index] = load_scalar(source + index * size, kind)


@kernel
def store_each(values, out, size, kind):
    for index in range(values.size):
        store_scalar(out + index * size, values[index], kind)


@kernel
def stage(out, source, rows, size, low, high, kind):
    stage_rows(out, source, source, rows, LANES * size, low, high, kind)


@kernel
def move_numbers(floats, integers, out):
    number = load_f32(address_of(floats) + 4)
    integer = load_i32(address_of(integers) + 4)
    store_i64(address_of(out) + 8, integer)
    return number, integer, fetch_add(address_of(out), 5)


def each(function, values):
    out = np.empty_like(values)
    function(values, out)
    return out


def assert_same_bits(got, expected):
    """Assert equality to the bit, including signs of zeros. A NaN must be a NaN."""
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(got), nan)
    unsigned = f"u{got.dtype.itemsize}"
    np.testing.assert_array_equal(got.view(unsigned)[~nan], expected.view(unsigned)[~nan])


def as_float16(bits):
    with np.errstate(invalid="ignore"):  # some processors warn when they widen a signaling NaN
        return bits.view(np.float16).astype(np.float32)


def as_bfloat16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize(
    ("compiled", "reference", "exact", "low", "high"),
    [(exp_each, floats.exp_f32, np.exp, -87, 88), (exp2_each, floats.exp2_f32, np.exp2, -126, 127)],
    ids=["exp", "exp2"],
)
def test_powers_are_accurate_and_equal_the_reference(compiled, reference, exact, low, high):
    values = np.concatenate([np.linspace(low, high, 400_001), np.linspace(-1, 1, 100_001)]).astype(
        np.float32
    )
    got = each(compiled, values)
    assert np.abs(got / exact(values.astype(np.float64)) - 1).max() < 2e-7
    assert_same_bits(got, reference(values))


@pytest.mark.parametrize(
    ("compiled", "reference", "lowest", "least"),
    [(exp_each, floats.exp_f32, -87, np.exp(-87.0)), (exp2_each, floats.exp2_f32, -126, 2.0**-126)],
    ids=["exp", "exp2"],
)
def test_powers_at_extreme_values(compiled, reference, lowest, least):
    """Every result is 0 or a normal number, so none depends on how subnormal numbers are treated."""
    below = np.nextafter(np.float32(lowest), np.float32(-np.inf))
    odd_nan = np.array([0x7FC00001], np.uint32).view(np.float32)[0]
    values = np.array([0, -0.0, lowest, below, -1e30, -np.inf, np.nan, odd_nan], np.float32)
    got = each(compiled, values)
    with np.errstate(all="ignore"):
        assert_same_bits(got, reference(values))
    expected = np.array([1, 1, least, 0, 0, 0, np.nan, np.nan])
    np.testing.assert_allclose(got, expected, rtol=2e-7)


def test_powers_in_vectors_equal_those_alone():
    values = (
        -np.abs(np.random.default_rng(0).standard_normal((50, 4, TILE)).astype(np.float32)) * 50
    )
    values[0, :, :3] = 0.0, -np.inf, -126.01
    out = values.copy()
    numbers = np.zeros(12, np.float32)
    exp2_rows(out.ctypes.data, numbers.ctypes.data, len(out))
    assert_same_bits(out, each(exp2_each, values.ravel()).reshape(values.shape))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(KIND_F16, as_float16(ALL_16_BITS)), (KIND_BF16, as_bfloat16(ALL_16_BITS))],
    ids=["float16", "bfloat16"],
)
def test_all_16_bit_values_widen_exactly(kind, expected):
    alone = np.empty(1 << 16, np.float32)
    staged = np.empty(1 << 16, np.float32)
    load_each(ALL_16_BITS.ctypes.data, 2, kind, alone)
    stage(staged.ctypes.data, ALL_16_BITS.ctypes.data, (1 << 16) // LANES, 2, 0, LANES, kind)
    assert_same_bits(alone, expected)
    assert_same_bits(staged, expected)


@pytest.mark.parametrize("kind", [KIND_F16, KIND_BF16], ids=["float16", "bfloat16"])
def test_rounding_is_to_nearest_and_ties_to_even(kind):
    wide = as_float16(ALL_16_BITS) if kind == KIND_F16 else as_bfloat16(ALL_16_BITS)
    wide = np.sort(wide[np.isfinite(wide)])
    middle = ((wide[1:].astype(np.float64) + wide[:-1]) / 2).astype(np.float32)
    around = [np.nextafter(middle, np.float32(side)) for side in (-np.inf, np.inf)]
    random = (
        np.random.default_rng(1).integers(0, 1 << 32, 100_000, dtype=np.uint32).view(np.float32)
    )
    edges = np.array(
        [65519.9, 65520, 3.4e38, -3.4e38, np.inf, -np.inf, np.nan, 1e-45, -1e-45], np.float32
    )
    odd_nan = np.array([0x7F800001, 0xFF80FFFF, 0x7FFFFFFF], np.uint32).view(np.float32)
    values = np.concatenate([wide, middle, *around, random, edges, odd_nan])
    bits = np.empty(values.size, np.uint16)
    store_each(values, bits.ctypes.data, 2, kind)
    if kind == KIND_F16:
        with np.errstate(over="ignore", invalid="ignore"):
            assert_same_bits(bits.view(np.float16), values.astype(np.float16))
    else:
        assert_same_bits(as_bfloat16(bits), round_to(values, "bfloat16"))


def test_float32_is_stored_unchanged():
    values = np.random.default_rng(2).integers(0, 1 << 32, 1000, dtype=np.uint32).view(np.float32)
    stored = np.empty_like(values)
    loaded = np.empty_like(values)
    store_each(values, stored.ctypes.data, 4, KIND_F32)
    load_each(stored.ctypes.data, 4, KIND_F32, loaded)
    assert_same_bits(loaded, values)


@pytest.mark.parametrize(("low", "high"), [(0, 16), (0, 5), (3, 16), (7, 8), (4, 4), (-20, 90)])
@pytest.mark.parametrize("kind", [KIND_F32, KIND_F16, KIND_BF16])
def test_staging_zeroes_missing_tokens(kind, low, high):
    kept = (np.arange(LANES) >= low) & (np.arange(LANES) < high)
    source = np.where(kept, np.float32(1.5), np.float32(np.nan)) * np.ones((3, 1), np.float32)
    stored = np.empty((3, LANES), {KIND_F32: np.float32}.get(kind, np.uint16))
    store_each(source.ravel(), stored.ctypes.data, stored.itemsize, kind)
    out = np.full((3, LANES), np.nan, np.float32)
    stage(out.ctypes.data, stored.ctypes.data, 3, stored.itemsize, low, high, kind)
    np.testing.assert_array_equal(out, np.where(kept, 1.5, 0.0) * np.ones((3, 1)))


def test_scalar_loads_stores_and_fetch_add():
    floats = np.array([1, -2.5], np.float32)
    integers = np.array([3, -4], np.int32)
    out = np.array([100, 0], np.int64)
    assert move_numbers(floats, integers, out) == (-2.5, -4, 100)
    assert out.tolist() == [105, -4]
