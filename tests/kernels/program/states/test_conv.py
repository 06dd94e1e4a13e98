"""Short convolutions: their specific behavior. test_mixers.py tests the common behavior."""

import numpy as np

from helpers.kernels.mixer_cases import Conv
from helpers.kernels.recurrent_cases import Piece, poisoned_pool


def test_nan_stays_in_its_sequence_and_channel():
    conv = Conv(528, 3)
    rows = conv.rows(30)
    rows[10, 3] = np.nan
    pool = poisoned_pool(conv.specs, 2)
    out = conv.run(rows, [Piece(20, -1, 0), Piece(10, -1, 1)], pool)
    broken = np.zeros_like(out, dtype=bool)
    broken[10 : 10 + conv.taps + 1, 3] = True
    np.testing.assert_array_equal(np.isnan(out), broken)
