"""Digests of the kernels' sources, by which libraries and compiled kernels are identified."""

from __future__ import annotations

import functools
import hashlib
from fnmatch import fnmatch
from pathlib import Path

__all__ = ["compiled_digest", "digest_of", "source_digest"]

# Modules that start the compiler, store or load its output, or check its results. No machine code
# depends on them, so an edit of them does not make compiled kernels invalid.
NOT_COMPILED = ("aot.py", "build.py", "code_cache.py", "library.py", "notices.py", "reference/*")


@functools.cache
def source_digest() -> str:
    """Return the digest of all sources in this package, for kernel libraries."""
    return digest_of(Path(__file__).parent)


@functools.cache
def compiled_digest() -> str:
    """Return the digest of the sources that machine code depends on, for compiled kernels."""
    return digest_of(Path(__file__).parent, NOT_COMPILED)


def digest_of(room: Path, leaving_out: tuple[str, ...] = ()) -> str:
    """Return the SHA-256 of the names and contents of all sources under a folder.

    Sources are Python files, and tables that kernels embed (`.npz`).

    Args:
        room: the folder.
        leaving_out: patterns of paths in the folder that the digest leaves out.
    """
    digest = hashlib.sha256()
    for path in sorted([*room.rglob("*.py"), *room.rglob("*.npz")]):
        name = path.relative_to(room).as_posix()
        if not any(fnmatch(name, pattern) for pattern in leaving_out):
            digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
