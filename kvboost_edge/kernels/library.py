"""Kernel libraries: kernels compiled ahead for a class of processors, loaded without Numba.

A library consists of `NAME.so`, the machine code, and `NAME.json`, which says what it was built
from. NAME is the class (`targets.py`). A process uses one library for all kernels or none. A
library that does not match this version of the package, of Numba or of LLVM is refused, and kernels
are compiled as if there were none.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from kvboost_edge.host.file_memo import cache_directory
from kvboost_edge.kernels.lazy import binding
from kvboost_edge.kernels.sources import source_digest
from kvboost_edge.kernels.targets import KernelTarget, usable_targets

__all__ = [
    "DIRECTORY_VARIABLE",
    "FORMAT",
    "Library",
    "LibraryChoice",
    "Manifest",
    "is_trusted",
    "kernel_library",
    "library_choice",
    "library_folder",
    "llvm_version",
    "package_versions",
    "symbol_of",
]

_LOG = logging.getLogger(__name__)
FORMAT = 1
"""Version of the files."""
DIRECTORY_VARIABLE = "KVBOOST_EDGE_KERNELS"
_OFF = "none"
_COMPILERS = ("numba", "llvmlite")
_SETTINGS = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")


class Manifest(NamedTuple):
    """Origin of a library, the contents of its JSON file.

    Attributes:
        format: FORMAT.
        target: name of the class.
        platform: `sys.platform`.
        cpu: LLVM's name of the processor.
        features: instruction sets, as given to LLVM.
        dot_form: variant of the integer kernels.
        sources: digest of the kernels' sources.
        versions: versions of the compilers.
        llvm: version of LLVM.
        sha256: digest of the machine code's file.
        entries: names of the kernels.
    """

    format: int
    target: str
    platform: str
    cpu: str
    features: str
    dot_form: str
    sources: str
    versions: dict[str, str]
    llvm: str
    sha256: str
    entries: list[str]


class Library:
    """A kernel library that is loaded.

    Attributes:
        path: the file of machine code.
        manifest: what it was built from.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._code = ctypes.CDLL(str(path))
        self._entries = frozenset(manifest.entries)

    def address_of(self, name: str) -> int:
        """Return the address of an entry's machine code, or 0 if the library does not have it."""
        if name not in self._entries:
            return 0
        function = self._code[symbol_of(name)]
        return ctypes.cast(function, ctypes.c_void_p).value or 0


class LibraryChoice(NamedTuple):
    """The decision on a kernel library.

    Attributes:
        library: the library that this process uses, or None.
        reason: which library is used, or why none is.
    """

    library: Library | None
    reason: str


def symbol_of(name: str) -> str:
    """Return the symbol of an entry, such as "kernels.team:_look_out"."""
    return "kvboost_" + "".join(letter if letter.isalnum() else "_" for letter in name)


def package_versions() -> dict[str, str]:
    """Return the versions of the installed compilers."""
    found = {}
    for package in _COMPILERS:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = ""
    return found


def llvm_version() -> str:
    """Return the version of LLVM that compiles or has compiled this process's kernels."""
    library = kernel_library()
    if library is not None:
        return library.manifest.llvm
    return ".".join(map(str, binding.llvm_version_info))


def library_folder() -> Path:
    """Return the folder of libraries: KVBOOST_EDGE_KERNELS, or one in the cache directory."""
    given = os.environ.get(DIRECTORY_VARIABLE)
    return Path(given) if given and given != _OFF else cache_directory() / "kernels"


def kernel_library() -> Library | None:
    """Return the kernel library that this process uses, or None."""
    return library_choice().library


@functools.cache
def library_choice() -> LibraryChoice:
    """Choose the kernel library of this process, once.

    The class is the fastest one that this processor belongs to. If its library is missing or is
    refused, none is used: code for a slower class would save seconds at the first start and cost
    more at every answer.
    """
    given = os.environ.get(DIRECTORY_VARIABLE)
    if given == _OFF:
        return LibraryChoice(None, f"{DIRECTORY_VARIABLE}={_OFF}")
    for name in _SETTINGS:
        if os.environ.get(name):
            return LibraryChoice(None, f"{name} is set")
    targets = usable_targets()
    if not targets:
        return LibraryChoice(None, "there is no class for this processor or system")
    target = targets[0]
    folder = library_folder()
    if not (folder / f"{target.name}.json").is_file():
        if given:
            _LOG.warning(
                "%s=%s has no library for %s; kernels are compiled instead. Build it with "
                "`kvboost-edge kernels build`",
                DIRECTORY_VARIABLE,
                given,
                target.name,
            )
        return LibraryChoice(None, f"there is no library for {target.name}")
    found = _opened(folder, target)
    if isinstance(found, Library):
        _LOG.info("kernels come from %s", found.path)
        return LibraryChoice(found, f"{target.name} from {folder}")
    reason = f"{folder / target.name}: {found}"
    _LOG.warning(
        "a kernel library is not used, and kernels are compiled instead: %s. Build it again "
        "with `kvboost-edge kernels build`",
        reason,
    )
    return LibraryChoice(None, reason)


def _opened(folder: Path, target: KernelTarget) -> Library | str:
    """Load a library, or return the reason why it is refused."""
    try:
        manifest = _manifest_of(json.loads((folder / f"{target.name}.json").read_bytes()))
        if manifest is None:
            return "its description is broken or of another version"
        problem = _mismatch(manifest, target)
        if problem:
            return problem
        path = folder / f"{target.name}.so"
        for each in (folder, path):
            if not is_trusted(each):
                return f"{each} can be written by other users"
        if hashlib.sha256(path.read_bytes()).hexdigest() != manifest.sha256:
            return "the file differs from its description"
        return Library(path.resolve(), manifest)
    except (OSError, ValueError) as error:
        return f"it cannot be read: {error}"


def is_trusted(path: Path) -> bool:
    """Return whether only this user and root can write to a file or folder."""
    # The file's code runs in this process.
    if not hasattr(os, "getuid"):
        return True
    stat = path.stat()
    return stat.st_uid in (os.getuid(), 0) and not stat.st_mode & 0o022


def _manifest_of(values: Any) -> Manifest | None:
    if not isinstance(values, dict) or set(values) != set(Manifest._fields):
        return None
    manifest = Manifest(**values)
    versions = manifest.versions
    is_sound = (
        manifest.format == FORMAT
        and isinstance(versions, dict)
        and isinstance(manifest.entries, list)
        and all(isinstance(entry, str) for entry in manifest.entries)
    )
    return manifest if is_sound else None


def _mismatch(manifest: Manifest, target: KernelTarget) -> str:
    """Return why a library cannot be used by this process, or ""."""
    if manifest.target != target.name:
        return f"it is for {manifest.target}"
    if (manifest.cpu, manifest.features) != (target.cpu, target.feature_text):
        return "it was compiled for other instructions"
    if manifest.platform != sys.platform:
        return f"it is for {manifest.platform}"
    if manifest.sources != source_digest():
        return "it was built from other sources of the kernels"
    for package, version in package_versions().items():
        built = manifest.versions.get(package)
        if version and version != built:
            return f"it was built with {package} {built}, but {version} is installed"
    return ""
