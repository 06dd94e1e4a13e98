"""Build script: `FORCE_CUDA=1 pip install ./cuda_ext` builds the compiled part.

pip builds in an isolated environment, so this script imports torch from the target environment.
That torch will also run the extension. If torch or nvcc lacks CUDA, FORCE_CUDA=1 makes the build
fail. Without FORCE_CUDA, only the Python part is installed, and its functions report the missing
part.

Environment variables:

- FORCE_CUDA: 1 requires the compiled part.
- CUDA_HOME: folder of the CUDA toolkit. The default is that of nvcc.
- TORCH_CUDA_ARCH_LIST: architectures to build for. The default is all of 7.0 to 9.0 that nvcc
  supports, and PTX for later architectures.
- MAX_JOBS: maximum number of parallel compiler processes.
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
    """Raised with the reason why the compiled part cannot be built."""


def find_nvcc(home: str | None) -> tuple[int, int]:
    """Return the CUDA version of nvcc; raise NotBuildable unless it is 11.8 or later."""
    nvcc = Path(home or "/usr/local/cuda") / "bin" / "nvcc"
    if not nvcc.exists():
        raise NotBuildable(f"no nvcc at {nvcc}; install the CUDA toolkit or set CUDA_HOME")
    said = subprocess.run(
        [str(nvcc), "--version"], capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"release (\d+)\.(\d+)", said)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if version < OLDEST_CUDA:
        raise NotBuildable(f"{nvcc} is CUDA {version[0]}.{version[1]}; install CUDA 11.8 or later")
    return version


def architectures(cuda: tuple[int, int]) -> str:
    """Return the architectures from 7.0 to 9.0 that this nvcc supports; CUDA 13 dropped 7.0."""
    return ";".join(arch for arch in ARCHITECTURES if cuda < (13, 0) or arch != "7.0") + "+PTX"


def extensions() -> dict[str, Any]:
    """Return the arguments of `setup` that build the compiled part."""
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
        '"""Versions that the compiled part was built for; written by setup.py."""\n\n'
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
