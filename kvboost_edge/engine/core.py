"""The engine thread: takes requests from an inbox and runs steps.

It alone uses the scheduler, the blocks and the runner. Callers put messages into the inbox and wait
on handles. A lock guards the bookkeeping for readers in other threads (statistics, reset). It is
free during forward passes, so that readers do not wait for them.
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
from kvboost_edge.engine.debug import BlockWatch, Unwatched
from kvboost_edge.engine.handle import RequestHandle
from kvboost_edge.engine.offload.tiering import Untiered
from kvboost_edge.engine.request.answer_ids import AnswerStore
from kvboost_edge.engine.request.request import Request
from kvboost_edge.engine.schedule.batch import build_batch, split_rows
from kvboost_edge.engine.schedule.progress_estimate import ProgressEstimate
from kvboost_edge.engine.schedule.retention import Retention, pin_prompt
from kvboost_edge.engine.schedule.scheduler import Scheduler, StepPlan
from kvboost_edge.engine.schedule.sequence import Floats, Sequence, SequenceStatus
from kvboost_edge.engine.schedule.step_plan import ScheduledTokens
from kvboost_edge.engine.schedule.step_times import StepTimes
from kvboost_edge.engine.sequence_factory import Sequences
from kvboost_edge.engine.spans import Prober
from kvboost_edge.engine.spec_decode.acceptance import AcceptedDrafts
from kvboost_edge.engine.stall_watchdog import StallWatchdog
from kvboost_edge.errors import CacheCorruption, KVBoostError
from kvboost_edge.host.file_memo import cache_directory
from kvboost_edge.host.memory import Slack
from kvboost_edge.runners.base import ForwardBatch, PassAbandoned, Runner

if TYPE_CHECKING:
    from kvboost_edge.engine.schedule.sequence import Sequence
    from kvboost_edge.tiers.io_thread import IOChunk

__all__ = [
    "Arrived",
    "Cancel",
    "Close",
    "Deadlines",
    "EngineCore",
    "Message",
    "Started",
    "Submit",
    "note_started",
]

_FORKED = (
    "this process was forked from the one that runs the engine, and a fork does not copy the "
    "engine's thread; make an engine in this process, or start processes with 'spawn', not 'fork'"
)
# Longest sleeps of an idle engine, in seconds.
_WHILE_LOADING = 1.0  # while a prefetch is running
_WHILE_SAVING = 0.02  # while blocks can be copied to the tiers
_WHILE_COMPUTED = 0.002  # while other threads compute something for a sequence
_LONG_SLEEP = 3600.0  # some systems do not allow timeouts of many days

_SPARE = 64  # deadlines of ended requests that are kept before a cleanup


class Started(Protocol):
    """An object with a thread."""

    def close(self) -> None:
        """End the thread."""
        ...

    def after_fork(self) -> None:
        """Note in a forked child that the thread does not exist there."""
        ...


_started: weakref.WeakSet[Started] = weakref.WeakSet()


def note_started(one: Started) -> None:
    """Register an object with a started thread, to be closed at exit. The reference is weak."""
    _started.add(one)


@atexit.register
def _close_all() -> None:
    """Close the engines that are still open."""
    # A thread that is still inside torch aborts the interpreter during shutdown.
    for one in list(_started):
        one.close()


def _after_fork() -> None:
    for one in list(_started):
        one.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Submit(NamedTuple):
    """A message: a new request."""

    sequence: Sequence


class Cancel(NamedTuple):
    """A message: a request that may have ended is cancelled."""

    request_index: int


class Arrived(NamedTuple):
    """A message: blocks came from a tier."""

    piece: IOChunk


class Close(NamedTuple):
    """A message: the engine is to end."""


Message = Submit | Cancel | Arrived | Close


class Deadlines:
    """The deadlines of requests, as a heap of (seconds of `time.monotonic`, request index).

    Entries of requests that ended stay in it for a while.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, deadline: float, index: int, live: Collection[int]) -> None:
        """Add a request's deadline.

        Args:
            live: indices of live requests; entries of others may be dropped.
        """
        if len(self._heap) > 2 * len(live) + _SPARE:
            self._heap = sorted(entry for entry in self._heap if entry[1] in live)
        heapq.heappush(self._heap, (deadline, index))

    @property
    def first(self) -> float | None:
        """The next deadline, or None."""
        return self._heap[0][0] if self._heap else None

    def passed(self, now: float) -> list[int]:
        """Remove and return the requests whose deadline has passed."""
        found: list[int] = []
        while self._heap and self._heap[0][0] <= now:
            found.append(heapq.heappop(self._heap)[1])
        return found


class EngineCore:
    """Runs requests.

    `start` begins the thread. Tests call `step` themselves instead.

    A request that fails (NaN logits, an error while sampling or decoding its text) ends alone, and
    its last tokens are not published. A failed forward pass ends the requests in it. A
    contradiction in the bookkeeping ends the engine: every request, and every later call, gets the
    error.
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
        self._prober = Prober(runner, scheduler.manager, scheduler.max_batch_tokens)
        self._watch = BlockWatch(scheduler.manager, backend) if debug_checks else Unwatched()
        # SimpleQueue.put is reentrant: a finalizer may call it at any moment, in any thread.
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._live: dict[int, Sequence] = {}  # from submit to the end
        self._estimate = ProgressEstimate(self._live, scheduler)
        self._accepted = AcceptedDrafts(runner, scheduler.manager)
        self._deadlines = Deadlines()
        self._slack = Slack()
        self._stalls = StallWatchdog(scheduler)
        self.step_times = StepTimes()
        self._kept: list[int] = []  # freed blocks that were not reported to the backend yet
        # Held only briefly, so that submitting never waits for the bookkeeping.
        self._submit_lock = threading.Lock()
        self._close_requested = False
        self._closing = False
        self._stopped = False
        self._failure: BaseException | None = None
        self._is_copy = False
        self.answers = AnswerStore()
        self._retention = Retention(scheduler.manager)
        self.tiering = Untiered()
        self._thread = threading.Thread(target=self._run, name="kvboost-edge-engine", daemon=True)

    def use_tiers(self, tiering: Untiered) -> None:
        """Use offload tiers; called before `start`."""
        self.tiering = tiering
        tiering.start(self.arrived)

    def arrived(self, piece: IOChunk) -> None:
        """Accept blocks that a prefetch has read. Called from the I/O thread."""
        self._inbox.put(Arrived(piece))

    # The callers' side.

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()
        note_started(self)

    def check_open(self) -> None:
        """Raise KVBoostError if the engine is closed, failed, or a copy in a forked process."""
        if self._is_copy:
            raise KVBoostError(_FORKED)
        if self._failure is not None:
            raise KVBoostError(
                f"the engine stopped after an error: {self._failure!r}"
            ) from self._failure
        if self._stopped:
            raise KVBoostError("the engine is closed; make a new one")

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Lock the bookkeeping for reading; a forward pass may continue."""
        with self.lock:
            self.check_open()
            yield

    @property
    def failure(self) -> BaseException | None:
        """The error that stopped the engine, or None."""
        return self._failure

    def is_alive(self) -> bool:
        """Return whether the engine is started, not closed, and its thread alive."""
        return self._failure is None and not self._stopped and self._thread.is_alive()

    def num_waiting(self) -> int:
        """Return the number of requests that hold no block: submitted, queued, or preempted."""
        return sum(
            sequence.status is SequenceStatus.WAITING for sequence in list(self._live.values())
        )

    def waiting_tokens(self) -> int:
        """Return the number of tokens that waiting requests have to compute."""
        waiting = [s for s in list(self._live.values()) if s.status is SequenceStatus.WAITING]
        return sum(sequence.num_pending for sequence in waiting)

    def submit(self, request: Request) -> RequestHandle:
        """Queue a request; raise CapacityError if it could not run even alone."""
        return self._submit(request).handle

    def submit_logits(self, request: Request) -> tuple[RequestHandle, list[Floats]]:
        """Queue a request for logits.

        Returns:
            The handle, and the list that holds the logits in order once the handle is done.
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
            message = Submit(sequence)  # first: Ctrl-C must not come between the next two lines
            self._live[sequence.index] = sequence
            self._inbox.put(message)
        return sequence

    def cancel(self, index: int) -> None:
        """Cancel a request; unknown or finished ones are ignored."""
        self._inbox.put(Cancel(index))
        # The message comes first: a pass may be abandoned for it, and the next step must find it.
        sequence = self._live.get(index)
        if sequence is not None:
            sequence.handle.cancel_requested = True

    def request_close(self) -> None:
        """Ask the thread to end. A finalizer may call it."""
        self._inbox.put(Close())
        self._close_requested = True

    def close(self) -> None:
        """End the thread after the current step and release runner and backend; running requests
        fail.
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
        """Make every call in a forked child raise an error."""
        # The thread does not exist here, and locks that were held stay held.
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

    # The engine thread's side.

    def _run(self) -> None:
        try:
            while not self._closing:
                if not self.step():
                    self._idle()
        except BaseException as error:
            # No state can be trusted after this. Callers get the error and do not wait forever.
            self._failure = error
        reason = self._failure or KVBoostError("the engine was closed before the request was done")
        with self.lock:
            with self._submit_lock:
                self._stopped = True
            self._drain_inbox()
            for sequence in list(self._live.values()):
                if self._failure is None:
                    self._end(sequence, error=reason)
                else:
                    sequence.handle._finish(None, reason)
            self._live.clear()
        self._sequences.close()
        self.tiering.close(save=self._failure is None)
        self._runner.close()
        self._backend.close()

    def _idle(self) -> None:
        """Save blocks to the tiers, then sleep until a message, a deadline or the end of a pin."""
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
        self._slack.give_back()
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
        """Wait for a message, at most this many seconds, and handle it."""
        with contextlib.suppress(queue.Empty):
            message = self._inbox.get(timeout=seconds)
            with self.lock:
                self._handle(message)

    def step(self) -> bool:
        """Run one step: plan, score, compute, sample. Return False if there was nothing to do."""
        planned = time.perf_counter()
        with self.lock:
            plan = self._plan()
            batch = None if plan is None else self._batch_of(plan)
        if plan is None:
            return False
        began = time.perf_counter()
        self._prepare(plan.preparing)
        found = self._compute(plan, batch)
        if found is not None:
            self._finish(plan, batch, found, began)
            with self.lock:
                self.step_times.observe(time.perf_counter() - planned)
        return True

    def _batch_of(self, plan: StepPlan) -> ForwardBatch | None:
        """Return the batch of a step; None if it computes nothing."""
        if not plan.work:
            return None
        members = plan.members

        def is_abandoned() -> bool:
            return self._close_requested or all(map(_is_ending, members))

        return build_batch(
            plan.work, self.scheduler.manager, self._runner.info.hidden_size, is_abandoned
        )

    def _prepare(self, sequences: list[Sequence]) -> None:
        """Score a part of each sequence's spans; one that fails ends alone."""
        if not sequences:
            return
        failed = self._prober.look(sequences)
        with self.lock:
            for sequence, error in failed:
                self._end(sequence, error=error)
            self._prober.end(sequences)

    def _compute(self, plan: StepPlan, batch: ForwardBatch | None) -> list[Floats] | None:
        """Copy blocks and run the forward pass.

        If it fails, all sequences that depend on it end.

        Returns:
            The rows of each item of work; None if the pass failed or all its sequences are ending.
        """
        try:
            if plan.copies:
                self._backend.copy_blocks(plan.copies)
            if batch is None:
                return []
            return split_rows(plan.work, self._runner.forward(batch), batch.states)
        except PassAbandoned:
            return None  # the next step ends all its sequences
        except Exception as error:
            with self.lock:
                for sequence in plan.members:
                    self._end(sequence, error=error)
            return None

    def _finish(
        self, plan: StepPlan, batch: ForwardBatch | None, found: list[Floats], began: float
    ) -> None:
        """Give each sequence its rows, commit accepted draft tokens, and write back blocks."""
        seconds = time.perf_counter() - began
        self._estimate.observe(plan, seconds)
        _note_shares(plan.work, seconds)
        if not plan.preparing:
            self.scheduler.pacing.observe(plan.work, seconds)
        with self.lock:
            self._take(plan.work, found)
            has_drafts = batch is not None and self._accepted.plan(plan.work, batch.layout)
        if has_drafts:
            self._accepted.take_in()
        with self.lock:
            for end in self._accepted.ends():
                self._end(end.sequence, reason=end.reason, error=end.error)
            self._watch.after()
            self.tiering.save_some(time.perf_counter() - began)

    def _plan(self) -> StepPlan | None:
        """Return the plan of the next step; None if nothing can be done.

        Its blocks are reserved, and freed blocks are reported to the backend.
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
        # The content of a block that is about to be copied is still needed, even if the block has a
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
            wanted: freed blocks that are still needed; they are reported at the next step.
        """
        if self._backend.spec.is_quantized:
            self._kept += self.scheduler.manager.drain_released()
            self._backend.release_blocks([block for block in self._kept if block not in wanted])
            self._kept = [block for block in self._kept if block in wanted]

    def _drain_inbox(self) -> None:
        while not self._inbox.empty():  # no other thread reads from it
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
        elif isinstance(message, Arrived):
            self.tiering.fill(message.piece)
        else:
            self._closing = True

    def _expire(self) -> None:
        """End requests whose deadline has passed, and pins whose time is over."""
        now = time.monotonic()
        self.scheduler.manager.pins.expire(now)
        for index in self._deadlines.passed(now):
            if index in self._live:
                self._end(self._live[index], reason="timeout")

    def _take(self, work: list[ScheduledTokens[Sequence]], found: list[Floats]) -> None:
        """Give each sequence its logits, publish full blocks, end finished sequences."""
        for one, rows in zip(work, found, strict=True):
            if one.sequence.status is not SequenceStatus.RUNNING:
                continue  # an earlier stretch of the sequence failed
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
        """Take one sequence's logits; return its finish reason, or None.

        Nothing is published unless all of it worked.
        """
        # Index of the largest logit of each certain row, or of the first NaN. NaN anywhere in the
        # tokens' KV shows here: the runner makes these rows NaN if attention did not.
        largest = rows[: len(rows) - work.num_drafted].argmax(axis=1).tolist()
        if not all(map(math.isfinite, map(rows.item, range(len(largest)), largest))):
            raise KVBoostError(
                f"the model returned NaN or infinite logits near token {work.certain_stop - 1}; "
                "the request ends and its blocks are not published; try runner='torch' or "
                "weights='f32', and if the model has worked before, remove its packed weights "
                f"from {cache_directory() / 'packed'}: they may be damaged"
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
        """Free a sequence's blocks, then finish its handle."""
        if self._live.pop(sequence.index, None) is None:
            return
        if error is None and reason in ("stop", "length"):
            error = pin_prompt(self.scheduler.manager.pins, sequence, time.monotonic())
        if error is None and reason in ("stop", "length"):
            self.tiering.save_first(self._retention.ended(sequence, time.monotonic()))
        self.scheduler.finish(sequence)
        self._estimate.ended(sequence)
        if error is None and reason in ("stop", "length"):
            self.answers.keep(sequence.tenant, sequence.request.root, *sequence.answer())
            self.scheduler.speculation.remember(sequence)
        sequence.handle._finish(None if error is not None else sequence.result(reason), error)


def _note_shares(work: list[ScheduledTokens[Sequence]], seconds: float) -> None:
    """Record for each sequence of a step its share of the step's tokens."""
    tokens: Counter[Sequence] = Counter()
    for one in work:
        tokens[one.sequence] += len(one.token_ids)
    total = tokens.total()
    for sequence, count in tokens.items():
        sequence.marks.took_part(seconds, count / total)


def _is_ending(sequence: Sequence) -> bool:
    """Return whether the next step will end a sequence: cancelled, or past its deadline."""
    deadline = sequence.request.terms.deadline
    return sequence.handle.cancel_requested or (
        deadline is not None and time.monotonic() >= deadline
    )
