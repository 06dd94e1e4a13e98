"""Every system call of the disk tier, in one small object: what is missing on a platform is told
here and nowhere else, and tests put failing ones in its place. All methods raise OSError.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import operator
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

__all__ = ["CHANGE", "NEW", "READ", "WRITE", "Files", "passes", "transferred"]

READ = os.O_RDONLY
CHANGE = os.O_RDWR
WRITE = CHANGE | os.O_CREAT
NEW = WRITE | os.O_EXCL
# No link is followed to a file that somebody else chose, a pipe in a file's place is not waited
# for, and nothing is inherited by programs that are started.
_NAMES = ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY")
_ALWAYS = functools.reduce(operator.or_, (getattr(os, name, 0) for name in _NAMES))
_NOT_HERE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_PASSING = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT}
)


class Files:
    """Calls of the operating system. A handle is a descriptor from `open`; positions are never
    shared state, except on Windows, where nobody else uses the handle meanwhile.
    """

    def open(self, path: Path, flags: int) -> int:
        """Open a file to READ or to CHANGE it; or make it, for this user alone: WRITE where it is
        not there, NEW only where nothing of that name is (else FileExistsError).
        """
        return os.open(path, flags | _ALWAYS, 0o600)

    def close(self, handle: int) -> None:
        os.close(handle)

    def make_directory(self, path: Path) -> None:
        """A directory for this user alone, and those above it, unless it is there. FileExistsError:
        a file is.
        """
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def make_private(self, path: Path) -> None:
        """Nobody else may look into a directory."""
        os.chmod(path, 0o700)

    def read(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill the buffers in turn from `offset`; how many bytes came: fewer at the end of the
        file, or just so.
        """
        if sys.platform != "win32":
            return os.preadv(handle, buffers, offset)
        os.lseek(handle, offset, os.SEEK_SET)
        data = os.read(handle, buffers[0].nbytes)
        buffers[0][: len(data)] = data
        return len(data)

    def write(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write the buffers one behind the other at `offset`; how many bytes went, perhaps
        fewer.
        """
        if sys.platform != "win32":
            return os.pwritev(handle, buffers, offset)
        os.lseek(handle, offset, os.SEEK_SET)
        return os.write(handle, buffers[0])

    def allocate(self, handle: int, nbytes: int) -> None:
        """Reserve room on the disk, as zeros, where the system can."""
        if sys.platform == "linux":
            try:
                os.posix_fallocate(handle, 0, nbytes)
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise

    def truncate(self, handle: int, nbytes: int) -> None:
        os.ftruncate(handle, nbytes)

    def sync(self, handle: int) -> None:
        """Return when the file's bytes are on the device."""
        os.fsync(handle)

    def sync_directory(self, path: Path) -> None:
        """Return when the names in a directory are on the device, where the system can."""
        if sys.platform == "win32":
            return
        handle = os.open(path, os.O_RDONLY | _ALWAYS)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def forget(self, handle: int) -> None:
        """The page cache need not keep this file."""
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)

    def size(self, handle: int) -> int:
        return os.fstat(handle).st_size

    def is_unlinked(self, handle: int) -> bool:
        """Whether the open file has no name any more."""
        return os.fstat(handle).st_nlink == 0

    def is_same(self, handle: int, path: Path) -> bool:
        """Whether the open file is the one that `path` names by now."""
        try:
            return os.path.samestat(os.fstat(handle), os.stat(path, follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def replace(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def sizes(self, directory: Path) -> dict[str, int]:
        """Names and lengths of the regular files in a directory."""
        found = {}
        with os.scandir(directory) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # gone since
                    if entry.is_file(follow_symlinks=False):
                        found[entry.name] = entry.stat(follow_symlinks=False).st_size
        return found

    def space(self, path: Path) -> tuple[int, int]:
        """Bytes free to this user and bytes in all, on the file system that `path` is or would be
        on.
        """
        while not path.exists() and path != path.parent:
            path = path.parent
        usage = shutil.disk_usage(path)
        return usage.free, usage.total

    def lock(self, handle: int) -> bool:
        """Lock an open file until it is closed or its process ends, however that happens; False:
        somebody else has.
        """
        try:
            if sys.platform == "win32":
                msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
            else:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return True


def passes(error: OSError) -> bool:
    """Whether the error says nothing of the file, and may be gone at the next attempt: a limit of
    the process or of the system, an interrupted call.
    """
    return error.errno in _PASSING


def transferred(
    call: Callable[[int, Sequence[memoryview], int], int],
    handle: int,
    buffers: Sequence[memoryview],
    offset: int,
) -> int:
    """Repeat `read` or `write` until all buffers are through, or no byte moves; how many bytes
    did.
    """
    wanted = sum(buffer.nbytes for buffer in buffers)
    done = 0
    while done < wanted:
        moved = call(handle, _after(buffers, done) if done else buffers, offset + done)
        if moved <= 0:
            break
        done += moved
    return done


def _after(buffers: Sequence[memoryview], skipped: int) -> list[memoryview]:
    rest = []
    for buffer in buffers:
        if skipped < buffer.nbytes:
            rest.append(buffer[skipped:])
        skipped = max(0, skipped - buffer.nbytes)
    return rest
