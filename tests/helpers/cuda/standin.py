"""The CUDA extension on the CPU: its own binding and Python code, its kernels over fibers, and host
tensors.

It cannot prove properties that only a GPU has: its scheduling, its memory and its arithmetic to the
last bit. With KVBOOST_EDGE_TEST_GPU=1 (`make cuda-test`) the installed extension and the GPU are
used instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.cuda.on_cpu import CSRC, ROOT, SHIM, built_kernels
from helpers.tools import find_compiler, must_run

ON_GPU = os.environ.get("KVBOOST_EDGE_TEST_GPU") == "1"
DEVICE = "cuda" if ON_GPU else "cpu"
CAN_RUN = ON_GPU or find_compiler() is not None or must_run()
needs_kernels = pytest.mark.skipif(
    not CAN_RUN, reason="no g++ compiles the CUDA kernels for this processor"
)
if not ON_GPU:
    sys.path.insert(0, str(ROOT / "cuda_ext"))  # not installed without a GPU

_TORCH = Path(torch.__file__).parent
_INCLUDES = (CSRC, _TORCH / "include", _TORCH / "include" / "torch" / "csrc" / "api" / "include")


class StandIn:
    """Settings and counters of the stand-in's launchers. `launches` is the number of launches so
    far.
    """

    def __init__(self, path: Path) -> None:
        torch.ops.load_library(str(path))
        library = ctypes.CDLL(str(path))
        self._major = ctypes.c_int.in_dll(library, "kvboost_edge_cuda_on_cpu_major")
        self._launches = ctypes.c_int.in_dll(library, "kvboost_edge_cuda_on_cpu_launches")

    @property
    def launches(self) -> int:
        return self._launches.value

    @contextlib.contextmanager
    def of(self, major: int) -> Iterator[None]:
        """Imitate a device of this compute capability: the wmma kernels run below 8, the mma
        kernels from 8 on.
        """
        before = self._major.value
        self._major.value = major
        try:
            yield
        finally:
            self._major.value = before


@contextlib.contextmanager
def standing_in() -> Iterator[tuple[Any, StandIn | None]]:
    """Yield the package `kvboost_edge_cuda` and the stand-in that replaces its compiled part; None
    on a GPU.
    """
    import kvboost_edge_cuda
    from kvboost_edge_cuda import library

    if ON_GPU:
        yield kvboost_edge_cuda, None
        return
    loaded = _loaded()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "unavailable_reason", lambda: None)
        patch.setattr(kvboost_edge_cuda, "unavailable_reason", lambda: None)
        yield kvboost_edge_cuda, loaded


@functools.cache
def _loaded() -> StandIn:
    kernels = built_kernels()
    sources = [CSRC / "binding.cpp", SHIM / "launch_on_cpu.cpp"]
    texts = [
        path.read_bytes() for path in (*sources, *sorted(CSRC.glob("*.h")), CSRC / "params.cuh")
    ]
    digest = hashlib.sha256(
        b"\0".join([torch.__version__.encode(), kernels.name.encode(), *texts])
    ).hexdigest()[:16]
    path = ROOT / "build" / "cuda_on_cpu" / f"binding-{digest}.so"
    if not path.exists():
        flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-Wall", "-DKVBOOST_EDGE_CUDA_DEVICE=CPU"]
        command = [
            "g++",
            *flags,
            *(f"-I{folder}" for folder in _INCLUDES),
            *map(str, sources),
            str(kernels),
        ]
        command += [f"-L{_TORCH / 'lib'}", "-lc10", "-ltorch_cpu"]
        with tempfile.TemporaryDirectory(dir=kernels.parent) as folder:
            made = Path(folder) / path.name
            subprocess.run([*command, "-o", str(made)], check=True, timeout=900)
            os.replace(made, path)
    return StandIn(path)
