"""Cached facts about large files, such as digests, which save reading a file again.

The cache directory contains one small JSON file per weight file. It holds the facts, and the weight
file's path, size, times and inode. If these differ, the weight file is read again. Without a usable
cache directory, nothing is cached and no error is raised.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from kvboost_edge.errors import ConfigError
from kvboost_edge.host.atomic_files import replace_file

__all__ = [
    "NO_CACHE",
    "FileStamp",
    "cache_directory",
    "home_directory",
    "make_private",
    "recall",
    "remember",
]

NO_CACHE = Path(os.devnull)
"""A cache directory that disables the cache."""


@dataclasses.dataclass(frozen=True, slots=True)
class FileStamp:
    """Metadata that changes when the content of a file changes."""

    path: str
    size: int
    modified_ns: int
    # Ctime, because programs can set mtime, for example when they copy a file with its times.
    changed_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileStamp:
        real = path.resolve()
        return cls._with(real, real.stat())

    @classmethod
    def of_open(cls, file: IO[bytes], path: Path) -> FileStamp:
        """Return the stamp of an open file, even if another file has replaced it at `path`."""
        return cls._with(path.resolve(), os.fstat(file.fileno()))

    @classmethod
    def _with(cls, path: Path, stat: os.stat_result) -> FileStamp:
        return cls(str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


def home_directory() -> Path:
    """Return the user's home directory, or the root directory for a user without one."""
    # A container may run as a user that has neither HOME nor an entry in the password database.
    # Container runtimes set HOME to the root directory for such users.
    try:
        return Path.home()
    except RuntimeError:
        return Path(os.sep)


def cache_directory() -> Path:
    """Return the directory in KVBOOST_EDGE_CACHE, or the platform's cache directory.

    The directory need not exist or be writable.

    Raises:
        ConfigError: KVBOOST_EDGE_CACHE begins with `~`, but that home directory is not known.
    """
    named = os.environ.get("KVBOOST_EDGE_CACHE")
    if named:
        try:
            return Path(named).expanduser()
        except RuntimeError as error:
            raise ConfigError(
                f"KVBOOST_EDGE_CACHE={named!r} begins with a home directory that is not known; "
                "set it to an absolute path"
            ) from error
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
        return (
            (Path(base) if base else home_directory() / "AppData" / "Local")
            / "kvboost-edge"
            / "cache"
        )
    if sys.platform == "darwin":
        return home_directory() / "Library" / "Caches" / "kvboost-edge"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else home_directory() / ".cache") / "kvboost-edge"


def recall(stamp: FileStamp, cache_dir: Path | None = None) -> dict[str, Any]:
    """Return the cached facts about the file with exactly this stamp, possibly none."""
    directory = _directory(cache_dir)
    if not _trusted(directory):
        return {}
    try:
        entry = json.loads(_entry_path(directory, stamp).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(entry, dict) or entry.get("stamp") != dataclasses.asdict(stamp):
        return {}
    facts = entry.get("facts")
    return facts if isinstance(facts, dict) else {}


def remember(stamp: FileStamp, facts: dict[str, Any], cache_dir: Path | None = None) -> None:
    """Add facts about a file, atomically and readable only by this user."""
    if cache_dir == NO_CACHE:
        return
    directory = _directory(cache_dir)
    entry = {"stamp": dataclasses.asdict(stamp), "facts": {**recall(stamp, cache_dir), **facts}}
    # Without the cache, on a read-only or full disk, only the next start takes longer.
    with contextlib.suppress(OSError):
        if make_private(directory):
            _write_atomically(_entry_path(directory, stamp), json.dumps(entry))


def make_private(directory: Path) -> bool:
    """Create a directory for this user, and return whether only this user can have written to it.

    Raises OSError.
    """
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    return _trusted(directory)


def _directory(cache_dir: Path | None) -> Path:
    return (cache_dir if cache_dir is not None else cache_directory()) / "files"


def _entry_path(directory: Path, stamp: FileStamp) -> Path:
    return (
        directory
        / f"{hashlib.sha256(stamp.path.encode(errors='surrogateescape')).hexdigest()[:32]}.json"
    )


def _trusted(directory: Path) -> bool:
    """Return whether only this user can have written to the directory."""
    # A forged digest would make two models share KV.
    try:
        stat = directory.stat()
    except OSError:
        return False
    return not hasattr(os, "getuid") or (stat.st_uid == os.getuid() and not stat.st_mode & 0o022)


def _write_atomically(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        replace_file(Path(name), path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
