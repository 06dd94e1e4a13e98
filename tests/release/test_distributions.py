"""Tests of the checks of wheels and sdists, on small ones built here."""

import io
import os
import tarfile
import zipfile

import pytest

from release.distributions import (
    REQUIRED,
    Distributions,
    aged_copy,
    content_problems,
    cuda_problems,
    different_files,
)

PACKAGE = [f"kvboost_edge/{name}" for name in ("__init__.py", *REQUIRED)]
TRACKED = [
    *PACKAGE,
    *("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "tests/test_a.py"),
]
SOURCES = [name for name in TRACKED if not name.startswith("tests/")]


def made(folder, *, wheel=PACKAGE, sdist=SOURCES, text=b"x"):
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "kvboost_edge-1-py3-none-any.whl", "w") as archive:
        for name in [*wheel, "kvboost_edge-1.dist-info/METADATA"]:
            archive.writestr(zipfile.ZipInfo(name), text)
    make_sdist(folder / "kvboost_edge-1.tar.gz", [*sdist, "PKG-INFO"])
    return Distributions(folder)


def make_sdist(path, names):
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            member = tarfile.TarInfo(f"{path.name.removesuffix('.tar.gz')}/{name}")
            archive.addfile(member, io.BytesIO())


def test_complete_distributions_have_no_problem(tmp_path):
    assert content_problems(made(tmp_path / "dist"), TRACKED) == []


@pytest.mark.parametrize("name", [f"kvboost_edge/{name}" for name in REQUIRED])
def test_a_missing_package_file_is_reported(tmp_path, name):
    """The file is required even if it is no longer under version control."""
    built = made(tmp_path / "dist", wheel=[one for one in PACKAGE if one != name])
    assert content_problems(built, TRACKED) == [f"the wheel lacks {name}"]
    tracked = [one for one in TRACKED if one != name]
    assert f"the wheel lacks {name}" in content_problems(built, tracked)


@pytest.mark.parametrize("name", ["tests/test_a.py", "kvboost_edge/notes.txt", "release/check.py"])
def test_unexpected_files_in_the_wheel_are_reported(tmp_path, name):
    built = made(tmp_path / "dist", wheel=[*PACKAGE, name])
    assert content_problems(built, TRACKED) == [f"the wheel contains {name}"]


def test_an_incomplete_sdist_and_unknown_files_in_it_are_named(tmp_path):
    sdist = [one for one in SOURCES if one != "kvboost_edge/py.typed"]
    built = made(tmp_path / "dist", sdist=[*sdist, "secret.txt"])
    assert content_problems(built, TRACKED) == [
        "the sdist lacks kvboost_edge/py.typed",
        "the sdist contains secret.txt",
    ]


def test_builds_that_differ_in_a_byte_are_found(tmp_path):
    first = made(tmp_path / "first")
    assert different_files(first, first) == []
    other = made(tmp_path / "other", text=b"y")
    [problem] = different_files(first, other)
    assert problem.startswith("kvboost_edge-1-py3-none-any.whl differs between two builds")


def test_the_second_build_has_other_times_and_permissions(tmp_path):
    (tmp_path / "tree" / "folder").mkdir(parents=True)
    (tmp_path / "tree" / "folder" / "a").write_bytes(b"content")
    copy = aged_copy(tmp_path / "tree", ["folder/a"], tmp_path / "copy")
    found = (copy / "folder" / "a").stat()
    assert (copy / "folder" / "a").read_bytes() == b"content"
    assert found.st_mtime == 1_000_000_000
    if os.name == "posix":
        assert found.st_mode & 0o777 == 0o600


def test_the_sdist_of_cuda_ext_has_all_sources(tmp_path):
    tracked = [
        f"cuda_ext/{name}"
        for name in ("setup.py", "kvboost_edge_cuda/csrc/a.cu", "compile_check/__init__.py")
    ]
    path = tmp_path / "kvboost_edge_cuda-1.tar.gz"
    make_sdist(path, ["setup.py"])
    assert cuda_problems(path, tracked) == [f"{path.name} lacks kvboost_edge_cuda/csrc/a.cu"]
    make_sdist(path, ["setup.py", "kvboost_edge_cuda/csrc/a.cu"])
    assert cuda_problems(path, tracked) == []
