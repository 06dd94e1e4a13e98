"""Threads that share the units of one call: all units are done, failures are raised, and no
resources are leaked.
"""

import gc
import threading
import time
import weakref

import numpy as np
import pytest

from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.team import KernelTeam
from kvboost_edge.kernels.vectors import fetch_add

NEXT = 0
DONE = 1
PATIENCE = 60.0


@kernel
def take_units(job):
    """Mark units until none is left. `job` is (address of the counters, address of int64 [units] to
    add 1 to, units).
    """
    counters, marks, units = job
    while True:
        unit = fetch_add(counters, 1)
        if unit >= units:
            return
        fetch_add(marks + 8 * unit, 1)
        fetch_add(counters + 8, 1)


def run_units(team, units):
    counters = np.zeros(2, np.int64)
    marks = np.zeros(units, np.int64)
    team.run(take_units, (counters.ctypes.data, marks.ctypes.data, units), counters, DONE, units)
    return marks.tolist()


def helpers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvboost-kernel")]


@pytest.fixture
def team():
    before = helpers()
    team = KernelTeam(3)
    yield team
    team.close()
    assert helpers() == before


def test_every_unit_runs_once(team):
    for call in range(2000):
        units = call % 7
        assert run_units(team, units) == [1] * units


def test_helper_threads_start_with_the_first_shared_work(team):
    before = len(helpers())
    run_units(team, 1)
    assert len(helpers()) == before
    run_units(team, 2)
    assert len(helpers()) == before + 2
    run_units(team, 50)
    assert len(helpers()) == before + 2


def test_one_thread_starts_no_helpers():
    before = helpers()
    team = KernelTeam(1)
    assert run_units(team, 50) == [1] * 50
    assert helpers() == before


def meet_all(team):
    """Run a call that ends only if three threads work on it at the same time."""
    barrier = threading.Barrier(3)
    lock = threading.Lock()
    counters = np.zeros(2, np.int64)

    def meet(job):
        barrier.wait(PATIENCE)
        with lock:
            counters[DONE] += 1

    team.run(meet, None, counters, DONE, 3)
    assert counters[DONE] == 3


def test_all_threads_work_at_the_same_time(team):
    meet_all(team)


def test_close_ends_the_threads():
    before = helpers()
    team = KernelTeam(3)
    run_units(team, 5)
    assert len(helpers()) == len(before) + 2
    team.close()
    assert helpers() == before
    team.close()


def test_a_dropped_team_ends_its_threads():
    before = helpers()
    team = KernelTeam(3)
    run_units(team, 5)
    del team
    gc.collect()
    assert helpers() == before


def test_helpers_work_on_after_an_error(team):
    """The error is raised by its call only, and all threads take part in the next call."""
    caller = threading.current_thread()

    def fail(job):
        if threading.current_thread() is not caller:
            raise ValueError("a unit went wrong")

    with pytest.raises(ValueError, match="a unit went wrong"):
        team.run(fail, None, np.zeros(2, np.int64), DONE, 3)
    meet_all(team)


def test_an_error_after_the_last_unit_is_not_raised_by_the_next_call(team):
    """A helper fails when all units of its call are done."""
    caller = threading.current_thread()
    started, returned = threading.Event(), threading.Event()
    counters = np.zeros(2, np.int64)

    def fail(job):
        if threading.current_thread() is caller:
            assert started.wait(PATIENCE)
            counters[DONE] = 2
            return
        started.set()
        returned.wait(PATIENCE)
        raise ValueError("a unit went wrong")

    def leave_to_helper(job):
        if threading.current_thread() is not caller:
            others[DONE] = 2

    team.run(fail, None, counters, DONE, 2)
    returned.set()
    end = time.monotonic() + PATIENCE
    while team._mailbox.failure is None and time.monotonic() < end:
        pass  # the helper has not failed yet
    others = np.zeros(2, np.int64)
    team.run(leave_to_helper, None, others, DONE, 2)
    assert others[DONE] == 2


@pytest.mark.parametrize("started", [0, 1])
def test_a_team_works_without_the_threads_that_the_system_refuses(started, monkeypatch, caplog):
    before = helpers()
    start = threading.Thread.start
    count = 0

    def limited(thread):
        nonlocal count
        count += 1
        if count > started:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    team = KernelTeam(4)
    for _ in range(2):
        assert run_units(team, 50) == [1] * 50
    assert len(helpers()) == len(before) + started
    assert count == started + 1
    [warning] = [each for each in caplog.messages if "kernels run on" in each]
    assert f"{started + 1} of 4" in warning
    team.close()
    assert helpers() == before


def test_an_error_is_raised_after_all_helpers_finished(team):
    caller = threading.current_thread()
    started = threading.Barrier(2)
    ended = threading.Event()

    def fail(job):
        if threading.current_thread() is caller:
            started.wait(PATIENCE)
            raise ValueError("a unit went wrong")
        started.wait(PATIENCE)
        end = time.monotonic() + PATIENCE
        while team._mailbox.work is not None and time.monotonic() < end:
            pass  # the caller has not failed yet
        ended.set()

    with pytest.raises(ValueError, match="a unit went wrong"):
        team.run(fail, None, np.zeros(2, np.int64), DONE, 2)
    assert ended.is_set()


def test_counters_outlive_late_helpers(team):
    """Threads know the counters only by address, so the counters must outlive the call while a
    helper may read them.
    """
    caller = threading.current_thread()
    started = threading.Event()
    may_end = threading.Event()
    counters = np.zeros(2, np.int64)
    alive = weakref.ref(counters)

    def start_late(job):
        if threading.current_thread() is caller:
            assert started.wait(PATIENCE)
            alive()[DONE] = 2
            return
        started.set()
        may_end.wait(PATIENCE)

    team.run(start_late, None, counters, DONE, 2)
    gc.collect()
    del counters
    try:
        assert alive() is not None
    finally:
        may_end.set()
    team.close()
    gc.collect()
    assert alive() is None


def test_zero_threads_are_refused():
    with pytest.raises(ConfigError, match="num_threads=0"):
        KernelTeam(0)
