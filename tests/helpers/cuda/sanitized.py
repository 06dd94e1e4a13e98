"""Run by tests in a process of its own, the address sanitizer loaded first: `attention`, or a
faulty kernel's name.

Arrays of NumPy and the fibers' shared memory are pieces of the heap, each with a red zone around
it: a read or write beside one ends the process.
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np

from helpers.cuda.cases import Case, check, make_inputs, oracle, run
from helpers.cuda.on_cpu import (
    ASAN_FLAGS,
    BF16,
    F16,
    HEAD_DIMS,
    SHIM,
    Form,
    Schedule,
    built,
    library,
)

CASES = (
    Case(((3, 75), (0, 5), (20, 9), (2, 0)), (4, 2), num_splits=2, has_sinks=True),
    Case(((1, 70), (20, 20)), (3, 1), block_size=16, window=(30, 0)),
)


def attend() -> int:
    """Both cases through every form; how many launches of attention that were."""
    kernels = library(HEAD_DIMS, ASAN_FLAGS)
    launches = 0
    for is_wmma, dtype in ((False, F16), (False, BF16), (True, F16)):
        for form in (Form(is_wmma, dtype, dim, warps_m) for dim in HEAD_DIMS for warps_m in (4, 1)):
            for case in CASES:
                inputs = make_inputs(case, form)
                result = run(kernels, case, form, inputs, Schedule(launches % 3, launches % 2))
                check(case, form, oracle(case, form, inputs), result)
                launches += 1
    return launches


def run_faulty(name: str) -> None:
    functions = ctypes.CDLL(str(built(SHIM / "faulty.cpp", ASAN_FLAGS)))
    given = np.zeros(32 * 128, dtype=np.uint16)
    out = np.zeros(128, dtype=np.uint32)
    functions.run_faulty(
        name.encode(), ctypes.c_void_p(given.ctypes.data), ctypes.c_void_p(out.ctypes.data), 0, 0
    )


if __name__ == "__main__":
    if sys.argv[1] == "attention":
        print(attend(), "launches")
    else:
        run_faulty(sys.argv[1])
