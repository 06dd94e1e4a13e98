"""Test doubles of other platforms: macOS, Windows, and a Linux sandbox.

A double removes the modules, functions, signals and files that the other platform lacks. Install it
before the package is imported. Libraries that were imported before keep using this platform. The
doubles do not imitate another processor or compiler.
"""

from __future__ import annotations

import asyncio
import builtins
import errno
import fcntl
import io
import mmap
import os
import platform
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil

__all__ = ["DOUBLES", "install"]

_POSIX_ONLY = ("posix_", "sched_", "wait", "getuid", "geteuid", "getgid", "getegid", "fork", "nice")
_KEPT = frozenset({"waitpid", "waitstatus_to_exitcode"})  # `subprocess` needs them on this platform
_NOT_ON_WINDOWS = (
    *("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_SYNC", "O_DSYNC"),
    *("pread", "preadv", "pwrite", "pwritev", "fchmod", "fchown", "chown", "lchown", "killpg"),
    *("register_at_fork", "setpriority", "getpriority", "PRIO_PROCESS", "mkfifo", "memfd_create"),
)
_NOT_ON_A_MAC = ("memfd_create", "posix_fadvise", "posix_fallocate", "sched_getaffinity")
_WINDOWS_SIGNALS = ("SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM")
_NO_SHARE = "The process cannot access the file because it is being used by another process"


def install(name: str) -> None:
    """Make this process look like one of `DOUBLES`. This cannot be undone."""
    DOUBLES[name]()


def _sandbox() -> None:
    """Imitate a sandbox on Linux without /proc, /sys and many system calls."""
    _refuse_kernel_files()
    _remove(os, _named(os, _POSIX_ONLY[:-1]), _KEPT | {"getuid", "geteuid", "getgid", "getegid"})
    _remove(os, ("register_at_fork",))
    _remove(mmap, [name for name in dir(mmap) if name.startswith("MADV_")])
    _leave_signals((*_WINDOWS_SIGNALS, "SIGKILL"))


def _mac() -> None:
    """Imitate the system calls, modules and names of macOS."""
    _refuse_kernel_files()
    _name("darwin", "Darwin")
    _remove(os, _NOT_ON_A_MAC)
    _remove(mmap, [name for name in dir(mmap) if name in ("MAP_POPULATE", "MAP_LOCKED")])
    _remove(psutil.Process, ("cpu_affinity",))


def _windows() -> None:
    """Imitate the system calls, modules, signals and file system of Windows."""
    files = _WindowsFiles()
    _refuse_kernel_files()
    _name("win32", "Windows")
    for module in ("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "readline"):
        sys.modules[module] = None  # type: ignore[assignment]
    sys.modules["msvcrt"] = _msvcrt()
    _remove(os, _named(os, _POSIX_ONLY), _KEPT)
    _remove(os, _NOT_ON_WINDOWS)
    os.O_BINARY = 0  # type: ignore[attr-defined]
    _remove(mmap, [name for name in dir(mmap) if name.startswith(("MAP_", "MADV_", "PROT_"))])
    mmap.mmap = _Mapping  # type: ignore[misc]
    _leave_signals(_WINDOWS_SIGNALS)
    signal.SIGBREAK = signal.Signals(21)  # type: ignore[attr-defined]
    _remove(socket, ("SO_REUSEPORT",))
    socket.SO_EXCLUSIVEADDRUSE = socket.SO_KEEPALIVE  # type: ignore[attr-defined]
    asyncio.ProactorEventLoop = asyncio.SelectorEventLoop  # type: ignore[attr-defined]
    subprocess.Popen.kill = lambda self: self.send_signal(9)  # type: ignore[method-assign]
    process = psutil.Process
    process.num_handles = process.num_fds  # type: ignore[attr-defined]
    memory = process.memory_info
    process.memory_info = lambda self: SimpleNamespace(  # type: ignore[method-assign]
        **memory(self)._asdict(), peak_wset=memory(self).rss
    )
    files.install()


DOUBLES: dict[str, Callable[[], None]] = {
    "sandbox": _sandbox,
    "mac": _mac,
    "windows": _windows,
}


def _name(name: str, system: str) -> None:
    sys.platform = name
    platform.system = lambda: system


def _named(module: ModuleType, starts: Iterable[str]) -> list[str]:
    return [name for name in dir(module) if name.startswith(tuple(starts))]


def _remove(owner: Any, names: Iterable[str], kept: Iterable[str] = ()) -> None:
    for name in set(names) - set(kept):
        if hasattr(owner, name):
            delattr(owner, name)


def _leave_signals(names: Iterable[str]) -> None:
    """Remove all other signals, and refuse handlers for them."""
    left = {getattr(signal, name) for name in names}
    taken = {
        name for name in dir(signal) if isinstance(getattr(signal, name), signal.Signals)
    } - set(names)
    _remove(signal, taken)
    _remove(signal, _named(signal, ("pthread_", "setitimer", "getitimer", "alarm", "sigw")))
    handle = signal.signal

    def checked(number: int, handler: Any) -> Any:
        if number not in left and number != getattr(signal, "SIGBREAK", None):
            raise ValueError("invalid signal value")
        return handle(number, handler)

    signal.signal = checked  # type: ignore[assignment]


def _refuse_kernel_files() -> None:
    """Make /proc and /sys unreadable, except for psutil, which imitates calls of other systems."""
    own = __name__

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.listdir", "os.scandir"):
            return
        path = arguments[0]
        if not isinstance(path, str | os.PathLike):
            return
        text = os.fspath(path)
        if not (isinstance(text, str) and text.startswith(("/proc/", "/sys/"))):
            return
        frame = sys._getframe(1)
        while frame is not None:
            name = frame.f_globals.get("__name__", "")
            if name == own or name.partition(".")[0] == "psutil":
                return
            frame = frame.f_back
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), text)

    sys.addaudithook(hook)


def _msvcrt() -> ModuleType:
    """Return a module with the mandatory byte-range locks of Windows, which belong to a handle."""
    module = ModuleType("msvcrt")
    module.LK_UNLCK, module.LK_LOCK, module.LK_NBLCK = 0, 1, 2  # type: ignore[attr-defined]

    def locking(handle: int, mode: int, nbytes: int) -> None:
        assert (mode, nbytes) == (2, 1), "only mode 2 (LK_NBLCK) with 1 byte is emulated"
        at = os.lseek(handle, 0, os.SEEK_CUR)
        assert at < 1 << 31, "positions in the C library have 31 bits"
        # Another handle could not read a locked byte.
        assert at > 1 << 30 or os.fstat(handle).st_size <= at
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from None

    module.locking = locking  # type: ignore[attr-defined]
    return module


class _Mapping(mmap.mmap):
    """A memory mapping with the parameters of Windows: no flags and no protection bits."""

    def __new__(
        cls,
        fileno: int,
        length: int,
        tagname: str | None = None,
        access: int = mmap.ACCESS_DEFAULT,
        offset: int = 0,
    ) -> _Mapping:
        assert tagname is None
        return super().__new__(cls, fileno, length, access=access, offset=offset)

    def madvise(self, *_: Any) -> None:
        raise AttributeError("madvise")


class _WindowsFiles:
    """A file system with the restrictions of Windows.

    It does not delete or replace read-only files, or files that this process has open or mapped, and
    it does not open directories.
    """

    def __init__(self) -> None:
        self._unlink = os.unlink
        self._rename = os.rename
        self._replace = os.replace
        self._open = os.open

    def install(self) -> None:
        os.unlink = os.remove = self.unlink  # type: ignore[assignment]
        os.rename = self.rename  # type: ignore[assignment]
        os.replace = self.replace  # type: ignore[assignment]
        os.open = self.open  # type: ignore[assignment]

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._check(_full(path, dir_fd), written=True)
        self._unlink(path, dir_fd=dir_fd)

    def rename(self, source: Any, target: Any) -> None:
        self._check(source)
        if Path(source) != Path(target) and os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        self._rename(source, target)

    def replace(self, source: Any, target: Any) -> None:
        self._check(source)
        self._check(target, written=True)
        self._replace(source, target)

    def open(self, path: Any, flags: int, *more: Any, dir_fd: int | None = None) -> int:
        # These modules were imported before, so they open directories as on this platform.
        is_own = sys._getframe(1).f_globals.get("__name__") in ("shutil", "tempfile")
        if not is_own and os.path.isdir(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return self._open(path, flags, *more, dir_fd=dir_fd)

    def _check(self, path: Any, *, written: bool = False) -> None:
        """Raise PermissionError if the file is open or mapped, or, if `written`, read-only."""
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return
        if not stat.S_ISREG(found.st_mode):
            return
        if written and not found.st_mode & stat.S_IWUSR:
            raise PermissionError(errno.EACCES, "Access is denied", str(path))
        if (found.st_dev, found.st_ino) in _open_files() or os.path.realpath(path) in _mapped():
            raise PermissionError(errno.EACCES, _NO_SHARE, str(path))


def _full(path: Any, dir_fd: int | None) -> str:
    folder = "" if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
    return os.path.join(folder, os.fspath(path))


def _open_files() -> set[tuple[int, int]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            one = os.fstat(int(name))
        except OSError:  # the descriptor of `listdir` itself, which is closed by now
            continue
        found.add((one.st_dev, one.st_ino))
    return found


def _mapped() -> set[str]:
    with io.open("/proc/self/maps", encoding="utf-8", errors="replace") as file:  # noqa: UP020
        rows = [line.rstrip("\n").split(None, 5) for line in file]
    return {row[5] for row in rows if len(row) == 6}


assert builtins.open is io.open
