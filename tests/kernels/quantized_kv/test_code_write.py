"""Codes of full blocks: the compiled quantizer gives the specification's bytes, and they decode to
the stored values.
"""

import numpy as np
import pytest

from kvboost_edge.kernels.attention.paged import KVPool, aligned_empty
from kvboost_edge.kernels.quantized_kv import code_write as coded_write
from kvboost_edge.kernels.quantized_kv.code_layout import BIT_PAIRS, code_layout
from kvboost_edge.kernels.reference import quantized_kv as reference

BLOCKS = 4
HEADS = 2


def make_pool(rng, dim, size):
    """Return a pool whose key channels and value tokens differ in magnitude by up to seven orders.
    One token is all zeros.
    """
    keys = rng.standard_normal((BLOCKS, HEADS, dim, size)) * rng.choice(
        [1e-5, 0.01, 1, 300], (BLOCKS, HEADS, dim, 1)
    )
    values = rng.standard_normal((BLOCKS, HEADS, size, dim)) * rng.choice(
        [1e-5, 0.1, 10], (BLOCKS, HEADS, size, 1)
    )
    values[:, :, 3] = 0
    keys[:, :, 1] = 7.5
    return KVPool(keys.astype(np.float16), values.astype(np.float16))


def quantize(module, pool, dim, size, bits):
    layout = code_layout(size, dim, bits)
    codes = aligned_empty((6, HEADS, layout.nbytes), np.uint8)
    codes[:] = 0xFF
    module.quantize_blocks(pool, np.array([0, 2, 3]), codes, np.array([5, 1, 2]), layout)
    return codes


@pytest.mark.parametrize("bits", BIT_PAIRS, ids=str)
@pytest.mark.parametrize("dim", [16, 20, 24, 64, 80, 128, 256])
def test_written_codes_equal_the_reference(dim, bits):
    for size in (16, 32, 64):
        pool = make_pool(np.random.default_rng([dim, size]), dim, size)
        mine, plain = (
            quantize(module, pool, dim, size, bits) for module in (coded_write, reference)
        )
        np.testing.assert_array_equal(mine, plain)
        assert (mine[[0, 3, 4]] == 0xFF).all()


@pytest.mark.parametrize("bits", BIT_PAIRS, ids=str)
def test_quantization_error_is_at_most_half_a_step(bits):
    """The bound is half a step of a channel's range (keys) or of a token's range (values), plus an
    eighth where a step is rounded up.
    """
    pool = make_pool(np.random.default_rng(1), 64, 16)
    codes = quantize(reference, pool, 64, 16, bits)
    for source, target in ((0, 5), (2, 1), (3, 2)):
        for head in range(HEADS):
            keys, values = reference.decode_block(codes[target, head], code_layout(16, 64, bits))
            true_keys, true_values = (half[source, head].astype(np.float64) for half in pool)
            step = np.ptp(true_keys, axis=1) / (2 ** bits[0] - 1)
            assert (
                np.abs(keys.T - true_keys) <= 0.5625 * np.maximum(step, 2.0**-18)[:, None] + 1e-9
            ).all()
            if bits[1] == 8:
                half_step = np.abs(true_values).max(axis=1) / 254
            else:
                half_step = np.ptp(true_values, axis=1) / 30
            # A midpoint is a float16, so it is off by up to 2^-11 of itself.
            slack = np.abs(true_values).max(axis=1) * (2.0**-10 if bits[1] == 4 else 0)
            assert (
                np.abs(values - true_values) <= (1.003 * half_step + slack + 5e-6)[:, None]
            ).all()


def test_code_sections_are_aligned_and_do_not_overlap():
    for bits in BIT_PAIRS:
        for dim in (16, 24, 64, 80, 128, 256):
            for size in (16, 32, 48, 64):
                r = code_layout(size, dim, bits)
                starts = (0, r.key_zeros, r.key_steps, r.values, r.value_scales, r.nbytes)
                lengths = (
                    r.dim * size * bits[0] // 8,
                    2 * r.dim,
                    r.dim,
                    r.dim * size * bits[1] // 8,
                    2 * size,
                )
                for start, length, stop in zip(starts, lengths, starts[1:], strict=False):
                    assert start % 64 == 0
                    assert start + length <= stop
                assert r.value_middles + (2 * size if bits[1] == 4 else 0) <= r.nbytes
                assert r.nbytes % 64 == 0
