"""Tests of the server's startup and shutdown: the heap before the first request, and connections
after the last.
"""

import contextlib
import gc
import json
import logging
import socket
import sys
from collections import deque
from urllib.parse import urlsplit

import httpx
import pytest

from helpers.server.live_servers import raw_answer, serving, wait_until
from helpers.server.server_process import running
from kvboost_edge.server import serve
from kvboost_edge.server.serve import freeze_heap

TEXT = {
    "prompt": "Hello",
    "max_tokens": 1900,
    "ignore_eos": True,
    "n": 8,
    "stream": True,
    "logprobs": 5,
}
LONG = {"content": "steady " * 5000, "with_pieces": True}


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="collects in steps, by another rule")
def test_a_large_heap_does_not_delay_garbage_collection():
    """The collector waits until new objects are a quarter of those that survived the last
    collection: 75,000 objects here.
    """
    kept = [[number] for number in range(300_000)]
    full = []
    gc.callbacks.append(
        watch := lambda phase, info: full.append(phase) if info["generation"] == 2 else None
    )
    freeze_heap()
    full.clear()
    try:
        in_flight = deque(maxlen=3000)
        for _ in range(100_000):
            circle = []
            circle.append(circle)
            in_flight.append(circle)
            if full:
                break
        assert full
    finally:
        gc.callbacks.remove(watch)
        gc.unfreeze()
        gc.freeze()  # as after the collection of tests, see tests/conftest.py
    assert len(kept) == 300_000


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def connected(stack, server, count):
    """Open plain sockets to a server process."""
    address = urlsplit(server.url())
    return [
        stack.enter_context(socket.create_connection((address.hostname, address.port), timeout=30))
        for _ in range(count)
    ]


def status(sock):
    """Return the status of a response, "" if the connection was closed or reset without one."""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        sock.sendall(HEALTH)
        return sock.recv(65536)[9:12].decode()
    return ""


def told(server, event):
    """Return the facts of each log line of an event."""
    return [facts for facts in map(json.loads, server.lines) if event in facts["event"]]


@pytest.fixture(scope="module")
def limited():
    """Server process with 64 file descriptors. It ends without an error and with a short log."""
    with running(max_files=64) as server:
        yield server
        server.process.terminate()
        assert server.end() == 0
    assert sum(map(len, server.lines)) < 100_000


def test_connections_beyond_the_descriptor_limit_are_answered(limited):
    """With 64 descriptors, some are reserved for the files of the model and of the disk tier."""
    with contextlib.ExitStack() as stack:
        answers = [status(sock) for sock in connected(stack, limited, 120)]
        (lowered,) = told(limited, "--max-connections")
        assert lowered["asked"] == 512
        assert 8 <= lowered["max_connections"] == answers.count("200") < 32
        assert set(answers) <= {"200", "503", ""}
    with contextlib.ExitStack() as stack:
        wait_until(
            lambda: status(connected(stack, limited, 1)[0]) == "200",
            "a place for a new connection",
        )


@pytest.mark.skipif(sys.platform != "linux", reason="changes a limit of another process")
def test_running_out_of_descriptors_is_logged_once(limited):
    """Connections that found no free descriptor are served once descriptors are free again."""
    import resource

    def limit(files):
        resource.prlimit(limited.process.pid, resource.RLIMIT_NOFILE, (files, 64))

    with contextlib.ExitStack() as stack:
        # Imports at first use need descriptors, for example that of the grammar's vocabulary.
        body = {"prompt": "Hello", "max_tokens": 4, "guided_choice": ["yes", "no"]}
        answer = httpx.post(f"{limited.url()}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        limit(4)
        waiting = connected(stack, limited, 6)
        wait_until(lambda: told(limited, "connections wait"), "the lack to be told")
        limit(64)
        assert {status(sock) for sock in waiting} == {"200"}
    assert len(told(limited, "connections wait")) == 1


def half_a_body(server):
    return server.request_bytes("/v1/completions", TEXT)[:-10]


def an_unread_stream(server):
    return server.request_bytes("/v1/completions", TEXT)


def an_unread_answer(server):
    return server.request_bytes("/tokenize", LONG)


@pytest.mark.parametrize("request_of", [half_a_body, an_unread_stream, an_unread_answer])
def test_no_connection_outlives_the_server(demo_engine, monkeypatch, caplog, request_of):
    """A client that stops sending or reading does not cause an error in the log."""
    monkeypatch.setattr(serve, "_LAST_SECONDS", 0.3)
    with socket.socket() as sock:
        with serving(demo_engine) as server, caplog.at_level(logging.WARNING):
            # The accepted socket inherits this small buffer; the default would hold megabytes.
            server.server.servers[0].sockets[0].setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDBUF, 4096
            )
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            sock.settimeout(20)
            sock.connect((server.host, server.port))
            sock.sendall(request_of(server))
            wait_until(lambda: server.server.server_state.tasks, "the request in progress")
            if request_of is not half_a_body:
                (connection,) = server.server.server_state.connections
                wait_until(
                    lambda: connection.flow.write_paused, "the answer to wait for its reader"
                )
        assert not server.server.server_state.connections
        raw_answer(sock)  # ends
    assert [record.message for record in caplog.records] == ["connections cut off"]
