"""Health checks of replicas run concurrently: one that hangs does not delay the figures of others.
Without Ray.
"""

import asyncio
import logging
import threading
from collections import Counter

import pytest

from helpers.serve_ray.fake_replies import ABOUT, NEVER, Reply, reply_of
from helpers.server.live_servers import wait_until
from kvboost_edge.config import EngineConfig
from kvboost_edge.serve_ray import pool, replicas
from kvboost_edge.serve_ray.pool import ReplicatedEngine
from kvboost_edge.serve_ray.replicas import Replicas
from kvboost_edge.serve_ray.watch.health_checks import HealthChecks
from kvboost_edge.server.api_errors import NoReplica


class Handle:
    """Deployment handle that answers for replicas, except those in `hung`.

    - asked, given_up: counts by replica and question
    """

    def __init__(self):
        self.hung = set()
        self.asked = Counter()
        self.given_up = Counter()

    def options(self, **_):
        return self

    def remote(self, asked):
        [name] = asked.targets
        question = (name, asked.method)
        self.asked[question] += 1

        def give_up():
            self.given_up[question] += 1

        return Reply(None if name in self.hung else reply_of(name, asked.method, 1e-3), give_up)


@pytest.fixture
def handle():
    return Handle()


@pytest.fixture
def three(handle, monkeypatch):
    """Three replicas without health checks so far."""
    monkeypatch.setattr(replicas, "_IDLE_SECONDS", 0.01)
    given = handle
    found = Replicas(given, "m")
    found.members_changed(dict.fromkeys("abc", ABOUT))
    yield found
    found.close()


def test_cancellation_is_repeated_until_the_work_ends(handle):
    """Ray may turn the cancellation of a call into an error, which the polling takes for a failure."""
    pool = Replicas(handle, "m")
    began = threading.Event()
    caught = []

    async def poll():
        while True:
            try:
                began.set()
                await asyncio.sleep(NEVER)
            except asyncio.CancelledError as error:
                caught.append(error)
                if len(caught) > 1:
                    raise

    pool.start(poll())
    assert began.wait(60)
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
    assert len(caught) == 2


def test_a_hanging_replica_does_not_delay_the_checks_of_others(three, handle, monkeypatch):
    three.open(60)
    monkeypatch.setattr(replicas, "_TELLING_SECONDS", NEVER)
    handle.hung = {"b"}
    before = handle.asked.copy()
    wait_until(
        lambda: min(handle.asked[name, "tell"] - before[name, "tell"] for name in "ac") > 20,
        "many looks",
        60,
    )
    assert handle.asked["b", "tell"] - before["b", "tell"] <= 2, (
        "at most one check may be waiting for a hanging replica"
    )


def test_an_unresponsive_replica_is_skipped_until_it_answers(three, handle, monkeypatch):
    three.open(60)
    monkeypatch.setattr(replicas, "_TELLING_SECONDS", 0.05)
    monkeypatch.setattr(pool, "_SAYING_SECONDS", NEVER)
    tokenizer = None
    whole = ReplicatedEngine(three, tokenizer, EngineConfig())
    assert [*whole.replicas()] == ["a", "b", "c"]
    handle.hung = {"b"}
    wait_until(lambda: three.talking == {"a", "c"}, "the replica to count as silent")
    assert handle.given_up["b", "tell"]
    assert [*whole.replicas()] == ["a", "c"]
    assert whole.num_waiting() == 4
    asked = handle.asked["b", "figures"]
    with monkeypatch.context() as brief:
        brief.setattr(pool, "_SAYING_SECONDS", 0.05)
        assert [*whole.replicas(patient=True)] == ["a", "c"]
    assert handle.asked["b", "figures"] == asked + 1, (
        "a patient caller must also ask the silent replica"
    )
    assert whole.block_map() == [ord("a"), ord("c")]
    assert len(whole.block_details()) == 2
    assert three.usable == {"a", "b", "c"}
    handle.hung = set()
    wait_until(lambda: three.talking == {"a", "b", "c"}, "the replica to answer again")
    assert whole.block_map() == [ord("a"), ord("b"), ord("c")]


def test_if_no_replica_answers_all_are_asked(three, handle, monkeypatch):
    three.open(60)
    monkeypatch.setattr(replicas, "_TELLING_SECONDS", 0.01)
    monkeypatch.setattr(pool, "_SAYING_SECONDS", 0.01)
    handle.hung = set("abc")
    wait_until(lambda: three._silent == {"a", "b", "c"}, "all to be known as silent")
    assert three.talking == {"a", "b", "c"}
    tokenizer = None
    whole = ReplicatedEngine(three, tokenizer, EngineConfig())
    with pytest.raises(NoReplica):
        whole.replicas()
    assert all(handle.asked[name, "figures"] for name in "abc")


def test_settings_are_taken_from_another_replica_if_the_first_is_gone(three, handle, monkeypatch):
    three.open(60)
    assert three.about.replica == "a"
    monkeypatch.setattr(replicas, "_TELLING_SECONDS", NEVER)
    handle.hung = {"b"}
    three.members_changed(dict.fromkeys("bc", ABOUT))
    wait_until(lambda: three.about.replica == "c", "the third one to say it")


def test_a_failed_health_check_is_repeated(caplog):
    looked = []

    async def look(name):
        looked.append(name)
        if looked == ["a"]:
            raise RuntimeError("a fault")

    async def run():
        looks = HealthChecks(look)
        for _ in range(2):
            looks.begin("ab")
            await looks.settle()

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert looked == ["a", "b", "a", "b"]
    assert [record.message for record in caplog.records] == ["health check failed"]


def test_hanging_health_checks_are_cancelled_at_the_end():
    async def run():
        ended = []

        async def look(name):
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(name)

        looks = HealthChecks(look)
        looks.begin("ab")
        await asyncio.sleep(0)
        await looks.end()
        looks.begin("a")  # and may begin again
        await asyncio.sleep(0)
        await looks.end()
        return ended

    assert asyncio.run(run()) == ["a", "b", "a"]
