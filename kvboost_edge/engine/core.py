"""The engine thread, which takes requests from an inbox and runs forward passes step by step.

Only this thread uses the scheduler, the blocks and the runner. Callers put messages into the inbox
and wait on handles. A lock protects the bookkeeping while other threads read it, for example for
statistics. The engine thread releases the lock during forward passes so readers do not wait.
"""

from __future__ import annotations

import atexit
import contextlib
import heapq
import math
import os
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvboost_edge.backends.base import Backend
from kvboost_edge.engine.debug_checks import BlockWatch, NoChecks
from kvboost_edge.engine.handle import RequestHandle
from kvboost_edge.engine.non_prefix_reuse import Prober
from kvboost_edge.engine.offload.tiering import NoTiers
from kvboost_edge.engine.request.answer_ids import AnswerStore
from kvboost_edge.engine.request.request import Request
from kvboost_edge.engine.schedule.progress_estimate import ProgressEstimate
from kvboost_edge.engine.schedule.retention import Retention, pin_prompt
from kvboost_edge.engine.schedule.scheduler import Scheduler, StepPlan
from kvboost_edge.engine.schedule.sequence import Floats, Sequence, SequenceStatus
from kvboost_edge.engine.schedule.step_batch import build_batch, split_hidden_states, split_rows
from kvboost_edge.engine.schedule.step_plan import ScheduledTokens
from kvboost_edge.engine.sequence_factory import Sequences
from kvboost_edge.engine.spec_decode.acceptance import AcceptedDrafts
from kvboost_edge.engine.stall_watchdog import StallWatchdog
from kvboost_edge.engine.stats import StepTimes
from kvboost_edge.errors import CacheCorruption, KVBoostError
from kvboost_edge.host.file_memo import cache_directory
from kvboost_edge.host.memory import give_back_growth
from kvboost_edge.runners.base import ForwardBatch, PassAbandoned, Runner

if TYPE_CHECKING:
    from kvboost_edge.engine.schedule.sequence import Sequence
    from kvboost_edge.tiers.io_thread import IOChunk

__all__ = [
    "BlocksArrived",
    "Cancel",
    "Close",
    "Deadlines",
    "EngineCore",
    "Message",
    "Submit",
    "ThreadOwner",
    "note_started",
]

_FORKED = (
    "the engine does not run in a forked process, because a fork does not copy its thread; "
    "create an engine in this process, or start processes with 'spawn'"
)
# Maximum sleep of an idle engine in each situation, in seconds.
_WHILE_LOADING = 1.0  # a prefetch from a tier is running
_WHILE_SAVING = 0.02  # blocks are waiting to be copied to the tiers
_WHILE_COMPUTED = 0.002  # another thread prepares a sequence, for example its grammar
_LONG_SLEEP = 3600.0  # some systems reject timeouts of many days

_SPARE = 64  # deadlines of finished requests to keep before a cleanup


class ThreadOwner(Protocol):
    """An object that owns a running thread."""

    def close(self) -> None:
        """Stop the thread and wait for it."""
        ...

    def after_fork(self) -> None:
        """Handle a fork in the child process, where the thread does not exist."""
        ...


_started: weakref.WeakSet[ThreadOwner] = weakref.WeakSet()


def note_started(one: ThreadOwner) -> None:
    """Register an object so that its thread is stopped at exit.

    Only a weak reference is kept.
    """
    _started.add(one)


@atexit.register
def _close_all() -> None:
    """Close all open engines."""
    # The interpreter aborts at shutdown if a thread is still inside torch.
    for one in list(_started):
        one.close()


def _after_fork() -> None:
    for one in list(_started):
        one.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Submit(NamedTuple):
    """A message that adds a request."""

    sequence: Sequence


class Cancel(NamedTuple):
    """A message that cancels a request, which may already have finished."""

    request_index: int


class BlocksArrived(NamedTuple):
    """A message with blocks that were read from a tier."""

    piece: IOChunk


class Close(NamedTuple):
    """A message that stops the engine."""


Message = Submit | Cancel | BlocksArrived | Close


class Deadlines:
    """A heap of request deadlines.

    Entries are (time, request index), with times from `time.monotonic`. Entries of finished
    requests are removed lazily.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, deadline: float, index: int, live: Collection[int]) -> None:
        """Add a request's deadline.

        Args:
            live: indices of unfinished requests. Entries of other requests may be dropped.
        """
        if len(self._heap) > 2 * len(live) + _SPARE:
            self._heap = sorted(entry for entry in self._heap if entry[1] in live)
        heapq.heappush(self._heap, (deadline, index))

    @property
    def first(self) -> float | None:
        """The earliest deadline, or None if the heap is empty."""
        return self._heap[0][0] if self._heap else None

    def passed(self, now: float) -> list[int]:
        """Remove and return the indices of requests whose deadline has passed."""
        found: list[int] = []
        while self._heap and self._heap[0][0] <= now:
            found.append(heapq.heappop(self._heap)[1])
        return found


class EngineCore:
    """The step loop, which runs requests on its own thread.

    Call `start` to start the thread. Tests call `step` directly instead.

    Errors end as little as possible:

    - An error in one request, such as NaN logits or a sampling error, ends only that request. The
      blocks of its last step are not added to the cache.
    - A failed forward pass ends the requests in its batch.
    - Inconsistent bookkeeping stops the engine. All requests and later calls raise the error.
    """

    def __init__(
        self,
        runner: Runner,
        backend: Backend,
        scheduler: Scheduler,
        sequences: Sequences,
        debug_checks: bool = False,
    ) -> None:
        self.lock = threading.RLock()
        self.scheduler = scheduler
        self._runner = runner
        self._backend = backend
        self._sequences = sequences
        self._prober = Prober(runner, scheduler.manager)
        self._watch = BlockWatch(scheduler.manager, backend) if debug_checks else NoChecks()
        # SimpleQueue.put is reentrant, so finalizers can call it at any time from any thread.
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._live: dict[int, Sequence] = {}  # unfinished requests by index
        self._estimate = ProgressEstimate(self._live, scheduler)
        self._accepted = AcceptedDrafts(runner, scheduler.manager)
        self._deadlines = Deadlines()
        self._stalls = StallWatchdog(scheduler)
        self.step_times = StepTimes()
        self._kept: list[int] = []  # freed blocks not yet reported to the backend
        # A separate lock lets callers submit without waiting for `lock`.
        self._submit_lock = threading.Lock()
        self._close_requested = False
        self._closing = False
        self._stopped = False
        self._failure: BaseException | None = None
        self._is_copy = False
        self.answers = AnswerStore()
        self._retention = Retention(scheduler.manager)
        self.tiering = NoTiers()
        self._thread = threading.Thread(target=self._run, name="kvboost-edge-engine", daemon=True)

    def use_tiers(self, tiering: NoTiers) -> None:
        """Attach offload tiers. Call this before `start`."""
        self.tiering = tiering
        tiering.start(self.arrived)

    def arrived(self, piece: IOChunk) -> None:
        """Accept blocks that a prefetch has read.

        The I/O thread calls this.
        """
        self._inbox.put(BlocksArrived(piece))

    # Methods for callers on any thread.

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()
        note_started(self)

    def check_open(self) -> None:
        """Check that the engine can take calls.

        Raises:
            KVBoostError: the engine is closed, has failed, or was copied by a fork.
        """
        if self._is_copy:
            raise KVBoostError(_FORKED)
        if self._failure is not None:
            raise KVBoostError(
                f"the engine stopped after an error: {self._failure!r}; create a new one"
            ) from self._failure
        if self._stopped:
            raise KVBoostError("the engine is closed; create a new one")

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Lock the bookkeeping for reading.

        A forward pass can run while the lock is held.
        """
        with self.lock:
            self.check_open()
            yield

    @property
    def failure(self) -> BaseException | None:
        """The error that stopped the engine, or None if no error did."""
        return self._failure

    def is_alive(self) -> bool:
        """Return whether the engine thread runs and no error has stopped it."""
        return self._failure is None and not self._stopped and self._thread.is_alive()

    def num_waiting(self) -> int:
        """Return the number of requests that wait to be scheduled, including preempted ones."""
        return sum(
            sequence.status is SequenceStatus.WAITING for sequence in list(self._live.values())
        )

    def waiting_tokens(self) -> int:
        """Return the number of tokens still to compute for waiting requests."""
        waiting = [s for s in list(self._live.values()) if s.status is SequenceStatus.WAITING]
        return sum(sequence.num_pending for sequence in waiting)

    def submit(self, request: Request) -> RequestHandle:
        """Queue a request.

        Raises:
            CapacityError: the request would not fit even if it ran alone.
        """
        return self._submit(request).handle

    def submit_logits(self, request: Request) -> tuple[RequestHandle, list[Floats]]:
        """Queue a request for logits.

        Returns:
            The handle and a list. The list holds the logits in order once the request is done.
        """
        sequence = self._submit(request)
        return sequence.handle, sequence.scores.logits

    def _submit(self, request: Request) -> Sequence:
        self.scheduler.check_fits(request)
        handle = RequestHandle(
            request.index, self.cancel, self._estimate.progress, request.num_prompt_tokens
        )
        sequence = self._sequences.make(request, handle)
        with self._submit_lock:
            self.check_open()
            # Build the message first so that Ctrl-C cannot interrupt between the next two lines.
            message = Submit(sequence)
            self._live[sequence.index] = sequence
            self._inbox.put(message)
        return sequence

    def cancel(self, index: int) -> None:
        """Cancel a request. Unknown and finished requests are ignored."""
        self._inbox.put(Cancel(index))
        # Queue the message before setting the flag. The flag may abort a forward pass, and the next
        # step must then find the message.
        sequence = self._live.get(index)
        if sequence is not None:
            sequence.handle.cancel_requested = True

    def request_close(self) -> None:
        """Ask the engine thread to stop. Finalizers may call this."""
        self._inbox.put(Close())
        self._close_requested = True

    def close(self) -> None:
        """Stop the engine thread after the current step and release the runner and backend.

        Unfinished requests fail with KVBoostError.
        """
        if self._stopped and not self._thread.is_alive():
            return
        self.request_close()
        if self._thread is threading.current_thread():
            return
        if self._thread.ident is None:
            self._run()
        else:
            self._thread.join()

    def after_fork(self) -> None:
        """Make every later call raise an error in a forked child process."""
        # The child has no engine thread, and a lock held at the fork would never be released.
        self.lock = threading.RLock()
        self._submit_lock = threading.Lock()
        self._inbox = queue.SimpleQueue()
        if self._stopped:
            return
        self._is_copy = True
        self._stopped = True
        self._failure = KVBoostError(_FORKED)
        for sequence in list(self._live.values()):
            sequence.handle.after_fork(self._failure)

    # Methods for the engine thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                if not self.step():
                    self._idle()
        except BaseException as error:
            # The engine's state can no longer be trusted. Report the error so that no caller waits
            # forever.
            self._failure = error
        with self.lock:
            with self._submit_lock:
                self._stopped = True
            self._end_all()
        with contextlib.ExitStack() as parts:  # closes all of them, even if one raises an error
            parts.callback(self._backend.close)
            parts.callback(self._runner.close)
            parts.callback(self.scheduler.speculation.close)
            parts.callback(self.tiering.close, save=self._failure is None)
            parts.callback(self._sequences.close)

    def _end_all(self) -> None:
        """End all requests when the engine stops."""
        if self._failure is None:
            closed = KVBoostError("the engine was closed before the request was done")
            try:
                self._drain_inbox()
                for sequence in list(self._live.values()):
                    self._end(sequence, error=closed)
            except BaseException as error:
                self._failure = error
        # After a failure, only tell the callers. Messages in the inbox would need the scheduler.
        for sequence in self._live.values():
            sequence.handle._finish(None, self._failure)
        self._live.clear()

    def _idle(self) -> None:
        """Save blocks to the tiers, then sleep until there is something to do.

        A message, a deadline or an expiring pin ends the sleep.
        """
        if self._closing:
            return
        if self.scheduler.awaits_features:
            self._sleep(_WHILE_COMPUTED)
            return
        with self.lock:
            if not self.scheduler.has_work:
                self._watch.idle()
            is_saving = self.tiering.save_more()
            pin_end = self.scheduler.manager.pins.next_end
        give_back_growth()
        ends = [end for end in (pin_end, self._deadlines.first) if end is not None]
        longest = (
            _WHILE_SAVING
            if is_saving
            else _WHILE_LOADING
            if self.scheduler.only_waits
            else _LONG_SLEEP
        )
        self._sleep(min([longest, *(max(0.0, end - time.monotonic()) for end in ends)]))

    def _sleep(self, seconds: float) -> None:
        """Wait up to `seconds` for a message and handle it."""
        with contextlib.suppress(queue.Empty):
            message = self._inbox.get(timeout=seconds)
            with self.lock:
                self._handle(message)

    def step(self) -> bool:
        """Run one step: plan, draft, score reused spans, run the forward pass and sample.

        Returns:
            False if there was nothing to do.
        """
        planned = time.perf_counter()
        with self.lock:
            plan = self._plan()
        if plan is None:
            return False
        began = time.perf_counter()
        if not self._copy(plan):
            return True
        self.scheduler.speculation.complete(plan.work, plan.copies, self._is_ending)
        with self.lock:
            batch = self._batch_of(plan)
        scored = self._prepare(plan)
        computing = time.perf_counter()
        found = self._compute(plan, batch)
        if found is not None:
            self._finish(plan, batch, found, began, scored)
            with self.lock:
                self.scheduler.speculation.observe(plan.work, time.perf_counter() - computing)
                self.step_times.observe(time.perf_counter() - planned)
        return True

    def _batch_of(self, plan: StepPlan) -> ForwardBatch | None:
        """Build the batch of a step, or return None if the step computes no tokens."""
        if not plan.work:
            return None
        members = plan.members

        def is_abandoned() -> bool:
            return all(map(self._is_ending, members))

        return build_batch(
            plan.work,
            self.scheduler.manager,
            self._runner.info.hidden_size,
            is_abandoned,
            self.scheduler.speculation.num_hidden_states,
            is_split=self._runner.info.splits_passes,
        )

    def _is_ending(self, sequence: Sequence) -> bool:
        """Return whether a sequence is cancelled or past its deadline, or the engine closes."""
        deadline = sequence.request.terms.deadline
        return (
            self._close_requested
            or sequence.handle.cancel_requested
            or (deadline is not None and time.monotonic() >= deadline)
        )

    def _prepare(self, plan: StepPlan) -> float:
        """Score the next part of a sequence's reused spans and return the seconds that it took.

        An error ends only this sequence.
        """
        if plan.preparing is None:
            return 0.0
        sequence, limit = plan.preparing
        if self._is_ending(sequence):
            return 0.0
        began = time.perf_counter()
        try:
            self._prober.look(sequence, limit)
        except Exception as error:
            with self.lock:
                self._end(sequence, error=error)
        else:
            with self.lock:
                self._prober.end(sequence)
        return time.perf_counter() - began

    def _copy(self, plan: StepPlan) -> bool:
        """Copy the blocks that the step writes, and return whether that succeeded.

        A failed copy ends all sequences of the step.
        """
        try:
            if plan.copies:
                self._backend.copy_blocks(plan.copies)
        except Exception as error:
            self._end_members(plan, error)
            return False
        return True

    def _compute(self, plan: StepPlan, batch: ForwardBatch | None) -> list[Floats] | None:
        """Run the forward pass.

        A failed pass ends all sequences in it.

        Returns:
            One array of rows per work item. None if the pass failed or was abandoned because all of
                its sequences are ending.
        """
        try:
            if batch is None:
                return []
            logits = self._runner.forward(batch)
            self.scheduler.speculation.keep_hidden_states(
                plan.work, split_hidden_states(batch), self._is_ending
            )
            return split_rows(plan.work, batch, logits)
        except PassAbandoned:
            return None  # the next step ends all sequences of this pass
        except Exception as error:
            self._end_members(plan, error)
            return None

    def _end_members(self, plan: StepPlan, error: Exception) -> None:
        """End all sequences of a step that failed."""
        with self.lock:
            for sequence in plan.members:
                self._end(sequence, error=error)

    def _finish(
        self,
        plan: StepPlan,
        batch: ForwardBatch | None,
        found: list[Floats],
        began: float,
        scored: float,
    ) -> None:
        """Sample the next tokens, commit accepted draft tokens, and save blocks to the tiers.

        Args:
            scored: seconds of the step that scoring took.
        """
        seconds = time.perf_counter() - began
        self._estimate.observe(plan, seconds)
        _note_shares(plan.work, seconds)
        if plan.work:
            self.scheduler.pacing.observe(plan.work, seconds - scored)
        with self.lock:
            self._take(plan.work, found)
            has_drafts = batch is not None and self._accepted.plan_slots(plan.work, batch.layout)
        if has_drafts:
            self._accepted.advance()
        with self.lock:
            for end in self._accepted.ends():
                self._end(end.sequence, reason=end.reason, error=end.error)
            self._watch.after()
            self.tiering.save_some(time.perf_counter() - began)

    def _plan(self) -> StepPlan | None:
        """Plan the next step and reserve its blocks.

        Blocks freed meanwhile are reported to the backend.

        Returns:
            The plan, or None if there is nothing to compute.
        """
        self._drain_inbox()
        self._expire()
        self.scheduler.loads.give_up_silent()
        if self._closing or not self.scheduler.has_work:
            self._release_blocks(frozenset())
            self._stalls.progressed()
            return None
        plan = self.scheduler.schedule()
        if plan.failed:
            for sequence, error in plan.failed:
                self._end(sequence, error=error)
            plan.work = [one for one in plan.work if one.sequence.status is SequenceStatus.RUNNING]
        self.tiering.save_evicted()
        # Blocks that are about to be copied must keep their content, even if they already have a
        # new owner.
        sources = frozenset([copy.src for copy in plan.copies])
        self._release_blocks(sources)
        self._watch.before(self.scheduler.manager.drain_new_blocks(), sources)
        is_empty = not plan.work and not plan.copies
        if is_empty and not plan.preparing:
            self._stalls.idled()
        else:
            self._stalls.progressed()
        waits = self.scheduler.only_waits or self.scheduler.awaits_features
        return None if is_empty and waits else plan

    def _release_blocks(self, wanted: frozenset[int]) -> None:
        """Report freed blocks to a quantized backend.

        Args:
            wanted: freed blocks that are still needed. They are reported in the next step.
        """
        if self._backend.spec.is_quantized:
            self._kept += self.scheduler.manager.drain_released()
            self._backend.release_blocks([block for block in self._kept if block not in wanted])
            self._kept = [block for block in self._kept if block in wanted]

    def _drain_inbox(self) -> None:
        while not self._inbox.empty():  # only this thread reads the inbox
            self._handle(self._inbox.get_nowait())

    def _handle(self, message: Message) -> None:
        if isinstance(message, Submit):
            sequence = message.sequence
            self.scheduler.add(sequence)
            if sequence.request.terms.deadline is not None:
                self._deadlines.add(sequence.request.terms.deadline, sequence.index, self._live)
        elif isinstance(message, Cancel):
            if message.request_index in self._live:
                self._end(self._live[message.request_index], reason="cancelled")
        elif isinstance(message, BlocksArrived):
            self.tiering.fill(message.piece)
        else:
            self._closing = True

    def _expire(self) -> None:
        """End requests whose deadline has passed, and remove expired pins."""
        now = time.monotonic()
        self.scheduler.manager.pins.expire(now)
        for index in self._deadlines.passed(now):
            if index in self._live:
                self._end(self._live[index], reason="timeout")

    def _take(self, work: list[ScheduledTokens[Sequence]], found: list[Floats]) -> None:
        """Pass each sequence its logits, cache its full blocks, and end finished sequences."""
        for one, rows in zip(work, found, strict=True):
            if one.sequence.status is not SequenceStatus.RUNNING:
                continue  # earlier work for this sequence in the same step failed
            try:
                reason = self._advance(one, rows)
            except CacheCorruption:
                raise
            except Exception as error:
                self._end(one.sequence, error=error)
                continue
            if reason is not None:
                self._end(one.sequence, reason=reason)

    def _advance(self, work: ScheduledTokens[Sequence], rows: Floats) -> str | None:
        """Pass a sequence its logits and return its finish reason, or None if it continues.

        If an error occurs, no blocks are added to the cache.
        """
        # Find the largest logit of each row whose token is certain. argmax returns the first NaN if
        # there is one. NaN in the KV of earlier tokens also shows here, because the runner sets
        # such rows to NaN.
        largest = rows[: len(rows) - work.num_drafted].argmax(axis=1).tolist()
        if not all(map(math.isfinite, map(rows.item, range(len(largest)), largest))):
            raise KVBoostError(
                f"the model returned NaN or infinite logits near token {work.certain_stop - 1}; "
                "try runner='torch' or weights='f32'. If the model worked before, its packed "
                f"weights may be damaged; remove them from {cache_directory() / 'packed'}"
            )
        sequence = work.sequence
        known = sequence.num_tokens
        reason = sequence.take(work, rows, largest)
        self.scheduler.num_generated_tokens += sequence.num_tokens - known
        if work.stop >= known:
            self.scheduler.speculation.settle(
                work, sequence.num_computed_tokens - work.certain_stop
            )
        return self._accepted.commit(work, reason)

    def _end(
        self, sequence: Sequence, *, reason: str = "", error: BaseException | None = None
    ) -> None:
        """Free a sequence's blocks and finish its handle with a result or an error."""
        sequence.handle.progress()  # the handle keeps these last figures
        if self._live.pop(sequence.index, None) is None:
            return
        try:
            if error is None and reason in ("stop", "length"):
                error = pin_prompt(self.scheduler.manager.pins, sequence, time.monotonic())
            if error is None and reason in ("stop", "length"):
                self.tiering.save_first(self._retention.ended(sequence, time.monotonic()))
            self.scheduler.finish(sequence)
            self._estimate.ended(sequence)
            if error is None and reason in ("stop", "length"):
                self.answers.keep(sequence.tenant, sequence.request.root, *sequence.answer())
                self.scheduler.speculation.remember(sequence)
            result = sequence.result(reason) if error is None else None
        except BaseException as failure:
            # The engine stops, but it fails only the handles of live requests.
            sequence.handle._finish(None, failure)
            raise
        sequence.handle._finish(result, error)


def _note_shares(work: list[ScheduledTokens[Sequence]], seconds: float) -> None:
    """Record each sequence's share of the tokens in a step."""
    tokens: Counter[Sequence] = Counter()
    for one in work:
        tokens[one.sequence] += len(one.token_ids)
    total = tokens.total()
    for sequence, count in tokens.items():
        sequence.marks.took_part(seconds, count / total)
