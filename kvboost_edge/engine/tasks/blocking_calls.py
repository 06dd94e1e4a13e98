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
from kvboost_edge.engine.schedule.sequence import Floats
from kvboost_edge.errors import KVBoostError

__all__ = ["Calls"]


class Calls:
    """Blocking calls of one engine. Safe to use from any thread except the engine thread."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

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
        with self.cancelling(requests):
            queued: collections.deque[tuple[RequestHandle, list[Floats]]] = collections.deque()
            left = iter(requests)
            for _ in requests:
                for request in itertools.islice(left, window - len(queued)):
                    queued.append(self._core.submit_logits(request))
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
