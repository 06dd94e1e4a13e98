"""Directory of a space: creation, checks and locking.

The process that holds the lock owns the directory and may write. All other processes only read, and
try to become the owner. The lock is released when its process ends, even after a crash. A forked
child closes its copy of the lock, so the lock is released when the parent exits.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvboost_edge.errors import ConfigError
from kvboost_edge.tiers.disk.file_names import DESCRIPTION, LOCK, is_space
from kvboost_edge.tiers.disk.system_calls import CHANGE, READ, WRITE, Files, read_file, write_whole

__all__ = [
    "SpaceDirectory",
    "check_owner",
    "describe",
    "is_locked",
    "lock_directory",
    "lock_with_retry",
    "open_directory",
]

_LOG = logging.getLogger(__name__)
_LOCK_TRIES = 10
_LOCK_RETRY_S = 0.005
_LOCK_WAIT_S = _LOCK_TRIES * _LOCK_RETRY_S
_MOST_USED = 1 << 62
_KNOB = "choose another disk_cache_dir, or 'off'"


class SpaceDirectory:
    """Directory of a space, which this process only reads until `take` makes it the owner.

    Args:
        path: the directory.
        description: contents of space.json. None keeps the existing contents.
        files: system calls to use.

    Attributes:
        path: the directory.
        why_not: one line that says why this process does not write. "" if it owns the directory.
    """

    def __init__(self, path: Path, description: Mapping[str, Any] | None, files: Files) -> None:
        self.path = path
        self.why_not = f"{path} is only read"
        self._description = description
        self._files = files
        # The open lock file, locked if this process owns the directory.
        self._lock: int | None = None

    @property
    def owned(self) -> bool:
        return self.why_not == ""

    def take(self, seconds: float = 0.0) -> bool:
        """Become the owner unless another process is, and return whether this process is it now.

        Args:
            seconds: how long to retry while the directory is locked.
        """
        lock = None
        why_not = ""
        try:
            lock = lock_with_retry(self.path, self._files, seconds)
            if lock is None:
                why_not = (
                    f"{self.path} is owned by another process; this process reads what that one "
                    "stores, stores nothing, and takes over when that one ends"
                )
            else:
                self._files.make_private(self.path)
                _describe(self.path, self._description, self._files)
        except OSError as error:
            why_not = f"{self.path} cannot be written ({error}); it is only read"
        if why_not and lock is not None:
            self._files.close(lock)
            lock = None
        if lock is None and self._lock is None:
            # Only to notice that the directory was replaced.
            with contextlib.suppress(OSError):
                lock = self._files.open(self.path / LOCK, READ)
        if lock is not None:
            self.close()
            self._lock = lock
        self.why_not = why_not
        return self.owned

    def give_up(self, why_not: str) -> None:
        """Release the lock if this process holds it, because it cannot be the owner for now."""
        self.close()
        self.why_not = why_not

    @property
    def generation(self) -> int:
        """Serial number that changes when the directory gets an owner. May raise OSError."""
        return int(describe(self.path, self._files)["used"])

    @property
    def is_lost(self) -> bool:
        """True if the directory that was opened no longer exists at `path`.

        The directory was deleted, moved or replaced, and another process may own its replacement.
        False if this cannot be determined.
        """
        try:
            return self._lock is not None and not self._files.is_same(self._lock, self.path / LOCK)
        except OSError:
            return False

    def close(self) -> None:
        """Release the lock. A second call does nothing."""
        lock = self._lock
        self._lock = None
        if lock is not None:
            with contextlib.suppress(OSError):
                self._files.close(lock)


def open_directory(
    root: Path, space: bytes, description: Mapping[str, Any] | None, files: Files
) -> SpaceDirectory:
    """Open the directory of a space in `root`, creating it if necessary.

    Args:
        root: the cache directory.
        space: 32-byte id of the space.
        description: contents of space.json. None keeps the existing contents.
        files: system calls to use.

    Raises:
        ConfigError: the directory can be neither written nor read, or is not safe to use.
    """
    path = root / space.hex()
    try:
        _make(root, files)
        _make(path, files)
        if path.is_symlink():
            raise ConfigError(
                f"{path} is a symbolic link, which the disk tier does not follow; remove it"
            )
        check_owner(path)
    except OSError as error:
        raise ConfigError(
            f"disk_cache_dir {str(root)!r} cannot be used: {error}; {_KNOB}"
        ) from error
    directory = SpaceDirectory(path, description, files)
    directory.take(_LOCK_WAIT_S)
    return directory


def lock_directory(path: Path, files: Files) -> int | None:
    """Lock a space's directory until the returned handle is closed.

    Returns None if another process owns the directory.

    May raise OSError.
    """
    for _ in range(_LOCK_TRIES):
        handle = files.open(path / LOCK, WRITE)
        try:
            if not files.lock(handle):
                files.close(handle)
                return None
            if files.is_same(handle, path / LOCK):
                return handle
        except BaseException:
            files.close(handle)
            raise
        files.close(handle)  # the last owner has removed the directory, so try again
    raise OSError(
        f"{path / LOCK} was replaced {_LOCK_TRIES} times while this process tried to lock it"
    )


def is_locked(path: Path, files: Files) -> bool:
    """Return whether a process owns a space's directory. May raise OSError."""
    try:
        handle = files.open(path / LOCK, CHANGE)
    except FileNotFoundError:
        return False
    try:
        return not files.lock(handle)
    finally:
        files.close(handle)


def lock_with_retry(path: Path, files: Files, seconds: float) -> int | None:
    """Lock a space's directory, retrying for `seconds` if it is locked. May raise OSError.

    Retrying helps because processes that inspect the directory or make room hold the lock briefly.
    """
    handle = lock_directory(path, files)
    for _ in range(round(seconds / _LOCK_RETRY_S)):
        if handle is not None:
            break
        time.sleep(_LOCK_RETRY_S)
        handle = lock_directory(path, files)
    return handle


def describe(path: Path, files: Files) -> dict[str, Any]:
    """Return the contents of a directory's space.json.

    The value of `used` is 0 if it is missing or invalid.
    """
    try:
        found = json.loads(read_file(files, path / DESCRIPTION) or b"")
    except (ValueError, RecursionError):
        found = None
    described = dict(found) if isinstance(found, dict) else {}
    used = described.get("used")
    is_number = isinstance(used, int) and not isinstance(used, bool) and 0 <= used < _MOST_USED
    return {**described, "used": used if is_number else 0}


def _describe(path: Path, description: Mapping[str, Any] | None, files: Files) -> None:
    try:
        used = max(
            describe(other, files)["used"]
            for other in path.parent.iterdir()
            if is_space(other.name)
        )
        before = describe(path, files) if description is None else description
        text = json.dumps({**before, "used": used + 1}, indent=1, ensure_ascii=False)
        write_whole(files, path / DESCRIPTION, text.encode(errors="replace"), durable=False)
    except OSError as error:
        _LOG.warning("%s cannot be written: %s", path / DESCRIPTION, error)


def _make(path: Path, files: Files) -> None:
    try:
        files.make_directory(path)
    except FileExistsError as error:
        raise ConfigError(
            f"disk_cache_dir: {str(path)!r} is a file, not a directory; {_KNOB}"
        ) from error


def check_owner(path: Path) -> None:
    """Check that `path` is a directory that belongs to this user."""
    # Anyone who can write to this directory controls the KV that the model reads.
    found = path.stat()
    if hasattr(os, "getuid") and found.st_uid != os.getuid():
        raise ConfigError(
            f"disk_cache_dir: {str(path)!r} belongs to user {found.st_uid}, not to the current "
            f"user; {_KNOB}"
        )
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"disk_cache_dir: {str(path)!r} is not a directory; {_KNOB}")
