"""The server's own part of running: the heap before the first request, and what is left after the
last.
"""

import gc
import logging
import socket
import sys
from collections import deque

import pytest

from helpers.server.live_servers import raw_answer, serving, wait_until
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
def test_a_large_heap_does_not_put_off_the_collection_of_what_comes_later():
    """The collector waits until what is new is a quarter of what it kept the last time: 75,000
    objects here.
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
        assert full
    finally:
        gc.callbacks.remove(watch)
        gc.unfreeze()
    assert len(kept) == 300_000


def half_a_body(server):
    return server.request_bytes("/v1/completions", TEXT)[:-10]


def an_unread_stream(server):
    return server.request_bytes("/v1/completions", TEXT)


def an_unread_answer(server):
    return server.request_bytes("/tokenize", LONG)


@pytest.mark.parametrize("request_of", [half_a_body, an_unread_stream, an_unread_answer])
def test_no_connection_outlives_the_server(demo_engine, monkeypatch, caplog, request_of):
    """Nor is what somebody does not send or take an error of ours."""
    monkeypatch.setattr(serve, "_LAST_SECONDS", 0.3)
    with socket.socket() as sock:
        with serving(demo_engine) as server, caplog.at_level(logging.WARNING):
            # Small buffers, which the accepted socket inherits: the kernel's own would hold
            # megabytes.
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
        raw_answer(sock)  # comes to its end
    assert [record.message for record in caplog.records] == ["connections cut off"]
