"""Wheel and sdist: building them twice, and checking their contents.

The wheel is built from the sdist, which shows that the sdist is complete. The second build starts
from a copy of the tree with other file times and permissions. Both must give the same bytes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["Distributions", "build", "content_problems", "cuda_problems", "different_files"]

PACKAGE = "kvboost_edge"
# Time stamp of all files in the distributions: 2020-02-02, the default of Hatchling.
SOURCE_DATE_EPOCH = "1580601600"
# Files that the package cannot work without and that are not Python code.
REQUIRED = (
    "assets/demo/README.md",
    "assets/demo/config.json",
    "assets/demo/model.safetensors",
    "assets/demo/tokenizer.json",
    "assets/demo_document.txt",
    "kernels/linear/grids.npz",
    "py.typed",
    "server/http/static/index.html",
    "server/http/static/main.js",
    "server/http/static/style.css",
)


class Distributions:
    """Wheel and sdist of one build.

    Args:
        folder: folder that contains exactly one wheel and one sdist.
    """

    def __init__(self, folder: Path) -> None:
        [self.wheel] = folder.glob("*.whl")
        [self.sdist] = folder.glob("*.tar.gz")

    @property
    def files(self) -> tuple[Path, Path]:
        return self.wheel, self.sdist


def build(builder: Sequence[str], tree: Path, out: Path) -> Distributions:
    """Build the sdist of a tree, and the wheel from the sdist.

    Args:
        builder: command of the build frontend.
        tree: folder of pyproject.toml.
        out: folder for the distributions. Earlier ones are deleted.

    Raises:
        subprocess.CalledProcessError: the build failed. Its `stdout` contains the output.
    """
    shutil.rmtree(out, ignore_errors=True)
    environment = {**os.environ, "SOURCE_DATE_EPOCH": SOURCE_DATE_EPOCH}
    subprocess.run(
        [*builder, "--outdir", str(out), str(tree)],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return Distributions(out)


def aged_copy(tree: Path, files: Sequence[str], copy: Path) -> Path:
    """Copy files of a tree, with other times and permissions, and return the copy."""
    for name in files:
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(tree / name, target)
        target.chmod(0o600)
        os.utime(target, (1_000_000_000, 1_000_000_000))
    return copy


def different_files(first: Distributions, second: Distributions) -> list[str]:
    """Return a line for each distribution whose bytes differ between two builds."""
    return [
        f"{one.name} differs between two builds of the same sources"
        for one, other in zip(first.files, second.files, strict=True)
        if one.name != other.name or one.read_bytes() != other.read_bytes()
    ]


def content_problems(built: Distributions, tracked: Sequence[str]) -> list[str]:
    """Return a line for each file that is missing from a distribution or does not belong in it.

    Args:
        built: wheel and sdist.
        tracked: files under version control, relative to the root of the repository.
    """
    package = {name for name in tracked if name.startswith(f"{PACKAGE}/")}
    found = []
    with zipfile.ZipFile(built.wheel) as wheel:
        names = set(wheel.namelist())
    inside = {name for name in names if ".dist-info/" not in name}
    found += [f"the wheel lacks {name}" for name in sorted(package - inside)]
    found += [f"the wheel contains {name}" for name in sorted(inside - package)]
    with tarfile.open(built.sdist) as sdist:
        members = {member.name.partition("/")[2] for member in sdist if member.isfile()}
    wanted = package | {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"}
    found += [f"the sdist lacks {name}" for name in sorted(wanted - members)]
    unknown = members - set(tracked) - {"PKG-INFO"}
    found += [f"the sdist contains {name}" for name in sorted(unknown)]
    required = {f"{PACKAGE}/{name}" for name in REQUIRED}
    found += [f"the wheel lacks {name}" for name in sorted(required - inside - package)]
    return found


def cuda_problems(sdist: Path, tracked: Sequence[str]) -> list[str]:
    """Return a line for each source file that the sdist of cuda_ext/ lacks."""
    folder = "cuda_ext/"
    wanted = {
        name.removeprefix(folder)
        for name in tracked
        if name.startswith((f"{folder}kvboost_edge_cuda/", f"{folder}setup.py"))
    }
    with tarfile.open(sdist) as archive:
        members = {member.name.partition("/")[2] for member in archive if member.isfile()}
    return [f"{sdist.name} lacks {name}" for name in sorted(wanted - members)]
