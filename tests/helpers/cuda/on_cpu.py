"""The kernels of cuda_ext/ on the CPU: g++ compiles them over fibers (cuda_ext/fibers.h), ctypes
calls them.

The compiled sources are the `.cuh` files that NVRTC and nvcc compile. Pointers are addresses of
arrays in this process. Speed is not represented. A faulty launch (threads that do not meet at a
barrier, an address that is unaligned or outside of shared memory) raises `LaunchError`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helpers.tools import find_compiler

ROOT = Path(__file__).parents[3]
CSRC = ROOT / "cuda_ext" / "kvboost_edge_cuda" / "csrc"
SHIM = ROOT / "tests" / "cuda_ext"
HEAD_DIMS = (64, 96, 128, 256)
F16 = 0
BF16 = 1
_FLAGS = (
    *(
        "-std=c++20",
        "-O1",
        "-ftree-vectorize",
        "-fno-strict-aliasing",
        "-fno-semantic-interposition",
        "-fPIC",
        "-shared",
    ),
    "-fno-gnu-unique",  # otherwise all libraries of a process share one machine
    *("-Wall", "-Wextra", "-Wno-unknown-pragmas"),
)
# Fiber stacks are switched by hand, so the sanitizer must not check them. It checks the heap,
# including shared memory.
ASAN_FLAGS = ("-fsanitize=address", "--param", "asan-stack=0", "-g1")


class LaunchError(Exception):
    """An operation of a launch that a GPU forbids, with file, line, block and thread."""


class Schedule(ctypes.Structure):
    """Order of threads and asynchronous work.

    Attributes:
        order: 0 forward, 1 backward, 2 shuffled.
        timing: 0 runs asynchronous work as early as possible, 1 as late as possible.
    """

    _fields_ = (("order", ctypes.c_int), ("timing", ctypes.c_int))


def _strides(names: Sequence[str]) -> list[tuple[str, Any]]:
    return [(f"{name}_stride", ctypes.c_longlong) for name in names]


def _pointers(names: Sequence[str]) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_void_p) for name in names]


def _ints(names: Sequence[str]) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_int) for name in names]


class AttentionParams(ctypes.Structure):
    """Mirror of the struct in params.cuh, which documents the fields."""

    _fields_ = (
        *_pointers(
            "q k v out lse cu_seqlens_q cu_seqlens_k seqused_k block_table cache_batch_idx sinks".split()
        ),
        *_pointers("partial_out partial_lse".split()),
        *_strides(
            [
                f"{tensor}_{axis}"
                for tensor in "q k v out lse".split()
                for axis in "batch row head".split()
            ]
        ),
        *_strides(["block_table"]),
        ("total_q", ctypes.c_longlong),
        *_ints("batch seqlen_q seqlen_k num_q_heads num_kv_heads head_dim block_size".split()),
        *_ints("window_left window_right num_splits".split()),
        ("softmax_scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class WriteKVParams(ctypes.Structure):
    """Mirror of the struct in params.cuh."""

    _fields_ = (
        *_pointers("keys values k_cache v_cache slot_mapping".split()),
        *_strides("keys_row keys_head values_row values_head".split()),
        *_strides("k_block k_row k_head v_block v_row v_head".split()),
        *_ints("num_tokens num_kv_heads head_dim block_size".split()),
    )


class CopyBlocksParams(ctypes.Structure):
    """Mirror of the struct in params.cuh."""

    _fields_ = (
        *_pointers("pools block_bytes pairs".split()),
        *_ints("num_pools num_pairs".split()),
    )


@dataclasses.dataclass(frozen=True)
class Form:
    """Variant of the attention kernel: wmma or mma, dtype, template head dim, and warps along the
    rows (4 for prefill, 1 for decode).
    """

    is_wmma: bool
    dtype: int
    head_dim: int
    warps_m: int


class Library:
    """The compiled kernels. Each method runs the launch that params.cuh describes."""

    def __init__(self, path: Path) -> None:
        self._functions = ctypes.CDLL(str(path))
        for name in ("attention", "merge", "write_slots", "copy"):
            getattr(self._functions, name).restype = ctypes.c_char_p
        self._functions.size_of.restype = ctypes.c_longlong
        sizes = [self._functions.size_of(i) for i in range(3)]
        own = [
            ctypes.sizeof(struct) for struct in (AttentionParams, WriteKVParams, CopyBlocksParams)
        ]
        if sizes != own:
            raise TypeError(f"the structs of params.cuh have {sizes} bytes, their mirrors {own}")

    def attention(self, params: AttentionParams, form: Form, schedule: Schedule) -> None:
        """Launch attention_mma or attention_wmma, followed by merge_splits if there are splits."""
        p = ctypes.byref(params)
        _check(
            self._functions.attention(
                p, int(form.is_wmma), form.dtype, form.head_dim, form.warps_m, schedule
            )
        )
        if params.num_splits > 1:
            _check(self._functions.merge(p, form.dtype, schedule))

    def write_kv(self, params: WriteKVParams, schedule: Schedule) -> None:
        _check(self._functions.write_slots(ctypes.byref(params), schedule))

    def copy_blocks(self, params: CopyBlocksParams, most_bytes: int, schedule: Schedule) -> None:
        _check(self._functions.copy(ctypes.byref(params), ctypes.c_longlong(most_bytes), schedule))


def _check(message: bytes | None) -> None:
    if message is not None:
        raise LaunchError(message.decode())


def built(source: Path, flags: Sequence[str] = (), include: Path = CSRC) -> Path:
    """Return the shared library of one C++ file. It is stored in build/ and compiled unless the
    same text was compiled before.
    """
    compiler = find_compiler()
    if compiler is None:
        raise FileNotFoundError(
            "g++ with its address sanitizer is not installed: it compiles the CUDA kernels here"
        )
    command = [compiler, *_FLAGS, "-DKVBOOST_EDGE_CUDA_ON_CPU", f"-I{include}", f"-I{SHIM}", *flags]
    texts = [
        path.read_bytes()
        for path in (source, *sorted(include.glob("*.cuh")), *sorted(SHIM.glob("*.h")))
    ]
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    digest = hashlib.sha256(b"\0".join([repr(command).encode(), version, *texts])).hexdigest()[:16]
    path = ROOT / "build" / "cuda_on_cpu" / f"{source.stem}-{digest}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            subprocess.run([*command, str(source), "-o", str(made)], check=True, timeout=900)
            os.replace(made, path)
    return path


def built_kernels(
    head_dims: tuple[int, ...] = HEAD_DIMS, flags: tuple[str, ...] = (), include: Path = CSRC
) -> Path:
    """Return the path of the shared library with the kernels for these head dims."""
    chosen = f"-DHEAD_DIMS={','.join(map(str, head_dims))}"
    return built(SHIM / "launches.cpp", (chosen, *flags), include)


@functools.cache
def library(
    head_dims: tuple[int, ...] = HEAD_DIMS, flags: tuple[str, ...] = (), include: Path = CSRC
) -> Library:
    """Load the kernels for these head dims."""
    return Library(built_kernels(head_dims, flags, include))
