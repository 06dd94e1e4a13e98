"""A system that fails: the n-th call of the disk tier raises, does half, ends the process, or ends
all that follow.
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
QUIET = frozenset({"close", "forget"})  # what is let go does not fail


class PowerOff(BaseException):
    """The process is gone: nothing catches this, and no call of the system happens any more."""


class FaultyFiles(Files):
    """Counts calls, and brings nothing to the device, which no test could see. `fault(name, call,
    …)` decides what becomes of the `at`-th call (from 0 on), or of all from there on if `lasting`.
    `names`: the calls that count.
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
    """The call raises this error, but for those that cannot."""

    def fault(name: str, call: Callable[..., Any], *args: Any) -> Any:
        if name in QUIET:
            return call(*args)
        raise OSError(code, os.strerror(code))

    return fault


def moves_half(name: str, call: Callable[..., Any], *args: Any) -> Any:
    """A read or write does less than it was asked to; every other call is itself."""
    if name not in ("read", "write"):
        return call(*args)
    handle, buffers, offset = args
    first = buffers[0]
    return call(handle, [first[: max(1, first.nbytes // 2)]], offset)


def moves_nothing(name: str, call: Callable[..., Any], *args: Any) -> Any:
    """A read or write does nothing and says so."""
    return 0 if name in ("read", "write") else call(*args)


def ends_before(name: str, call: Callable[..., Any], *args: Any) -> Any:
    """kill -9 in place of the call."""
    os.kill(os.getpid(), signal.SIGKILL)


def ends_within(name: str, call: Callable[..., Any], *args: Any) -> Any:
    """kill -9 when a write is half done; of other calls, behind them."""
    if name == "write":
        handle, buffers, offset = args
        data = b"".join(buffers)
        call(handle, [memoryview(data)[: len(data) // 2]], offset)
    else:
        call(*args)
    os.kill(os.getpid(), signal.SIGKILL)


def powers_off(name: str, call: Callable[..., Any], *args: Any) -> Any:
    """The same within this process: nothing is called any more; a handle that is let go goes with
    the process.
    """
    if name == "close":
        call(*args)
    raise PowerOff


ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)
