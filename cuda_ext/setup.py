"""Builds the compiled part where CUDA is: `FORCE_CUDA=1 pip install ./cuda_ext`.

pip builds in an environment of its own, without the torch that will run the extension; that torch
is found in the environment that is installed into. Without FORCE_CUDA, and where torch or nvcc has
no CUDA, only the Python part is installed, which says when it is imported what is missing.
FORCE_CUDA=1 makes each of that an error.

Settings: FORCE_CUDA=1; CUDA_HOME (default: where nvcc is); TORCH_CUDA_ARCH_LIST (default: all that
nvcc knows of 7.0 to 9.0, and PTX for later ones); MAX_JOBS.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import setup

SOURCES = "kvboost_edge_cuda/csrc"
OLDEST_CUDA = (11, 8)
NOTE = Path(__file__).parent / "kvboost_edge_cuda" / "built_for.py"
ARCHITECTURES = ("7.0", "7.5", "8.0", "8.6", "8.9", "9.0")


class NotBuildable(Exception):
    """Why the compiled part cannot be built here."""


def find_nvcc(home: str | None) -> tuple[int, int]:
    """The version of nvcc, at least 11.8."""
    nvcc = Path(home or "/usr/local/cuda") / "bin" / "nvcc"
    if not nvcc.exists():
        raise NotBuildable(f"there is no nvcc at {nvcc}; install the CUDA toolkit or set CUDA_HOME")
    said = subprocess.run(
        [str(nvcc), "--version"], capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"release (\d+)\.(\d+)", said)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if version < OLDEST_CUDA:
        raise NotBuildable(f"{nvcc} is of CUDA {version[0]}.{version[1]}; it takes 11.8 or later")
    return version


def architectures(cuda: tuple[int, int]) -> str:
    """Those of 7.0 to 9.0 that this nvcc compiles for; CUDA 13 has dropped 7.0."""
    return ";".join(arch for arch in ARCHITECTURES if cuda < (13, 0) or arch != "7.0") + "+PTX"


def extensions() -> dict[str, Any]:
    """The arguments of `setup` that build the compiled part."""
    sys.path.append(sysconfig.get_paths()["purelib"])
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        raise NotBuildable(
            f"torch cannot be imported ({error}); install a CUDA build of torch first"
        ) from error
    if torch.version.cuda is None:
        raise NotBuildable(
            f"torch {torch.__version__} is built without CUDA; install a CUDA build of torch first"
        )
    cuda = find_nvcc(cpp_extension.CUDA_HOME)
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", architectures(cuda))
    NOTE.write_text(
        '"""What the compiled part was built for; written by setup.py."""\n\n'
        f"TORCH = {torch.__version__!r}\nCUDA = {torch.version.cuda!r}\n"
    )
    sources = [
        f"{SOURCES}/binding.cpp",
        *(str(path) for path in sorted(Path(SOURCES).glob("*.cu"))),
    ]
    flags = {"cxx": ["-O2"], "nvcc": ["-O3", "-std=c++17"]}
    extension = cpp_extension.CUDAExtension(
        "kvboost_edge_cuda._compiled", sources, extra_compile_args=flags
    )
    return {"ext_modules": [extension], "cmdclass": {"build_ext": cpp_extension.BuildExtension}}


def arguments() -> dict[str, Any]:
    try:
        return extensions()
    except NotBuildable as reason:
        NOTE.unlink(missing_ok=True)
        if os.environ.get("FORCE_CUDA") == "1":
            sys.exit(f"FORCE_CUDA=1, but kvboost_edge_cuda cannot be built: {reason}")
        print(
            f"kvboost_edge_cuda is installed without its compiled part: {reason}", file=sys.stderr
        )
        return {}


setup(**arguments())
