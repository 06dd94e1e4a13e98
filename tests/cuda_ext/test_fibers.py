"""Tests of the fibers: faults that a GPU would punish are detected, conversions are exact, and the
address sanitizer works.
"""

import ctypes
import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from helpers.cuda.cases import to_bits
from helpers.cuda.on_cpu import BF16, F16, SHIM, built
from helpers.tools import address_sanitizer, find_compiler

NUM_THREADS = 128
SCHEDULES = tuple(itertools.product((0, 1, 2), (0, 1)))


@pytest.fixture(scope="module")
def functions():
    loaded = ctypes.CDLL(str(built(SHIM / "faulty.cpp")))
    loaded.run_faulty.restype = ctypes.c_char_p
    loaded.convert_half.restype = loaded.convert_brain.restype = ctypes.c_float
    loaded.pack_half.argtypes = loaded.pack_brain.argtypes = (ctypes.c_float, ctypes.c_float)
    loaded.pack_half.restype = loaded.pack_brain.restype = ctypes.c_uint
    return loaded


def outcomes(functions, name):
    """Return, for each schedule, the error or the values that the threads wrote."""
    found = []
    for order, timing in SCHEDULES:
        given = np.arange(32 * NUM_THREADS, dtype=np.uint16)
        out = np.zeros(NUM_THREADS, dtype=np.uint32)
        addresses = (ctypes.c_void_p(array.ctypes.data) for array in (given, out))
        error = functions.run_faulty(name.encode(), *addresses, order, timing)
        found.append(error.decode() if error is not None else out.tolist())
    return found


def test_a_correct_kernel_gives_the_same_results_in_every_order(functions):
    expected = np.roll(np.arange(NUM_THREADS), -1).tolist()
    assert outcomes(functions, "no_fault") == [expected] * len(SCHEDULES)


@pytest.mark.parametrize(
    "name",
    ["no_block_barrier", "no_warp_barrier", "copy_read_too_early", "copy_over_what_others_read"],
)
def test_a_race_gives_different_results_in_some_orders(functions, name):
    found = outcomes(functions, name)
    assert all(isinstance(outcome, list) for outcome in found)
    assert any(outcome != found[0] for outcome in found)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("barriers_of_two_branches", "divergent barrier: another thread waits at line"),
        (
            "barrier_that_some_miss",
            "deadlock: 32 of 128 threads have returned, 96 wait at __syncthreads",
        ),
        (
            "shuffle_of_half_a_warp",
            "deadlock: 64 of 128 threads have returned, 0 wait at __syncthreads",
        ),
        ("shuffles_of_two_branches", "divergent warp: another of its threads waits at line"),
        ("copy_off_by_two_bytes", "must be a multiple of 16"),
        ("matrix_after_the_end", "is outside of 2048 bytes of shared memory"),
    ],
)
def test_a_kernel_error_names_its_place(functions, name, message):
    for outcome in outcomes(functions, name):
        assert message in outcome
        assert "faulty.cpp:" in outcome or "fibers.h:" in outcome


def test_an_unawaited_async_copy_is_an_error(functions):
    for (_, timing), outcome in zip(SCHEDULES, outcomes(functions, "unawaited_copy"), strict=True):
        assert isinstance(outcome, str) == (timing == 1)


def test_every_f16_and_bf16_value_equals_numpys(functions):
    bits = np.arange(65536, dtype=np.uint16)
    halves = np.array([functions.convert_half(int(b)) for b in bits], dtype=np.float32)
    np.testing.assert_array_equal(halves, bits.view(np.float16).astype(np.float32))
    brains = np.array([functions.convert_brain(int(b)) for b in bits], dtype=np.float32)
    np.testing.assert_array_equal(brains, (bits.astype(np.uint32) << 16).view(np.float32))


def test_rounding_is_to_nearest_even(functions):
    rng = np.random.default_rng(0)
    numbers = np.concatenate(
        [
            (rng.standard_normal(4000) * 2.0 ** rng.integers(-30, 18, 4000)).astype(np.float32),
            np.array([0.0, -0.0, 65504, 65519.996, 65520, -65520, np.inf, -np.inf], np.float32),
            np.array([2**-24, 2**-25, 1.5 * 2**-25], np.float32),
            (
                np.arange(1, 4001, dtype=np.float32) * np.float32(2**-12) + 1
            ),  # every second value is a tie in f16
            (np.arange(1, 512, dtype=np.float32) * np.float32(2**-9) + 1),  # likewise in bf16
        ]
    )
    with np.errstate(over="ignore"):
        expected = to_bits(numbers, F16)
    assert [functions.pack_half(x, 1.0) for x in numbers.tolist()] == [
        0x3C00 << 16 | int(b) for b in expected
    ]
    assert [functions.pack_brain(1.0, x) for x in numbers.tolist()] == [
        int(b) << 16 | 0x3F80 for b in to_bits(numbers, BF16)
    ]


def sanitized(argument):
    script = Path(__file__).parents[1] / "helpers" / "cuda" / "sanitized.py"
    preload = str(address_sanitizer(str(find_compiler())))
    environment = os.environ | {
        "LD_PRELOAD": preload,
        "ASAN_OPTIONS": "detect_leaks=0:exitcode=77",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    return subprocess.run(
        [sys.executable, script, argument],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def test_no_variant_accesses_memory_out_of_bounds():
    done = sanitized("attention")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "48 launches\n"


@pytest.mark.parametrize("name", ["read_after_the_end", "read_before_the_input"])
def test_the_address_sanitizer_detects_out_of_bounds_accesses(name):
    done = sanitized(name)
    assert done.returncode == 77
    assert "heap-buffer-overflow" in done.stderr
    assert name in done.stderr
