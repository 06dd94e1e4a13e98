"""Building kernel libraries (`library.py`) for classes of processors.

Children compile the kernels, each to an object file, and the C compiler links them. A child runs
`python -m kvboost_edge.kernels.build FOLDER` with the class's settings of Numba. It answers with a
line of JSON, then reads kernel names, one per line, and answers with each name once its object file
is in the folder.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import json
import logging
import os
import pkgutil
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from kvboost_edge.errors import BackendUnavailable, ConfigError
from kvboost_edge.host.processor import default_num_threads
from kvboost_edge.kernels.aot import Answers, Child, compiled_by
from kvboost_edge.kernels.entry import all_entries, entry_named
from kvboost_edge.kernels.integers import dot_form
from kvboost_edge.kernels.library import (
    FORMAT,
    Manifest,
    is_trusted,
    library_folder,
    llvm_version,
    package_versions,
    symbol_of,
)
from kvboost_edge.kernels.signature import numba_type
from kvboost_edge.kernels.sources import source_digest
from kvboost_edge.kernels.targets import KernelTarget

__all__ = ["build_library"]

_LOG = logging.getLogger(__name__)
_MODULE = "kvboost_edge.kernels.build"
_PACKAGE = "kvboost_edge.kernels"
_COMPILERS = ("cc", "gcc", "clang")
# The kernels that compile longest are started first.
_SLOWEST = ("_take_units", "_run_experts", "_attend_codes", "_attend_floats", "_run_scan")
_LINK = (
    "-shared",
    "-fPIC",
    "-nostdlib",
    "-Wl,--build-id=none",
    "-Wl,--strip-all",
    "-Wl,-z,noexecstack",
)
# Numba's code can end the life of arrays that own memory. No kernel gets or makes such an array.
_STUB = """
__attribute__((visibility("hidden"))) void NRT_MemInfo_call_dtor(void *owner) { __builtin_trap(); }
"""


def build_library(
    target: KernelTarget,
    folder: Path,
    *,
    names: Sequence[str] | None = None,
    num_processes: int | None = None,
    tell: Callable[[int, int], None] | None = None,
) -> Path:
    """Compile a class's kernels and write its library.

    Args:
        target: the class. The machine's architecture must be the same, but the machine need not
            belong to the class.
        folder: where the library's files are written.
        names: names of the kernels; None for all.
        num_processes: number of compiling processes; None for one per usable CPU.
        tell: callback `tell(done, total)` that reports the progress.

    Returns:
        The file of machine code.

    Raises:
        BackendUnavailable: a kernel cannot be compiled or linked.
        ConfigError: the folder cannot be written, or processes on this machine would search it and
            other users can write to it.
    """
    link = _linker()
    try:
        # Others may not write to it, whatever the umask is: its files are run.
        folder.mkdir(parents=True, exist_ok=True, mode=0o755)
        if not is_trusted(folder):
            if folder.resolve() == library_folder().resolve():
                raise ConfigError(
                    f"{folder} can be written by other users, so processes would refuse the "
                    "library; choose a folder of this user or root, or use "
                    f"`chmod go-w {folder}`"
                )
            _warn_untrusted(folder)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as name:
            return _build(target, folder, Path(name), link, names, num_processes, tell)
    except OSError as error:
        raise ConfigError(f"kernels cannot be written to {folder}: {error}") from error


@functools.cache
def _warn_untrusted(folder: Path) -> None:
    """Log once that processes do not load libraries from a folder as it is."""
    _LOG.warning(
        "%s can be written by other users. Before processes can use its libraries, the folder or a "
        "copy of it must belong to their user or root, and no other user may write to it",
        folder,
    )


def _build(
    target: KernelTarget,
    folder: Path,
    room: Path,
    link: list[str],
    names: Sequence[str] | None,
    num_processes: int | None,
    tell: Callable[[int, int], None] | None,
) -> Path:
    count = default_num_threads() if num_processes is None else num_processes
    with _children(target, room, count) as children:
        about = {}
        for child in children:
            answer = child.answer()
            if answer is None:
                raise child.failure("kernels")
            about = json.loads(answer)
        known = sorted(about["entries"]) if names is None else list(names)
        known.sort(key=lambda name: name.partition(":")[2] not in _SLOWEST)
        if tell is not None:
            tell(0, len(known))
        for done, _ in enumerate(compiled_by(children, known)):
            if tell is not None:
                tell(done + 1, len(known))
    known.sort()
    code = _linked(link, room, [room / f"{symbol_of(name)}.o" for name in known])
    manifest = Manifest(
        FORMAT,
        target.name,
        sys.platform,
        target.cpu,
        target.feature_text,
        about["dot_form"],
        source_digest(),
        package_versions(),
        about["llvm"],
        hashlib.sha256(code.read_bytes()).hexdigest(),
        known,
    )
    description = room / "manifest.json"
    description.write_text(json.dumps(manifest._asdict(), indent=1) + "\n", encoding="utf-8")
    for path in (code, description):
        path.chmod(0o644)
    place = folder / f"{target.name}.so"
    os.replace(code, place)
    os.replace(description, place.with_suffix(".json"))
    return place


@contextlib.contextmanager
def _children(target: KernelTarget, room: Path, count: int) -> Iterator[list[Child]]:
    settings = {"NUMBA_CPU_NAME": target.cpu, "NUMBA_CPU_FEATURES": target.feature_text}
    children: list[Child] = []
    try:
        for _ in range(max(1, count)):
            children.append(Child([_MODULE, str(room)], settings))
        yield children
    finally:
        for child in children:
            child.end()


def _linker() -> list[str]:
    """Return the command of a C compiler that links.

    Raises:
        BackendUnavailable: there is none.
    """
    given = os.environ.get("CC")
    for name in (given,) if given else _COMPILERS:
        found = shutil.which(name)
        if found:
            return [found]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-P", "-m", "ziglang", "cc"]
    raise BackendUnavailable(
        f"no C compiler was found ({given or ', '.join(_COMPILERS)}), which links the kernels; "
        "install gcc, or `pip install ziglang`"
    )


def _linked(link: list[str], room: Path, objects: Sequence[Path]) -> Path:
    stub = room / "stub.c"
    stub.write_text(_STUB, encoding="utf-8")
    code = room / "library.so"
    command = [*link, *_LINK, "-o", str(code), str(stub), *map(str, objects)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BackendUnavailable(f"kernels cannot be linked with {link[0]}: {done.stderr[-2000:]}")
    return code


def _import_all() -> None:
    package = importlib.import_module(_PACKAGE)
    for info in pkgutil.walk_packages(package.__path__, f"{_PACKAGE}."):
        if info.name != _MODULE:
            importlib.import_module(info.name)


def _write_object(name: str, room: Path) -> None:
    from kvboost_edge.kernels.compiler import object_code

    entry = entry_named(name)
    code, returns = object_code(entry.kernel.dispatcher, entry.arguments, symbol_of(name))
    if returns != numba_type(entry.returns):
        raise TypeError(f"the kernel {name} returns {returns}, not {entry.returns}")
    (room / f"{symbol_of(name)}.o").write_bytes(code)


def _serve(room: Path, names: IO[str], answers: Answers) -> None:
    """Describe the kernels, then compile those named on stdin."""
    _import_all()
    about: dict[str, Any] = {
        "entries": sorted(entry.name for entry in all_entries()),
        "dot_form": dot_form(),
        "llvm": llvm_version(),
    }
    answers.give(json.dumps(about))
    for line in names:
        name = line.strip()
        _write_object(name, room)
        answers.give(name)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), sys.stdin, Answers())
