"""System calls of the disk tier, gathered in one class, and the functions on whole files.

Platform differences are handled only here, and tests replace the class to make calls fail. All its
methods may raise OSError.
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

from kvboost_edge.host.atomic_files import is_open, replace_file
from kvboost_edge.host.file_lock import try_lock
from kvboost_edge.tiers.disk.file_names import UNFINISHED

__all__ = [
    "CHANGE",
    "NEW",
    "READ",
    "WRITE",
    "Files",
    "is_full",
    "passes",
    "read_file",
    "transferred",
    "write_whole",
]

READ = os.O_RDONLY
CHANGE = os.O_RDWR
WRITE = CHANGE | os.O_CREAT
NEW = WRITE | os.O_EXCL
# Do not follow links that another user may have created, do not block on a pipe in place of a file,
# and do not pass handles to child processes.
_NAMES = ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY")
_ALWAYS = functools.reduce(operator.or_, (getattr(os, name, 0) for name in _NAMES))
_NOT_HERE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_PASSING = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT}
)
# Maximum size of a file of the tier that is read as a whole, enough for a manifest of 30 million
# blocks.
_LONGEST = 256 << 20


class Files:
    """System calls for files.

    A handle is a file descriptor from `open`. Reads and writes pass explicit offsets and do not use
    the file position. Windows has no such calls, so only one thread at a time may use a handle
    there.
    """

    def open(self, path: Path, flags: int) -> int:
        """Open a file. New files are accessible only to this user.

        READ and CHANGE require an existing file. WRITE creates a missing file. NEW raises
        FileExistsError if the file exists.
        """
        return os.open(path, flags | _ALWAYS, 0o600)

    def close(self, handle: int) -> None:
        os.close(handle)

    def make_directory(self, path: Path) -> None:
        """Create a directory accessible only to this user, and its parents, unless it exists.

        Raises:
            FileExistsError: the path exists but is not a directory.
        """
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def make_private(self, path: Path) -> None:
        """Revoke other users' access to a directory."""
        os.chmod(path, 0o700)

    def read(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read from `offset` into consecutive buffers, and return the number of bytes read.

        Fewer bytes than requested may be read, even before the end of the file.
        """
        if sys.platform != "win32":
            return os.preadv(handle, buffers, offset)
        os.lseek(handle, offset, os.SEEK_SET)
        data = os.read(handle, buffers[0].nbytes)
        buffers[0][: len(data)] = data
        return len(data)

    def write(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write consecutive buffers at `offset`, and return the number of bytes written.

        Fewer bytes than requested may be written.
        """
        if sys.platform != "win32":
            return os.pwritev(handle, buffers, offset)
        os.lseek(handle, offset, os.SEEK_SET)
        return os.write(handle, buffers[0])

    def allocate(self, handle: int, nbytes: int) -> None:
        """Reserve zeroed disk space for a file, if the system supports it."""
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(handle, 0, nbytes)
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise

    def truncate(self, handle: int, nbytes: int) -> None:
        os.ftruncate(handle, nbytes)

    def sync(self, handle: int) -> None:
        """Flush the contents of a file to the device."""
        os.fsync(handle)

    def sync_directory(self, path: Path) -> None:
        """Flush a directory's entries to the device, if the system supports it."""
        if sys.platform == "win32":
            return
        handle = os.open(path, os.O_RDONLY | _ALWAYS)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def forget(self, handle: int) -> None:
        """Allow the operating system to drop a file from its page cache."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)

    def size(self, handle: int) -> int:
        return os.fstat(handle).st_size

    def is_same(self, handle: int, path: Path) -> bool:
        """Return whether `path` refers to the open file `handle`."""
        try:
            return os.path.samestat(os.fstat(handle), os.stat(path, follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def replace(self, source: Path, target: Path) -> None:
        replace_file(source, target)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def unlink_lock(self, handle: int, path: Path) -> None:
        """Delete a file that this process has opened and locked, and close it.

        On Windows, the file stays if another process has it open.
        """
        if sys.platform == "win32":
            # An open file cannot be deleted. A process that opens it after the close keeps it.
            self.close(handle)
            with contextlib.suppress(PermissionError):
                self.unlink(path)
            return
        try:
            self.unlink(path)
        finally:
            self.close(handle)

    def is_held(self, path: Path) -> bool:
        """Return whether a process has locked a file, or on Windows, whether it has it open."""
        if sys.platform == "win32":
            return is_open(path)
        handle = self.open(path, READ)
        try:
            return self._is_locked(handle)
        finally:
            self.close(handle)

    def unlink_unheld(self, path: Path) -> bool:
        """Delete a file unless it is held, see `is_held`. Return False if it is.

        Where files cannot be locked, the file is deleted.
        """
        if sys.platform == "win32":
            try:
                self.unlink(path)
            except PermissionError:
                return False
            return True
        handle = self.open(path, READ)
        try:
            if self._is_locked(handle):
                return False
            self.unlink(path)
        finally:
            self.close(handle)
        return True

    def _is_locked(self, handle: int) -> bool:
        """Return whether a file is locked. False if files cannot be locked."""
        try:
            return not self.lock(handle)
        except OSError:
            return False

    def sizes(self, directory: Path) -> dict[str, int]:
        """Return the names and sizes of the regular files in a directory."""
        found = {}
        with os.scandir(directory) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # the file was deleted in the meantime
                    if entry.is_file(follow_symlinks=False):
                        found[entry.name] = entry.stat(follow_symlinks=False).st_size
        return found

    def space(self, path: Path) -> tuple[int, int]:
        """Return the free space for this user and the total size of a file system, in bytes.

        The file system is that of `path`, or of its nearest existing parent.
        """
        while not path.exists() and path != path.parent:
            path = path.parent
        usage = shutil.disk_usage(path)
        return usage.free, usage.total

    def lock(self, handle: int) -> bool:
        """Lock an open file until it is closed. Return False if it is already locked."""
        return try_lock(handle)


def is_full(error: OSError) -> bool:
    """Return whether an operation failed because the device or the user's quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def passes(error: OSError) -> bool:
    """Return whether an error is transient and unrelated to the file.

    Examples are an exhausted limit of the process or system, and an interrupted call.
    """
    return error.errno in _PASSING


def transferred(
    call: Callable[[int, Sequence[memoryview], int], int],
    handle: int,
    buffers: Sequence[memoryview],
    offset: int,
) -> int:
    """Repeat a read or write until all buffers are done or no more bytes are transferred.

    Returns:
        the number of bytes transferred.
    """
    wanted = sum(buffer.nbytes for buffer in buffers)
    done = 0
    while done < wanted:
        moved = call(handle, _after(buffers, done) if done else buffers, offset + done)
        if moved <= 0:
            break
        done += moved
    return done


def read_file(
    files: Files, path: Path, most: int = _LONGEST, *, cuts: bool = False
) -> bytes | None:
    """Return the contents of a file, or None.

    None means that the file does not exist, cannot be read, or has more than `most` bytes.

    Args:
        files: system calls to use.
        path: path of the file.
        most: number of bytes to read at most.
        cuts: return the first `most` bytes of a larger file instead of None.

    Raises:
        OSError: a transient failure, after which a retry may succeed.
    """
    handle = None
    try:
        handle = files.open(path, READ)
        size = files.size(handle)
        if size > most and not cuts:
            return None
        data = bytearray(min(size, most))
        return (
            bytes(data[: transferred(files.read, handle, [memoryview(data)], 0)]) if data else b""
        )
    except OSError as error:
        if passes(error):
            raise
        return None
    finally:
        if handle is not None:
            files.close(handle)


def write_whole(
    files: Files, path: Path, data: bytes, *, durable: bool = True, mark: str = ""
) -> None:
    """Write a file atomically.

    Args:
        files: system calls to use.
        path: path of the file, which is replaced if it exists.
        data: contents to write.
        durable: sync the contents to the device before the file is renamed to `path`.
        mark: part of the temporary file's name, which several writers of `path` need.

    Raises:
        OSError: the file could not be written.
    """
    new = path.with_name(path.name + mark + UNFINISHED)
    # Never write into an existing file, because it might be a link to another file.
    files.unlink(new)
    handle = files.open(new, NEW)
    try:
        try:
            if transferred(files.write, handle, [memoryview(data)], 0) != len(data):
                raise OSError(f"only a part of {new} could be written")
            if durable:
                files.sync(handle)
        finally:
            files.close(handle)
        files.replace(new, path)
    except OSError:
        with contextlib.suppress(OSError):
            files.unlink(new)  # do not waste space if the disk is full
        raise


def _after(buffers: Sequence[memoryview], skipped: int) -> list[memoryview]:
    rest = []
    for buffer in buffers:
        if skipped < buffer.nbytes:
            rest.append(buffer[skipped:])
        skipped = max(0, skipped - buffer.nbytes)
    return rest
