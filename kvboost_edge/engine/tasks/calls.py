"""Requests of this process: queued together, waited for, and cancelled on an interrupt."""

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
    """Waits for requests on one engine's thread. Safe to use from any thread but that one."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def run(
        self, requests: Sequence[Request], submit: Callable[[Request], RequestHandle] | None = None
    ) -> list[GenerationResult]:
        """Queue all and wait for the results; `submit` queues one in place of the core."""
        with self.cancelling(requests):
            return wait_for_all([(submit or self._core.submit)(request) for request in requests])

    def logits(self, request: Request) -> tuple[GenerationResult, Floats]:
        """The result of a request for logits, and those, float32 [num_tokens - logits_start,
        vocab_size].
        """
        with self.cancelling([request]):
            handle, rows = self._core.submit_logits(request)
            result = handle.result()
        return result, np.concatenate(rows)

    def rows(
        self, requests: Sequence[Request], handles: list[RequestHandle], window: int
    ) -> Iterator[Floats]:
        """What each of many requests for logits or states gives, in order; `window` of them are
        queued at a time, so that others get their turn and few rows are held. `handles` gets
        theirs. KVBoostError once one was ended.
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
                        f"an input was ended (finish_reason={reason!r}) before it was computed"
                    )
                yield np.concatenate(rows)

    @contextlib.contextmanager
    def cancelling(self, requests: Sequence[Request]) -> Iterator[None]:
        """Whatever is raised inside cancels these requests. Ctrl-C may come at any moment, between
        queueing a request and holding its handle too, so they are named by their numbers; one that
        is not there does not mind.
        """
        try:
            yield
        except BaseException:
            for request in requests:
                self._core.cancel(request.index)
            raise
