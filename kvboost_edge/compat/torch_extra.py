"""A check that torch and transformers are installed, before they are imported."""

from __future__ import annotations

import importlib.util

from kvboost_edge.errors import BackendUnavailable, install_extra

__all__ = ["require_torch"]


def require_torch(caller: str, *others: str) -> None:
    """Raise BackendUnavailable if a package is missing, and name the extra to install.

    Args:
        caller: name of the function that needs torch.
        others: further packages that it needs.
    """
    missing = [name for name in ("torch", *others) if importlib.util.find_spec(name) is None]
    if missing:
        raise BackendUnavailable(
            f"{caller} needs the {' and '.join(missing)} package, which is not installed; install "
            f"the extra: {install_extra('torch')}"
        )
