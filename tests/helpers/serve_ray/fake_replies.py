"""Replies of replicas to the questions of a pool, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any, cast

from kvboost_edge import __version__
from kvboost_edge.engine.request.sampling_defaults import DEFAULT_SAMPLING
from kvboost_edge.serve_ray.messages import Description, ReplicaFigures, ReplicaUpdate
from kvboost_edge.serve_ray.routing.cache_records import ReplicaReport

ABOUT = {"version": __version__, "model": "m", "root": b"r".hex()}
NEVER = 600.0  # seconds: longer than any test


class Reply:
    """Ray's response to a question. It waits forever if `found` is None."""

    def __init__(self, found: Any, cancelled: Callable[[], None] = lambda: None) -> None:
        self._found = found
        self.cancel = cancelled

    def __await__(self) -> Generator[Any, None, Any]:
        if self._found is None:
            yield from asyncio.Event().wait().__await__()
        return self._found


def reply_of(name: str, method: str, seconds_per_token: float) -> Any:
    """Return the answer of an idle replica to a question."""
    if method == "tell":
        report = ReplicaReport(serial=1, seconds_per_token=seconds_per_token)
        return ReplicaUpdate(name, True, report, [])
    if method == "describe":
        about = (cast(Any, None), DEFAULT_SAMPLING, True, None, True, 0, None)
        return Description(name, 1, "m", b"r", 16, *about)
    if method == "figures":
        return ReplicaFigures(name, {"num_blocks": 4}, {}, 1, 2, 3, {}, {})
    return [ord(name)], [(1, 2, 3)]
