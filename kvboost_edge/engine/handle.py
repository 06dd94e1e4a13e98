"""The caller's handle of a request: token events, the result, and cancellation."""

from __future__ import annotations

import asyncio
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import NamedTuple

from kvboost_edge.engine.request.progress import Progress
from kvboost_edge.engine.request.results import GenerationResult, TokenLogprobs

__all__ = ["Handles", "RequestHandle", "TokenEvent", "wait_for_all"]

# A signal right before a wait, or during one that cannot be interrupted, is handled after it.
_LONGEST_WAIT_S = 1.0


class TokenEvent(NamedTuple):
    """One output token.

    Attributes:
        token_id: id of the token.
        text: text that became certain with the token. It is empty while a character or a possible
            stop string is incomplete, and for the EOS token. The texts of all events, joined, are
            the result's `output_text`.
        time_ms: milliseconds since the start of the caller's call.
        logprobs: log probabilities, if requested.
    """

    token_id: int
    text: str
    time_ms: float
    logprobs: TokenLogprobs | None = None


class _Alarm:
    """Wakes coroutines of one event loop from other threads."""

    # Wakes that come before the loop runs are combined. Otherwise each step would pay a system call
    # for each stream.

    def __init__(self) -> None:
        self._due: deque[asyncio.Event] = deque()
        self._ringing = False

    def wake(self, loop: asyncio.AbstractEventLoop, changed: asyncio.Event) -> None:
        """Set an event in its loop; raise RuntimeError if the loop is closed."""
        self._due.append(changed)
        # If it is ringing, `_ring` has not cleared it and so will still empty the queue.
        if not self._ringing or loop.is_closed():
            self._ringing = True
            loop.call_soon_threadsafe(self._ring)

    def _ring(self) -> None:
        self._ringing = False
        while self._due:
            self._due.popleft().set()


_alarms: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Alarm] = weakref.WeakKeyDictionary()
_alarms_lock = threading.Lock()


class _Listener(NamedTuple):
    """A waiting coroutine.

    Attributes:
        loop: its event loop.
        alarm: wakes coroutines of that loop.
        changed: event that the coroutine waits for.
        each_event: True if each token wakes it, False if only the end does.
    """

    loop: asyncio.AbstractEventLoop
    alarm: _Alarm
    changed: asyncio.Event
    each_event: bool


class RequestHandle:
    """The handle of a request, returned by `submit`. Safe to use from any thread.

    Iterate (`for` or `async for`) over pieces of text, or over `events()` or `aevents()`; each
    event is returned once. `result()` waits for the end, and `cancel()` ends the request within one
    step. The iteration and `result()` raise the error that ended the request.

    Args:
        look: returns the progress of a request by its index; None once it has ended.

    Attributes:
        index: index of the request.
        prompt_logprobs: log probabilities of the prompt, if requested; set before the first event.
        cached_tokens: prompt tokens found in the cache; set before the first event.
        pinned_tokens: tokens of the request's `pins` that were pinned; set with the result.
        cancel_requested: True once the engine has noted that the request is to end.
    """

    def __init__(
        self,
        index: int,
        cancel: Callable[[int], None],
        look: Callable[[int], Progress | None] = lambda index: None,
        num_prompt_tokens: int = 0,
    ) -> None:
        self.index = index
        self._look = look
        self._progress = Progress(num_prompt_tokens)
        self._has_started = False
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self.cached_tokens = self.pinned_tokens = 0
        self.cancel_requested = False
        self._request_cancel = cancel
        self._make_lock()
        self._events: deque[TokenEvent] = deque()
        self._result: GenerationResult | None = None
        self._error: BaseException | None = None
        self._listeners: tuple[_Listener, ...] = ()
        self._owner: object = None

    def _make_lock(self) -> None:
        self._lock = threading.RLock()
        # A caller that only waits for the result is not woken by each token.
        self._changed = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)

    def keep_alive(self, owner: object) -> None:
        """Keep a reference to the engine. An engine without references is closed."""
        self._owner = owner

    @property
    def done(self) -> bool:
        """True once the result or the error is set."""
        return self._result is not None or self._error is not None

    def progress(self) -> Progress:
        """Return the progress of the prompt and an estimate of the time to the first token.

        It does not wait.
        """
        found = None if self.done else self._look(self.index)
        with self._lock:
            known = self._progress
            cached = self.cached_tokens
            if known.seconds_left != 0:
                last = known if found is None else found
                computed = max(known.computed, last.computed, cached)
                left = last.seconds_left
                if self._has_started or (
                    self._result is not None and self._result.finish_reason in ("stop", "length")
                ):
                    computed = last.total
                    left = 0.0
                if self._result is not None:
                    last = last._replace(elapsed=max(last.elapsed, self._result.prompt_ms / 1e3))
                self._progress = last._replace(cached=cached, computed=computed, seconds_left=left)
            return self._progress

    def started(self, timeout: float | None = None) -> bool:
        """Wait for the first token or the end.

        Args:
            timeout: longest wait in seconds; None: no limit.

        Returns:
            False on timeout.
        """
        with self._lock:
            return self._changed.wait_for(lambda: self._has_started or self.done, timeout)

    async def astarted(self, timeout: float | None = None) -> bool:
        """Wait for the first token or the end; `started()` for asyncio."""
        changed = self._listen()
        try:
            async with asyncio.timeout(timeout):
                while not (self._has_started or self.done):
                    await changed.wait()
                    changed.clear()
        except TimeoutError:
            return False
        finally:
            self._unlisten(changed)
        return True

    def cancel(self) -> None:
        """Cancel the request within one step. Without effect once it is done."""
        if not self.done:
            self._request_cancel(self.index)

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Wait for the end and return the result, or raise the request's error.

        Args:
            timeout: longest wait in seconds; None: no limit.

        Raises:
            TimeoutError: the request is not done; it continues.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        with self._lock:
            while not self.done:
                left = end - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"request {self.index} is not done after timeout={timeout} seconds"
                    )
                self._ended.wait(min(left, _LONGEST_WAIT_S))
        return self._outcome()

    def __iter__(self) -> Iterator[str]:
        """Return an iterator over the non-empty pieces of the output text."""
        return (event.text for event in self.events() if event.text)

    def events(self) -> Iterator[TokenEvent]:
        """Yield one event per output token, as they come."""
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._events or self.done)
                if not self._events:
                    self._outcome()
                    return
                event = self._events.popleft()
            yield event

    async def aresult(self) -> GenerationResult:
        """Wait for the result; `result()` for asyncio.

        Cancelling the task does not cancel the request.
        """
        changed = self._listen(each_event=False)
        try:
            while not self.done:
                await changed.wait()
                changed.clear()
        finally:
            self._unlisten(changed)
        return self._outcome()

    async def __aiter__(self) -> AsyncIterator[str]:
        async for event in self.aevents():
            if event.text:
                yield event.text

    async def aevents(self) -> AsyncIterator[TokenEvent]:
        """Yield one event per output token; `events()` for asyncio."""
        changed = self._listen()
        try:
            while True:
                changed.clear()
                while (event := self._pop()) is not None:
                    yield event
                if self.done and not self._events:
                    break
                await changed.wait()
        finally:
            self._unlisten(changed)
        self._outcome()

    async def abatches(self) -> AsyncIterator[list[TokenEvent | GenerationResult]]:
        """Yield lists of all new events; the last list ends with the result.

        Use it if the reader may be slower than the engine.
        """
        changed = self._listen()
        try:
            while True:
                changed.clear()
                done = self.done  # read first: once it is done, all its events can be taken
                batch: list[TokenEvent | GenerationResult] = [*self._pop_all()]
                if done and self._result is not None:
                    batch.append(self._result)
                if batch:
                    yield batch
                if done:
                    break
                await changed.wait()
        finally:
            self._unlisten(changed)
        self._outcome()

    def _pop(self) -> TokenEvent | None:
        with self._lock:
            return self._events.popleft() if self._events else None

    def _pop_all(self) -> list[TokenEvent]:
        with self._lock:
            return [self._events.popleft() for _ in range(len(self._events))]

    def _outcome(self) -> GenerationResult:
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def _listen(self, *, each_event: bool = True) -> asyncio.Event:
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()
        with _alarms_lock:
            alarm = _alarms.setdefault(loop, _Alarm())
        with self._lock:
            self._listeners = (*self._listeners, _Listener(loop, alarm, changed, each_event))
            if self._events or self.done:
                changed.set()
        return changed

    def _unlisten(self, changed: asyncio.Event) -> None:
        with self._lock:
            self._listeners = tuple(item for item in self._listeners if item.changed is not changed)

    # The engine thread's side.

    def _push(self, event: TokenEvent) -> None:
        with self._lock:
            self._has_started = True
            self._events.append(event)
            self._changed.notify_all()
            listeners = self._listeners
        self._wake(listeners)

    def _finish(self, result: GenerationResult | None, error: BaseException | None) -> None:
        with self._lock:
            if self.done:
                return
            self._result = result
            self._error = error
            self._changed.notify_all()
            self._ended.notify_all()
            listeners = self._listeners
        self._wake(listeners)

    def after_fork(self, error: BaseException) -> None:
        """End the handle in a forked child, where no event comes any more."""
        self._make_lock()  # a thread of the parent may have held the old one
        self._listeners = ()  # waking the parent's listeners would write into its event loop
        self._finish(None, error)

    def _wake(self, listeners: tuple[_Listener, ...]) -> None:
        """Wake the listeners. The caller does not hold the lock."""
        # Without the lock: a system call in here yields the interpreter to the reader, which would
        # wait for the lock.
        for listener in listeners:
            # A listener that only wants the result is not woken for each token, to save the engine
            # thread's time.
            if not (listener.each_event or self.done or listener.loop.is_closed()):
                continue
            try:
                listener.alarm.wake(listener.loop, listener.changed)
            except RuntimeError:  # the reader's loop was closed
                self._request_cancel(self.index)


class Handles(list[RequestHandle]):
    """The handles of requests that a worker thread submits.

    After `stop`, a handle that is appended later is cancelled at once.
    """

    _stopped = False

    def append(self, handle: RequestHandle) -> None:
        super().append(handle)
        if self._stopped:  # read after the append, because `stop` may have read the list before
            handle.cancel()

    def stop(self) -> None:
        self._stopped = True
        for handle in list(self):
            handle.cancel()


def wait_for_all(handles: Sequence[RequestHandle]) -> list[GenerationResult]:
    """Return all results in order.

    A request's error is raised once all are done.
    """
    results: list[GenerationResult] = []
    failure: Exception | None = None
    for handle in handles:
        try:
            results.append(handle.result())
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return results
