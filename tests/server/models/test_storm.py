"""Stress test of two models that displace each other, with clients of all APIs that disconnect at
random, query the server and unload models.

No response is a server error, and all resources are released.
"""

import asyncio
import gc
import json
import threading

import psutil
import pytest

from helpers.server.api_bodies import ASKED, GENERATING, asked
from helpers.server.live_servers import serving, wait_until
from helpers.server.loop_lag import check, in_threads, least_lag
from helpers.server.served_models import ASKED as CANARY
from helpers.server.visitors import storm

pytestmark = pytest.mark.alone

LOOKS = (
    "/v1/stats",
    "/v1/blocks",
    "/slots",
    "/props",
    "/metrics",
    "/v1/models",
    "/api/ps",
    "/v1/requests",
)
NAMES = ("a", "b", "nobody", "b\n\"}{'<b>\u202e", "")


def request_of(rng):
    """Return a random path and a request for it as bytes."""
    kind = rng.random()
    name = rng.choice(("a", "b")) if rng.random() < 0.9 else rng.choice(NAMES)
    head = "Host: localhost\r\nConnection: close"
    if kind < 0.2:
        path = rng.choice(LOOKS)
        query = f"?model={rng.choice('ab')}" if rng.random() < 0.7 else ""
        return path, f"GET {path}{query} HTTP/1.1\r\n{head}\r\n\r\n".encode()
    if kind < 0.35:
        path = "/api/generate"
        body = {"model": name, "keep_alive": rng.choice((0, 0, 0.01, "1s", -1))}
    elif kind < 0.4:
        path = "/cache/reset"
        body = {}
    else:
        path = rng.choice([path for path in ASKED if path != "/cache/reset"])
        text = " ".join(rng.choices(("shared", "prefix", "words"), k=rng.choice((3, 30))))
        more = {"stream": rng.random() < 0.6} if path in GENERATING else {}
        body = {**asked(path, text, tokens=rng.choice((1, 8)), **more), "model": name}
        if path in ("/api/chat", "/api/generate") and rng.random() < 0.5:
            body["keep_alive"] = 0
    data = json.dumps(body).encode()
    return (
        path,
        f"POST {path} HTTP/1.1\r\n{head}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data,
    )


def held_by(server):
    """Return the resources that must be equal before and after, with only the first model loaded."""
    models = server.kv.models
    return (
        sorted(
            thread.name
            for thread in threading.enumerate()
            if not thread.name.startswith("asyncio_")
        ),
        [(one.name, one.phase, one.num_bytes, one.in_use, one.waits_for) for one in models.all],
        models.num_waiting,
        models.loader.taken,
        len(models.loader._tasks),
        server.kv.bodies.num_bytes,
        len(server.server.server_state.tasks),
        len(server.server.server_state.connections),
    )


@pytest.fixture
def models(first, second, tmp_path):
    for number, one in enumerate((first, second)):
        one.options["disk_cache_dir"] = tmp_path / str(number)
    return first, second


def test_many_clients_of_two_models_leak_nothing(models, scale):
    first, second = models
    budget = int(1.5 * max(first.plan(), second.plan()))

    with (
        first.open() as engine,
        serving(
            engine,
            source=first.source,
            others=[(("b",), second.source)],
            model_name="a",
            budget=budget,
        ) as server,
        server.client() as client,
    ):

        def canary(name):
            answer = client.post(
                "/v1/completions", json={**CANARY, "model": name, "kvboost": {"mode": "baseline"}}
            )
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"]

        def settle():
            """Unload the second model, keep the first one loaded and idle, and return the held
            resources.
            """
            canary("a")
            client.post("/api/generate", json={"model": "b", "keep_alive": 0})
            client.post("/api/generate", json={"model": "a", "keep_alive": -1})
            wait_until(
                lambda: [one.phase for one in server.kv.models.all] == ["loaded", "not_loaded"],
                "b to go",
                60,
            )
            wait_until(
                lambda: not any(one.in_use for one in server.kv.models.all), "all leases to end", 60
            )
            wait_until(lambda: not server.kv.models.loader._tasks, "all loads to end", 60)
            # A task of a client that left may outlive its lease of the model.
            wait_until(lambda: not server.server.server_state.tasks, "all tasks to end", 60)
            return held_by(server)

        expected = {name: canary(name) for name in ("b", "a")}
        asyncio.run(storm(server, request_of, range(10_000, 10_020)))
        before = settle()
        seen = asyncio.run(storm(server, request_of, range(scale(60, 3000))))
        assert settle() == before
        assert server.kv.models.loader.taken <= budget
        for name in ("b", "a"):
            assert canary(name) == expected[name]
        assert {"200", "left", "left in the answer"} <= set(seen)
        assert seen.count("200") > len(seen) // 5, {
            status: seen.count(status) for status in set(seen)
        }
        assert second.loads > 2
        assert client.get("/health").status_code == 200


def test_many_loads_leak_no_memory(first, second, scale):
    process = psutil.Process()
    with (
        first.open() as engine,
        serving(
            engine, source=first.source, others=[(("b",), second.source)], model_name="a"
        ) as server,
        server.client() as client,
    ):
        served = server.kv.models.find("b")

        def num_threads():
            """Count the threads of engines, tiers and loads. Shared request threads start on demand
            and do not count.
            """
            return sum(one.name.startswith("kvboost") for one in threading.enumerate())

        own = num_threads()

        def turn():
            """Load, use and unload the model; return the memory and file descriptors held
            afterwards.
            """
            answer = client.post("/v1/completions", json={**CANARY, "model": "b"})
            assert answer.status_code == 200
            assert (
                server.kv.models.loader.taken
                == sum(one.num_bytes for one in server.kv.models.all)
                > 0
            )
            client.post("/api/generate", json={"model": "b", "keep_alive": 0})
            wait_until(
                lambda: served.phase == "not_loaded" and not server.kv.models.loader._tasks,
                "it to go",
            )
            wait_until(lambda: num_threads() == own, "its threads to end")
            return server.kv.models.loader.taken, process.num_fds()

        for _ in range(3):
            turn()
        gc.collect()
        before = turn()
        resident = process.memory_info().rss
        count = scale(2, 200)
        assert {turn() for _ in range(count)} == {before}
        gc.collect()
        grown = process.memory_info().rss - resident
        assert grown < (8 << 20) + count * (100 << 10), grown
        assert (served.num_loads, served.num_unloads, second.loads) == (count + 4,) * 3


@pytest.mark.full
def test_loads_and_unloads_do_not_block_the_event_loop(first, second):
    with (
        first.open() as engine,
        serving(
            engine, source=first.source, others=[(("b",), second.source)], model_name="a"
        ) as server,
        server.client() as client,
    ):
        served = server.kv.models.find("b")

        def turns(number):
            for _ in range(6):
                answer = client.post("/v1/completions", json={**CANARY, "model": "b"})
                assert answer.status_code == 200
                client.post("/api/generate", json={"model": "b", "keep_alive": 0})
                wait_until(lambda: served.phase == "not_loaded", "the model to go")

        def load():
            """Send short requests for the other model in the meantime."""
            (thread,) = in_threads(turns, 1)
            while thread.is_alive():
                assert (
                    client.post("/v1/completions", json={**CANARY, "model": "a"}).status_code == 200
                )

        turns(0)  # one-time reads and compilations
        before = second.loads
        check(least_lag(server, load))
        assert second.loads >= before + 6
