"""Notice of the first kernel that must be compiled while a model runs."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["on_first_compilation", "tell_of_compilation"]

_listeners: list[Callable[[], None]] = []


def on_first_compilation(tell: Callable[[], None] | None) -> None:
    """Set a callback that runs once, before the first kernel that must be compiled.

    A kernel that is already in memory or on disk does not trigger the callback. It runs in the
    thread that called the kernel. Compiling takes seconds.

    Args:
        tell: the new callback, which replaces the previous one; None removes it.
    """
    _listeners[:] = [] if tell is None else [tell]


def tell_of_compilation() -> None:
    """Run and remove the callback of `on_first_compilation`."""
    if _listeners:
        _listeners.pop()()
