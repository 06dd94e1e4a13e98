"""Simulated system faults: the n-th system call of the disk tier raises, does half its work, kills
the process, or makes all later calls fail.
"""

from __future__ import annotations

import errno
import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvboost_edge.tiers.disk.system_calls import Files

CALLS = (
    *(
        "allocate",
        "close",
        "forget",
        "is_same",
        "lock",
        "make_directory",
        "make_private",
        "open",
        "read",
    ),
    *("replace", "size", "sizes", "space", "sync", "sync_directory", "truncate", "unlink", "write"),
)
QUIET = frozenset({"close", "forget"})  # releasing a resource does not fail


class PowerOff(BaseException):
    """Loss of power: no handler catches this, and no system call follows."""


class FaultyFiles(Files):
    """Files that count their calls. They write nothing through to the device, which tests could not
    observe.

    Args:
        at: number of the faulty call, from 0 on.
        fault: `fault(name, call, ...)` runs in place of the faulty call.
        lasting: all calls from `at` on are faulty.
        names: names of the calls that count.
    """

    def __init__(
        self,
        at: int = -1,
        fault: Callable[..., Any] | None = None,
        *,
        lasting: bool = False,
        names: Any = CALLS,
    ) -> None:
        self.calls = 0
        self.trace: list[str] = []
        self.at = at
        self.lasting = lasting
        self.fault = fault
        for name in names:
            self.__dict__[name] = functools.partial(self._count, name, getattr(self, name))

    def sync(self, handle: int) -> None:
        pass

    def sync_directory(self, path: Path) -> None:
        pass

    def _count(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        number = self.calls
        self.calls += 1
        self.trace.append(name)
        due = number == self.at or (self.lasting and 0 <= self.at <= number)
        return self.fault(name, call, *args) if due and self.fault is not None else call(*args)


def fails(code: int) -> Callable[..., Any]:
    """Return a fault that raises this error, except in calls that cannot fail."""

    def fault(name: str, call: Callable[..., Any], *args: Any) -> Any:
        if name in QUIET:
            return call(*args)
        raise OSError(code, os.strerror(code))

    return fault


def moves_half(name: str, call: Callable[..., Any], *args: Any) -> Any:
    """Do only a part of a read or write; run other calls unchanged."""
    if name not in ("read", "write"):
        return call(*args)
    handle, buffers, offset = args
    first = buffers[0]
    return call(handle, [first[: max(1, first.nbytes // 2)]], offset)


def moves_nothing(name: str, call: Callable[..., Any], *args: Any) -> Any:
    """Do nothing in a read or write, and return 0."""
    return 0 if name in ("read", "write") else call(*args)


def ends_before(name: str, call: Callable[..., Any], *args: Any) -> Any:
    """Kill the process instead of the call."""
    os.kill(os.getpid(), signal.SIGKILL)


def ends_within(name: str, call: Callable[..., Any], *args: Any) -> Any:
    """Kill the process when a write is half done, or after another call."""
    if name == "write":
        handle, buffers, offset = args
        data = b"".join(buffers)
        call(handle, [memoryview(data)[: len(data) // 2]], offset)
    else:
        call(*args)
    os.kill(os.getpid(), signal.SIGKILL)


def powers_off(name: str, call: Callable[..., Any], *args: Any) -> Any:
    """Lose power within this process: no later call runs. A handle is still closed, as at the end
    of a process.
    """
    if name == "close":
        call(*args)
    raise PowerOff


ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)
