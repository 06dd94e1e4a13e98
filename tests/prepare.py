"""Compile the kernels that the tests need and that are not compiled yet (part of `make setup`).

They are the kernels for this machine and the CUDA kernels for this processor. Without this step
both workers of `make test` would compile most kernels at the same time.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import helpers  # noqa: F401 - processes compile kernels, whether or not there is a library of them
import kvboost_edge.kernels
from helpers.cuda.on_cpu import ASAN_FLAGS, built_kernels
from helpers.cuda.standin import standing_in
from helpers.kernels.paged_cases import make_case
from helpers.kernels.prebuilt import prepare_library
from helpers.kernels.quantized_kv_cases import make_backend, run, whole
from helpers.tools import find_compiler
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
        backend.close()


def compile_cuda_kernels() -> None:
    """Compile the CUDA kernels as the tests of `cuda_ext` run them, with the address sanitizer."""
    with standing_in():
        built_kernels(flags=ASAN_FLAGS)


def main() -> None:
    """Compile the kernels and, if there is a C++ compiler, the CUDA kernels at the same time."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with ThreadPoolExecutor() as pool:
        cuda = pool.submit(compile_cuda_kernels) if find_compiler() is not None else None
        compile_entries()
        compile_backend_kernels()
        prepare_library()
    if cuda is not None:
        cuda.result()


if __name__ == "__main__":
    main()
