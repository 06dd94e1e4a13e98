"""Embedding and reranking in one of several replicas, and calls in all of them. Without Ray."""

import asyncio
import contextlib
import logging
from collections import Counter
from typing import Any, cast

import pytest

from helpers.serve_ray.fake_replies import ABOUT, NEVER, Reply, reply_of
from helpers.server.live_servers import wait_until
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.serve_ray import replicas
from kvboost_edge.serve_ray.messages import CallOutcome, Failure, Sent
from kvboost_edge.serve_ray.pool import ReplicatedEngine
from kvboost_edge.serve_ray.replicas import Replicas
from kvboost_edge.server.api_errors import NoReplica


class Call:
    """Ray's stream of a call to a replica, which ends once `released` is set."""

    def __init__(self, outcome, released):
        self._outcome = outcome
        self._released = released

    async def __aiter__(self):
        yield None
        await self._released.wait()
        yield self._outcome

    def cancel(self):
        pass


class Handle:
    """Deployment handle whose replicas report once that they are idle.

    Attributes:
        outcomes: Outcome of a call by replica; the name of the replica if it is missing.
        speeds: Seconds per token by replica.
        sent: Calls of engine methods: the request, and the chosen replica.
        asked: Number of polls by replica.
        released: Event without which no call of an engine method ends.
    """

    def __init__(self):
        self.outcomes = {}
        self.speeds = {}
        self.sent = []
        self.asked = Counter()
        self.released = asyncio.Event()

    def options(self, method_name, **_):
        return _Method(getattr(self, method_name))

    def generate(self, sent):
        raise AssertionError("these tests generate no text")

    def compute(self, sent, call, arguments, options):
        name = sent.targets[0]
        self.sent.append((sent, name))
        return Call(self.outcomes.get(name, CallOutcome(name, (), None)), self.released)

    def ask(self, asked):
        [name] = asked.targets
        self.asked[name] += asked.method == "tell"
        return Reply(reply_of(name, asked.method, self.speeds.get(name, 1e-4)))


class _Method:
    def __init__(self, remote):
        self.remote = remote


@pytest.fixture
def handle():
    return Handle()


@contextlib.contextmanager
def opened(handle):
    found = Replicas(cast(Any, handle), "m")
    try:
        found.members_changed(dict.fromkeys("abc", ABOUT))
        found.open(60)
        yield found
    finally:
        found.close()


@pytest.fixture
def three(handle):
    with opened(handle) as found:
        yield found


def begin(three, size, *, everywhere=False):
    """Start a call, and return the future of its outcome."""
    sent = Sent("r", (), b"", SamplingParams(), Terms(), None, 0.0, None, size)
    return three.start(three.compute(sent, "warm" if everywhere else "embed", (), {}, everywhere))


@pytest.mark.parametrize("size", [1, 30_000])
def test_calls_between_two_polls_are_spread(three, handle, size):
    calls = [begin(three, size) for _ in range(60)]
    wait_until(lambda: len(handle.sent) == 60, "the calls to be sent")
    three.call_soon(handle.released.set)
    assert {call.result(timeout=60).value for call in calls} == set("abc")
    counts = Counter(name for _, name in handle.sent)
    assert max(counts.values()) - min(counts.values()) <= (1 if size > 1 else 20)


def test_an_ended_call_no_longer_counts(three, handle):
    begin(three, 10**9)
    wait_until(lambda: len(handle.sent) == 1, "the call to be sent")
    first = handle.sent[0][1]
    three.call_soon(handle.released.set)
    wait_until(
        lambda: begin(three, 30_000).result(timeout=60).value == first, "the replica to be idle"
    )


def test_a_call_is_as_long_as_its_texts(three, handle):
    three.call_soon(handle.released.set)
    engine = ReplicatedEngine(three, cast(Any, None), EngineConfig())
    engine.embed(["four", [1, 2]])
    engine.rerank("query", ["document", "doc"])
    assert [sent.missing_tokens for sent, _ in handle.sent] == [6, 16]


async def pause():
    """Let the tasks of the event loop run once."""
    await asyncio.sleep(0)


def test_a_call_after_idling_is_polled_at_once(handle, monkeypatch):
    for name in ("_IDLE_SECONDS", "_BUSY_SECONDS"):
        monkeypatch.setattr(replicas, name, NEVER)
    with opened(handle) as three:
        for _ in range(100):  # until the polls of the start have ended
            three.start(pause()).result(timeout=60)
        before = handle.asked.copy()
        begin(three, 1)
        wait_until(lambda: all(handle.asked[name] > before[name] for name in "abc"), "a poll")


def test_a_call_avoids_replicas_whose_engine_has_died(handle):
    """Such a replica answers at once, so its queue is always the shortest."""
    died = CallOutcome(None, (), Failure("KVBoostError", "the engine stopped", has_died=True))
    handle.outcomes = {"a": died, "b": died}
    handle.speeds = {"c": 1e-2}
    with opened(handle) as three:
        three.call_soon(handle.released.set)
        assert begin(three, 100).result(timeout=60).value == "c"
        handle.outcomes["c"] = died
        with pytest.raises(NoReplica):
            begin(three, 100).result(timeout=60)


def test_a_failure_in_one_of_all_replicas_is_the_outcome(three, handle, caplog):
    handle.outcomes = {
        name: CallOutcome(value, (), None) for name, value in zip("abc", [5, 7, 6], strict=True)
    }
    three.call_soon(handle.released.set)
    assert begin(three, 1, everywhere=True).result(timeout=60).value == 7
    handle.outcomes["b"] = CallOutcome(None, (), Failure("CapacityError", "the pool is too small"))
    with caplog.at_level(logging.WARNING):
        found = begin(three, 1, everywhere=True).result(timeout=60)
    assert found.failure == Failure("CapacityError", "the pool is too small")
    assert [record.message for record in caplog.records] == ["warm failed in a replica"]
    handle.outcomes["b"] = CallOutcome(None, (), Failure("KVBoostError", "", has_died=True))
    assert begin(three, 1, everywhere=True).result(timeout=60).value == 6
