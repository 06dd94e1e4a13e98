"""Short convolutions: their specific behavior. test_mixers.py tests the common behavior."""

import numpy as np
import pytest

from helpers.kernels.mixer_cases import Conv
from helpers.kernels.recurrent_cases import Piece, poisoned_pool


@pytest.mark.parametrize(
    "conv",
    [Conv(1024, 2), Conv(528, 3), Conv(16, 2, bias=True), Conv(32, 7)],
    ids=["of whole units", "of more than a unit", "with bias", "longer"],
)
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 64, 300])
def test_convolution_is_close_to_float64(conv, length):
    rows = conv.rows(length)
    out = conv.run(rows, [Piece(length, -1, 0)], poisoned_pool(conv.specs, 1))
    exact, _ = conv.expected(rows.astype(np.float64))
    np.testing.assert_allclose(out, exact, rtol=2e-5, atol=2e-5)


def test_nan_stays_in_its_sequence_and_channel():
    conv = Conv(528, 3)
    rows = conv.rows(30)
    rows[10, 3] = np.nan
    pool = poisoned_pool(conv.specs, 2)
    out = conv.run(rows, [Piece(20, -1, 0), Piece(10, -1, 1)], pool)
    broken = np.zeros_like(out, dtype=bool)
    broken[10 : 10 + conv.taps + 1, 3] = True
    np.testing.assert_array_equal(np.isnan(out), broken)
