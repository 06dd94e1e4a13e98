"""The caller's handle of a request: token events, the result, cancellation."""

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

# A signal that comes right before a wait, and where waits cannot be interrupted any, is noticed
# behind it.
_LONGEST_WAIT_S = 1.0


class TokenEvent(NamedTuple):
    """One output token. `text` is what became certain with it: empty while a character or a
    possible stop string is still open, and for the EOS token. Joined over all events the texts are
    the result's `output_text`.
    """

    token_id: int
    text: str
    time_ms: float
    logprobs: TokenLogprobs | None = None


class _Alarm:
    """Wakes coroutines of one event loop from other threads. Wakes that come before the loop runs
    are one: with many streams each step would otherwise pay a system call for each of them.
    """

    def __init__(self) -> None:
        self._due: deque[asyncio.Event] = deque()
        self._ringing = False

    def wake(self, loop: asyncio.AbstractEventLoop, changed: asyncio.Event) -> None:
        """Set the event in its loop; RuntimeError if the loop was closed."""
        self._due.append(changed)
        # Whoever sees it ringing came before `_ring` clears it, and so before it empties the queue.
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
    """A waiting coroutine: its loop, what wakes it, and whether each token does or only the end."""

    loop: asyncio.AbstractEventLoop
    alarm: _Alarm
    changed: asyncio.Event
    each_event: bool


class RequestHandle:
    """Returned by `submit`. Safe to use from any thread; each event is handed out once.

    Iterate (`for` or `async for`) over pieces of text, or over `events()` / `aevents()`; `result()`
    waits for the end; `cancel()` ends the request within one step. An error that ended the request
    is raised by the iteration and by `result()`. `prompt_logprobs`, if asked for, and
    `cached_tokens` are there before the first event; `pinned_tokens`, of what the request wanted
    pinned where there is room, with the result. Until then `progress()` says how far the prompt is,
    and `started()` waits for the first event.
    """

    def __init__(
        self,
        index: int,
        cancel: Callable[[int], None],
        look: Callable[[int], Progress | None] = lambda index: None,
        num_prompt_tokens: int = 0,
    ) -> None:
        """look: how far the request of an index is now, None once it has ended."""
        self.index = index
        self._look = look
        self._progress = Progress(num_prompt_tokens)
        self._has_started = False
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self.cached_tokens = self.pinned_tokens = 0
        self.cancel_requested = False  # set by the engine, after it has noted the request's end
        self._request_cancel = cancel
        self._make_lock()
        self._events: deque[TokenEvent] = deque()
        self._result: GenerationResult | None = None
        self._error: BaseException | None = None
        self._listeners: tuple[_Listener, ...] = ()
        self._owner: object = None

    def _make_lock(self) -> None:
        self._lock = threading.RLock()
        # Who waits for the result alone is not woken by each token, only to take a processor and
        # fall asleep again.
        self._changed = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)

    def keep_alive(self, owner: object) -> None:
        """Hold the engine for as long as somebody may wait here: one that nobody holds is
        closed.
        """
        self._owner = owner

    @property
    def done(self) -> bool:
        """True once the result or the error is there."""
        return self._result is not None or self._error is not None

    def progress(self) -> Progress:
        """How far the prompt is computed, and about how long it takes until the first token. Waits
        for nothing, and costs the engine nothing.
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
        """Wait until the first token is there, or the end, at most `timeout` seconds; whether it
        is.
        """
        with self._lock:
            return self._changed.wait_for(lambda: self._has_started or self.done, timeout)

    async def astarted(self, timeout: float | None = None) -> bool:
        """`started()` for asyncio."""
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
        """Ask for the end of the request; it takes effect within one step. Harmless once done."""
        if not self.done:
            self._request_cancel(self.index)

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Wait for the end. Raises the request's error, or TimeoutError after `timeout` seconds (it
        runs on).
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
        """The output text in pieces, none of them empty."""
        return (event.text for event in self.events() if event.text)

    def events(self) -> Iterator[TokenEvent]:
        """One event per output token, as they come."""
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._events or self.done)
                if not self._events:
                    self._outcome()
                    return
                event = self._events.popleft()
            yield event

    async def aresult(self) -> GenerationResult:
        """`result()` for asyncio; cancelling the task does not cancel the request by itself."""
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
        """`events()` for asyncio."""
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
        """`aevents()` in lists of all that is there, for readers that may be slower than the
        engine; the last list ends with the result.
        """
        changed = self._listen()
        try:
            while True:
                changed.clear()
                done = self.done  # read first: every event of a request that is done can be taken
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
        """In a forked child: nothing comes any more, and whoever held the lock is not there."""
        self._make_lock()
        self._listeners = ()  # they are the parent's: waking them would write into its event loop
        self._finish(None, error)

    def _wake(self, listeners: tuple[_Listener, ...]) -> None:
        """Without the lock: a system call in here gives the interpreter to the reader, who would
        wait for the lock.
        """
        for listener in listeners:
            # Waking a loop for every token of a result that is wanted whole would cost the engine
            # thread its time.
            if not (listener.each_event or self.done or listener.loop.is_closed()):
                continue
            try:
                listener.alarm.wake(listener.loop, listener.changed)
            except RuntimeError:  # the loop was closed under its reader: nobody listens any more
                self._request_cancel(self.index)


class Handles(list[RequestHandle]):
    """Those of what is queued in a worker thread. Once they are stopped, one that comes later ends
    at once: nobody has to be left who would stop it.
    """

    _stopped = False

    def append(self, handle: RequestHandle) -> None:
        super().append(handle)
        if (
            self._stopped
        ):  # read behind the line above: `stop` may have looked at the list before it
            handle.cancel()

    def stop(self) -> None:
        self._stopped = True
        for handle in list(self):
            handle.cancel()


def wait_for_all(handles: Sequence[RequestHandle]) -> list[GenerationResult]:
    """All results in order. A request's error is raised when all are done."""
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
