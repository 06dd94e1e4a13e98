"""Tests of size limits, connection limits and deadlines; well-behaved clients keep working next to
bad ones.
"""

import contextlib
import re
import socket
import statistics
import time

import pytest

from helpers.server.live_servers import raw_answer, serving, wait_until
from kvboost_edge.server.http import protocol

TEXT = {"model": "kvboost-edge/demo", "prompt": "Hello", "max_tokens": 4, "temperature": 0}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def strict(demo_engine):
    """Server with small limits and with deadlines short enough to wait for."""
    settings = {
        "header_seconds": 0.4,
        "body_seconds": 0.4,
        "write_seconds": 0.5,
        "keep_alive_seconds": 1,
    }
    with serving(demo_engine, max_body_bytes=20_000, max_connections=300, **settings) as server:
        yield server


def test_a_declared_body_over_the_limit_is_413(strict):
    with strict.client() as client:
        answer = client.post("/v1/completions", content=b"x" * 20_001)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        assert "--max-body-bytes" in answer.json()["error"]["message"]
        assert client.get("/health").status_code == 200


def test_a_chunked_body_over_the_limit_is_413(strict):
    with strict.client() as client:
        answer = client.post("/v1/completions", content=iter([b"x" * 5000] * 5))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


def test_total_body_bytes_are_bounded(demo_engine):
    """The server holds eight bodies of the maximum size. More bytes are rejected until one of them
    is complete.
    """
    with serving(demo_engine, max_body_bytes=40_000) as server, contextlib.ExitStack() as stack:
        bodies = server.kv.bodies
        senders = [stack.enter_context(server.connect()) for _ in range(8)]
        for sock in senders:
            sock.sendall(HEAD + b"Content-Length: 40000\r\n\r\n" + b" " * 39_999)
        wait_until(lambda: bodies.num_bytes == 8 * 39_999, "all bodies to be held")
        with server.client() as client:
            refused = client.post("/v1/completions", json={**TEXT, "user": "x" * 100})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
            assert refused.json()["error"]["message"] == (
                "request bodies take 319992 bytes (limit: 320000); try again later, or raise "
                "--max-body-bytes (the limit is 8 times its value)"
            )
            assert refused.headers["retry-after"]
            assert client.get("/health").status_code == 200
            senders.pop().sendall(b"x")
            wait_until(lambda: bodies.num_bytes == 7 * 39_999, "one body to be read")
            assert client.post("/v1/completions", json=TEXT).status_code == 200
    assert bodies.num_bytes == 0


def test_total_body_bytes_are_shared_between_keys(demo_engine):
    """With two keys, two of the eight largest bodies are reserved for each key, so one key can hold
    six.
    """
    with (
        serving(demo_engine, max_body_bytes=40_000, api_keys=("one", "two")) as server,
        contextlib.ExitStack() as stack,
    ):
        bodies = server.kv.bodies
        for _ in range(6):
            sock = stack.enter_context(server.connect())
            sock.sendall(HEAD + b"x-api-key: one\r\nContent-Length: 40000\r\n\r\n" + b" " * 39_999)
        wait_until(lambda: bodies.num_bytes == 6 * 39_999, "the bodies to be held")
        with server.client(headers={"x-api-key": "one"}) as client:
            refused = client.post("/v1/completions", json={**TEXT, "user": "x" * 100})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        with server.client(headers={"x-api-key": "two"}) as client:
            assert client.post("/v1/completions", json=TEXT).status_code == 200
    assert bodies.num_bytes == 0


def test_a_body_at_the_limit_is_read(strict):
    with strict.client() as client:
        answer = client.post("/v1/completions", content=b'{"model": 1}'.ljust(20_000))
    assert answer.status_code == 400


def test_a_refused_body_is_not_read_indefinitely(strict):
    with strict.connect() as sock:
        sock.sendall(HEAD + b"Content-Length: 4000000000\r\n\r\n")
        started = time.monotonic()
        received = b""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while time.monotonic() < started + 10:
                sock.sendall(b"x" * 65536)
        with contextlib.suppress(ConnectionResetError):
            received = sock.recv(65536)
        assert time.monotonic() < started + 5
        assert not received or received.startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"G",
        b"GET /health HTT",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n",
        HEAD + b"Content-Length: 9\r\n\r\n{",
    ],
    ids=["nothing", "one byte", "request line", "headers", "body"],
)
def test_a_slow_request_gets_408_and_is_closed(strict, start):
    with strict.connect() as sock:
        started = time.monotonic()
        sock.sendall(start)
        answer = raw_answer(sock)
        seconds = time.monotonic() - started
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"code": "request_timeout"' in answer
    assert 0.3 < seconds < 5


FORM = (
    b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
)
FORM_END = b"\r\n--x--\r\n"


def start_of_upload(path, size):
    """Return the head of an upload, and the start of its form, whose file has `size` bytes."""
    length = len(FORM) + size + len(FORM_END)
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: {length}\r\n\r\n"
    ).encode() + FORM


def test_an_upload_that_advances_may_take_longer(demo_engine, tmp_path, monkeypatch):
    """Each piece is sent after the deadline of the previous one was extended."""
    monkeypatch.setattr(protocol, "_UPLOAD_BYTES", 1000)
    with (
        serving(demo_engine, batch_dir=tmp_path, body_seconds=0.3) as server,
        server.connect() as sock,
    ):
        sock.sendall(start_of_upload("/v1/files", 5000))
        wait_until(lambda: server.server.server_state.connections, "the connection")
        (connection,) = server.server.server_state.connections
        for number in range(1, 5):
            sock.sendall(b"x" * 1000)
            wait_until(lambda: connection._uploaded >= 1000 * number, "a new deadline")  # noqa: B023
        sock.sendall(b"x" * 1000 + FORM_END)
        answer = raw_answer(sock)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b'"bytes":5000' in answer


@pytest.mark.parametrize(("path", "count"), [("/v1/files", 500), ("/v1/completions", 2000)])
def test_a_slow_body_gets_408(demo_engine, tmp_path, monkeypatch, path, count):
    """An upload must advance, and other bodies have a fixed deadline."""
    monkeypatch.setattr(protocol, "_UPLOAD_BYTES", len(FORM) + 1000)
    with (
        serving(demo_engine, batch_dir=tmp_path, body_seconds=0.3) as server,
        server.connect() as sock,
    ):
        sock.sendall(start_of_upload(path, 5000) + b"x" * count)
        answer = raw_answer(sock)
        wait_until(lambda: not list(tmp_path.glob("*/files/*")), "the file to be removed")
    assert answer.startswith(b"HTTP/1.1 408")


def test_trickling_bytes_do_not_extend_the_deadline(strict):
    with strict.connect() as sock:
        started = time.monotonic()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for byte in HEAD + b"X-Slow: " + b"a" * 1000:
                sock.sendall(bytes([byte]))
                time.sleep(0.01)
                if time.monotonic() > started + 5:
                    break
        assert time.monotonic() < started + 4


def test_an_idle_connection_is_closed(strict):
    with strict.connect() as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        started = time.monotonic()
        answer = raw_answer(sock)
        seconds = time.monotonic() - started
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.count(b"HTTP/1.1") == 1
    assert 0.5 < seconds < 5


def test_a_client_that_does_not_read_is_dropped_and_cancelled(demo_engine):
    with serving(demo_engine, write_seconds=0.5) as server, socket.socket() as sock:
        # The accepted socket inherits this small buffer; the default would hold megabytes.
        server.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.settimeout(20)
        sock.connect((server.host, server.port))
        body = {
            **TEXT,
            "max_tokens": 1900,
            "ignore_eos": True,
            "n": 8,
            "stream": True,
            "logprobs": 5,
        }
        sock.sendall(server.request_bytes("/v1/completions", body))
        wait_until(lambda: server.state.admission.admitted, "the request in flight")
        wait_until(server.idle, "the work to stop")
        # The stream was aborted: the received part does not contain its end.
        assert b"[DONE]" not in raw_answer(sock)


@pytest.mark.alone
def test_a_slow_but_steady_reader_gets_the_whole_answer(demo_engine):
    text = "steady " * 3500
    with serving(demo_engine, write_seconds=0.6) as server, socket.socket() as sock:
        with server.client() as client:
            whole = client.post("/tokenize", json={"content": text, "with_pieces": True}).content
        server.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        sock.settimeout(20)
        sock.connect((server.host, server.port))
        body = {"content": text, "with_pieces": True}
        sock.sendall(server.request_bytes("/tokenize", body, "Connection: close"))
        received = bytearray()
        started = time.monotonic()
        while data := sock.recv(2048):
            received += data
            time.sleep(0.02)
        assert received.endswith(whole), f"cut off after {len(received)} of {len(whole)} bytes"
        assert time.monotonic() - started > 1.2, "the reader was too fast for this test"


def test_more_connections_than_allowed_get_503(demo_engine):
    with serving(demo_engine, max_connections=3) as server, contextlib.ExitStack() as stack:
        kept = [stack.enter_context(server.connect()) for _ in range(3)]
        for sock in kept:  # the server has accepted each of them
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert sock.recv(65536).startswith(b"HTTP/1.1 200")
        extra = stack.enter_context(server.connect())
        answer = raw_answer(extra)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"too_many_connections" in answer
        assert b"Service Unavailable\r\n" in answer
        assert re.search(rb"\r\nRetry-After: [1-9][0-9]?\r\n", answer)
        kept[0].close()
        wait_until(lambda: len(server.server.server_state.connections) < 3, "a place to be free")
        with server.client() as client:
            assert client.get("/health").status_code == 200


@pytest.mark.alone
def test_a_hundred_slow_clients_do_not_delay_others(strict):
    def best_of(count, client):
        times = []
        for _ in range(count):
            started = time.perf_counter()
            assert client.post("/v1/completions", json=TEXT).status_code == 200
            times.append(time.perf_counter() - started)
        return statistics.median(sorted(times)[: count // 2])

    with strict.client() as client, contextlib.ExitStack() as stack:
        best_of(5, client)
        alone = best_of(30, client)
        slow = [stack.enter_context(strict.connect()) for _ in range(100)]
        for index, sock in enumerate(slow):
            sock.sendall((HEAD + b"Content-Length: 99\r\n\r\n{")[: 1 + index % 120])
        beside = best_of(30, client)
        # Only the faster half of each counts, so that other load on the machine has no effect.
        assert beside < 1.5 * alone + 0.005, (alone, beside)
        for sock in slow:
            assert raw_answer(sock).startswith(b"HTTP/1.1 408")
    wait_until(lambda: not strict.server.server_state.connections, "all connections to be closed")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"X-A: " + b"a" * 70_000, 431),
        (b"\r\n".join(b"X-%d: a" % i for i in range(150)), 431),
        (b"X-A: " + b"a" * 8000, 200),
    ],
    ids=["one large", "many", "fine"],
)
def test_the_size_of_the_head_is_bounded(strict, head, status):
    with strict.connect() as sock:
        sock.sendall(
            b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + head + b"\r\n\r\n"
        )
        answer = raw_answer(sock)
    assert answer.startswith(b"HTTP/1.1 %d" % status)
