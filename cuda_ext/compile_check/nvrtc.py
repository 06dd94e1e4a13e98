"""ctypes interface to NVRTC, CUDA's compiler library."""

from __future__ import annotations

import ctypes
import re
import sysconfig
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

__all__ = ["SITE", "Built", "CompileError", "Used", "compile_program"]

SITE = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
CSRC = Path(__file__).parents[1] / "kvboost_edge_cuda" / "csrc"
_INCLUDES = (CSRC, SITE / "cuda_runtime" / "include", SITE / "cuda_nvcc" / "include")
_USED = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?(?P<stack>\d+) bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


class CompileError(Exception):
    """Raised with the output of NVRTC."""


class Used(NamedTuple):
    """Resources of a kernel as reported by ptxas.

    Attributes:
        registers: registers per thread.
        stack: bytes of stack per thread.
        spilled: bytes of spill stores and loads.
        static_shared: bytes of static shared memory.
    """

    registers: int
    stack: int
    spilled: int
    static_shared: int


class Built(NamedTuple):
    cubin: bytes
    used: dict[str, Used]


def compile_program(source: str, architecture: str) -> Built:
    """Compile a program for an architecture such as "sm_80".

    The result refers to kernels by their mangled names. Several threads may call this function at
    once.

    Raises:
        CompileError: NVRTC rejects the program.
    """
    library = _library()
    program = ctypes.c_void_p()
    _check(
        library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"check.cu", 0, None, None
        )
    )
    options = [f"--gpu-architecture={architecture}", "-std=c++17", "--ptxas-options=-v"]
    options += [f"-I{path}" for path in _INCLUDES]
    try:
        words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = library.nvrtcCompileProgram(program, len(options), words)
        log = _text(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program).decode(
            errors="replace"
        )
        if status:
            raise CompileError(f"{architecture}: {log}")
        cubin = _text(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
    return Built(cubin, dict(_kernels(log)))


def _kernels(log: str) -> list[tuple[str, Used]]:
    found = []
    for entry in re.split(r"(?=ptxas info\s*: Compiling entry function)", log):
        match = _USED.search(entry)
        if match:
            shared = re.search(r"(\d+) bytes smem", match["rest"])
            spilled = int(match["stores"]) + int(match["loads"])
            used = Used(
                int(match["registers"]),
                int(match["stack"]),
                spilled,
                int(shared[1]) if shared else 0,
            )
            found.append((match["name"], used))
    return found


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(SITE / "cuda_nvrtc" / "lib" / "libnvrtc.so.12"))


def _check(status: int) -> None:
    if status:
        raise CompileError(f"NVRTC returned {status}")


def _text(get_size: object, get: object, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(get_size(program, ctypes.byref(size)))  # type: ignore[operator]
    buffer = ctypes.create_string_buffer(size.value)
    _check(get(program, buffer))  # type: ignore[operator]
    return buffer.raw
