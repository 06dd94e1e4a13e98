"""Tests of work in other threads, which ends when its request is cancelled."""

import asyncio
import threading

import pytest

from kvboost_edge.engine.handle import Handles, RequestHandle
from kvboost_edge.server.work.bridge import to_its_end


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


def test_queued_requests_are_cancelled():
    handles = Handles()
    cancelled = list[int]()
    handles.append(RequestHandle(5, cancelled.append))
    assert not cancelled
    handles.stop()
    assert cancelled == [5]
