"""The engines whose threads were started in this process: closed when it ends, told when it was
forked.
"""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol

__all__ = ["Started", "note_started"]


class Started(Protocol):
    """Something with a thread."""

    def close(self) -> None:
        """End the thread."""
        ...

    def after_fork(self) -> None:
        """In a forked child: the thread did not come along."""
        ...


_started: weakref.WeakSet[Started] = weakref.WeakSet()


def note_started(one: Started) -> None:
    """Its thread was started. It may be forgotten without a word."""
    _started.add(one)


@atexit.register
def _close_all() -> None:
    """End engines that nobody closed: a thread still inside torch while the interpreter is taken
    down aborts it.
    """
    for one in list(_started):
        one.close()


def _after_fork() -> None:
    for one in list(_started):
        one.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
