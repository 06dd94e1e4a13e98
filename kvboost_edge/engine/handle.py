"""The caller's handle of a request, with token events, result and cancellation."""

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

# On some systems a signal is handled only after a blocking wait ends, so waits are kept short.
_LONGEST_WAIT_S = 1.0


class TokenEvent(NamedTuple):
    """One generated token.

    Attributes:
        token_id: id of the token.
        text: text that the token completed. It is empty for the EOS token, and while a character or
            a possible stop string is incomplete. Joining the texts of all events gives the result's
            `output_text`.
        time_ms: milliseconds since the start of the caller's call.
        logprobs: log probabilities, if requested.
    """

    token_id: int
    text: str
    time_ms: float
    logprobs: TokenLogprobs | None = None


class _Alarm:
    """Wakes coroutines of one event loop from other threads."""

    # Several wakes before the loop runs are combined into one, which saves a system call per stream
    # and step.

    def __init__(self) -> None:
        self._due: deque[asyncio.Event] = deque()
        self._ringing = False

    def wake(self, loop: asyncio.AbstractEventLoop, changed: asyncio.Event) -> None:
        """Set an event in its loop.

        Raises:
            RuntimeError: the loop is closed.
        """
        self._due.append(changed)
        # While `_ringing` is set, a scheduled `_ring` call will still empty the queue.
        if not self._ringing or loop.is_closed():
            self._ringing = True
            loop.call_soon_threadsafe(self._ring)

    def _ring(self) -> None:
        self._ringing = False
        while self._due:
            self._due.popleft().set()


_alarms: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Alarm] = weakref.WeakKeyDictionary()
_alarms_lock = threading.Lock()


class _Reminder:
    """Sets an event of this thread's loop whenever `seconds` pass without a call of `restart`.

    Attributes:
        is_due: True from then on until `restart`.
    """

    # One timer per reader. A timeout around each wait would cost a timer per token.

    def __init__(self, changed: asyncio.Event, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = changed
        self._seconds = seconds
        self.restart()
        self._timer = self._loop.call_at(self._due, self._look)

    def restart(self) -> None:
        self.is_due = False
        self._due = self._loop.time() + self._seconds

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        if self._loop.time() >= self._due:
            self._changed.set()
            self.is_due = True
            self._due += self._seconds
        self._timer = self._loop.call_at(self._due, self._look)


class _Listener(NamedTuple):
    """A coroutine that waits for changes of a request.

    Attributes:
        loop: event loop of the coroutine.
        alarm: alarm that wakes coroutines of that loop.
        changed: event that the coroutine waits for.
        each_event: whether each token wakes the coroutine, or only the end of the request.
    """

    loop: asyncio.AbstractEventLoop
    alarm: _Alarm
    changed: asyncio.Event
    each_event: bool


class RequestHandle:
    """The handle of a request, returned by `submit`. All methods are thread-safe.

    Iterate over the handle with `for` or `async for` to get pieces of text. `events()` and
    `aevents()` yield token events, each of them once. `result()` waits for the end, and `cancel()`
    stops the request within one step. If the request failed, iterating and `result()` raise its
    error.

    Args:
        look: function that returns the progress of a request by its index, or None after the end.

    Attributes:
        index: index of the request.
        prompt_logprobs: log probabilities of the prompt, if requested. Set before the first event.
        cached_tokens: number of prompt tokens found in the cache. Set before the first event.
        pinned_tokens: number of tokens pinned for the request's `pin` or `pins`, of which only full
            blocks are kept. Set with the result.
        cancel_requested: True once the request was cancelled, even if a step still computes it.
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
        # A separate condition, so that callers of `result()` are not woken by each token.
        self._changed = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)

    def keep_alive(self, owner: object) -> None:
        """Keep a reference to the engine, which would be closed if nothing referenced it."""
        self._owner = owner

    @property
    def done(self) -> bool:
        """True once the request has a result or an error."""
        return self._result is not None or self._error is not None

    def progress(self) -> Progress:
        """Return the prompt's progress and the estimated time to the first token.

        The call does not block.
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
        """Wait for the first token or the end of the request.

        Args:
            timeout: maximum wait in seconds, or None to wait without a limit.

        Returns:
            False if the timeout expired.
        """
        with self._lock:
            return self._changed.wait_for(lambda: self._has_started or self.done, timeout)

    async def astarted(self, timeout: float | None = None) -> bool:
        """Wait for the first token or the end of the request with asyncio."""
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
        """Cancel the request within one step. A finished request is not affected."""
        if not self.done:
            self._request_cancel(self.index)

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Wait for the end and return the result.

        If the request failed, its error is raised.

        Args:
            timeout: maximum wait in seconds, or None to wait without a limit.

        Raises:
            TimeoutError: the request is not done. It keeps running.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        with self._lock:
            while not self.done:
                left = end - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"request {self.index} is not done after timeout={timeout} s; it continues"
                    )
                self._ended.wait(min(left, _LONGEST_WAIT_S))
        return self._outcome()

    def __iter__(self) -> Iterator[str]:
        """Return an iterator over the non-empty pieces of the output text."""
        return (event.text for event in self.events() if event.text)

    def events(self) -> Iterator[TokenEvent]:
        """Yield one event per generated token as it arrives."""
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._events or self.done)
                if not self._events:
                    self._outcome()
                    return
                event = self._events.popleft()
            yield event

    async def aresult(self) -> GenerationResult:
        """Wait for the result with asyncio.

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
        """Yield one event per generated token with asyncio."""
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

    async def abatches(
        self, silence: float | None = None
    ) -> AsyncIterator[list[TokenEvent | GenerationResult]]:
        """Yield lists of all new events. The last list ends with the result.

        Use this method if the reader may be slower than the engine.

        Args:
            silence: seconds without an event after which an empty list is yielded, repeatedly. None
                yields no empty lists.
        """
        changed = self._listen()
        reminder = None if silence is None else _Reminder(changed, silence)
        try:
            while True:
                changed.clear()
                done = self.done  # read before taking events, so that none can arrive after them
                batch: list[TokenEvent | GenerationResult] = [*self._pop_all()]
                if done and self._result is not None:
                    batch.append(self._result)
                if batch or (reminder is not None and reminder.is_due):
                    yield batch
                if done:
                    break
                if reminder is not None:
                    reminder.restart()
                await changed.wait()
        finally:
            if reminder is not None:
                reminder.close()
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

    # Methods for the engine thread.

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
        """Fail the handle in a forked child, where no more events arrive."""
        self._make_lock()  # a parent thread may have held the old lock
        self._listeners = ()  # waking them would write into the parent's event loop
        self._finish(None, error)

    def _wake(self, listeners: tuple[_Listener, ...]) -> None:
        """Wake the listeners. The caller must not hold the lock."""
        # Waking makes a system call, which lets the reader run. With the lock held, the reader
        # would only wait for it.
        for listener in listeners:
            # Do not wake a listener for each token if it only waits for the result.
            if not (listener.each_event or self.done or listener.loop.is_closed()):
                continue
            try:
                listener.alarm.wake(listener.loop, listener.changed)
            except RuntimeError:  # the listener's event loop is closed
                self._request_cancel(self.index)


class Handles(list[RequestHandle]):
    """A list of request handles that a worker thread fills.

    After `stop`, handles that are appended are cancelled immediately.

    Attributes:
        on_first: function called after the first handle is appended, if not None.
    """

    on_first: Callable[[], object] | None = None
    _stopped = False

    def append(self, handle: RequestHandle) -> None:
        super().append(handle)
        if self.on_first is not None:
            self.on_first()
            self.on_first = None
        if self._stopped:  # checked after appending, because `stop` may have read the list before
            handle.cancel()

    def stop(self) -> None:
        self._stopped = True
        for handle in list(self):
            handle.cancel()


def wait_for_all(handles: Sequence[RequestHandle]) -> list[GenerationResult]:
    """Wait for all requests and return their results in order.

    If a request failed, its error is raised after all requests are done.
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
