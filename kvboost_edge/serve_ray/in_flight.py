"""The way of a request from the ingress to a replica and back, on the pool's event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

from kvboost_edge.engine.handle import RequestHandle
from kvboost_edge.engine.request.progress import Progress
from kvboost_edge.errors import CapacityError, KVBoostError
from kvboost_edge.serve_ray.messages import Came, Sent
from kvboost_edge.serve_ray.routing.cache_records import RoutingDecision
from kvboost_edge.serve_ray.routing.prompt_chain import PromptChain
from kvboost_edge.serve_ray.routing.router import PrefixRouter
from kvboost_edge.server.api_errors import ApiError, NoReplica

__all__ = ["CancelledBeforeStart", "Flight", "ReplicaLost", "Stream", "is_loss"]

_TRIES = 4
_TARGETS = 3  # replicas to try in order, before any other
_ENDING_SECONDS = 5.0  # wait for a cancelled request to end


class ReplicaLost(ApiError):
    """Error 503: the replica ended in the middle of an answer.

    A client may send the request again. Another replica then computes it.
    """

    def __init__(self) -> None:
        message = "the replica that computed this answer ended; send the request again"
        super().__init__(503, message, code="replica_lost", headers={"Retry-After": "1"})


class CancelledBeforeStart(KVBoostError):
    """The request was cancelled before a replica began it, or its replica reported no outcome."""


class Stream(Protocol):
    """The stream of a streaming Ray call."""

    def __aiter__(self) -> AsyncIterator[Any]: ...

    def cancel(self) -> None: ...


def is_loss(error: BaseException) -> bool:
    """Return whether an error means that a replica, or the connection to it, is lost."""
    from ray import exceptions
    from ray.serve.exceptions import DeploymentUnavailableError

    kinds = (
        exceptions.RayActorError,
        exceptions.OutOfMemoryError,  # Ray's memory monitor has killed the replica.
        exceptions.NodeDiedError,
        exceptions.ObjectLostError,
        exceptions.RpcError,
        exceptions.RaySystemError,
    )
    return isinstance(error, (*kinds, DeploymentUnavailableError))


class Flight:
    """A request in flight, which is sent to a replica and whose answer goes to its handle.

    Args:
        sent: The request.
        chain: The prompt of the request.
        handle: Receives the answer.
        router: Router to inform when the request starts.
        choices: Function of (prompt, count) that returns at most `count` replicas, best first.
        call: Function that sends the request and returns the stream of its answer.
        end: Function that asks the replicas to cancel the request.
        keep: Function that stores the token ids of the answer's text.

    Attributes:
        progress: Progress of the prompt, as last reported by the replica.
    """

    def __init__(
        self,
        sent: Sent,
        chain: PromptChain,
        handle: RequestHandle,
        router: PrefixRouter,
        *,
        choices: Callable[[PromptChain, int], list[RoutingDecision]],
        call: Callable[[Sent], Stream],
        end: Callable[[Sent], Awaitable[None]],
        keep: Callable[[Sent, str, list[int]], None],
    ) -> None:
        self._sent = sent
        self._chain = chain
        self._handle = handle
        self._router = router
        self._choices = choices
        self._call = call
        self._end = end
        self._keep = keep
        self._queued: RoutingDecision | None = None  # where the tokens count as queued
        self.progress: Progress | None = None
        self._begun = time.monotonic()
        self._has_begun = self._has_events = self._is_cancelled = False
        self._stream: Stream | None = None
        self._ending: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Run until the handle has a result or an error."""
        self._task = asyncio.current_task()
        try:
            if self._is_cancelled:  # cancelled before this task began
                raise asyncio.CancelledError
            await self._run()
        except asyncio.CancelledError:
            self._handle._finish(
                None, CancelledBeforeStart(f"request {self._sent.request} was cancelled")
            )
        except Exception as error:
            self._handle._finish(None, error)
        finally:
            self._settle()
            if self._stream is not None:
                self._stream.cancel()  # harmless if the stream has ended
            if self._ending is not None:
                self._ending.cancel()

    def cancel(self) -> None:
        """Cancel the request: in the replica if it has begun there, else only here."""
        self._is_cancelled = True
        if self._ending is None and self._task is not None and not self._task.done():
            if self._has_begun:
                self._ending = asyncio.ensure_future(self._end_there())
            else:
                self._task.cancel()

    async def _end_there(self) -> None:
        with suppress(Exception):
            await asyncio.wait_for(self._end(self._sent), _ENDING_SECONDS)
        await asyncio.sleep(_ENDING_SECONDS)
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        lost: set[str] = set()
        refusal: CapacityError | None = None
        tries = 0
        while tries < _TRIES:
            choice, sent = self._placed(lost)
            if choice is None and refusal is not None:
                raise refusal
            try:
                if await self._follow(sent):
                    return
                tries += 1
            except CapacityError as error:  # Another replica may have a larger pool.
                if self._has_events or self._ending is not None or choice is None:
                    raise
                refusal = error
            except Exception as error:
                if not is_loss(error):
                    raise
                tries += 1
            if self._has_events or self._ending is not None:
                raise ReplicaLost
            # The client has seen nothing yet, so another replica may compute the answer.
            if self._stream is not None:
                self._stream.cancel()
            self._settle()
            if choice is not None:
                lost.add(choice.replica_id)
            self._has_begun = False
        raise NoReplica if refusal is None else refusal

    def _settle(self) -> None:
        """Tell the router that the request's tokens are no longer queued."""
        if self._queued is not None:
            self._router.note_not_started(self._queued)
            self._queued = None

    def _placed(self, lost: set[str]) -> tuple[RoutingDecision | None, Sent]:
        """Choose targets that are not lost; return the best one, and the request for them."""
        now = time.monotonic()
        choices = [
            choice
            for choice in self._choices(self._chain, _TARGETS + len(lost))
            if choice.replica_id not in lost
        ][:_TARGETS]
        passed = now - self._begun
        sent = self._sent._replace(
            targets=tuple(choice.replica_id for choice in choices),
            since=self._sent.since + passed,
            left=None if self._sent.left is None else max(0.0, self._sent.left - passed),
            missing_tokens=choices[0].missing_tokens if choices else self._chain.num_tokens,
            restored_tokens=choices[0].restored_tokens if choices else 0,
        )
        if not choices:
            return None, sent
        self._router.note_routed(choices[0], self._chain, now)
        self._queued = choices[0]
        return choices[0], sent

    async def _follow(self, sent: Sent) -> bool:
        """Pass the answer on; return False if the replica ended before the answer was complete."""
        handle = self._handle
        self._stream = self._call(sent)
        async for came in self._stream:
            assert isinstance(came, Came)
            self._has_begun = True
            handle.cached_tokens = came.cached_tokens
            handle.prompt_logprobs = came.prompt_logprobs
            self.progress = came.progress
            if came.events or came.result is not None:
                self._settle()
            for event in came.events:
                self._has_events = True
                handle._push(event)
            if came.failure is not None:
                if came.failure.has_died:
                    return False
                raise came.failure.as_error()
            if came.result is not None:
                handle.pinned_tokens = came.pinned_tokens
                if came.kept is not None:
                    self._keep(sent, came.result.output_text, came.kept)
                self._stream = None
                handle._finish(came.result, None)
                return True
        return False
