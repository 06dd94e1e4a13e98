"""The asyncio API: results, streams, cancellation, and an event loop that ends."""

import asyncio
import gc
import itertools
import threading
import time
from collections import deque

import pytest

from helpers.engine.fake_runner import expected_tokens, fake_engine, hold_passes, runner_of
from kvboost_edge.engine.handle import RequestHandle, TokenEvent
from kvboost_edge.errors import KVBoostError, RequestError


@pytest.fixture
def engine():
    with fake_engine() as engine:
        yield engine


async def drained(engine):
    """Wait for a request queued after a cancel, which is then done, and check that nothing is held."""
    await engine.agenerate([1], max_new_tokens=1)
    assert engine.paged_stats()["used_blocks"] == 0
    assert not engine._core._live


async def test_many_at_once_equal_single_runs(engine):
    prompts = [[i] * (10 + i) for i in range(12)]
    results = await asyncio.gather(
        *(engine.agenerate(prompt, max_new_tokens=9) for prompt in prompts)
    )
    for prompt, result in zip(prompts, results, strict=True):
        assert list(result.output_token_ids) == expected_tokens(prompt, 9)
    await drained(engine)


async def test_astream_yields_the_text(engine):
    pieces = [piece async for piece in engine.astream([1, 2, 3], max_new_tokens=20)]
    assert all(pieces)
    assert "".join(pieces) == engine.generate([1, 2, 3], max_new_tokens=20).output_text


async def test_cancelling_the_task_cancels_the_request(engine):
    started = asyncio.Event()
    loop = asyncio.get_running_loop()
    runner_of(engine).on_forward = lambda batch: loop.call_soon_threadsafe(started.set) and None
    task = asyncio.create_task(engine.agenerate([1, 2, 3], max_new_tokens=None))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    runner_of(engine).on_forward = None
    await drained(engine)


async def test_cancelling_during_tokenization(engine, monkeypatch):
    entered = threading.Event()
    go = threading.Event()
    submitted = threading.Event()
    handles = []
    real = engine._submit

    def slow(*args, **kwargs):
        entered.set()
        assert go.wait(30)
        handles.append(real(*args, **kwargs))
        submitted.set()
        return handles[0]

    monkeypatch.setattr(engine, "_submit", slow)
    task = asyncio.create_task(engine.agenerate([1, 2, 3], max_new_tokens=None))
    await asyncio.to_thread(entered.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()
    monkeypatch.undo()
    await asyncio.to_thread(submitted.wait, 30)
    assert (await handles[0].aresult()).finish_reason == "cancelled"
    await drained(engine)


async def test_timing_starts_before_waiting_for_a_thread(engine, monkeypatch):
    got_a_thread = []
    entered = []
    real = engine._submit

    async def to_thread(call):
        got_a_thread.append(time.perf_counter())
        return call()

    def submit(request):
        entered.append(request.entered_at)
        return real(request)

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    monkeypatch.setattr(engine, "_submit", submit)
    await engine.agenerate([1, 2, 3], max_new_tokens=1)
    async for _ in engine.astream([1, 2, 3], max_new_tokens=1):
        pass
    assert len(entered) == 2
    assert all(start <= thread for start, thread in zip(entered, got_a_thread, strict=True))


async def test_each_event_is_delivered_once():
    """Two readers, in any threads, never get the same event."""
    handle = RequestHandle(0, lambda index: None)

    class Guarded(deque[TokenEvent]):
        def popleft(self):
            assert handle._lock._is_owned()
            return super().popleft()

    events = [TokenEvent(i, "", 0.0) for i in range(3)]
    handle._events = Guarded(events)
    handle._finish(None, KVBoostError("the end"))
    taken = []

    async def read():
        async for event in handle.aevents():
            taken.append(event)

    with pytest.raises(KVBoostError, match="the end"):
        await read()
    assert taken == events


async def test_leaving_a_stream_cancels_the_request(engine):
    stream = engine.astream([1, 2, 3], max_new_tokens=None)
    async for _ in stream:
        break
    await stream.aclose()
    await drained(engine)


async def test_errors_reach_the_awaiting_task(engine):
    with pytest.raises(RequestError, match="the prompt is empty"):
        await engine.agenerate([])
    runner_of(engine).nan_for = {3}
    with pytest.raises(KVBoostError, match="NaN"):
        await engine.agenerate([1, 2, 3])
    with pytest.raises(KVBoostError, match="NaN"):
        async for _ in engine.astream([1, 2, 3]):
            pass
    await drained(engine)


def test_a_closed_event_loop_cancels_its_requests(engine):
    go = threading.Event()
    hold_passes(engine, go)
    handle = engine.submit([1, 2, 3], max_new_tokens=None)
    loop = asyncio.new_event_loop()

    async def listen():
        handle._listen()

    loop.run_until_complete(listen())
    loop.close()
    go.set()
    assert handle.result(30).finish_reason == "cancelled"
    gc.collect()


async def test_a_result_wakes_the_event_loop_once(engine, monkeypatch):
    """A wake-up for each token would cost time of the engine's thread without any use."""
    loop = asyncio.get_running_loop()
    real = loop.call_soon_threadsafe
    wakes = []

    def counted(callback, *args, **kwargs):
        wakes.append(callback)
        return real(callback, *args, **kwargs)

    go = threading.Event()
    hold_passes(engine, go)
    handle = engine.submit([1, 2, 3], max_new_tokens=20, ignore_eos=True)
    waiting = asyncio.create_task(handle.aresult())
    await asyncio.sleep(0)
    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    go.set()
    assert (await waiting).generated_tokens == 20
    assert len(wakes) == 1


async def test_batches_hold_all_pending_events_and_end_with_the_result(engine):
    handle = engine.submit([1, 2, 3], max_new_tokens=20, ignore_eos=True)
    await asyncio.to_thread(handle.result)
    batches = [batch async for batch in handle.abatches()]
    assert len(batches) == 1, "all pending events must arrive in one batch"
    *events, result = batches[0]
    assert result is handle.result()
    assert [event.token_id for event in events] == list(result.output_token_ids)

    runner_of(engine).nan_for = {3}
    with pytest.raises(KVBoostError, match="NaN"):
        async for _ in engine.submit([1, 2, 3]).abatches():
            pass


async def test_silence_yields_empty_batches(engine):
    """Each of them comes at least this time after the last event."""
    go = threading.Event()
    hold_passes(engine, go)
    handle = engine.submit([1, 2, 3], max_new_tokens=20, ignore_eos=True)
    batches = []
    times = []
    loop = asyncio.get_running_loop()
    async for batch in handle.abatches(silence=0.02):
        batches.append(batch)
        times.append(loop.time())
        if len(batches) == 4:
            go.set()
    assert batches[:4] == [[]] * 4
    assert all(after - before >= 0.019 for before, after in itertools.pairwise(times[:4]))
    events = [event for batch in batches for event in batch]
    assert events.pop() is handle.result()
    assert [event.token_id for event in events] == list(handle.result().output_token_ids)


async def test_wake_ups_of_the_event_loop_are_merged(monkeypatch):
    """Each wake-up is a system call of the engine's thread. Many streams would cause one each in
    every step.
    """
    loop = asyncio.get_running_loop()
    real = loop.call_soon_threadsafe
    wakes = []

    def counted(callback, *args, **kwargs):
        wakes.append(callback)
        return real(callback, *args, **kwargs)

    handles = [RequestHandle(i, lambda index: None) for i in range(8)]
    readers = [asyncio.create_task(handle.abatches().__anext__()) for handle in handles]
    await asyncio.sleep(0)
    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    for round_number in range(3):
        for handle in handles:
            handle._push(TokenEvent(round_number, "", 0.0))
    assert len(wakes) == 1
    for batch in await asyncio.gather(*readers):
        assert [event.token_id for event in batch] == [0, 1, 2]
