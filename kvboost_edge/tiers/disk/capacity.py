"""Capacity of the disk tier: a cap over all spaces in a cache directory, and a free-space reserve.

Before a space evicts its own blocks, segments of spaces without an owner are deleted, starting with
the least recently used space.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvboost_edge.errors import ConfigError
from kvboost_edge.tiers.disk.directory import describe, lock_directory, lock_with_retry
from kvboost_edge.tiers.disk.file_names import is_space, segment_ids, segment_path, sidecar_path
from kvboost_edge.tiers.disk.system_calls import Files

__all__ = ["LEAST_BYTES", "Room", "default_cap", "free_floor", "segment_sizes", "space_directories"]

LEAST_BYTES = 1 << 20
"""Minimum cap, in bytes."""
_DEFAULT_CAP = 16 << 30
_DEFAULT_SHARE = 5  # or a fifth of the free space, if that is less
_LOCK_WAIT_S = 0.5
_FLOOR_BYTES = 1 << 30
_FLOOR_SHARE = 20  # or a twentieth of the file system, if that is less


class _Other(NamedTuple):
    """Segment that belongs to another space.

    Attributes:
        used: serial number of the space's last opening. The smallest belongs to the least recently
            used space.
        directory: directory of the space.
        number: number of the segment.
        nbytes: size of the segment.
    """

    used: int
    directory: Path
    number: int
    nbytes: int


def space_directories(root: Path) -> list[Path]:
    """Return the directories of all spaces in a cache directory. May raise OSError."""
    return sorted(
        path
        for path in root.iterdir()
        if is_space(path.name) and path.is_dir() and not path.is_symlink()
    )


def free_floor(total: int) -> int:
    """Return how many bytes must stay free on a file system of `total` bytes."""
    return min(_FLOOR_BYTES, total // _FLOOR_SHARE)


def default_cap(root: Path, files: Files) -> int:
    """Return the default cap: 16 GiB or a fifth of the free space, whichever is less.

    Space that the tier already occupies counts as free. May raise OSError.
    """
    free, _ = files.space(root)
    taken = (
        sum(sum(segment_sizes(path, files).values()) for path in space_directories(root))
        if root.is_dir()
        else 0
    )
    return max(LEAST_BYTES, min(_DEFAULT_CAP, (free + taken) // _DEFAULT_SHARE))


def segment_sizes(directory: Path, files: Files) -> dict[int, int]:
    """Return the sizes of a space's segments, by segment number. May raise OSError.

    The result is empty if the directory does not exist or cannot be read.
    """
    try:
        sizes = files.sizes(directory)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return {}
    return {number: sizes[segment_path(directory, number).name] for number in segment_ids(sizes)}


class Room:
    """Disk space available to one space.

    Args:
        directory: directory of the space.
        files: system calls to use.
        max_bytes: cap over all spaces, in bytes. None means `default_cap`.

    Raises:
        ConfigError: the cap is below LEAST_BYTES.
    """

    def __init__(self, directory: Path, files: Files, max_bytes: int | None) -> None:
        self._directory = directory
        self._root = directory.parent
        self._files = files
        self._others: list[_Other] = []
        self._is_disk_full = False
        self.max_bytes = (
            default_cap(self._root, files) if max_bytes is None else _checked(max_bytes)
        )

    def limit(self, max_bytes: int) -> None:
        """Set a new cap, which applies from the next segment on.

        Raises:
            ConfigError: the cap is below LEAST_BYTES.
        """
        self.max_bytes = _checked(max_bytes)

    def allowed(self, own_bytes: int) -> int:
        """Return how many bytes this space may occupy in total.

        `own_bytes` is its current size. Inspects the disk and may raise OSError.
        """
        others = [path for path in space_directories(self._root) if path != self._directory]
        self._others = [segment for path in others for segment in self._segments(path)]
        free, total = self._files.space(self._root)
        theirs = sum(other.nbytes for other in self._others)
        of_disk = own_bytes + free - free_floor(total)
        self._is_disk_full = of_disk < self.max_bytes - theirs
        return min(self.max_bytes - theirs, of_disk)

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Hold the lock that serializes making room, and yield whether it was acquired in time.

        On file systems without locks, it always yields True.
        """
        # Without the lock, two processes could both use the room that one of them made.
        try:
            handle = lock_with_retry(self._root, self._files, _LOCK_WAIT_S)
        except OSError:
            yield True
            return
        try:
            yield handle is not None
        finally:
            if handle is not None:
                with contextlib.suppress(OSError):
                    self._files.close(handle)

    def take_from_others(self) -> bool:
        """Delete a segment from the least recently used space without an owner.

        Returns:
            False if no such segment could be deleted.
        """
        for other in sorted(self._others):
            with contextlib.suppress(OSError):
                handle = lock_directory(other.directory, self._files)
                if handle is None:
                    continue
                try:
                    self._files.unlink(segment_path(other.directory, other.number))
                    self._files.unlink(sidecar_path(other.directory, other.number))
                finally:
                    self._files.close(handle)
                return True
        return False

    def why_none(self) -> str:
        """Return one line that says why the last call of `allowed` left no room."""
        free, total = self._files.space(self._root)
        if self._is_disk_full:
            return (
                f"the file system of {self._root} has {free / 1e6:,.1f} MB free, of which "
                f"{free_floor(total) / 1e6:,.1f} MB must stay free"
            )
        theirs = sum(other.nbytes for other in self._others)
        return f"other open models use {theirs / 1e6:,.0f} MB of max_disk_bytes={self.max_bytes}"

    def _segments(self, path: Path) -> list[_Other]:
        sizes = segment_sizes(path, self._files)
        used = describe(path, self._files)["used"] if sizes else 0
        return [_Other(used, path, number, nbytes) for number, nbytes in sizes.items()]


def _checked(max_bytes: int) -> int:
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < LEAST_BYTES:
        raise ConfigError(
            f"max_disk_bytes={max_bytes!r} must be an integer of at least {LEAST_BYTES}"
        )
    return max_bytes
