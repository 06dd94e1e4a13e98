"""Quantization of weights: the kernel equals its NumPy specification to the bit, beats plain
rounding, and is exact where possible.
"""

import numpy as np
import numpy.typing as npt
import pytest

from helpers.kernels.weight_formats import FITTED, random_blocks
from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.linear.k_blocks import pack_blocks
from kvboost_edge.kernels.linear.weight_formats import FORMATS
from kvboost_edge.kernels.linear.weights import pack_codes, pack_rows, packed_sizes
from kvboost_edge.kernels.reference.weights import fit_rows, round_to_nearest, unpack_rows
from kvboost_edge.models.locate import BUNDLED_MODEL, locate_model
from kvboost_edge.models.weights.safetensors_source import SafetensorsSource

Floats = npt.NDArray[np.float32]
SHAPES = [(16, 32), (33, 64), (16, 40), (5, 31), (40, 7), (1, 1), (17, 33)]


def _weights(shape, seed=0):
    return np.random.default_rng(seed).standard_t(4, shape).astype(np.float32)


def _back(weights, kind):
    packed = pack_rows(weights, kind)
    return unpack_rows(packed, *weights.shape, kind), packed


def _relative(off, weights):
    return float(
        np.linalg.norm(off.astype(np.float64)) / np.linalg.norm(weights.astype(np.float64))
    )


@pytest.mark.parametrize("kind", FITTED)
@pytest.mark.parametrize("shape", SHAPES)
def test_packing_kernels_equal_the_reference(kind, shape):
    weights = _weights(shape)
    back, packed = _back(weights, kind)
    codes, scales, minima = fit_rows(weights, kind)
    expected = codes.astype(np.float32) * scales[:, :, None].astype(np.float32) - minima[
        :, :, None
    ].astype(np.float32)
    np.testing.assert_array_equal(back, expected.reshape(len(weights), -1)[:, : shape[1]])
    assert tuple(len(section) for section in packed[:3]) == packed_sizes(*shape, kind)
    wide = weights.astype(np.float64)
    np.testing.assert_allclose(packed.error, ((wide - back) ** 2).sum(), rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(packed.energy, (wide**2).sum(), rtol=1e-5)


# Relative L2 error on Gaussian weights, and the allowed fraction of plain rounding's error.
@pytest.mark.parametrize(
    ("kind", "error", "left"),
    [("int8", 0.0050, 0.94), ("int4", 0.082, 0.85), ("int4-asym", 0.072, 0.93)],
)
def test_fitted_weights_have_less_error_than_rounded_ones(kind, error, left):
    rng = np.random.default_rng(1)
    gaussian = rng.standard_normal((256, 512)).astype(np.float32)
    assert _relative(_back(gaussian, kind)[0] - gaussian, gaussian) < error
    with SafetensorsSource(locate_model(BUNDLED_MODEL)) as source:
        real = source.rows("model.layers.2.mlp.down_proj.weight")
    for weights in (
        gaussian,
        rng.uniform(-1, 1, (64, 256)).astype(np.float32),
        _weights((64, 512)),
        real,
    ):
        back = _back(weights, kind)[0]
        rounded = round_to_nearest(weights, kind)
        assert _relative(back - weights, weights) < 0.99 * _relative(rounded - weights, weights)
    assert _relative(back - real, real) < left * _relative(rounded - real, real)


@pytest.mark.parametrize("kind", FITTED)
def test_no_fitted_group_is_worse_than_rounding(kind):
    weights = _weights((64, 320), 3)
    off = _back(weights, kind)[0] - weights
    rounded = round_to_nearest(weights, kind) - weights
    ours, plain = ((x.reshape(64, 10, 32) ** 2).sum(axis=2) for x in (off, rounded))
    assert np.quantile(ours / plain, 0.99) < 1.1
    assert (ours / plain).mean() < 0.97


@pytest.mark.parametrize("kind", FITTED)
@pytest.mark.parametrize("value", [0.0, 1.0, -0.375, 1e-3, 6e4, -6e4, 1e-7])
def test_constant_groups_are_exact(kind, value):
    weights = np.full((17, 65), value, np.float32)
    back = _back(weights, kind)[0]
    np.testing.assert_allclose(back, weights, rtol=1e-2, atol=1e-7)
    assert np.isfinite(back).all()


@pytest.mark.parametrize("kind", FITTED)
def test_the_largest_weights_are_representable(kind):
    for sign in (1.0, -1.0):
        weights = np.zeros((16, 32), np.float32)
        weights[3, 5] = sign * FORMATS[kind].largest
        weights[4, 5] = sign * FORMATS[kind].largest
        weights[4, 6] = -sign * FORMATS[kind].largest
        back = _back(weights, kind)[0]
        np.testing.assert_allclose(
            back[3:5], weights[3:5], rtol=0.02, atol=FORMATS[kind].largest / 20
        )


def test_rows_do_not_depend_on_their_neighbours():
    weights = _weights((50, 96))
    for kind in FITTED:
        whole = _back(weights, kind)[0]
        for start, stop in ((0, 1), (7, 30), (49, 50)):
            np.testing.assert_array_equal(_back(weights[start:stop], kind)[0], whole[start:stop])


NARROW = ("int1-g128", "int2-g256", "int2-g64")


@pytest.mark.parametrize("kind", [*FITTED, *NARROW, "int4t", "nvfp4", "int5", "int5-asym"])
@pytest.mark.parametrize("shape", SHAPES)
def test_stored_codes_are_packed_exactly(kind, shape):
    rng = np.random.default_rng(4)
    table = rng.permutation(256)[:16].astype(np.uint8).view(np.int8)
    values = {
        "int8": np.arange(-128, 128),
        "int4": np.arange(-8, 8),
        "int4-asym": np.arange(16),
        "int4t": table,
        "int5": np.arange(-16, 16),
        "int5-asym": np.arange(32),
        "int1-g128": np.array([-1, -99, 1]),
        "int2-g256": np.arange(-1, 3),
        "int2-g64": np.arange(-1, 3),
        "nvfp4": np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]),
    }[kind]
    form = FORMATS[kind]
    codes = rng.integers(0, 1 << form.bits, shape).astype(np.uint8) * form.code_step
    each = form.scale_inputs
    count = -(-shape[1] // (each * form.parts)) * form.parts
    halves = rng.standard_normal((2, shape[0], count)).astype(np.float16)
    scales = halves[0]
    factors = None
    if kind == "nvfp4":
        scales = np.float16(2.0) ** rng.integers(-10, 8, halves[0].shape)
        factors = rng.standard_normal(shape[0]).astype(np.float32)
    minima = halves[1] if kind.endswith("-asym") else None
    packed = pack_codes(codes, scales, minima, kind, table if kind == "int4t" else None, factors)
    assert tuple(array.size for array in packed[:3]) == packed_sizes(*shape, kind)
    expected = (
        values[codes].astype(np.float32)
        * scales.astype(np.float32).repeat(each, axis=1)[:, : shape[1]]
    )
    if factors is not None:
        expected *= factors[:, None]
    if minima is not None:
        expected -= minima.astype(np.float32).repeat(each, axis=1)[:, : shape[1]]
    np.testing.assert_array_equal(unpack_rows(packed, *shape, kind), expected)
    assert (packed.error, packed.energy) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        *(("q2k", 1.0), ("q3k", 1.037), ("q4k", 1.028), ("q5k", 1.023), ("q6k", 1.0)),
        *(("iq1s", 1.0), ("iq1m", 1.036)),
        *(("iq2xxs", 1.061), ("iq2xs", 1.055), ("iq2s", 1.0), ("iq3xxs", 1.041), ("iq3s", 1.0)),
    ],
)
def test_packed_sizes_are_close_to_the_files(kind, most):
    assert sum(packed_sizes(160, 2048, kind)) <= most * random_blocks(kind, 160, 8).nbytes


@pytest.mark.parametrize(
    ("kind", "weights", "nbytes"),
    [
        ("int5", 32, 22),
        ("int5-asym", 32, 24),
        ("int1-g128", 128, 18),
        ("int2-g64", 64, 18),
        ("int2-g256", 256, 66),
    ],
)
def test_packed_sizes_equal_the_files(kind, weights, nbytes):
    """The sizes are those of blocks of Q5_0, Q5_1, Q1_0, Q2_0 and TQ2_0."""
    assert sum(packed_sizes(160, 2048, kind)) == 160 * 2048 // weights * nbytes


def test_lookup_tables_add_under_a_thousandth():
    both = [sum(packed_sizes(9728, 2560, kind)) for kind in ("int4t", "int4")]
    assert both[0] / both[1] < 1.001
    assert both[1] == 9728 * 2560 * 0.5625


CODES = np.zeros((16, 64), np.uint8)
SCALES = np.ones((16, 2), np.float16)
TABLE = np.zeros(16, np.int8)


@pytest.mark.parametrize(
    ("kind", "codes", "scales", "minima", "table", "message"),
    [
        ("int4", CODES + np.uint8(16), SCALES, None, None, "code 16 of 'int4' exceeds 15"),
        (
            "int4t",
            CODES + np.uint8(16),
            SCALES,
            None,
            TABLE,
            "code 16 of 'int4t' exceeds 15",
        ),
        ("int5", CODES + np.uint8(32), SCALES, None, None, "code 32 of 'int5' exceeds 31"),
        ("int2-g64", CODES + np.uint8(4), SCALES[:, :1], None, None, "code 4 .* exceeds 3"),
        ("int1-g128", CODES + np.uint8(1), SCALES[:, :1], None, None, "must be multiples of 2"),
        ("int1-g128", CODES + np.uint8(3), SCALES[:, :1], None, None, "code 3 .* exceeds 2"),
        ("int2-g64", CODES, SCALES, None, None, r"shape \(16, 2\), expected \(16, 1\)"),
        ("int4-asym", CODES, SCALES, None, None, "minima"),
        ("int5-asym", CODES, SCALES, None, None, "minima"),
        ("int8", CODES, SCALES, SCALES, None, "minima"),
        ("int4t", CODES, SCALES, SCALES, TABLE, "with minima"),
        ("int8", CODES, SCALES[:, :1], None, None, "shape"),
        ("int4t", CODES, SCALES, None, None, "table"),
        ("int4t", CODES, SCALES, None, TABLE[:8], "table"),
        ("int4", CODES, SCALES, None, TABLE, "table"),
        ("q4k", CODES, SCALES, None, None, "'q4k' has no groups .* pack it with pack_blocks"),
        ("bf16", CODES, SCALES, None, None, "'bf16' has no groups .* pack it with pack_rows"),
    ],
)
def test_invalid_codes_are_refused(kind, codes, scales, minima, table, message):
    with pytest.raises(ConfigError, match=message):
        pack_codes(codes, scales, minima, kind, table)


def test_blocks_of_another_format_or_size_are_refused():
    blocks = np.zeros((16, 144), np.uint8)
    with pytest.raises(ConfigError, match=r"'int4' is not a format of GGUF blocks; .*'q4k'"):
        pack_blocks(blocks, "int4")
    with pytest.raises(ConfigError, match="rows of 143 bytes are not a multiple of the 144 bytes"):
        pack_blocks(blocks[:, 1:], "q4k")


def test_unknown_kinds_and_floats_in_a_table_are_refused():
    with pytest.raises(ConfigError, match="weight format 'int3' is not one of"):
        packed_sizes(16, 32, "int3")
    for kind in ("int4t", "int5", "int5-asym", *NARROW):
        with pytest.raises(ConfigError, match=f"floats cannot be packed as '{kind}'"):
            pack_rows(np.ones((16, 32), np.float32), kind)


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_floats_keep_their_values(kind):
    weights = _weights((37, 41))
    back, packed = _back(weights, kind)
    if kind == "f32":
        np.testing.assert_array_equal(back, weights)
    np.testing.assert_allclose(back, weights, rtol=2**-8)
    np.testing.assert_allclose(
        packed.error, ((weights.astype(np.float64) - back) ** 2).sum(), rtol=1e-9
    )
