"""Tests of the extension's errors if its compiled part is missing or built for another torch
version, and of the setup's errors.
"""

import os
import runpy
import shutil
import sys
import types
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

import helpers.cuda.standin  # noqa: F401  the package is found through it
from helpers.cuda.on_cpu import CSRC, ROOT


@pytest.fixture
def library(monkeypatch, tmp_path):
    """Module that loads the compiled part, here from an empty folder."""
    from kvboost_edge_cuda import library

    monkeypatch.setattr(library, "_HERE", tmp_path)
    library.unavailable_reason.cache_clear()
    yield library
    library.unavailable_reason.cache_clear()


def say_built_for(monkeypatch, version, cuda):
    note = types.ModuleType("kvboost_edge_cuda.built_for")
    note.TORCH = version
    note.CUDA = cuda
    monkeypatch.setitem(sys.modules, "kvboost_edge_cuda.built_for", note)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: note)


def test_without_the_compiled_part_the_import_names_what_is_missing(library):
    import kvboost_edge_cuda

    q = torch.zeros(1, 1, 1, 64, dtype=torch.float16)
    with pytest.raises(kvboost_edge_cuda.ExtensionUnavailable, match="FORCE_CUDA=1 pip install"):
        kvboost_edge_cuda.flash_attn_func(q, q, q)
    assert "no compiled part" in library.unavailable_reason()


def test_a_build_for_another_torch_is_refused(library, tmp_path, monkeypatch):
    (tmp_path / "_compiled.so").write_bytes(b"not looked at")
    say_built_for(monkeypatch, "2.6.0+cu118", "11.8")
    said = library.unavailable_reason()
    assert "built for torch 2.6.0+cu118 (CUDA 11.8)" in said
    assert f"this is torch {torch.__version__}" in said
    assert "FORCE_CUDA=1 pip install" in said


def test_a_library_that_cannot_be_loaded_is_named(library, tmp_path, monkeypatch):
    (tmp_path / "_compiled.so").write_bytes(b"no library")
    say_built_for(monkeypatch, torch.__version__, torch.version.cuda)
    assert "_compiled.so of kvboost_edge_cuda cannot be loaded" in library.unavailable_reason()


def test_the_version_equals_the_installed_packages(monkeypatch):
    import kvboost_edge_cuda

    def not_installed(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(kvboost_edge_cuda, "version", {"kvboost-edge-cuda": "1.2.3"}.get)
    assert kvboost_edge_cuda.__version__ == "1.2.3"
    monkeypatch.setattr(kvboost_edge_cuda, "version", not_installed)
    assert kvboost_edge_cuda.__version__ == "0+unknown"
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = kvboost_edge_cuda.other


@pytest.fixture
def run_setup(monkeypatch, tmp_path):
    """Function that runs a copy of setup.py with a value of FORCE_CUDA and returns the arguments
    for setuptools.
    """
    copy = Path(
        shutil.copytree(
            ROOT / "cuda_ext", tmp_path / "cuda_ext", ignore=shutil.ignore_patterns("__pycache__")
        )
    )
    monkeypatch.chdir(copy)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "")  # so that the test restores it
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    monkeypatch.setattr(sys, "path", sys.path.copy())

    def run(force):
        given = {}
        monkeypatch.setenv("FORCE_CUDA", force)
        monkeypatch.setattr("setuptools.setup", given.update)
        runpy.run_path("setup.py", run_name="__main__")
        return given

    return run


Run = Callable[[str], dict[str, Any]]


def have_nvcc(monkeypatch, folder, release):
    """Simulate a torch built with CUDA and an nvcc of this release."""
    nvcc = folder / "home" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.99'\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(folder / "home"))


def test_without_cuda_only_the_python_part_is_installed(run_setup, monkeypatch, capsys):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert run_setup("0") == {}
    assert "installed without its compiled part: torch" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"FORCE_CUDA=1, but .* torch .* is built without CUDA"):
        run_setup("1")


def test_without_nvcc_the_error_names_the_searched_paths(run_setup, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path / "nowhere"))
    with pytest.raises(SystemExit, match=r"no nvcc at .*nowhere/bin/nvcc"):
        run_setup("1")


def test_an_old_cuda_is_refused(run_setup, monkeypatch, tmp_path):
    have_nvcc(monkeypatch, tmp_path, "11.7")
    with pytest.raises(SystemExit, match=r"CUDA 11\.7; install CUDA 11\.8 or later"):
        run_setup("1")


@pytest.mark.parametrize(("release", "first"), [("11.8", "7.0"), ("12.4", "7.0"), ("13.0", "7.5")])
def test_with_cuda_every_source_is_built_for_every_architecture(
    release, first, run_setup, monkeypatch, tmp_path
):
    have_nvcc(monkeypatch, tmp_path, release)
    (extension,) = run_setup("1")["ext_modules"]
    sources = {Path(source).name for source in extension.sources}
    assert sources == {"binding.cpp", *(path.name for path in CSRC.glob("*.cu"))}
    assert os.environ["TORCH_CUDA_ARCH_LIST"].split(";")[0] == first
    assert os.environ["TORCH_CUDA_ARCH_LIST"].endswith("9.0+PTX")
    note = runpy.run_path("kvboost_edge_cuda/built_for.py")
    assert (note["TORCH"], note["CUDA"]) == (torch.__version__, "12.4")
