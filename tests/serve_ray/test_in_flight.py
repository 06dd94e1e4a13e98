"""The path of a request in flight, without replicas."""

import asyncio
from typing import Any, cast

import pytest

from kvboost_edge.engine.handle import RequestHandle, TokenEvent
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.errors import CapacityError, RequestError
from kvboost_edge.serve_ray.in_flight import CancelledBeforeStart, Flight, ReplicaLost
from kvboost_edge.serve_ray.messages import Came, Sent, failure_of
from kvboost_edge.serve_ray.routing.cache_records import RoutingDecision
from kvboost_edge.serve_ray.routing.prompt_chain import PromptChain
from kvboost_edge.serve_ray.routing.router import PrefixRouter


def test_a_request_cancelled_before_its_start_is_never_sent():
    handle = RequestHandle(1, lambda number: None, lambda number: None, 1)
    nothing = None

    class Named:
        request = "r"

    sent = Named()

    def never(*_):
        raise AssertionError("the request was sent")

    flight = Flight(
        sent, nothing, handle, nothing, choices=never, call=never, end=never, keep=never
    )
    flight.cancel()
    asyncio.run(flight.run())
    with pytest.raises(CancelledBeforeStart, match="request r was cancelled"):
        handle.result(timeout=60)


class Answer:
    """Result of a call, in Ray's form."""

    def __init__(self, came, error=None):
        self._came = came
        self._error = error

    async def __aiter__(self):
        for one in self._came:
            yield one
        if self._error is not None:
            raise self._error

    def cancel(self):
        pass


class Pools:
    """The interface of replicas that a request in flight uses.

    Replicas in `refusing` refuse it, and those in `broken` fail after the given parts.
    """

    def __init__(self, refusing, names, broken=None):
        self.refusing = refusing
        self.broken = broken or {}
        self.names = names
        self.asked = []

    def choices(self, chain, count):
        return [RoutingDecision(name, 0, 1, 0.1) for name in self.names[:count]]

    def call(self, sent):
        name = sent.targets[0]
        self.asked.append(name)
        if name in self.broken:
            return Answer(*self.broken[name])
        if name in self.refusing:
            return Answer(
                [Came(name, failure=failure_of(CapacityError(f"the pool of {name} is too small")))]
            )
        return Answer([Came(name), Came(name, result=cast(Any, f"by {name}"))])

    def run(self):
        handle = RequestHandle(1, lambda number: None, lambda number: None, 1)
        sent = Sent("r", (), b"", SamplingParams(), Terms(), None, 0.0, None, 1)
        flight = Flight(
            sent,
            PromptChain((), 1, 16),
            handle,
            PrefixRouter(),
            choices=self.choices,
            call=self.call,
            end=cast(Any, None),
            keep=cast(Any, None),
        )
        asyncio.run(flight.run())
        return handle


def test_a_request_too_large_for_a_pool_tries_all_others():
    pools = Pools({"a", "b"}, ["a", "b", "c"])
    assert pools.run()._result == "by c"
    assert pools.asked == ["a", "b", "c"]
    alike = Pools({"a", "b"}, ["a", "b"])
    with pytest.raises(CapacityError, match="the pool of b is too small"):
        alike.run().result(timeout=60)
    assert alike.asked == ["a", "b"]
    many = Pools(set("abcdefgh"), list("abcdefgh"))
    with pytest.raises(CapacityError, match="the pool of h is too small"):
        many.run().result(timeout=60)
    assert many.asked == list("abcdefgh")
    last = Pools(set("abcdefg"), list("abcdefgh"))
    assert last.run()._result == "by h"


@pytest.mark.parametrize(
    "kind", ["ActorDiedError", "OutOfMemoryError", "NodeDiedError", "ObjectLostError"]
)
def test_a_request_survives_the_end_of_its_replica_until_its_first_token(imported_ray, kind):
    """Ray reports replicas that its memory monitor killed with an error of their own."""
    exceptions = imported_ray.exceptions
    error = {
        "ActorDiedError": exceptions.ActorDiedError,
        "OutOfMemoryError": lambda: exceptions.OutOfMemoryError("the node ran low on memory"),
        "NodeDiedError": lambda: exceptions.NodeDiedError("the node died"),
        "ObjectLostError": lambda: exceptions.ObjectLostError("00" * 28, None, ""),
    }[kind]()
    waiting = Pools(set(), ["a", "b"], {"a": ([Came("a")], error)})
    assert waiting.run()._result == "by b"
    assert waiting.asked == ["a", "b"]
    event = TokenEvent(5, "text", 1.0)
    started = Pools(set(), ["a", "b"], {"a": ([Came("a"), Came("a", (event,))], error)})
    with pytest.raises(ReplicaLost):
        started.run().result(timeout=60)
    assert started.asked == ["a"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RequestError("too long"), RequestError("too long")),
        (
            RequestError("no budget", option="reasoning_budget"),
            RequestError("no budget", option="reasoning_budget"),
        ),
        (CapacityError("the pool is too small"), CapacityError("the pool is too small")),
        (ValueError("a client's text"), RuntimeError("ValueError in a replica")),
    ],
    ids=str,
)
def test_an_error_of_a_replica_reaches_the_caller(error, expected):
    found = failure_of(error).as_error()
    assert (type(found), str(found)) == (type(expected), str(expected))
    assert getattr(found, "option", None) == getattr(expected, "option", None)


def test_other_errors_of_ray_end_a_request(imported_ray):
    exceptions = imported_ray.exceptions
    error = exceptions.ObjectStoreFullError("the object store is full")
    pools = Pools(set(), ["a", "b"], {"a": ([Came("a")], error)})
    with pytest.raises(exceptions.ObjectStoreFullError):
        pools.run().result(timeout=60)
