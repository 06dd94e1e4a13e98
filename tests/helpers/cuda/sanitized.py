"""Script that tests run in a separate process with the address sanitizer preloaded. Its argument is
`attention` or a faulty kernel's name.

NumPy arrays and the fibers' shared memory are heap allocations, each with a red zone around it: an
access outside of one ends the process.
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
    """Run both cases with every kernel variant and return the number of attention launches."""
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
