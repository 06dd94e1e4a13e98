"""What lies where: one directory per space below the cache directory, and the files in it.

<cache directory>/lock      locked by the process that makes room for a segment at the moment
<cache directory>/<64 hex digits of the space>/
    lock              locked by the process that owns the directory: it alone writes
    space.json        what the space is, for people; and `used`, a number that grows with every
                      opening of any space
    00000001.kvs      a segment: records one behind the other, each at a multiple of 64, then
                      perhaps zeros
    00000001.kvx      its sidecar: the records' places and hashes, once nothing is added to the
                      segment any more
    order             the manifest: which records count, oldest use first
    *.new             one of the above on its way
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

from kvboost_edge.tiers.disk.files import NEW, Files, transferred

__all__ = [
    "DESCRIPTION",
    "LAST_SEGMENT",
    "LOCK",
    "ORDER",
    "is_own",
    "is_space",
    "leftovers",
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
_SEGMENT = re.compile(r"([0-7][0-9a-f]{7})\.kvs")
_OWN = re.compile(r"lock|(space\.json|order|[0-7][0-9a-f]{7}\.kvx)(\.new)?|[0-7][0-9a-f]{7}\.kvs")
LAST_SEGMENT = 0x7FFFFFFF
"""Numbers of segments end here: the manifest has 31 bits for them."""


def is_space(name: str) -> bool:
    """Whether a directory of this name is a space's."""
    return _SPACE.fullmatch(name) is not None


def is_own(name: str) -> bool:
    """Whether a file of this name in a space's directory is the tier's; all others are left as they
    are.
    """
    return _OWN.fullmatch(name) is not None


def segment_path(directory: Path, number: int) -> Path:
    return directory / f"{number:08x}.kvs"


def sidecar_path(directory: Path, number: int) -> Path:
    return directory / f"{number:08x}.kvx"


def segment_ids(sizes: Iterable[str]) -> list[int]:
    """Numbers of the segments among a directory's files, in the order they were begun."""
    return sorted(int(found[1], 16) for found in map(_SEGMENT.fullmatch, sizes) if found)


def leftovers(sizes: Iterable[str]) -> list[str]:
    """Of a directory's files, what a process left that ended in between: files on their way,
    sidecars of no segment.
    """
    held = {sidecar_path(Path(), number).name for number in segment_ids(sizes)}
    return [
        name
        for name in sizes
        if is_own(name) and name.endswith((_NEW, ".kvx")) and name not in held
    ]


def write_whole(files: Files, path: Path, data: bytes, *, durable: bool = True) -> None:
    """Put a file in its place, complete (`durable`: and on the device), or not at all. Raises
    OSError.
    """
    new = path.with_name(path.name + _NEW)
    files.unlink(
        new
    )  # what stands there may be a link: nothing is written to a file that was there before
    handle = files.open(new, NEW)
    try:
        try:
            if transferred(files.write, handle, [memoryview(data)], 0) != len(data):
                raise OSError(f"{new} cannot be written whole")
            if durable:
                files.sync(handle)
        finally:
            files.close(handle)
        files.replace(new, path)
    except OSError:
        with contextlib.suppress(OSError):
            files.unlink(new)  # on a full disk it takes room
        raise
