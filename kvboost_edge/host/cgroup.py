"""Memory and CPU limits of this process from Linux control groups, versions 1 and 2.

Without cgroups (macOS, Windows, an unreadable /proc), the functions return None. They take the root
of the file system as an argument, because tests build their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

__all__ = ["MemoryLimit", "cpu_quota", "memory_limit"]

# Version 1 writes "no limit" as the largest page-aligned integer.
_NO_LIMIT = 1 << 60


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Tightest memory limit of this process's groups.

    Attributes:
        limit: Limit in bytes.
        used: Bytes in use, without reclaimable file cache.
    """

    limit: int
    used: int

    @property
    def free(self) -> int:
        return max(0, self.limit - self.used)


@dataclasses.dataclass(frozen=True, slots=True)
class _Mount:
    point: Path
    root: PurePosixPath  # part of the hierarchy that is visible at `point`
    version: int
    controllers: frozenset[str]


def memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """Return the limit that leaves the least free memory, or None without a limit."""
    found = [
        limit
        for directory, version in _groups("memory", root)
        if (limit := _memory(directory, version))
    ]
    return min(found, key=lambda limit: limit.free, default=None)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the CPU seconds per second that this process may use, or None without a quota."""
    found = [
        quota
        for directory, version in _groups("cpu", root)
        if (quota := _quota(directory, version))
    ]
    return min(found, default=None)


def _memory(directory: Path, version: int) -> MemoryLimit | None:
    names = (
        ("memory.max", "memory.current")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    limit, used = (_read_int(directory / name) for name in names)
    if limit is None or limit >= _NO_LIMIT:
        return None
    reclaimable = _read_field(
        directory / "memory.stat", "inactive_file" if version == 2 else "total_inactive_file"
    )
    return MemoryLimit(limit, max(0, (used or 0) - reclaimable))


def _quota(directory: Path, version: int) -> float | None:
    if version == 2:
        fields = _read_text(directory / "cpu.max").split()
        quota, period = (
            (_to_int(fields[0]), _to_int(fields[1])) if len(fields) == 2 else (None, None)
        )
    else:
        quota = _read_int(directory / "cpu.cfs_quota_us")
        period = _read_int(directory / "cpu.cfs_period_us")
    if quota is None or quota <= 0 or not period:
        return None
    return quota / period


def _groups(controller: str, root: Path) -> Iterator[tuple[Path, int]]:
    """Yield the directories of this process's groups for a controller, innermost first."""
    memberships = list(_memberships(root))
    for mount in _mounts(root):
        for controllers, path in memberships:
            mine = (
                not controllers
                if mount.version == 2
                else controller in controllers & mount.controllers
            )
            if not mine:
                continue
            group = PurePosixPath(path)
            # A container's mount shows only a part of the hierarchy. For a path outside it, use the
            # top of the mount.
            relative = (
                group.relative_to(mount.root)
                if group.is_relative_to(mount.root)
                else PurePosixPath()
            )
            if ".." in relative.parts:
                relative = PurePosixPath()
            for parent in (relative, *relative.parents):
                yield mount.point / parent, mount.version


def _memberships(root: Path) -> Iterator[tuple[frozenset[str], str]]:
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            yield frozenset(filter(None, parts[1].split(","))), parts[2]


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in _read_text(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        kind = right.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        point = root / fields[4].lstrip("/")
        version = 2 if kind[0] == "cgroup2" else 1
        yield _Mount(point, PurePosixPath(fields[3]), version, frozenset(kind[2].split(",")))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _to_int(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _read_int(path: Path) -> int | None:
    return _to_int(_read_text(path).strip())


def _read_field(path: Path, name: str) -> int:
    for line in _read_text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return _to_int(value.strip()) or 0
    return 0
