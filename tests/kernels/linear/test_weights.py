"""Quantization of weights: the kernel equals its NumPy form to the bit, beats rounding, and is exact if it can be."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.linear.weights import (
    KINDS,
    LARGEST,
    QUANTIZED,
    PackedRows,
    pack_codes,
    pack_rows,
    packed_sizes,
)
from kvboost_edge.kernels.reference.weights import fit_rows, round_to_nearest, unpack_rows
from kvboost_edge.models.locate import BUNDLED_MODEL, locate_model
from kvboost_edge.models.weights.safetensors_source import SafetensorsSource

Floats = npt.NDArray[np.float32]
SHAPES = [(16, 32), (33, 64), (16, 40), (5, 31), (40, 7), (1, 1), (17, 33)]


def _weights(shape: tuple[int, int], seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_t(4, shape).astype(np.float32)


def _back(weights: Floats, kind: str) -> tuple[Floats, PackedRows]:
    packed = pack_rows(weights, KINDS[kind])
    return unpack_rows(packed, *weights.shape, kind), packed


def _relative(off: Floats, weights: Floats) -> float:
    return float(np.linalg.norm(off.astype(np.float64)) / np.linalg.norm(weights.astype(np.float64)))


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_equals_the_reference(kind: str, shape: tuple[int, int]) -> None:
    weights = _weights(shape)
    back, packed = _back(weights, kind)
    codes, scales, minima = fit_rows(weights, kind)
    expected = codes.astype(np.float32) * scales[:, :, None].astype(np.float32) - minima[:, :, None].astype(np.float32)
    np.testing.assert_array_equal(back, expected.reshape(len(weights), -1)[:, : shape[1]])
    assert tuple(len(section) for section in packed[:3]) == packed_sizes(*shape, KINDS[kind])
    wide = weights.astype(np.float64)
    np.testing.assert_allclose(packed.error, ((wide - back) ** 2).sum(), rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(packed.energy, (wide**2).sum(), rtol=1e-5)


# Relative L2 error on Gaussian weights, and the part of plain rounding's error that may be left.
@pytest.mark.parametrize(
    ("kind", "error", "left"), [("int8", 0.0050, 0.94), ("int4", 0.082, 0.85), ("int4-asym", 0.072, 0.93)]
)
def test_fitted_weights_are_nearer_than_rounded_ones(kind: str, error: float, left: float) -> None:
    rng = np.random.default_rng(1)
    gaussian = rng.standard_normal((256, 512)).astype(np.float32)
    assert _relative(_back(gaussian, kind)[0] - gaussian, gaussian) < error
    with SafetensorsSource(locate_model(BUNDLED_MODEL)) as source:
        real = source.rows("model.layers.2.mlp.down_proj.weight")
    for weights in (gaussian, rng.uniform(-1, 1, (64, 256)).astype(np.float32), _weights((64, 512)), real):
        back = _back(weights, kind)[0]
        rounded = round_to_nearest(weights, kind)
        assert _relative(back - weights, weights) < 0.99 * _relative(rounded - weights, weights)
    assert _relative(back - real, real) < left * _relative(rounded - real, real)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_no_group_is_worse_than_rounding(kind: str) -> None:
    weights = _weights((64, 320), 3)
    off, rounded = _back(weights, kind)[0] - weights, round_to_nearest(weights, kind) - weights
    ours, plain = ((x.reshape(64, 10, 32) ** 2).sum(axis=2) for x in (off, rounded))
    assert np.quantile(ours / plain, 0.99) < 1.1
    assert (ours / plain).mean() < 0.97


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("value", [0.0, 1.0, -0.375, 1e-3, 6e4, -6e4, 1e-7])
def test_constant_groups(kind: str, value: float) -> None:
    weights = np.full((17, 65), value, np.float32)
    back = _back(weights, kind)[0]
    np.testing.assert_allclose(back, weights, rtol=1e-2, atol=1e-7)
    assert np.isfinite(back).all()


@pytest.mark.parametrize("kind", QUANTIZED)
def test_the_largest_weights_fit(kind: str) -> None:
    for sign in (1.0, -1.0):
        weights = np.zeros((16, 32), np.float32)
        weights[3, 5] = sign * LARGEST[kind]
        weights[4, 5], weights[4, 6] = sign * LARGEST[kind], -sign * LARGEST[kind]
        back = _back(weights, kind)[0]
        np.testing.assert_allclose(back[3:5], weights[3:5], rtol=0.02, atol=LARGEST[kind] / 20)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    weights = _weights((50, 96))
    for kind in QUANTIZED:
        whole = _back(weights, kind)[0]
        for start, stop in ((0, 1), (7, 30), (49, 50)):
            np.testing.assert_array_equal(_back(weights[start:stop], kind)[0], whole[start:stop])


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_are_packed_as_they_are(kind: str, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(4)
    top, offset = {"int8": (256, 128), "int4": (16, 8), "int4-asym": (16, 0)}[kind]
    codes = rng.integers(0, top, shape).astype(np.uint8)
    halves = rng.standard_normal((2, shape[0], -(-shape[1] // 32))).astype(np.float16)
    scales, minima = halves[0], halves[1] if kind == "int4-asym" else None
    packed = pack_codes(codes, scales, minima, KINDS[kind])
    expected = (codes.astype(np.float32) - offset) * scales.astype(np.float32).repeat(32, axis=1)[:, : shape[1]]
    if minima is not None:
        expected -= minima.astype(np.float32).repeat(32, axis=1)[:, : shape[1]]
    np.testing.assert_array_equal(unpack_rows(packed, *shape, kind), expected)
    assert (packed.error, packed.energy) == (0.0, 0.0)


def test_codes_that_do_not_fit_are_refused() -> None:
    codes, scales = np.zeros((16, 64), np.uint8), np.zeros((16, 2), np.float16)
    with pytest.raises(ConfigError, match="above 15"):
        pack_codes(codes + np.uint8(16), scales, None, KINDS["int4"])
    with pytest.raises(ConfigError, match="minima"):
        pack_codes(codes, scales, None, KINDS["int4-asym"])
    with pytest.raises(ConfigError, match="minima"):
        pack_codes(codes, scales, scales, KINDS["int8"])
    with pytest.raises(ConfigError, match="shape"):
        pack_codes(codes, scales[:, :1], None, KINDS["int8"])
    with pytest.raises(ConfigError, match="weight kind"):
        packed_sizes(16, 32, 99)


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_floats_keep_their_values(kind: str) -> None:
    weights = _weights((37, 41))
    back, packed = _back(weights, kind)
    if kind == "f32":
        np.testing.assert_array_equal(back, weights)
    np.testing.assert_allclose(back, weights, rtol=2**-8)
    np.testing.assert_allclose(packed.error, ((weights.astype(np.float64) - back) ** 2).sum(), rtol=1e-9)
