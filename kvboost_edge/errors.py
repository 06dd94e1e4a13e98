"""Exceptions of the package. This module imports nothing but the standard library.

Every message contains the invalid value, the limit that it exceeds, and the option that sets the
limit.
"""

from __future__ import annotations

__all__ = [
    "BackendUnavailable",
    "CacheCorruption",
    "CapacityError",
    "ConfigError",
    "DraftModelMismatch",
    "KVBoostError",
    "ModelFormatError",
    "RequestError",
    "exit_code",
    "install_extra",
]

# pip keeps an installed kvboost-edge, from a wheel or a clone, and installs what it lacks.
_INSTALL = "pip install 'kvboost-edge[{extra}]'"


def install_extra(extra: str) -> str:
    """Return the command that installs an extra, for use in messages."""
    return _INSTALL.format(extra=extra)


class KVBoostError(Exception):
    """Base class of the package's errors."""


class ConfigError(KVBoostError, ValueError):
    """Error for an option that is unknown, out of range, of the wrong type, or unsupported."""


class DraftModelMismatch(ConfigError):
    """Error for a draft model that is supported, but not with the given target model."""


class ModelFormatError(KVBoostError, ValueError):
    """Error for a model file or config that is missing, damaged, inconsistent or unsupported."""


class CapacityError(KVBoostError):
    """Error for a request that does not fit in the pool, or a pool that does not fit in memory.

    The message shows the calculation.
    """


class BackendUnavailable(KVBoostError):
    """Error for a backend, runner or optional dependency that cannot be used on this machine."""


class RequestError(KVBoostError, ValueError):
    """Error for an invalid prompt or request parameter, raised before anything is computed.

    Attributes:
        option: name of an option that cannot be used with this model or with the request's other
            options; None for other errors.
    """

    def __init__(self, *args: object, option: str | None = None) -> None:
        super().__init__(*args)
        self.option = option


class CacheCorruption(KVBoostError):
    """Error for inconsistent bookkeeping of the block pool, such as a double free or a stale id."""


def exit_code(error: KVBoostError) -> int:
    """Return a command's exit code for an error: 2 for an invalid option, otherwise 1."""
    return 2 if isinstance(error, ConfigError) else 1
