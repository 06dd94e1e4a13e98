"""A thread team for kernels that take work units from an atomic counter.

The calling thread works too, and takes every unit that is left. So a helper that the system does
not schedule costs only its share: no thread waits at a barrier for a sleeping one. After its work
a helper spins briefly before it sleeps, because the calls of a forward pass follow one another
closely. Waking a sleeping helper costs the caller about 1 us; the helper starts about 20 us later.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba.core import types

from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.entry import KernelEntry
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.vectors import address_of, fetch_add, load_acquire, relax

__all__ = ["KernelTeam", "team_entries"]

_SPINS = 20_000  # about 100 us, then the waiting thread yields its core
_NAP_S = 50e-6
_LOOKS = 10_000  # about 150 us, then a helper without work sleeps


@kernel
def _wait_for(counters: npt.NDArray[np.int64], index: int, value: int, spins: int) -> bool:
    """Spin until counters[index] >= value, at most `spins` times; return whether it is."""
    at = address_of(counters) + 8 * index
    while spins > 0:
        if fetch_add(at, 0) >= value:
            return True
        spins -= 1
    return False


@kernel
def _look_out(board: npt.NDArray[np.int64], seen: int, looks: int) -> Any:
    """Return the number on the board once it differs from `seen`, or `seen` after `looks` loads."""
    at = address_of(board)
    while looks > 0:
        number = load_acquire(at)
        if number != seen:
            return number
        relax()
        looks -= 1
    return seen


_COUNTERS = types.Array(types.int64, 1, "C")
team_entries = [
    KernelEntry(_wait_for, _COUNTERS, *[types.int64] * 3),
    KernelEntry(_look_out, _COUNTERS, types.int64, types.int64),
]
"""Kernels that every team runs."""


class _Work(NamedTuple):
    """A call that helpers may join.

    Attributes:
        serial: number of the call, ascending.
        function: what a helper calls with `job`.
        job: the kernel's arguments.
        counters: int64, held because a helper that starts late still counts itself in.
    """

    serial: int
    function: Callable[[Any], None]
    job: Any
    counters: npt.NDArray[np.int64]


class _Mailbox:
    """The newest work of a team, as its helpers see it; without a reference to the team."""

    def __init__(self) -> None:
        # Changes with every work, for helpers that are awake.
        self.board = np.zeros(1, dtype=np.int64)
        self.work: _Work | None = None
        self.failure: BaseException | None = None
        self.closed = False
        self._busy = 0
        self._changed = threading.Condition()

    def begin(self, last: int) -> _Work | None:
        """Return work newer than the serial `last`, or None; the helper must call `end` after."""
        with self._changed:
            work = self.work
            if work is None or work.serial == last:
                return None
            self._busy += 1
            return work

    def end(self) -> None:
        with self._changed:
            self._busy -= 1
            self._changed.notify_all()

    def withdraw(self) -> None:
        """Stop offering the work and wait for helpers that run it: they use the caller's memory."""
        with self._changed:
            self.work = None
            self._changed.wait_for(lambda: self._busy == 0)


class KernelTeam:
    """A team of `num_threads` threads, including the caller.

    Only one thread at a time may call `run`. Helpers start with the first work that can be shared.
    They end with `close` or when the team is collected.
    """

    def __init__(self, num_threads: int) -> None:
        if num_threads < 1:
            raise ConfigError(f"num_threads={num_threads} must be at least 1")
        self.num_threads = num_threads
        self._serial = 0
        self._mailbox = _Mailbox()
        self._signals: list[threading.Lock] = []
        self._threads: list[threading.Thread] = []
        weakref.finalize(self, _dismiss, self._mailbox, self._signals, self._threads)

    def run(
        self,
        function: Callable[[Any], None],
        job: Any,
        counters: npt.NDArray[np.int64],
        done: int,
        units: int,
    ) -> None:
        """Call the nogil kernel `function(job)` on the team; return when counters[done] >= units.

        The function takes units until none is left, and adds 1 to counters[done] after each. It
        may start late, when all units are taken; then it must return at once.

        Args:
            function: the kernel.
            job: its argument.
            counters: int64 array that all threads share.
            done: index in `counters` of the number of finished units.
            units: number of units.
        """
        if self.num_threads > 1 and units > 1:
            self._serial += 1
            self._wake(
                _Work(self._serial, function, job, counters), min(self.num_threads, units) - 1
            )
        try:
            function(job)
            while not _wait_for(counters, done, units, _SPINS):
                if self._mailbox.failure is not None:
                    raise self._mailbox.failure
                time.sleep(_NAP_S)
        except BaseException:
            self._mailbox.withdraw()
            raise
        self._mailbox.work = None

    def close(self) -> None:
        """End the helpers. The team cannot be used afterwards."""
        _dismiss(self._mailbox, self._signals, self._threads)

    def _wake(self, work: _Work, num_helpers: int) -> None:
        """Offer work and wake `num_helpers` helpers; starts the threads at the first call."""
        if not self._threads:
            self._start()
        self._mailbox.work = work
        self._mailbox.board[0] += 1
        for signal in self._signals[:num_helpers]:
            _raise_signal(signal)

    def _start(self) -> None:
        """Start the helper threads, each with a locked signal."""
        for index in range(1, self.num_threads):
            signal = threading.Lock()
            signal.acquire()
            thread = threading.Thread(
                target=_help,
                args=(self._mailbox, signal),
                name=f"kvboost-kernel-{index}",
                daemon=True,
            )
            self._signals.append(signal)
            self._threads.append(thread)
            thread.start()


def _raise_signal(signal: threading.Lock) -> None:
    """Wake a helper whose signal is locked: it sleeps or works."""
    # An open signal has not been taken yet; the helper that takes it finds the newest work.
    if signal.locked():
        signal.release()


def _help(mailbox: _Mailbox, signal: threading.Lock) -> None:
    """Run a helper thread: join the newest work, look out for more, then sleep until its signal."""
    last = seen = 0
    signal.acquire()
    while not mailbox.closed:
        work = mailbox.begin(last)
        if work is not None:
            last = work.serial
            try:
                work.function(work.job)
            except BaseException as failure:
                mailbox.failure = failure
                return
            finally:
                mailbox.end()
            work = None  # a waiting helper keeps no finished call alive
        number = _look_out(mailbox.board, seen, _LOOKS)
        # A helper that is awake takes the signal of the work, if it has arrived.
        # Otherwise it sleeps until a signal comes.
        signal.acquire(blocking=number == seen)
        seen = number


def _dismiss(
    mailbox: _Mailbox, signals: list[threading.Lock], threads: list[threading.Thread]
) -> None:
    """Close the mailbox, wake all helpers and join their threads."""
    mailbox.closed = True
    mailbox.work = None
    mailbox.board[0] += 1
    for signal in signals:
        _raise_signal(signal)
    for thread in threads:
        thread.join()
    signals.clear()
    threads.clear()
