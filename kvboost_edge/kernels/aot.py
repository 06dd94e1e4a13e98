"""Ahead-of-time compilation of kernels in child processes.

Compiling in this process would cost about 200 MB that is never returned to the system. Child
processes compile instead, and this process loads the machine code from disk.

A child runs `python -m kvboost_edge.kernels.aot`. It reads kernel names, one per line, and answers
with each name once the machine code is on disk, or with nothing if it cannot be stored. Lines that
do not begin with `_MARK` are not answers. Settings of Numba, for example, can print such lines.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO

from kvboost_edge.errors import BackendUnavailable
from kvboost_edge.host.processor import default_num_threads
from kvboost_edge.kernels.entry import KernelEntry, entry_named
from kvboost_edge.kernels.jit import cache_path
from kvboost_edge.kernels.lazy import numba_config

__all__ = [
    "MOST_CHILDREN",
    "Answers",
    "Child",
    "compile_ahead",
    "compiled_by",
    "expected_seconds",
    "on_compiling",
]

_LOG = logging.getLogger(__name__)
_MODULE = "kvboost_edge.kernels.aot"
# A child takes half a second to start, and the slowest kernel accounts for a third of the total
# time, so more children would not help.
MOST_CHILDREN = 4
_LAST_LINES = 12
_MARK = "kvboost-edge: "
_EXIT_S = 10.0
_SIGKILL = 9
_SECONDS_OF_ONE = 4.0  # CPU seconds per kernel, measured on an idle core

_listeners: list[Callable[[int, int], None]] = []


def on_compiling(tell: Callable[[int, int], None] | None) -> None:
    """Set the callback that reports the progress of ahead-of-time compilation.

    `tell(done, total)` runs before the first kernel and after each kernel, in the thread that opens
    the model.

    Args:
        tell: the new callback, which replaces the previous one; None removes it.
    """
    _listeners[:] = [] if tell is None else [tell]


def expected_seconds(num_kernels: int) -> float:
    """Estimate the seconds that `compile_ahead` needs for this many kernels on idle cores."""
    processes = max(1, min(default_num_threads(), num_kernels, MOST_CHILDREN))
    return _SECONDS_OF_ONE * num_kernels / processes


def compile_ahead(entries: Sequence[KernelEntry], num_processes: int) -> None:
    """Compile the kernels that are not on disk yet, in child processes.

    If no child process can be started, or machine code cannot be stored on disk, this process
    compiles the kernels and logs a warning.

    Args:
        entries: kernels to compile, slowest first.
        num_processes: maximum number of child processes.

    Raises:
        BackendUnavailable: a child failed. The message has the kernel's name and the compiler's
            output.
    """
    missing = [entry for entry in entries if not entry.is_ready]
    if not missing:
        return
    tell = _listeners[0] if _listeners else lambda done, total: None
    left = {entry.name: entry for entry in missing}
    with _children(min(num_processes, len(missing), MOST_CHILDREN)) as children:
        where = (
            f"{len(children)} process(es)"
            if children
            else "this process, whose memory grows by about 200 MB"
        )
        later = "load them from disk" if cache_path() else "compile them again"
        _LOG.info(
            "compiling %d kernels for this machine in %s; later runs %s", len(missing), where, later
        )
        tell(0, len(missing))
        try:
            for name in compiled_by(children, list(left)):
                del left[name]
                tell(len(missing) - len(left), len(missing))
        except _NotStoredError as error:
            _LOG.warning("kernels are compiled in this process: %s", error)
    for number, entry in enumerate(left.values(), start=len(missing) - len(left) + 1):
        entry.compile()
        tell(number, len(missing))


class _NotStoredError(Exception):
    """Machine code that a child compiled but could not store on disk."""


class Child:
    """A child process that compiles one entry at a time.

    Args:
        arguments: module to run as a program, and its arguments.
        environment: variables in addition to this process's.
    """

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                # -P keeps modules of the current directory out.
                [sys.executable, "-P", "-m", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                text=True,
                encoding="utf-8",
                errors="replace",
                env={**_environment(), **environment},
            )
        except BaseException:
            self._said.close()
            raise

    def compile(self, name: str) -> None:
        """Compile one kernel and wait until its machine code is on disk.

        Raises:
            BackendUnavailable: the child exited first.
            _NotStoredError: the machine code cannot be stored.
        """
        into = self._process.stdin
        assert into is not None
        with contextlib.suppress(OSError):  # the child has exited, so answer() below returns None
            into.write(f"{name}\n")
            into.flush()
        answer = self.answer()
        if answer == "":
            raise _NotStoredError(
                f"a child process cannot store machine code: {self._last_words()}"
            )
        if answer != name:
            raise self.failure(f"the kernel {name}")

    def answer(self) -> str | None:
        """Return the next answer of the child, or None if it has exited."""
        out = self._process.stdout
        assert out is not None
        for line in out:
            if line.startswith(_MARK):
                return line.removeprefix(_MARK).strip()
        return None

    def failure(self, work: str) -> BackendUnavailable:
        """Return the error of a child that did not answer as expected, and end the child."""
        try:
            code = self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        end = f"exited with {code}"
        if code < 0:
            end = f"was ended by signal {-code}"
            if -code == _SIGKILL:
                end += " (SIGKILL), perhaps because the system ran out of memory"
        return BackendUnavailable(f"the process that compiled {work} {end}: {self._last_words()}")

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = self._said.read().decode("utf-8", "replace").strip().splitlines()
        return "\n".join(lines[-_LAST_LINES:]) or "no output"

    def end(self) -> None:
        """Kill the process and wait for it."""
        self._process.kill()
        self._process.communicate()
        self._said.close()


@contextlib.contextmanager
def _children(count: int) -> Iterator[list[Child]]:
    """Start up to `count` children and kill them on exit.

    The list is empty if no Python interpreter can be started or no folder can be written.
    """
    if cache_path() is None:  # `cache_path` has logged a warning
        yield []
        return
    reason = ""
    if not sys.executable or getattr(sys, "frozen", False):
        reason = "no Python interpreter is known (sys.executable)"
    children: list[Child] = []
    try:
        while not reason and len(children) < count:
            try:
                children.append(Child([_MODULE]))
            except OSError as error:
                reason = f"a child process cannot be started: {error}"
        if not children:
            _LOG.warning("kernels are compiled in this process: %s", reason)
        yield children
    finally:
        for child in children:
            child.end()


def _environment() -> dict[str, str]:
    """Return this process's environment plus its import path and Numba settings, for a child."""
    package = str(Path(__file__).parents[2])
    # Python's imports ignore entries that are not strings, such as a Path.
    paths = [package, *(path for path in sys.path if isinstance(path, str) and path)]
    chosen = {
        "NUMBA_CACHE_DIR": numba_config.CACHE_DIR,
        "NUMBA_CPU_NAME": numba_config.CPU_NAME,
        "NUMBA_CPU_FEATURES": numba_config.CPU_FEATURES,
    }
    given = {name: str(value) for name, value in chosen.items() if value}
    return {**os.environ, **given, "PYTHONPATH": os.pathsep.join(paths)}


def compiled_by(children: Sequence[Child], names: Sequence[str]) -> Iterator[str]:
    """Yield names of kernels as children finish them, and raise the first error of a child.

    Without children, this yields nothing.
    """
    left: queue.SimpleQueue[str] = queue.SimpleQueue()
    done: queue.SimpleQueue[str | BaseException] = queue.SimpleQueue()
    for name in names:
        left.put(name)

    def work(child: Child) -> None:
        try:
            while True:
                name = left.get_nowait()
                child.compile(name)
                done.put(name)
        except queue.Empty:
            return
        except BaseException as error:
            done.put(error)

    for child in children:
        threading.Thread(target=work, args=(child,), name="kvboost-compile", daemon=True).start()
    for _ in names if children else ():
        result = done.get()
        if isinstance(result, BaseException):
            raise result
        yield result


class Answers:
    """A child's answers to its parent. All else that the process prints goes to stderr."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8", newline="\n")
        os.dup2(2, 1)
        self._out.write("\n")  # ends a line that was printed before

    def give(self, answer: str) -> None:
        """Send one line."""
        self._out.write(f"{_MARK}{answer}\n")
        self._out.flush()


def _serve(names: IO[str], answers: Answers) -> None:
    """Compile the kernels named on stdin, one per line, and answer with each name when it is done.

    An empty answer stands for a kernel that could not be stored on disk.
    """
    for line in names:
        entry = entry_named(line.strip())
        entry.compile()
        answers.give(entry.name if entry.is_stored else "")


if __name__ == "__main__":
    _serve(sys.stdin, Answers())
