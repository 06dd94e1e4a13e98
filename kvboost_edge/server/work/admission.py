"""Admission control with a bounded queue, deadlines and cancellation on disconnect.

`async with state.admit(request, num_tokens) as admission` encloses the entire handling of a
generating request. Entering takes microseconds and precedes any expensive work, so a full server
rejects requests at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request

from kvboost_edge.server.api_errors import (
    ApiError,
    ClientGone,
    DeadlineExceeded,
    QueueFull,
    ShuttingDown,
)
from kvboost_edge.server.engines import replicas_of
from kvboost_edge.server.traces import TRACE_FACT
from kvboost_edge.server.work.grouping import PrefixGroups
from kvboost_edge.server.work.tenant_shares import Shares

if TYPE_CHECKING:
    from kvboost_edge.engine.request.results import GenerationResult
    from kvboost_edge.server.engines import Engine
    from kvboost_edge.server.settings import ServerSettings
    from kvboost_edge.server.traces import RequestTrace

__all__ = ["Admission", "AdmissionQueue", "Bodies", "Observer", "queue_full"]

_MAX_RETRY_AFTER = 60
_LARGEST_BODIES = 8  # limit of all held bodies, as a multiple of --max-body-bytes
_QUEUE_TOKENS_PER_POOL = 16  # default of --max-queue-tokens, as a multiple of the pool's capacity


class Observer(Protocol):
    """Interface that counts finished and aborted sequences."""

    def observe(self, result: GenerationResult) -> None: ...

    def observe_aborted(self, num_sequences: int) -> None: ...


class AdmissionQueue:
    """Count of the sequences and tokens in flight, by tenant (see tenant_shares.py).

    Only the event loop's thread uses it.
    """

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        # Read once, when the server starts. With `patient`, this includes replicas that are busy.
        pools = [figures.paged_stats() for figures in replicas_of(engine, patient=True).values()]
        self.weights = settings.tenant_weights
        self.batch = settings.max_batch_size or sum(int(pool["max_num_seqs"]) for pool in pools)
        sizes = [int(pool["num_blocks"]) * int(pool["block_size"]) for pool in pools]
        self.pool_tokens = min(sizes)  # a request may run in the pool of any replica
        self.request_timeout = settings.request_timeout
        self._places = Shares(self.batch + settings.max_queue_size, self.weights, least=1)
        most_tokens = settings.max_queue_tokens or _QUEUE_TOKENS_PER_POOL * sum(sizes)
        self._tokens = Shares(most_tokens, self.weights)
        self.refused = 0
        self.admitted: set[Admission] = set()
        self.groups = PrefixGroups(settings.batch_window_ms / 1e3, engine.config.block_size)
        self._mean_seconds = 1.0

    @property
    def sequences(self) -> int:
        """Number of sequences in flight."""
        return self._places.used

    @property
    def max_sequences(self) -> int:
        """Maximum number of sequences in flight."""
        return self._places.limit

    @property
    def tokens(self) -> int:
        """Estimated number of tokens of the requests in flight."""
        return self._tokens.used

    def check(self, tenant: str | None, num_sequences: int = 1, num_tokens: int = 0) -> None:
        """Raise an error if these sequences and tokens do not fit.

        Raises:
            QueueFull: they do not fit together with the requests in flight (503).
            ApiError: they exceed the tenant's maximum, so they can never fit (400).
        """
        self.check_size(tenant, num_sequences, num_tokens)
        refusal = self.refusal(tenant, num_sequences, num_tokens)
        if refusal is not None:
            self.refused += 1
            raise refusal

    def check_size(self, tenant: str | None, num_sequences: int, num_tokens: int) -> None:
        """Raise ApiError (400) if these sequences and tokens can never fit."""
        most_sequences = self._places.most(tenant)
        most_tokens = self._tokens.most(tenant)
        if num_sequences > most_sequences:
            raise ApiError(
                400,
                f"the request needs {num_sequences} sequences, but the limit is {most_sequences}; "
                "request fewer, or raise --max-queue-size",
                code="request_too_large",
            )
        if num_tokens > most_tokens:
            raise ApiError(
                400,
                f"the request holds about {num_tokens} tokens, but the limit is {most_tokens}; "
                "send less, or raise --max-queue-tokens",
                code="request_too_large",
            )

    def refusal(
        self, tenant: str | None, num_sequences: int = 1, num_tokens: int = 0
    ) -> QueueFull | None:
        """Return the error for sequences and tokens that do not fit now, or None if they fit.

        Does not count the request as rejected.
        """
        if not self._places.fit(tenant, num_sequences):
            return queue_full(
                "{used} requests{owner} are in flight",
                self._places,
                tenant,
                remedy="raise --max-queue-size",
                retry_after=self.retry_after(tenant),
            )
        if not self._tokens.fit(tenant, num_tokens):
            return queue_full(
                "requests{owner} with {used} tokens are in flight",
                self._tokens,
                tenant,
                remedy="raise --max-queue-tokens",
                retry_after=self.retry_after(tenant),
            )
        return None

    def enter(self, tenant: str | None, num_sequences: int, num_tokens: int) -> None:
        """Count an admitted request. Raises the errors of `check` if it does not fit."""
        self.check(tenant, num_sequences, num_tokens)
        self._places.take(tenant, num_sequences)
        self._tokens.take(tenant, num_tokens)

    def leave(self, tenant: str | None, num_sequences: int, num_tokens: int) -> None:
        """Stop counting a request that has ended."""
        self._places.give_back(tenant, num_sequences)
        self._tokens.give_back(tenant, num_tokens)

    def cancel_all(self) -> None:
        """Cancel every request in flight."""
        for admission in list(self.admitted):
            admission.cancel(ShuttingDown())

    def took(self, seconds: float) -> None:
        """Update the mean duration of requests with the duration of one request."""
        self._mean_seconds += 0.1 * (seconds - self._mean_seconds)

    def retry_after(self, tenant: str | None = None) -> int:
        """Return the estimated seconds until the queue has room."""
        # With several tenants, use only this tenant's count. The estimate must not reveal other
        # tenants' requests.
        in_flight = self._places.used_by(tenant) if self._places.are_kept else self.sequences
        seconds = self._mean_seconds * max(1, in_flight) / self.batch
        return max(1, min(_MAX_RETRY_AFTER, math.ceil(seconds)))


class Bodies:
    """Request bodies that the server holds for all models, and a lock for parsing long ones.

    Only the event loop's thread uses it.
    """

    def __init__(self, settings: ServerSettings) -> None:
        # Python parses JSON without releasing the GIL. With a lock of the event loop, the next body
        # is parsed only after the loop has run once. With a queue of the worker thread, another
        # body would be parsed each time that the loop releases the GIL, for instance in `recv`.
        self.reading = asyncio.Lock()
        self._held = Shares(_LARGEST_BODIES * settings.max_body_bytes, settings.tenant_weights)
        self.refused = 0

    @property
    def num_bytes(self) -> int:
        """Bytes currently held."""
        return self._held.used

    def hold(self, tenant: str | None, num_bytes: int) -> None:
        """Count received bytes of a body. Raises QueueFull if all bodies together are too large."""
        if not self._held.fit(tenant, num_bytes):
            self.refused += 1
            raise queue_full(
                "request bodies{owner} take {used} bytes",
                self._held,
                tenant,
                remedy=f"raise --max-body-bytes (the limit is {_LARGEST_BODIES} times its value)",
                retry_after=1,
            )
        self._held.take(tenant, num_bytes)

    def free(self, tenant: str | None, num_bytes: int) -> None:
        """Stop counting the bytes of a request that has ended."""
        self._held.give_back(tenant, num_bytes)


def queue_full(
    problem: str, shares: Shares, tenant: str | None, *, remedy: str, retry_after: int
) -> QueueFull:
    """Return the error for a resource that is used up.

    Args:
        problem: description with the fields {used} and {owner}.
        shares: the resource.
        tenant: tenant of the request.
        remedy: option that raises the limit, in an imperative.
        retry_after: seconds after which the client may try again.
    """
    if shares.are_kept:
        used = problem.format(used=shares.used_by(tenant), owner=" of this API key")
        limit = f"its share is {shares.kept_for(tenant)}, and no more is free"
    else:
        used = problem.format(used=shares.used, owner="")
        limit = f"limit: {shares.limit}"
    return QueueFull(f"{used} ({limit}); try again later, or {remedy}", retry_after)


class Admission:
    """An admitted request, as an async context manager.

    If the client disconnects or the deadline passes, the task inside the `async with` is cancelled,
    and leaving the block raises the matching ApiError. Entering raises QueueFull (503), or ApiError
    400 for a request that can never fit.

    Attributes:
        facts: facts for the request's log line, which include the tenant from AuthMiddleware.
        tenant: tenant of the API key; None without keys.
        weight: scheduling weight of the tenant.
        pin_share: fraction of the pinnable blocks that the tenant may pin, by its weight.
        streams: whether the answer is streamed. Its deadline then moves with each part of it.
        arrived_at: start of the times in the request's results, in seconds of `time.perf_counter`.
        background: kind of a background request, such as a line of a batch, see the engine's
            `Terms`. It takes no place in the queue, because its sender limits the number in flight.
    """

    def __init__(
        self,
        queue: AdmissionQueue,
        observer: Observer,
        request: Request,
        num_tokens: int,
        num_sequences: int,
        *,
        streams: bool = False,
    ) -> None:
        self.facts: dict[str, Any] = request.scope.setdefault("kvboost", {})
        self.tenant: str | None = self.facts.get("tenant")
        self.weight = 1.0 if self.tenant is None else queue.weights[self.tenant]
        self.pin_share = 1.0 if self.tenant is None else self.weight / sum(queue.weights.values())
        self.background: str | None = self.facts.get("background")
        self.timeout = float(self.facts.get("timeout", queue.request_timeout))
        self.streams = streams
        self.arrived_at = time.perf_counter()
        # The time spent waiting for the model to load counts towards the deadline.
        self.deadline = (
            time.monotonic() + self.timeout - float(self.facts.get("load_wait_seconds", 0.0))
        )
        self._queue = queue
        self._observer = observer
        self._request = request
        self._num_tokens = num_tokens
        self._num_sequences = num_sequences
        self._reason: ApiError | None = None
        self._task: asyncio.Task[object] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._group: bytes | None = None
        self._num_observed = 0
        self._entered = 0.0
        self._has_progressed = False
        self._prompt_tokens: Callable[[], int] = int
        self._num_computed = 0

    async def __aenter__(self) -> Admission:
        queue = self._queue
        if self.background is None:
            queue.enter(self.tenant, self._num_sequences, self._num_tokens)
        else:
            queue.check_size(self.tenant, self._num_sequences, self._num_tokens)
        queue.admitted.add(self)
        loop = asyncio.get_running_loop()
        self._entered = time.monotonic()
        self._task = asyncio.current_task()
        self._timer = loop.call_later(self.deadline - self._entered, self._expire)
        self._watch = loop.create_task(self._await_disconnect())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        queue = self._queue
        if self.background is None:
            queue.leave(self.tenant, self._num_sequences, self._num_tokens)
            queue.took(time.monotonic() - self._entered)
        queue.admitted.discard(self)
        self.first_token()
        if self._reason is not None or isinstance(error, (DeadlineExceeded, ShuttingDown)):
            self._observer.observe_aborted(max(0, self._num_sequences - self._num_observed))
        if self._timer is not None:
            self._timer.cancel()
        if self._watch is not None:
            self._watch.cancel()
        # A cancelled task keeps its error, whose traceback refers to this admission. A reference to
        # the task would close a cycle of all the request's objects, which only the garbage
        # collector could free.
        self._watch = None
        if self._reason is None or self._task is None:
            return
        if not isinstance(error, asyncio.CancelledError):
            with contextlib.suppress(asyncio.CancelledError):
                # The block ended before the cancellation arrived. Consume the pending cancellation.
                await asyncio.sleep(0)
        if not self._task.uncancel() and isinstance(error, asyncio.CancelledError):
            raise self._reason from None

    def cancel(self, reason: ApiError) -> None:
        """Cancel the work inside the block. Leaving the block then raises `reason`."""
        if self._reason is None and self._task is not None:
            self._reason = reason
            self._task.cancel()

    def observe(self, result: GenerationResult) -> None:
        """Count a finished sequence in the metrics and in the request's log line."""
        self._num_observed += 1
        self._observer.observe(result)
        trace: RequestTrace | None = self.facts.get(TRACE_FACT)
        if trace is not None:
            trace.observe(result, self.arrived_at)
        counts = {
            "prompt_tokens": result.prompt_tokens,
            "cached_tokens": result.exact_cached_tokens,
            "generated_tokens": result.generated_tokens,
        }
        for name, count in counts.items():
            self.facts[name] = self.facts.get(name, 0) + count

    async def group(self, prompt_ids: Sequence[int]) -> None:
        """Wait, at most for the batch window, while another request computes the same first block.

        Call it immediately before the prompt is submitted.
        """
        if self._group is None:
            self._group = await self._queue.groups.join(self.tenant, prompt_ids)

    @property
    def is_late(self) -> bool:
        """True once the deadline has ended the work."""
        return isinstance(self._reason, DeadlineExceeded)

    def first_token(self) -> None:
        """Release the requests that wait for this request's prefix."""
        if self._group is not None:
            self._queue.groups.leave(self._group)
            self._group = None

    def progress(self) -> None:
        """Extend the deadline of a stream, a part of which is now sent."""
        if self.streams:
            self._has_progressed = True
            self.deadline = time.monotonic() + self.timeout

    def follow_prompt(self, prompt_tokens: Callable[[], int]) -> None:
        """Extend the deadline of a stream as long as its prompt advances.

        Args:
            prompt_tokens: returns the number of prompt tokens computed so far.
        """
        self._prompt_tokens = prompt_tokens

    def _has_prompt_advanced(self) -> bool:
        """Return whether prompt tokens of a stream were computed since the last call."""
        if not self.streams or self._has_progressed:
            return False
        before, self._num_computed = self._num_computed, self._prompt_tokens()
        return self._num_computed > before

    def _expire(self) -> None:
        """Cancel the work, or wait again if the deadline has moved or the prompt advances."""
        left = self.deadline - time.monotonic()
        if left <= 0 and self._has_prompt_advanced():
            left = self.timeout
            self.deadline = time.monotonic() + left
        if left <= 0:
            self.cancel(DeadlineExceeded(self.timeout, in_stream=self._has_progressed))
        else:
            self._timer = asyncio.get_running_loop().call_later(left, self._expire)

    async def _await_disconnect(self) -> None:
        """Cancel the work when the client disconnects."""
        # The body was read before, so the only message that can arrive is the disconnect.
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self.cancel(ClientGone())
