"""Mamba2's mixer: its specific behavior. test_mixers.py tests the common behavior."""

import numpy as np
import pytest

from helpers.kernels.mixer_cases import Ssd, SsdShape
from helpers.kernels.recurrent_cases import Piece, poisoned_pool

NO_NORM = SsdShape(1, 3, 64, 32, "none", (0.01, 0.5))


@pytest.mark.parametrize("shape", [NO_NORM, SsdShape(1, 1, 16, 32)], ids=["no norm", "one head"])
def test_time_steps_are_clamped(shape):
    ssd = Ssd(shape)
    rows = ssd.rows(5)
    rows[:, ssd.gates] = [-1e5, 1e5, -np.inf, 2e5, np.nan]
    times = ssd.steps(rows[:, : ssd.channels], rows).times[:, 0]
    least, most = (np.float32(end) for end in shape.limit)
    np.testing.assert_array_equal(times[[0, 2]], [least] * 2)
    np.testing.assert_array_equal(
        times[[1, 3]], np.minimum(np.float32([1e5, 2e5]) + ssd.dt_bias[0], most)
    )
    pool = poisoned_pool(ssd.specs, 1)
    with np.errstate(invalid="ignore", over="ignore"):
        expected, _ = ssd.expected(rows)
    np.testing.assert_array_equal(ssd.run(rows, [Piece(5, -1, 0)], pool), expected)
    assert np.isnan(expected[4, 0])
