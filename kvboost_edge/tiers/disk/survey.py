"""Survey of a cache directory for administration: list, verify and delete its spaces.

It never takes ownership of a space, and never deletes files that another process has open.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvboost_edge.host.file_memo import cache_directory
from kvboost_edge.tiers.disk.capacity import space_directories
from kvboost_edge.tiers.disk.directory import describe, is_locked, lock_directory
from kvboost_edge.tiers.disk.file_names import LOCK, is_own, segment_ids, segment_path, sidecar_path
from kvboost_edge.tiers.disk.sidecar import Scan, decode_sidecar
from kvboost_edge.tiers.disk.system_calls import READ, Files, read_file

__all__ = [
    "FoundSpace",
    "SurveyResult",
    "default_directory",
    "delete_space",
    "find_spaces",
    "verify_space",
]


def default_directory() -> Path:
    """Return the directory that the disk tier uses if disk_cache_dir is not set."""
    return cache_directory() / "blocks"


@dataclasses.dataclass(frozen=True, slots=True)
class FoundSpace:
    """Directory of a space.

    Attributes:
        path: the directory.
        description: contents of space.json, without `used`.
        used: serial number of the last opening. The largest is the most recent.
        nbytes: size of all segments, in bytes.
        segments: number of segments.
        changed: time of the last write, in seconds since the epoch.
        in_use: whether some process currently owns the space.
    """

    path: Path
    description: dict[str, Any]
    used: int
    nbytes: int
    segments: int
    changed: float
    in_use: bool


@dataclasses.dataclass(frozen=True, slots=True)
class SurveyResult:
    """Result of verifying the records of a space.

    Attributes:
        sound: number of intact records.
        damaged: number of records that are listed or found but not intact.
    """

    sound: int
    damaged: int


def find_spaces(root: Path, files: Files) -> list[FoundSpace]:
    """Return the spaces in a cache directory, least recently used first. May raise OSError.

    Directories that contain no files of the tier or cannot be read are skipped.
    """
    found = [_look(path, files) for path in space_directories(root)] if root.is_dir() else []
    return sorted(
        (space for space in found if space is not None), key=lambda space: (space.used, space.path)
    )


def verify_space(space: FoundSpace, files: Files, progress: Callable[[int], None]) -> SurveyResult:
    """Read all records of a space and verify their checksums. May raise OSError.

    Files are not modified. Segments that the owner deletes in the meantime are skipped.

    Args:
        space: the space.
        files: system calls to use.
        progress: function that is called with the size of each finished segment.
    """
    sound = damaged = 0
    sizes = files.sizes(space.path)
    for number in segment_ids(sizes):
        size = sizes[segment_path(space.path, number).name]
        with contextlib.suppress(FileNotFoundError):
            handle = files.open(segment_path(space.path, number), READ)
            try:
                scan = Scan(files, handle, size, bytes.fromhex(space.path.name))
                intact = sum(map(scan.payload_holds, scan.records))
            finally:
                files.close(handle)
            data = read_file(files, sidecar_path(space.path, number)) or b""
            known = decode_sidecar(data, bytes.fromhex(space.path.name), number, 1 << 62) or []
            sound += intact
            damaged += max(len(known), len(scan.records)) - intact
        progress(size)
    return SurveyResult(sound, damaged)


def delete_space(space: FoundSpace, files: Files) -> bool:
    """Delete a space. Return False if another process owns it. May raise OSError.

    The directory is kept if it contains other files.
    """
    handle = lock_directory(space.path, files)
    if handle is None:
        return False
    try:
        for name in filter(is_own, files.sizes(space.path)):
            if name != LOCK:
                files.unlink(space.path / name)
    except BaseException:
        files.close(handle)
        raise
    # Delete the lock last, because a process that creates a new lock then owns the directory.
    files.unlink_lock(handle, space.path / LOCK)
    with contextlib.suppress(OSError):
        space.path.rmdir()
    return True


def _look(path: Path, files: Files) -> FoundSpace | None:
    try:
        sizes = {name: size for name, size in files.sizes(path).items() if is_own(name)}
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    if not sizes:
        return None
    description = describe(path, files)
    used = description.pop("used")
    numbers = segment_ids(sizes)
    nbytes = sum(sizes[segment_path(path, number).name] for number in numbers)
    changed = max(_changed(path / name) for name in sizes)
    return FoundSpace(path, description, used, nbytes, len(numbers), changed, _in_use(path, files))


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _in_use(path: Path, files: Files) -> bool:
    try:
        return is_locked(path, files)
    except OSError:
        return False
