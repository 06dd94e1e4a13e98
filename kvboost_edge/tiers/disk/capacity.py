"""How much the tier may take: a cap over all spaces of the cache directory, and a floor of room
that stays free.

Segments of spaces that nobody owns, those used longest ago first, go before anything of one's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvboost_edge.errors import ConfigError
from kvboost_edge.tiers.disk.directory import describe, lock_directory, lock_soon
from kvboost_edge.tiers.disk.file_names import is_space, segment_ids, segment_path, sidecar_path
from kvboost_edge.tiers.disk.files import Files

__all__ = ["LEAST_BYTES", "Room", "default_cap", "free_floor", "segment_sizes", "space_directories"]

LEAST_BYTES = 1 << 20
"""The smallest cap."""
_DEFAULT_CAP = 16 << 30
_DEFAULT_SHARE = 5  # a fifth of what is free
_TURN_S = 0.5
_FLOOR_BYTES = 1 << 30
_FLOOR_SHARE = 20  # a twentieth of the file system, where that is less


class _Other(NamedTuple):
    """A segment of another space. `used`: when the space was last opened, as a number that
    grows.
    """

    used: int
    directory: Path
    number: int
    nbytes: int


def space_directories(root: Path) -> list[Path]:
    """The directories of all spaces below a cache directory. Raises OSError."""
    return sorted(
        path
        for path in root.iterdir()
        if is_space(path.name) and path.is_dir() and not path.is_symlink()
    )


def free_floor(total: int) -> int:
    """Bytes to be left free on a file system of so many."""
    return min(_FLOOR_BYTES, total // _FLOOR_SHARE)


def default_cap(root: Path, files: Files) -> int:
    """The smaller of 16 GiB and a fifth of what is free, counting as free what the tier takes.
    Raises OSError.
    """
    free, _ = files.space(root)
    taken = (
        sum(sum(segment_sizes(path, files).values()) for path in space_directories(root))
        if root.is_dir()
        else 0
    )
    return max(LEAST_BYTES, min(_DEFAULT_CAP, (free + taken) // _DEFAULT_SHARE))


def segment_sizes(directory: Path, files: Files) -> dict[int, int]:
    """Bytes of a space's segments by their numbers; none where this user may not look, or it is
    gone by now. Raises OSError.
    """
    try:
        sizes = files.sizes(directory)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return {}
    return {number: sizes[segment_path(directory, number).name] for number in segment_ids(sizes)}


class Room:
    """What one space may take. Raises ConfigError for a cap below LEAST_BYTES."""

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
        """Another cap, from the next segment on. Raises ConfigError."""
        self.max_bytes = _checked(max_bytes)

    def allowed(self, own_bytes: int) -> int:
        """The bytes this space may take in all, where it takes `own_bytes` now. Looks at the disk;
        raises OSError.
        """
        others = [path for path in space_directories(self._root) if path != self._directory]
        self._others = [segment for path in others for segment in self._segments(path)]
        free, total = self._files.space(self._root)
        theirs = sum(other.nbytes for other in self._others)
        of_disk = own_bytes + free - free_floor(total)
        self._is_disk_full = of_disk < self.max_bytes - theirs
        return min(self.max_bytes - theirs, of_disk)

    @contextlib.contextmanager
    def turn(self) -> Iterator[bool]:
        """One process at a time makes room and takes it, or two would take the same: whether it is
        our turn, which is waited for shortly. Where there can be no lock, everybody goes on
        without.
        """
        try:
            handle = lock_soon(self._root, self._files, _TURN_S)
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
        """Delete the least recently used segment of a space that nobody owns; whether there was
        one.
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
        """One line on why there was no room when `allowed` was asked last."""
        free, total = self._files.space(self._root)
        if self._is_disk_full:
            return (
                f"{free / 1e6:,.1f} MB are free beside {self._root}, "
                f"{free_floor(total) / 1e6:,.1f} MB of them stay so"
            )
        theirs = sum(other.nbytes for other in self._others)
        return (
            f"other models that are open take {theirs / 1e6:,.0f} MB of "
            f"max_disk_bytes={self.max_bytes}"
        )

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
