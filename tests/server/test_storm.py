"""Stress test of all APIs with two keys, whose clients disconnect at random moments: all resources
of the requests are released.
"""

import asyncio
import gc
import json
import threading

import psutil
import pytest

from helpers.server.api_bodies import ASKED, GENERATING, asked
from helpers.server.live_servers import ENGINE_OPTIONS, KEYS, serving, wait_until
from helpers.server.visitors import storm
from kvboost_edge import CPUPagedEngine
from kvboost_edge.server.api.compat.anthropic import blocks

pytestmark = pytest.mark.alone

# Sessions stay pinned for a day.
PATHS = [path for path in ASKED if path not in ("/cache/reset", "/v1/sessions")]
READ = (
    "/v1/requests",
    "/v1/requests/last/cache",
    "/v1/responses/resp_0",
    "/v1/models",
    "/api/tags",
    "/api/ps",
    "/props",
)
SHORT_SECONDS = 0.2
OF_OPENAI = ("/v1/completions", "/v1/chat/completions")


@pytest.fixture(scope="module")
def server(isolated_cache):
    """Server whose pins expire within a moment.

    The engine is not shared with other tests, whose pins would stay for minutes.
    """
    with (
        CPUPagedEngine.from_pretrained("kvboost-edge/demo", **ENGINE_OPTIONS) as engine,
        pytest.MonkeyPatch.context() as patch,
    ):
        engine.generate("warm", max_new_tokens=2)
        patch.setattr(blocks, "_SECONDS", {"5m": SHORT_SECONDS, "1h": 2 * SHORT_SECONDS})
        options = {"max_batch_size": 8, "max_queue_size": 64, "request_timeout": 60}
        with serving(engine, api_keys=KEYS, **options) as server:
            yield server


def body_of(rng, path):
    text = " ".join(
        rng.choices(("shared", "prefix", "words", "of", "a", "prompt"), k=rng.choice((3, 60, 400)))
    )
    more = {}
    if path in GENERATING:
        more["stream"] = rng.random() < 0.6
    if path in OF_OPENAI:
        more |= {
            "n": rng.choice((1, 1, 1, 3)),
            "temperature": rng.choice((0, 1)),
            "ignore_eos": True,
        }
        more["kvboost"] = {"explain": rng.random() < 0.3}
    if path == "/v1/warm" and rng.random() < 0.5:
        more |= {"pin": True, "ttl": SHORT_SECONDS}
    body = asked(path, text, tokens=rng.choice((1, 10, 50)), **more)
    if path == "/v1/messages" and rng.random() < 0.5:
        body["cache_control"] = {"type": "ephemeral", "ttl": rng.choice(("5m", "1h"))}
    return body


def request_of(rng):
    """Return a random path and a request for it with one of the two keys."""
    path = rng.choice(READ if rng.random() < 0.1 else PATHS)
    key = f"x-api-key: {rng.choice(KEYS)}"
    if path in READ:
        return (
            path,
            f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{key}\r\n\r\n".encode(),
        )
    data = json.dumps(body_of(rng, path)).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{key}\r\nContent-Length: "
        f"{len(data)}"
    )
    return path, f"{head}\r\n\r\n".encode() + data


def held_by(server):
    """Return what must be equal before and after: threads, files and sockets, blocks, tasks,
    connections and records.
    """
    gc.collect()  # closes sockets and files of earlier tests
    # Threads of pools start on demand and stay; the pools are bounded.
    pools = ("asyncio_", "ThreadPoolExecutor-read", "ThreadPoolExecutor-long")
    threads = sorted(
        thread.name for thread in threading.enumerate() if not thread.name.startswith(pools)
    )
    state = server.server.server_state
    stats = server.engine.paged_stats()
    return {
        "threads": threads,
        "files and sockets": psutil.Process().num_fds(),
        "blocks": stats["used_blocks"],
        "pinned blocks": stats["pinned_blocks"],
        "live requests": len(server.engine._core._live),
        "tasks": len(state.tasks),
        "connections": len(state.connections),
        "idle": server.idle(),
        "tenants": len(server.state.admission.groups._groups),
        "remembered bytes": server.state.remembered.num_bytes,
        "history bytes": server.state.doctor.history.nbytes,
        "reports of those who left": len(server.state.doctor._left),
    }


def sockets_of(server):
    """Return both ends of all connections with the server.

    The server forgets a connection before its socket is closed, so a count of descriptors may
    include one.
    """
    port = server.port
    return [
        (one.laddr, one.raddr, one.status)
        for one in psutil.Process().net_connections("tcp")
        if one.raddr and port in (one.laddr.port, one.raddr.port)
    ]


def forget(server):
    """Expire all stored records, as after a day, and check that the next requests drop them."""
    remembered = server.state.remembered.kept
    history = server.state.doctor.history.kept
    remembered.seconds = history.seconds = -1.0
    with server.client() as client:
        assert client.get("/v1/responses/resp_0").status_code == 404
        assert client.get("/v1/requests").json()["data"] == []
    remembered.seconds = 24 * 3600.0
    history.seconds = server.state.settings.request_history


def test_many_disconnecting_clients_leak_nothing(server, scale):
    count = scale(120, 5000)

    def settled():
        state = server.server.server_state
        pinned = server.engine.paged_stats()["pinned_blocks"]
        held = pinned or state.connections or state.tasks or sockets_of(server)
        return server.idle() and not held

    asyncio.run(storm(server, request_of, range(10_000, 10_020)))
    wait_until(settled, "the first visitors to be gone", 60)
    forget(server)
    wait_until(settled, "the forgetting to be over")
    before = held_by(server)
    kept = ("remembered bytes", "history bytes", "reports of those who left")
    assert [before[name] for name in kept] == [0, 0, 0]
    seen = asyncio.run(storm(server, request_of, range(count)))
    wait_until(settled, "the storm to be over", 60)
    assert (
        server.state.remembered.num_bytes
    )  # of clients that stayed, and of some that disconnected
    assert server.state.doctor.history.nbytes > 0
    forget(server)
    wait_until(settled, "the forgetting to be over")
    after = held_by(server)
    # A file of an earlier test may have been closed meanwhile.
    assert after["files and sockets"] <= before["files and sockets"]
    after["files and sockets"] = before["files and sockets"]
    assert after == before
    assert {"incomplete", "left", "left in the answer", "200"} <= set(seen)
    statuses = {status: seen.count(status) for status in set(seen)}
    assert statuses["200"] > count // 10, statuses
    server.engine._scheduler.manager.check_invariants([])
    with server.client() as client:
        assert client.get("/ready").status_code == 200
