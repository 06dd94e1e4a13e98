"""A thread team for kernels that take work units from an atomic counter.

The calling thread also works, and it takes every unit that the helpers have not taken. A helper
that the OS does not schedule therefore costs only its share of the speedup. No thread waits at a
barrier for a sleeping helper.

Calls in a forward pass follow each other closely, so a helper spins briefly before it sleeps.
Waking a sleeping helper costs the caller about 1 us, and the helper starts about 20 us later.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.entry import KernelEntry
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.signature import BOOL, INT64, array
from kvboost_edge.kernels.vectors import address_of, fetch_add, load_acquire, relax

__all__ = ["KernelTeam", "team_entries"]

_LOG = logging.getLogger(__name__)
_SPINS = 20_000  # about 100 us; then the waiting thread yields its core
_NAP_S = 50e-6
_LOOKS = 10_000  # about 150 us; then a helper without work sleeps


@kernel
def _wait_for(counters: npt.NDArray[np.int64], index: int, value: int, spins: int) -> bool:
    """Spin up to `spins` times until counters[index] >= value; return whether it got there."""
    at = address_of(counters) + 8 * index
    while spins > 0:
        if fetch_add(at, 0) >= value:
            return True
        spins -= 1
    return False


@kernel
def _look_out(board: npt.NDArray[np.int64], seen: int, looks: int) -> Any:
    """Poll the board up to `looks` times until it differs from `seen`; return its number."""
    at = address_of(board)
    while looks > 0:
        number = load_acquire(at)
        if number != seen:
            return number
        relax()
        looks -= 1
    return seen


_COUNTERS = array("int64")
team_entries = [
    KernelEntry(_wait_for, _COUNTERS, *[INT64] * 3, returns=BOOL),
    KernelEntry(_look_out, _COUNTERS, INT64, INT64, returns=INT64),
]
"""Entries of the kernels that every team runs."""


class _Work(NamedTuple):
    """A kernel call that helpers may join.

    Attributes:
        serial: number of the call, ascending.
        function: function that a helper calls with `job`.
        job: the kernel's arguments.
        counters: int64. The reference keeps the array alive for a helper that starts late.
    """

    serial: int
    function: Callable[[Any], None]
    job: Any
    counters: npt.NDArray[np.int64]


class _Failure(NamedTuple):
    """An exception in a helper.

    Attributes:
        serial: number of the call.
        error: the exception.
    """

    serial: int
    error: BaseException


class _Mailbox:
    """The latest work of a team, shared with its helpers.

    The mailbox holds no reference to the team, so the team can be garbage-collected.
    """

    def __init__(self) -> None:
        # Number of the latest work, polled by helpers that are awake.
        self.board = np.zeros(1, dtype=np.int64)
        self.work: _Work | None = None
        self.failure: _Failure | None = None
        self.closed = False
        self._busy = 0
        self._changed = threading.Condition()

    def begin(self, last: int) -> _Work | None:
        """Return work newer than serial `last`, or None. The helper must call `end` after it."""
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
        """Stop offering the work and wait for the helpers that run it.

        The helpers use the caller's memory, which may be freed afterwards.
        """
        with self._changed:
            self.work = None
            self._changed.wait_for(lambda: self._busy == 0)


class KernelTeam:
    """A team of `num_threads` threads, including the caller.

    Only one thread at a time may call `run`. Helper threads start with the first work that they can
    share. They end when `close` is called or the team is garbage-collected.
    """

    def __init__(self, num_threads: int) -> None:
        if num_threads < 1:
            raise ConfigError(f"num_threads={num_threads} must be at least 1")
        self.num_threads = num_threads
        self._serial = 0
        self._has_started = False
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
        """Run the nogil kernel `function(job)` on the team until counters[done] >= units.

        The function takes units until all are taken, and adds 1 to counters[done] after each unit.
        A helper may call it after the last unit is taken. It must then return at once.

        Args:
            function: the kernel.
            job: the kernel's argument.
            counters: int64 array shared by all threads.
            done: index in `counters` of the number of finished units.
            units: number of units.
        """
        self._serial += 1
        if self.num_threads > 1 and units > 1:
            self._wake(
                _Work(self._serial, function, job, counters), min(self.num_threads, units) - 1
            )
        try:
            function(job)
            while not _wait_for(counters, done, units, _SPINS):
                failure = self._mailbox.failure
                if failure is not None and failure.serial == self._serial:
                    self._mailbox.failure = None
                    raise failure.error
                time.sleep(_NAP_S)
        except BaseException:
            self._mailbox.withdraw()
            raise
        self._mailbox.work = None

    def close(self) -> None:
        """Stop the helper threads. The team cannot be used afterwards."""
        _dismiss(self._mailbox, self._signals, self._threads)

    def _wake(self, work: _Work, num_helpers: int) -> None:
        """Offer work and wake `num_helpers` helpers; the first call starts the threads."""
        if not self._has_started:
            self._start()
        self._mailbox.work = work
        self._mailbox.board[0] += 1
        for signal in self._signals[:num_helpers]:
            _raise_signal(signal)

    def _start(self) -> None:
        """Start the helper threads, each with its own lock as a wake-up signal."""
        self._has_started = True
        for index in range(1, self.num_threads):
            signal = threading.Lock()
            signal.acquire()
            thread = threading.Thread(
                target=_help,
                args=(self._mailbox, signal),
                name=f"kvboost-kernel-{index}",
                daemon=True,
            )
            try:
                thread.start()
            except RuntimeError as error:
                _LOG.warning(
                    "kernels run on %d of %d threads, because the system starts no more (%s); "
                    "raise its limit, or set num_threads",
                    index,
                    self.num_threads,
                    error,
                )
                return
            self._signals.append(signal)
            self._threads.append(thread)


def _raise_signal(signal: threading.Lock) -> None:
    """Wake a helper whose signal is locked, which means that it sleeps or works."""
    # If the signal is already open, the helper has yet to take it and will then find the newest
    # work.
    if signal.locked():
        signal.release()


def _help(mailbox: _Mailbox, signal: threading.Lock) -> None:
    """Run a helper thread: join the newest work, spin for more work, then sleep until signaled."""
    last = seen = 0
    signal.acquire()
    while not mailbox.closed:
        work = mailbox.begin(last)
        if work is not None:
            last = work.serial
            try:
                work.function(work.job)
            except BaseException as error:
                mailbox.failure = _Failure(last, error)
            finally:
                mailbox.end()
            work = None  # a waiting helper must not keep a finished call alive
        number = _look_out(mailbox.board, seen, _LOOKS)
        # A helper that found work by polling must clear its signal, if it has arrived. A helper
        # that found none sleeps until the signal arrives.
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
