"""What lies where: one directory per space below the cache directory, and the files in it.

<cache directory>/<64 hex digits of the space>/
    lock              locked by the process that owns the directory: it alone writes
    space.json        what the space is, for people; and `used`, a number that grows with every opening of any space
    00000001.kvs      a segment: records one behind the other, each at a multiple of 64, then perhaps zeros
    00000001.kvx      its sidecar: the records' places and hashes, once nothing is added to the segment any more
    order             the manifest: which records count, oldest use first
    *.new             one of the above on its way
"""

from __future__ import annotations

import re
from pathlib import Path

from kvboost_edge.tiers.disk.files import WRITE, Files, transferred

__all__ = [
    "DESCRIPTION",
    "LOCK",
    "ORDER",
    "is_space",
    "segment_ids",
    "segment_path",
    "sidecar_path",
    "write_whole",
]

LOCK = "lock"
DESCRIPTION = "space.json"
ORDER = "order"
_NEW = ".new"
_SPACE = re.compile(r"[0-9a-f]{64}")
_SEGMENT = re.compile(r"([0-9a-f]{8})\.kvs")


def is_space(name: str) -> bool:
    """Whether a directory of this name is a space's."""
    return _SPACE.fullmatch(name) is not None


def segment_path(directory: Path, number: int) -> Path:
    return directory / f"{number:08x}.kvs"


def sidecar_path(directory: Path, number: int) -> Path:
    return directory / f"{number:08x}.kvx"


def segment_ids(sizes: dict[str, int]) -> list[int]:
    """Numbers of the segments among a directory's files, in the order they were begun."""
    return sorted(int(found[1], 16) for found in map(_SEGMENT.fullmatch, sizes) if found)


def write_whole(files: Files, path: Path, data: bytes, *, durable: bool = True) -> None:
    """Put a file in its place, complete (`durable`: and on the device), or not at all. Raises OSError."""
    new = path.with_name(path.name + _NEW)
    handle = files.open(new, WRITE)
    try:
        files.truncate(handle, 0)
        if transferred(files.write, handle, [memoryview(data)], 0) != len(data):
            raise OSError(f"{new} cannot be written whole")
        if durable:
            files.sync(handle)
    finally:
        files.close(handle)
    files.replace(new, path)
