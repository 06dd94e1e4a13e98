"""File layout of the disk tier: one directory per space in the cache directory.

<cache directory>/lock  held by a process while it makes room for a segment
<cache directory>/<64 hex digits of the space>/
    lock          held by the process that owns the directory; only the owner writes
    space.json    description of the space, and `used`, a serial number that grows each time
                  any space is opened
    00000001.kvs  segment: records, each at a multiple of 64 bytes, possibly followed by zeros
    00000001.kvx  sidecar of a complete segment: positions and hashes of its records
    order         manifest: the valid records, least recently used first
    *.new         file that is still being written
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

__all__ = [
    "DESCRIPTION",
    "LAST_SEGMENT",
    "LOCK",
    "ORDER",
    "UNFINISHED",
    "is_own",
    "is_space",
    "leftovers",
    "segment_ids",
    "segment_path",
    "sidecar_path",
]

LOCK = "lock"
DESCRIPTION = "space.json"
ORDER = "order"
UNFINISHED = ".new"
_SPACE = re.compile(r"[0-9a-f]{64}")
_SEGMENT = re.compile(r"([0-7][0-9a-f]{7})\.kvs")
_OWN = re.compile(r"lock|(space\.json|order|[0-7][0-9a-f]{7}\.kvx)(\.new)?|[0-7][0-9a-f]{7}\.kvs")
LAST_SEGMENT = 0x7FFFFFFF
"""Largest segment number, limited by the 31 bits that the manifest has for it."""


def is_space(name: str) -> bool:
    """Return whether a directory with this name belongs to a space."""
    return _SPACE.fullmatch(name) is not None


def is_own(name: str) -> bool:
    """Return whether a file with this name in a space's directory belongs to the tier.

    The tier never touches other files.
    """
    return _OWN.fullmatch(name) is not None


def segment_path(directory: Path, number: int) -> Path:
    return directory / f"{number:08x}.kvs"


def sidecar_path(directory: Path, number: int) -> Path:
    return directory / f"{number:08x}.kvx"


def segment_ids(names: Iterable[str]) -> list[int]:
    """Return the segment numbers in a list of file names, in ascending order."""
    return sorted(int(found[1], 16) for found in map(_SEGMENT.fullmatch, names) if found)


def leftovers(names: Iterable[str]) -> list[str]:
    """Return the names of files left by a killed process.

    These are unfinished files, and sidecars without a segment.
    """
    held = {sidecar_path(Path(), number).name for number in segment_ids(names)}
    return [
        name
        for name in names
        if is_own(name) and name.endswith((UNFINISHED, ".kvx")) and name not in held
    ]
