"""A request's way, without replicas."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvboost_edge.engine.handle import RequestHandle
from kvboost_edge.serve_ray.flight import Cancelled, Flight


def test_what_is_cancelled_before_it_begins_is_never_sent() -> None:
    handle = RequestHandle(1, lambda number: None, lambda number: None, 1)
    nothing: Any = None

    class Named:
        request = "r"

    sent: Any = Named()

    def never(*_: Any) -> Any:
        raise AssertionError("it was sent")

    flight = Flight(sent, nothing, handle, nothing, choices=never, call=never, end=never, keep=never)
    flight.cancel()
    asyncio.run(flight.run())
    with pytest.raises(Cancelled, match="request r was cancelled"):
        handle.result(timeout=60)
