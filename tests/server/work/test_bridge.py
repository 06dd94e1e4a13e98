"""Tests of work in other threads, which ends when its request is cancelled."""

import asyncio
import functools
import threading

import pytest

from kvboost_edge.engine.handle import Handles, RequestHandle
from kvboost_edge.server.work.bridge import off_loop, to_its_end
from kvboost_edge.server.work.threads import in_thread


@pytest.mark.parametrize("times", [1, 2])
async def test_a_request_cancelled_during_tokenization_computes_nothing(times):
    """A request is cancelled once at the disconnect, and again when the server's grace period ends.
    The late work must be stopped in both cases.
    """
    handles = Handles()
    begun = threading.Event()
    read = threading.Event()
    cancelled = []
    ended = threading.Event()

    def work():
        begun.set()
        assert read.wait(20)
        for number in range(3):
            handles.append(RequestHandle(number, cancelled.append))
        ended.set()

    task = asyncio.ensure_future(to_its_end(work, 0, handles))
    await asyncio.to_thread(begun.wait, 20)
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0.01)
    assert task.done() == (times == 2), "a task that was cancelled once must wait for the end"
    read.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(ended.wait, 20)
    assert cancelled == [0, 1, 2]


@pytest.mark.parametrize("size", [0, 1 << 20])
async def test_computing_work_delays_no_other_work(size):
    """All of it computes at the same time, and the shared threads remain free."""
    count = 40
    computing = threading.Semaphore(0)
    computed = threading.Event()

    def work(handles):
        handles.append(RequestHandle(0, lambda index: None))
        computing.release()
        assert computed.wait(20)

    tasks = []
    for _ in range(count):
        handles = Handles()
        work_of = functools.partial(work, handles)
        tasks.append(asyncio.ensure_future(to_its_end(work_of, size, handles)))
    try:
        async with asyncio.timeout(10):
            assert await off_loop(lambda: 1) == await off_loop(lambda: 1, 1 << 20) == 1
            await in_thread(lambda: [computing.acquire(timeout=10) for _ in range(count)])
    finally:
        computed.set()
        await asyncio.gather(*tasks)


@pytest.mark.parametrize(("size", "most"), [(0, 4), (1 << 20, 2)])
@pytest.mark.parametrize("fails", [False, True])
async def test_few_threads_read_at_a_time(size, most, fails):
    """Reading ends with the first submitted request, or with the work."""
    count = 3 * most
    reading = threading.Semaphore(0)
    read = threading.Semaphore(0)

    def work(handles):
        reading.release()
        assert read.acquire(timeout=20)
        if fails:
            raise ValueError
        handles.append(RequestHandle(0, lambda index: None))

    tasks = []
    for _ in range(count):
        handles = Handles()
        work_of = functools.partial(work, handles)
        tasks.append(asyncio.ensure_future(to_its_end(work_of, size, handles)))
    for _ in range(count // most):
        assert await in_thread(lambda: all(reading.acquire(timeout=20) for _ in range(most)))
        assert not await in_thread(lambda: reading.acquire(timeout=0.1))
        read.release(most)
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ValueError if fails else type(None)] * count


def test_queued_requests_are_cancelled():
    handles = Handles()
    cancelled = list[int]()
    handles.append(RequestHandle(5, cancelled.append))
    assert not cancelled
    handles.stop()
    assert cancelled == [5]
