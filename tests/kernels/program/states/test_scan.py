"""The gated delta rule: its specific behavior. test_mixers.py tests the common behavior."""

import numpy as np

from helpers.kernels.mixer_cases import Delta, DeltaShape
from helpers.kernels.recurrent_cases import Piece, poisoned_pool
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.program.states.scan import softplus_f32
from kvboost_edge.kernels.reference.floats import softplus_f32 as reference_softplus


def test_extreme_gates_saturate():
    delta = Delta(DeltaShape(1, 1, 16, 16))
    rows = delta.rows(4)
    rows[:, delta.gates] = [-np.inf, np.inf, -1e5, 1e5]
    rows[:, delta.gates + 1] = [np.inf, -np.inf, 1e5, -1e5]
    steps = delta.steps(rows[:, : delta.channels], rows)
    np.testing.assert_allclose(steps.shares[:, 0], [0, 1, 0, 1], atol=1e-37)
    np.testing.assert_array_equal(steps.decays[:, 0], np.float32([0, 1, 0, 1]))
    pool = poisoned_pool(delta.specs, 1)
    expected, _ = delta.expected(rows)
    np.testing.assert_array_equal(delta.run(rows, [Piece(4, -1, 0)], pool), expected)


def test_softplus_equals_the_reference_and_float64():
    @kernel
    def of_all(x, out):
        for index in range(x.size):
            out[index] = softplus_f32(x[index])

    x = np.concatenate(
        [np.linspace(-40, 40, 4001), [0.0, -0.0, 1e-30, -1e-30, 100.0, -100.0]]
    ).astype(np.float32)
    out = np.empty_like(x)
    of_all(x, out)
    np.testing.assert_array_equal(out, reference_softplus(x))
    np.testing.assert_allclose(out, np.logaddexp(0, x.astype(np.float64)), rtol=5e-7, atol=1e-38)
