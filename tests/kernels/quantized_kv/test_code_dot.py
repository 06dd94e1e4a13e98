"""Every variant of attention's byte dot product gives the exact sums."""

import numpy as np
import pytest
from llvmlite import binding
from numba import njit
from numba.core import types

from kvboost_edge.kernels.attention.paged import aligned_empty
from kvboost_edge.kernels.integers import emit_load_bytes
from kvboost_edge.kernels.jit import intrinsic
from kvboost_edge.kernels.quantized_kv.code_dot import coded_dot_form, emit_dot
from kvboost_edge.kernels.vectors import emit_store

_FEATURES = binding.get_host_cpu_features()
FORMS = sorted({"plain", coded_dot_form()} & {"plain", "neon"})
if _FEATURES.get("avx512vnni") and _FEATURES.get("avx512vl"):
    FORMS += ["vnni256", "vnni512"]


def make_dot(form):
    @intrinsic
    def dot(typing, sums, unsigned, signed):
        def codegen(context, b, signature, arguments):
            vectors = [emit_load_bytes(b, address) for address in arguments]
            emit_store(b, emit_dot(b, form, *vectors), arguments[0])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), codegen

    @njit  # not cached, because the code depends on `form`
    def call(sums, unsigned, signed):
        dot(sums, unsigned, signed)

    return call


@pytest.mark.parametrize("form", FORMS)
def test_sums_are_exact_at_the_extremes(form):
    rng = np.random.default_rng(0)
    dot = make_dot(form)
    for _ in range(20):
        sums = aligned_empty((16,), np.int32)
        unsigned = aligned_empty((16, 4), np.uint8)
        signed = aligned_empty((16, 4), np.int8)
        sums[:] = rng.integers(-1000, 1000, 16)
        unsigned[:] = rng.choice([0, 1, 127, 128, 254, 255], (16, 4))
        signed[:] = rng.choice([-128, -127, -1, 0, 1, 126, 127], (16, 4))
        expected = sums + (unsigned.astype(np.int64) * signed).sum(axis=1)
        dot(sums.ctypes.data, unsigned.ctypes.data, signed.ctypes.data)
        np.testing.assert_array_equal(sums, expected)


def test_this_process_has_a_known_variant():
    assert coded_dot_form() in ("plain", "neon", "vnni256", "vnni512")
