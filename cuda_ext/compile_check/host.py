"""Compiles host and device code of the .cu files with nvcc 13, links it and calls the launchers."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from compile_check.nvrtc import CSRC, SITE

__all__ = ["NvccError", "call_launchers", "compile_source", "disassembled_hmma", "link"]

_ARCHITECTURES = ("sm_75", "sm_80")  # one architecture with wmma kernels and one with mma kernels
_HOME = SITE / "cu13"
_FUNCTIONS = ("attention", "write_kv", "copy_blocks")


class NvccError(Exception):
    """Raised with the output of nvcc."""


def compile_source(name: str, folder: Path) -> Path:
    """Compile the host and device code of a source to an object file in `folder`."""
    target = folder / f"{name}.o"
    codes = [f"-gencode=arch=compute_{arch[3:]},code={arch}" for arch in _ARCHITECTURES]
    _nvcc(
        [
            "-c",
            "-O3",
            "-std=c++17",
            "-Xcompiler",
            "-fPIC",
            *codes,
            str(CSRC / f"{name}.cu"),
            "-o",
            str(target),
        ]
    )
    return target


def link(objects: Sequence[Path], folder: Path) -> Path:
    """Link all launchers into a shared library."""
    target = folder / "launchers.so"
    undefined = ["-Xlinker", "--no-undefined"]
    _nvcc(
        [
            "-shared",
            *map(str, objects),
            f"-L{_HOME / 'lib'}",
            "-cudart",
            "static",
            *undefined,
            "-o",
            str(target),
        ]
    )
    return target


def call_launchers(path: Path) -> dict[str, str]:
    """Call each launcher with empty parameters, without a GPU; return the names of the errors."""
    library = ctypes.CDLL(str(path))
    library.kvboost_edge_cuda_error.restype = ctypes.c_char_p
    params = ctypes.create_string_buffer(1024)
    ctypes.memset(params, 1, 512)
    calls = {
        "attention": (params, ctypes.c_int(0), ctypes.c_void_p()),
        "write_kv": (params, ctypes.c_void_p()),
        "copy_blocks": (params, ctypes.c_longlong(16), ctypes.c_void_p()),
    }
    said = {}
    for name in _FUNCTIONS:
        error = getattr(library, f"kvboost_edge_cuda_{name}")(*calls[name])
        said[name] = library.kvboost_edge_cuda_error(error).decode() if error else ""
    return said


def disassembled_hmma(cubin: bytes, folder: Path) -> int:
    """Return the number of HMMA instructions that nvdisasm finds in the machine code."""
    path = folder / "form.cubin"
    path.write_bytes(cubin)
    done = subprocess.run(
        [_tool("nvdisasm"), "-c", str(path)], capture_output=True, text=True, check=True
    )
    return sum("HMMA." in line for line in done.stdout.splitlines())


def _nvcc(arguments: Sequence[str]) -> None:
    command = [
        _tool("nvcc"),
        f"-I{_HOME / 'include'}",
        f"-I{_HOME / 'include' / 'cccl'}",
        *arguments,
    ]
    for tool in (_HOME / "nvvm" / "bin").glob("*"):
        _make_executable(tool)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NvccError(f"{' '.join(arguments[-3:])}: {done.stdout}{done.stderr}")


def _tool(name: str) -> str:
    for path in (_HOME / "bin").glob("*"):
        _make_executable(path)
    return str(_HOME / "bin" / name)


def _make_executable(path: Path) -> None:
    if path.is_file() and not os.access(path, os.X_OK):
        path.chmod(0o755)
