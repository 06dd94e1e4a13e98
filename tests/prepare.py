"""Compile the kernels that the tests need and that are not compiled yet (part of `make setup`).

    python tests/prepare.py kernels   # for this machine; needs the native runner's packages
    python tests/prepare.py cuda      # the CUDA kernels for this processor; needs torch and pytest

Without this step the workers of `make test` would compile most kernels at the same time.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import pkgutil
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import helpers  # noqa: F401 - processes compile kernels, whether or not there is a library of them
import kvboost_edge.kernels
from helpers.kernels.paged_cases import make_case
from helpers.kernels.prebuilt import prepare_library
from helpers.kernels.quantized_kv_cases import make_backend, run, whole
from kvboost_edge.backends.base import AttentionParams, KVSpec, LayerKVSpec
from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.host.processor import default_num_threads
from kvboost_edge.kernels.aot import compile_ahead
from kvboost_edge.kernels.entry import all_entries

# They take longest, so they are compiled first.
SLOWEST = ("_take_units", "_run_experts", "_attend_codes", "_attend_floats", "_run_scan")


def compile_entries() -> None:
    """Compile the kernels of forward passes in child processes."""
    for module in pkgutil.walk_packages(kvboost_edge.kernels.__path__, "kvboost_edge.kernels."):
        importlib.import_module(module.name)
    entries = sorted(all_entries(), key=lambda entry: entry.kernel.__name__ not in SLOWEST)
    compile_ahead(entries, default_num_threads())


def compile_backend_kernels() -> None:
    """Compile the kernels that `CPUBackend` calls for attention over a pool."""
    case = make_case(
        np.random.default_rng(0),
        ((1, 30), (7, 100)),
        kv_heads=2,
        per_group=3,
        dim=24,
        block_size=16,
    )
    plain = CPUBackend(KVSpec((LayerKVSpec(2, 24),), 16, "float32"), 16, num_threads=1)
    for backend in (plain, make_backend("cpu", case, (8, 8))):
        run(backend, case, whole(case), AttentionParams(0.2))
        sparse = dataclasses.replace(case.whole, sparse=np.array([(0, 0), (64, 80)], np.int32))
        backend.attention(
            0, case.rows(case.queries, whole(case)), backend.prepare(sparse), AttentionParams(0.2)
        )
        backend.close()


def compile_kernels() -> None:
    """Compile all kernels for this machine, for pytest and for the processes that tests start."""
    compile_entries()
    with ThreadPoolExecutor(1) as pool:
        library = pool.submit(prepare_library)
        compile_backend_kernels()
        library.result()


def compile_cuda_kernels() -> None:
    """Compile the CUDA kernels as the tests of `cuda_ext` run them, with the address sanitizer."""
    from helpers.cuda.on_cpu import ASAN_FLAGS, built_kernels
    from helpers.cuda.standin import standing_in
    from helpers.tools import find_compiler

    if find_compiler() is not None:
        with standing_in():
            built_kernels(flags=ASAN_FLAGS)


def main() -> None:
    """Compile the kernels that the argument names."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    {"kernels": compile_kernels, "cuda": compile_cuda_kernels}[sys.argv[1]]()


if __name__ == "__main__":
    main()
