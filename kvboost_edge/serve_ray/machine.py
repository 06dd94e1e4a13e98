"""Identities of the machine and of the storage that several processes may share."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
from pathlib import Path

__all__ = ["directory_id", "machine_id"]


def machine_id() -> str:
    """Return an identity of the machine since its last boot."""
    boot = b""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    return hashlib.sha256(platform.node().encode() + boot).hexdigest()


def directory_id(path: str | os.PathLike[str]) -> str:
    """Return an identity of a directory, which is equal in all processes of the machine."""
    place = os.fspath(path)
    with contextlib.suppress(OSError):
        found = os.stat(path)
        place = f"{found.st_dev}:{found.st_ino}"
    return f"{machine_id()}:{place}"
