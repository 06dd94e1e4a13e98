"""Estimates of prompt progress and remaining time, based on the step times at each depth.

The depth of a token is its position. Attention takes longer for later tokens, so the time per token
is recorded by depth. The engine thread reports each step, and callers read the estimate without
blocking.
"""

from __future__ import annotations

import bisect
import statistics
import time
from collections import deque
from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

from kvboost_edge.engine.request.progress import Progress
from kvboost_edge.engine.schedule.scheduler import Scheduler, StepPlan
from kvboost_edge.engine.schedule.sequence import Sequence, SequenceStatus

__all__ = ["ProgressEstimate"]

_FIRST_DEPTH = 1024  # tokens in the first depth range; each further range doubles the end
_KEPT = 9  # steps per depth; their median ignores a step that compiled a kernel
_MIN_TOKENS = 32  # prompts with fewer tokens in a step are ignored, because overhead dominates
_BOARD_SECONDS = 0.5
_LATEST = 0.1  # weight of the latest value in a running mean


class _Board(NamedTuple):
    """A snapshot of all requests, with times in seconds of computation.

    Attributes:
        made_at: time of the snapshot, in seconds of `time.monotonic`.
        ranks: ranks of the waiting requests, in order.
        ahead: seconds of prompt computation before each waiting request. The last entry is the
            total.
        prompts: (index, tenant, seconds) of running requests with unfinished prompts.
        ends: seconds until each running request is done, ascending.
    """

    made_at: float
    ranks: list[tuple[int, int]]
    ahead: list[float]
    prompts: list[tuple[int, bytes, float]]
    ends: list[float]


class ProgressEstimate:
    """An estimator of each request's progress.

    The engine thread calls `observe` and `ended`. Any thread may call `progress`.

    Args:
        live: unfinished requests by index.
    """

    def __init__(self, live: Mapping[int, Sequence], scheduler: Scheduler) -> None:
        self._live = live
        self._most_running = scheduler.max_num_seqs
        self._min_tokens = min(_MIN_TOKENS, scheduler.max_batch_tokens)
        # (position, seconds per token) of the latest steps at each depth
        self._recent: dict[int, deque[tuple[float, float]]] = {}
        self._known: list[tuple[float, float]] = []  # mean position and median time per depth
        self._step_seconds = self._mean_outputs = 0.0
        self._board = _Board(-1.0, [], [0.0], [], [])

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Update the estimate with the measured time of a step."""
        self._step_seconds = _mean(self._step_seconds, seconds)
        prompts = [
            one for one in plan.work if len(one.token_ids) - one.num_drafted >= self._min_tokens
        ]
        if plan.preparing or not prompts:
            return
        rows = sum(len(one.token_ids) for one in plan.work)
        for one in prompts:
            middle = (one.start + one.stop) / 2
            self._recent.setdefault(_depth(int(middle)), deque(maxlen=_KEPT)).append(
                (middle, seconds / rows)
            )
        self._known = [
            (
                statistics.fmean(middle for middle, _ in kept),
                statistics.median(per_token for _, per_token in kept),
            )
            for _, kept in sorted(self._recent.items())
        ]

    def ended(self, sequence: Sequence) -> None:
        """Update the mean output length with a finished request."""
        if (outputs := sequence.num_tokens - sequence.request.num_prompt_tokens) > 0:
            self._mean_outputs = _mean(self._mean_outputs, outputs)

    def progress(self, index: int) -> Progress | None:
        """Return the current progress of a request, or None after its end."""
        sequence = self._live.get(index)
        if sequence is None:
            return None
        total = sequence.request.num_prompt_tokens
        began = sequence.marks.admitted_at
        computed = min(sequence.num_computed_tokens, total)
        elapsed = 0.0 if began is None else time.perf_counter() - began
        return Progress(
            total, sequence.num_cached_tokens, computed, elapsed, self._seconds_left(sequence)
        )

    def seconds(self, start: int, stop: int) -> float | None:
        """Return the estimated seconds to compute a prompt's tokens [start, stop).

        Returns:
            None before any measurement.
        """
        if not self._known:
            return None
        found = 0.0
        while start < stop:
            end = min(stop, _FIRST_DEPTH << _depth(start))
            found += (end - start) * self._per_token((start + end) / 2)
            start = end
        return found

    def _per_token(self, depth: float) -> float:
        """Return the seconds per token at a depth, interpolated between measured depths."""
        known = self._known
        at = bisect.bisect(known, (depth, 0.0))
        if len(known) < 2 or at == 0:
            return known[0][1]
        (low, first), (high, second) = (
            (known[at - 1], known[at]) if at < len(known) else (known[0], known[-1])
        )
        slope = (second - first) / (high - low)
        return second + (max(0.0, slope) if depth > high else slope) * (depth - high)

    def _prompt_seconds(self, sequence: Sequence) -> float:
        """Return the seconds to compute a prompt's pending tokens, or 0 for a decoding sequence."""
        pending = sequence.num_pending
        start = sequence.num_computed_tokens
        stop = sequence.num_tokens
        if pending < 2 or start >= stop:
            return 0.0
        return (self.seconds(start, stop) or 0.0) * min(1.0, pending / (stop - start))

    def _seconds_left(self, sequence: Sequence) -> float | None:
        """Return the seconds until the first token, assuming that no further requests arrive.

        The cache lookup happens at admission, so a waiting request counts with its whole prompt.
        """
        if not self._known:
            return None
        own = max(self._prompt_seconds(sequence), self._per_token(sequence.num_tokens))
        board = self._now()
        if sequence.status is SequenceStatus.RUNNING:
            return own + sum(self._share(sequence, own, other) for other in board.prompts)
        at = bisect.bisect_left(board.ranks, sequence.rank)
        lacking = len(board.ends) + at + 1 - self._most_running
        if sequence.blocked_at is not None:
            lacking = max(lacking, 1)
        return max(board.ahead[at], self._until_ended(board, lacking)) + own

    def _share(self, sequence: Sequence, own: float, other: tuple[int, bytes, float]) -> float:
        """Return the seconds by which another prompt delays this one.

        Within a tenant, shorter prompts are computed first, except for the share of the oldest one.
        Tenants share equally.
        """
        index, tenant, seconds = other
        if index == sequence.index:
            return 0.0
        if tenant != sequence.tenant:
            return min(seconds, own)
        if seconds <= own:
            return seconds
        return min(seconds, own / 3) if index < sequence.index else 0.0

    def _until_ended(self, board: _Board, count: int) -> float:
        """Return the seconds until `count` running requests, or their successors, are done."""
        if count < 1 or not board.ends:
            return 0.0
        rounds, at = divmod(count - 1, len(board.ends))
        return board.ends[at] + rounds * self._mean_outputs * self._step_seconds

    def _now(self) -> _Board:
        """Return a recent snapshot, taking a new one if the last is too old."""
        now = time.monotonic()
        if now - self._board.made_at < _BOARD_SECONDS:
            return self._board
        live = list(self._live.values())
        running = [one for one in live if one.status is SequenceStatus.RUNNING]
        waiting = sorted((one.rank, one) for one in live if one.status is SequenceStatus.WAITING)
        left = [(one, self._prompt_seconds(one)) for one in running]
        ends = [
            seconds + _steps_left(one, self._mean_outputs) * self._step_seconds
            for one, seconds in left
        ]
        first = sum(seconds for _, seconds in left)
        self._board = _Board(
            now,
            [rank for rank, _ in waiting],
            list(accumulate((self._prompt_seconds(one) for _, one in waiting), initial=first)),
            [(one.index, one.tenant, seconds) for one, seconds in left if seconds],
            sorted(ends),
        )
        return self._board


def _depth(position: int) -> int:
    return (position // _FIRST_DEPTH).bit_length()


def _mean(mean: float, latest: float) -> float:
    """Return a running mean updated with the latest value. A mean of 0 is replaced by the value."""
    return mean + _LATEST * (latest - mean) if mean else latest


def _steps_left(sequence: Sequence, mean: float) -> float:
    """Return the expected number of steps after a sequence's prompt.

    The first output token takes no step, because the prompt's last step computes it.

    Args:
        mean: mean output length in tokens, or 0 if unknown.
    """
    request = sequence.request
    if request.prefill_only or request.logits_start is not None:
        return 0.0
    most = request.max_tokens - sequence.num_tokens
    generated = sequence.num_tokens - request.num_prompt_tokens
    left = min(most, max(mean - generated, mean / 2)) if mean else most
    return left if generated else max(0.0, left - 1)
