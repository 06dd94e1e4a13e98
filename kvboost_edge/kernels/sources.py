"""Digest of the kernels' sources, which compiled kernels are identified by."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

__all__ = ["digest_of", "source_digest"]


@functools.cache
def source_digest() -> str:
    """Return the digest of all Python files in this package."""
    return digest_of(Path(__file__).parent)


def digest_of(room: Path) -> str:
    """Return the SHA-256 of the names and contents of all Python files under a folder."""
    digest = hashlib.sha256()
    for path in sorted(room.rglob("*.py")):
        digest.update(path.relative_to(room).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
