"""Folder of the batch API, with a space for each tenant, used by one server at a time."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from kvboost_edge.errors import ConfigError
from kvboost_edge.host.file_lock import try_lock
from kvboost_edge.server.batches.tenant_space import TenantSpace
from kvboost_edge.server.settings import ServerSettings, tenant_of_key

__all__ = ["BatchStore"]

_FOLDER = re.compile(r"[0-9a-f]{32}")


class BatchStore:
    """The spaces of all tenants. Close it to let another server use the folder."""

    def __init__(self, directory: Path, settings: ServerSettings) -> None:
        """Open a folder, and create it if necessary.

        Raises:
            ConfigError: the folder cannot be used, or another server uses it.
        """
        self._lock: IO[bytes] | None = None
        tenants: list[str | None] = [*map(tenant_of_key, settings.all_keys)] or [None]
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _locked(directory)
            self._spaces = {
                tenant: TenantSpace(directory / _folder_of(tenant), settings, tenant)
                for tenant in tenants
            }
            known = {_folder_of(tenant) for tenant in tenants}
            # Files of keys that are no longer set stay until they expire.
            for path in directory.iterdir():
                if _FOLDER.fullmatch(path.name) and path.name not in known:
                    TenantSpace(path, settings).expire()
        except OSError as error:
            self.close()
            raise ConfigError(
                f"batch_dir={str(directory)!r} cannot be used: {error.strerror}; choose another "
                "--batch-dir"
            ) from error
        except BaseException:
            self.close()
            raise

    def space(self, tenant: str | None) -> TenantSpace:
        """Return the space of a tenant."""
        return self._spaces[tenant]

    def __iter__(self) -> Iterator[TenantSpace]:
        return iter(self._spaces.values())

    def close(self) -> None:
        """Let another server use the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _folder_of(tenant: str | None) -> str:
    """Return the name of a tenant's folder, which does not reveal the digest of its key."""
    return hashlib.sha256(b"kvboost-edge batches " + (tenant or "").encode()).hexdigest()[:32]


def _locked(directory: Path) -> IO[bytes]:
    """Lock the folder until the returned file is closed. Raises ConfigError and OSError."""
    handle = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    file = os.fdopen(handle, "r+b")
    try:
        if not try_lock(handle):
            raise ConfigError(
                f"batch_dir={str(directory)!r} is in use by another server; choose another "
                "--batch-dir"
            )
    except BaseException:
        file.close()
        raise
    return file
