"""The one exception tree of the package. Importable alone: no dependency, no other module of the
package.

Every message names the offending value, the limit it broke and the knob that moves the limit.
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

_INSTALL = "pip install '.[{extra}]' in a clone of the repository"  # it is not on PyPI yet


def install_extra(extra: str) -> str:
    """Return the command that installs an extra, for messages."""
    return _INSTALL.format(extra=extra)


class KVBoostError(Exception):
    """Base of every error the package raises on purpose."""


class ConfigError(KVBoostError, ValueError):
    """An option is unknown, out of range, of the wrong type, or belongs to a feature that is not
    there.
    """


class ModelFormatError(KVBoostError, ValueError):
    """A model directory, config or weight file is missing, damaged, inconsistent or not
    supported.
    """


class CapacityError(KVBoostError):
    """Something does not fit: a request into the pool, the pool into memory. The message shows the
    arithmetic.
    """


class BackendUnavailable(KVBoostError):
    """A backend, runner or optional dependency was asked for by name and is not usable on this
    machine.
    """


class RequestError(KVBoostError, ValueError):
    """A prompt or a request parameter is invalid; nothing was computed and nothing is held."""


class CacheCorruption(KVBoostError):
    """The bookkeeping of the block pool contradicts itself: double free, stale id, broken
    invariant.
    """
