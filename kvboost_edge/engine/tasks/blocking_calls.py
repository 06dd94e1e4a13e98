"""Blocking calls that submit several requests and cancel them on an interrupt."""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvboost_edge.engine.core import EngineCore
from kvboost_edge.engine.handle import RequestHandle, wait_for_all
from kvboost_edge.engine.request.request import Request
from kvboost_edge.engine.request.results import GenerationResult
from kvboost_edge.engine.request_builder import RequestBuilder
from kvboost_edge.engine.schedule.sequence import Floats
from kvboost_edge.errors import KVBoostError

__all__ = ["Calls"]


class Calls:
    """Blocking calls of one engine. Safe to use from any thread except the engine thread."""

    def __init__(self, core: EngineCore, builder: RequestBuilder) -> None:
        self._core = core
        self._builder = builder

    def run(
        self, requests: Sequence[Request], submit: Callable[[Request], RequestHandle] | None = None
    ) -> list[GenerationResult]:
        """Submit all requests and wait for the results.

        Args:
            requests: The requests.
            submit: Function to use instead of the core's `submit`.
        """
        with self.cancelling(requests):
            return wait_for_all([(submit or self._core.submit)(request) for request in requests])

    def run_in_turn(
        self, requests: Sequence[Request], handles: list[RequestHandle], window: int
    ) -> None:
        """Compute requests that generate nothing, a few at a time.

        After a request that failed, was cancelled or timed out, no further ones are submitted. The
        first error is raised after all submitted requests are done.

        Args:
            requests: The requests.
            handles: List that receives the requests' handles.
            window: Number of requests submitted at a time, see `rows`.
        """
        submitted: list[Request] = []
        queued: collections.deque[RequestHandle] = collections.deque()
        left = iter(requests)
        failure: Exception | None = None
        with self.cancelling(submitted):
            while True:
                for request in itertools.islice(left, window - len(queued)):
                    queued.append(self._core.submit(self._arriving(request, submitted)))
                    handles.append(queued[-1])
                if not queued:
                    break
                try:
                    is_whole = queued.popleft().result().finish_reason == "length"
                except Exception as error:
                    failure = failure or error
                    is_whole = False
                if not is_whole:
                    left = iter(())
        if failure is not None:
            raise failure

    def _arriving(self, request: Request, submitted: list[Request]) -> Request:
        """Return a request with a new index, and add it to the submitted ones.

        The index puts it after requests of others that came while it was not submitted.
        """
        submitted.append(self._builder.renumbered(request))
        return submitted[-1]

    def logits(self, request: Request) -> tuple[GenerationResult, Floats]:
        """Return the result and the logits, float32 [num_tokens - logits_start, vocab_size]."""
        with self.cancelling([request]):
            handle, rows = self._core.submit_logits(request)
            result = handle.result()
        return result, np.concatenate(rows)

    def rows(
        self, requests: Sequence[Request], handles: list[RequestHandle], window: int
    ) -> Iterator[Floats]:
        """Yield the rows of logits or hidden states of each request, in order.

        Args:
            requests: The requests.
            handles: List that receives the requests' handles.
            window: Number of requests submitted at a time. It limits the rows in memory and leaves
                capacity for other requests.

        Raises:
            KVBoostError: A request ended before it was computed.
        """
        submitted: list[Request] = []
        with self.cancelling(submitted):
            queued: collections.deque[tuple[RequestHandle, list[Floats]]] = collections.deque()
            left = iter(requests)
            for _ in requests:
                for request in itertools.islice(left, window - len(queued)):
                    queued.append(self._core.submit_logits(self._arriving(request, submitted)))
                    handles.append(queued[-1][0])
                handle, rows = queued.popleft()
                reason = handle.result().finish_reason
                if reason != "length":
                    raise KVBoostError(
                        f"an input ended with finish_reason={reason!r} before it was computed"
                    )
                yield np.concatenate(rows)

    @contextlib.contextmanager
    def cancelling(self, requests: Sequence[Request]) -> Iterator[None]:
        """Cancel the requests if the body raises."""
        # Ctrl-C may arrive before a submitted request's handle is stored, so cancel by index.
        # Cancelling an unknown index does nothing.
        try:
            yield
        except BaseException:
            for request in requests:
                self._core.cancel(request.index)
            raise
