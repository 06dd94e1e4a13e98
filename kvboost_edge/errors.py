"""The exceptions of the package. Imports no dependency and no other module of the package.

Every message names the invalid value, the limit that it exceeds, and the option that changes the
limit.
"""

from __future__ import annotations

__all__ = [
    "BackendUnavailable",
    "CacheCorruption",
    "CapacityError",
    "ConfigError",
    "KVBoostError",
    "ModelFormatError",
    "RequestError",
    "install_extra",
]

_INSTALL = "pip install '.[{extra}]' in a clone of the repository"  # not yet on PyPI


def install_extra(extra: str) -> str:
    """Return the command that installs an extra, for messages."""
    return _INSTALL.format(extra=extra)


class KVBoostError(Exception):
    """Base class of the package's errors."""


class ConfigError(KVBoostError, ValueError):
    """An option is unknown, out of range, of the wrong type, or not supported."""


class ModelFormatError(KVBoostError, ValueError):
    """A model's file or config is missing, damaged, inconsistent or not supported."""


class CapacityError(KVBoostError):
    """A request does not fit in the pool, or the pool does not fit in memory.

    The message shows the arithmetic.
    """


class BackendUnavailable(KVBoostError):
    """A requested backend, runner or optional dependency is not usable on this machine."""


class RequestError(KVBoostError, ValueError):
    """A prompt or a request parameter is invalid. Nothing was computed."""


class CacheCorruption(KVBoostError):
    """Inconsistent bookkeeping of the block pool: double free, stale id, broken invariant."""
