"""Tests of HTTP/1.1: the server is strict where a request would be ambiguous, and ordinary
elsewhere.
"""

import contextlib
import http.client
import json
import logging
import re
import socket
import time

import h11
import pytest

from helpers.server.live_servers import raw_answer, serving, wait_until
from kvboost_edge.server.http import protocol

HOST = b"Host: localhost\r\n"
CLOSE = b"Connection: close\r\n"
AMBIGUOUS = {
    "both lengths": b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "lengths that differ": b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
    "equal lengths": b"Content-Length: 3\r\ncontent-length: 3\r\n\r\nabc",
    "negative length": b"Content-Length: -1\r\n\r\n",
    "signed length": b"Content-Length: +3\r\n\r\nabc",
    "list of lengths": b"Content-Length: 3, 4\r\n\r\nabc",
    "list of equal lengths": b"Content-Length: 3, 3\r\n\r\nabc",
    "unknown encoding": b"Transfer-Encoding: gzip\r\n\r\n",
    "two encodings": b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "obscured encoding": b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "bare line feed in a name": b"X\nY: 1\r\n\r\n",
    "null in a value": b"X: a\0b\r\n\r\n",
    "bad chunk size": b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n\r\n",
    "negative chunk size": b"Transfer-Encoding: chunked\r\n\r\n-5\r\n\r\n",
    "folded header": b"X: a\r\n b\r\nContent-Length: 0\r\n\r\n",
    "folded by a tab": b"X: a\r\n\tb\r\nContent-Length: 0\r\n\r\n",
    "line feeds alone": b"X: a\nContent-Length: 0\n\n",
    "a line feed alone at the end": b"X: a\r\nContent-Length: 0\r\n\n",
    "trailer with line feeds alone": b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: a\n\r\n",
    "huge chunk size": b"Transfer-Encoding: chunked\r\n\r\n" + b"F" * 40 + b"\r\n",
}


@contextlib.contextmanager
def own_log(caplog):
    """Send the server's log lines to `caplog` while the block runs."""
    logger = logging.getLogger("kvboost_edge.server")
    before = logger.level, logger.propagate
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(caplog.handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


def ask(server, data):
    with server.connect() as sock:
        sock.sendall(data)
        return raw_answer(sock)


@pytest.mark.parametrize("rest", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_an_ambiguous_request_gets_400_and_is_closed(live_server, rest):
    follow_up = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answer = ask(live_server, b"POST /tokenize HTTP/1.1\r\n" + HOST + rest + follow_up)
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 501"))
    assert answer.count(b"HTTP/1.1 ") == 1, "the rest must not be read as a second request"
    head, _, body = answer.partition(b"\r\n\r\n")
    assert json.loads(body)["error"]["code"] in ("malformed_request", "headers_too_large")
    assert b"content-security-policy: default-src 'self'" in head.lower()


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /\r\n\r\n",
        b"\xff" * 50 + b"\r\n\r\n",
    ],
    ids=["TLS", "HTTP/2", "HTTP/0.9", "binary"],
)
def test_other_protocols_are_refused(live_server, data):
    assert ask(live_server, data).startswith((b"HTTP/1.1 400", b"HTTP/1.1 505"))


@pytest.mark.parametrize("headers", [b"", b"Host: a\r\nHost: b\r\n"], ids=["none", "two"])
def test_exactly_one_host_header_is_required(live_server, headers):
    assert ask(live_server, b"GET /health HTTP/1.1\r\n" + headers + CLOSE + b"\r\n").startswith(
        b"HTTP/1.1 400"
    )


def test_pipelined_requests_are_answered_in_order(live_server):
    one = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
    two = b"GET /version HTTP/1.1\r\n" + HOST + b"\r\n"
    last = b"GET /nothing HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n"
    answer = ask(live_server, one + two + one + last)
    assert [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]] == [200, 200, 200, 404]
    assert answer.index(b'"ok"') < answer.index(b'"version"') < answer.rindex(b'"ok"')


def test_a_half_closed_client_gets_all_answers(live_server):
    body = {"prompt": "Hello", "max_tokens": 100, "ignore_eos": True, "temperature": 0}
    with live_server.client() as client:
        text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    with live_server.connect() as sock:
        sock.sendall(live_server.request_bytes("/v1/completions", body) * 3)
        sock.sendall(b"GET /version HTTP/1.0\r\n" + HOST + b"\r\n")
        sock.shutdown(socket.SHUT_WR)
        answers = re.split(rb"HTTP/1\.1 200 OK\r\n", raw_answer(sock))[1:]
    bodies = [json.loads(one.partition(b"\r\n\r\n")[2].partition(b"HTTP/")[0]) for one in answers]
    assert [one["choices"][0]["text"] for one in bodies[:3]] == [text] * 3
    assert "version" in bodies[3]
    assert len(bodies) == 4


@pytest.mark.parametrize(
    "rest",
    [b"", b"GET /hea", b"POST /tokenize HTTP/1.1\r\n" + HOST + b"Content-Length: 9\r\n\r\n{"],
)
def test_a_half_closed_incomplete_request_is_closed_at_once(live_server, rest):
    """The server first answers the complete request that preceded it."""
    with live_server.connect() as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n" + rest)
        sock.shutdown(socket.SHUT_WR)
        started = time.monotonic()
        answer = raw_answer(sock)
        assert time.monotonic() - started < 5  # before the deadlines of 10 and 30 seconds
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("path", [b"/health", b"/metrics", b"/"])
def test_head_has_no_body(live_server, path):
    answer = ask(live_server, b"HEAD " + path + b" HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    "method", [b"CONNECT localhost:80", b"TRACE /", b"OPTIONS *", b"PUT /v1/models", b"BREW /"]
)
def test_other_methods_are_refused_in_the_apis_format(live_server, method):
    answer = ask(live_server, method + b" HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n")
    assert answer.split(b" ")[1] in (b"404", b"405")
    assert "error" in json.loads(answer.partition(b"\r\n\r\n")[2])


def test_an_upgrade_is_ignored(live_server):
    upgrade = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: AA==\r\nSec-WebSocket-Version: 13\r\n"
    with live_server.connect() as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\n" + HOST + upgrade + b"\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_connection_serves_many_requests(live_server):
    connection = http.client.HTTPConnection(live_server.host, live_server.port, timeout=10)
    with contextlib.closing(connection):
        connection.connect()
        first = connection.sock
        for _ in range(20):
            connection.request("GET", "/version")
            response = connection.getresponse()
            assert (response.status, bool(response.read())) == (200, True)
            assert connection.sock is first


def test_every_answer_has_an_id_and_the_security_headers(live_server):
    with live_server.client() as client:
        ids = set()
        for path in ("/health", "/", "/nothing", "/v1/models", "/metrics", "/openapi.json"):
            answer = client.get(path)
            ids.add(answer.headers["x-request-id"])
            assert "default-src 'self'" in answer.headers["content-security-policy"]
            assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert "server" not in answer.headers
            assert "access-control-allow-origin" not in answer.headers
        assert len(ids) == 6


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://localhost/health", 200),
        (b"HTTP://127.0.0.1:8000/health?x=http://y/", 200),
        (b"http://localhost", 200),
        (b"http://localhost?x", 200),
        (b"http://localhost/nothing", 404),
        (b"http://evil.example/health", 421),
        (b"http://user@localhost/health", 421),
        (b"http:///health", 400),
        (b"ftp://localhost/health", 404),
    ],
)
def test_an_absolute_url_target_determines_the_host(live_server, target, status):
    answer = ask(live_server, b"GET " + target + b" HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 %d" % status), answer[:200]


@pytest.mark.parametrize(
    ("data", "status", "phrase"),
    [
        (b"GET / HTTP/1.1\r\nHost\r\n\r\n", 400, b"Bad Request"),
        (
            b"GET / HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 20_000 + b"\r\n\r\n",
            431,
            b"Request Header Fields Too Large",
        ),
        (
            b"POST /tokenize HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\nXX\r\n",
            400,
            b"Bad Request",
        ),
    ],
    ids=["head", "size", "body"],
)
def test_protocol_errors_are_counted_and_logged_with_an_id(
    live_server, caplog, data, status, phrase
):
    def counted():
        samples = live_server.kv.metrics.registry.collect()
        return sum(
            sample.value
            for family in samples
            for sample in family.samples
            if sample.name == "kvboost:http_requests_total"
            and sample.labels["status"] == str(status)
        )

    before = counted()
    with own_log(caplog):
        answer = ask(live_server, data)
        wait_until(lambda: counted() == before + 1, "the refusal to be counted")
        lines = [record.facts for record in caplog.records if record.getMessage() == "request"]
    head = answer.partition(b"\r\n\r\n")[0]
    assert head.startswith(b"HTTP/1.1 %d %s\r\n" % (status, phrase))
    request_id = re.search(rb"x-request-id: (req-[0-9a-f]{24})", head)
    assert request_id is not None
    found = [line["status"] for line in lines if line["request_id"] == request_id[1].decode()]
    assert found == [status]


def test_too_many_pipelined_bytes_close_the_connection(live_server):
    body = {"prompt": "Hello", "max_tokens": 1500, "ignore_eos": True}
    with live_server.connect() as sock:
        sock.sendall(live_server.request_bytes("/v1/completions", body))
        wait_until(lambda: live_server.state.admission.admitted, "the request in flight")
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3000)
        assert raw_answer(sock) == b""
    wait_until(live_server.idle, "the work to stop")


def test_a_disconnect_after_pipelining_is_noticed(live_server):
    body = {"prompt": "Hello", "max_tokens": 1500, "ignore_eos": True}
    with live_server.connect() as sock:
        sock.sendall(live_server.request_bytes("/v1/completions", body))
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
        wait_until(lambda: live_server.state.admission.admitted, "the request in flight")
    wait_until(live_server.idle, "the work to stop")


@pytest.mark.parametrize("version", [b"3.0", b"2.0", b"0.9", b"1.2"])
def test_another_http_version_is_505(live_server, version):
    answer = ask(live_server, b"GET /version HTTP/" + version + b"\r\n" + HOST + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 505 ")
    assert b'"http_version"' in answer


@pytest.mark.parametrize("size", range(1, 9))
def test_a_head_is_parsed_at_any_split(size):
    """The head is cut everywhere; a live test would see only the cuts that happen in the network."""
    head = b"GET /version HTTP/1.1\r\nHost: localhost\r\nA: b\r\nLonger-Name: c d e\r\n\r\n"
    buffer = protocol._StrictBuffer()
    lines = None
    for at in range(0, len(head), size):
        assert lines is None
        buffer += head[at : at + size]
        lines = buffer.maybe_extract_lines()
    assert lines == head[:-4].split(b"\r\n")
    assert not buffer


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize(
    "head", [b"GET / HTTP/1.1\r\nA: b\nC: d\r\n\r\n", b"GET / HTTP/1.1\r\nA: b\r\n c\r\n\r\n"]
)
def test_an_ambiguous_head_is_refused_at_any_split(head, size):
    buffer = protocol._StrictBuffer()

    def read():
        nonlocal buffer
        for at in range(0, len(head), size):
            buffer += head[at : at + size]
            buffer.maybe_extract_lines()

    with pytest.raises(h11.RemoteProtocolError):
        read()


def test_a_head_sent_byte_by_byte_is_parsed(live_server):
    with live_server.connect() as sock:
        for byte in b"GET /version HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n":
            sock.sendall(bytes([byte]))
        assert raw_answer(sock).startswith(b"HTTP/1.1 200 ")


def test_thousands_of_tiny_chunks_are_refused_at_once(live_server):
    head = b"POST /tokenize HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
    text = json.dumps({"content": "a" * 50_000}).encode()
    many = b"".join(b"1\r\n%c\r\n" % byte for byte in text) + b"0\r\n\r\n"
    assert ask(live_server, head + many).startswith(b"HTTP/1.1 400 ")
    few = b"".join(
        b"64\r\n" + text[at : at + 100].ljust(100) + b"\r\n" for at in range(0, len(text), 100)
    )
    close = head.replace(HOST, HOST + CLOSE)
    assert ask(live_server, close + few + b"0\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def test_head_equals_get_without_the_body(live_server):
    with live_server.client() as client:
        for path in (
            "/v1/models",
            "/v1/models/kvboost-edge/demo",
            "/",
            "/openapi.json",
            "/health",
            "/v1/blocks",
        ):
            head = client.head(path)
            get = client.get(path)
            assert (head.status_code, head.content) == (200, b""), path
            assert head.headers["content-type"] == get.headers["content-type"]
        assert client.head("/v1/completions").status_code == 405
        assert client.head("/nothing").status_code == 404


def test_options_lists_the_methods(live_server, keyed_server):
    for server in (live_server, keyed_server):
        with server.client(headers={}) as client:
            for path, allow in (
                ("/v1/completions", "OPTIONS, POST"),
                ("/v1/models", "GET, HEAD, OPTIONS"),
            ):
                answer = client.options(path)
                assert (answer.status_code, answer.headers["allow"], answer.content) == (
                    204,
                    allow,
                    b"",
                )
    with live_server.client() as client:
        assert client.options("/nothing").status_code == 404


def test_a_disconnect_during_a_large_answer_is_not_an_error(demo_engine, caplog):
    with serving(demo_engine, max_queue_tokens=10_000_000) as server, own_log(caplog):
        # The accepted socket inherits this small buffer; the default would hold megabytes.
        server.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        request = server.request_bytes("/tokenize", {"content": "漢" * 100_000})
        for _ in range(2):
            with server.connect() as sock:
                sock.sendall(request)
                assert sock.recv(100).startswith(b"HTTP/1.1 200")
        wait_until(server.idle, "the server to be idle")
        wait_until(
            lambda: len([r for r in caplog.records if r.getMessage() == "request"]) >= 2,
            "the log lines",
        )
    assert {record.levelname for record in caplog.records} == {"INFO"}


@pytest.mark.parametrize(
    ("path", "kind", "part"),
    [
        ("/v1/chat/completions", "application/json", b'{"messages": ['),
        ("/api/pull", "application/json", b'{"model": '),
        (
            "/v1/files",
            "multipart/form-data; boundary=x",
            b"--x\r\nContent-Disposition: form-data; ",
        ),
    ],
)
def test_a_disconnect_during_a_body_is_not_an_error(
    demo_engine, tmp_path, caplog, path, kind, part
):
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
        "Content-Length: 1000\r\n\r\n"
    )
    with serving(demo_engine, batch_dir=tmp_path) as server, own_log(caplog):
        with server.connect() as sock:
            sock.sendall(head.encode() + part)
            wait_until(lambda: server.server.server_state.tasks, "the request to begin")
        wait_until(lambda: caplog.records, "the log line")
        wait_until(server.idle, "the server to be idle")
        assert not list(tmp_path.glob("*/files/*"))
    (record,) = caplog.records
    assert (record.levelname, record.facts["status"], record.facts["route"]) == ("INFO", 499, path)
