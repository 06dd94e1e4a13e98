"""Tests of closed connections: a client that is still sending reads the error response; one that
sends forever or falls silent is disconnected.
"""

import contextlib
import shutil
import subprocess
import threading

import openai
import pytest

from helpers.server.live_servers import KEYS, raw_answer, serving, wait_until
from kvboost_edge.server.http import lingering_close

LARGE = 16_000_000  # more than the buffers of a connection hold
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
KEY = b"Authorization: Bearer " + KEYS[0].encode() + b"\r\n"


@pytest.fixture(scope="module")
def server(demo_engine):
    with serving(demo_engine, api_keys=KEYS, max_body_bytes=20_000) as server:
        yield server


def chunked(size):
    chunk = b"%x\r\n%s\r\n" % (1_000_000, b"x" * 1_000_000)
    return chunk * (size // 1_000_000) + b"0\r\n\r\n"


@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"], ids=["keep-alive", "close"])
@pytest.mark.parametrize(
    ("key", "length", "status", "code"),
    [
        (KEY, True, 413, b"request_too_large"),
        (KEY, False, 413, b"request_too_large"),
        (b"", True, 401, b"invalid_api_key"),
        (b"", False, 401, b"invalid_api_key"),
    ],
    ids=["length", "chunks", "length without a key", "chunks without a key"],
)
def test_a_client_that_sends_its_whole_body_first_reads_the_error(
    server, key, length, status, code, more
):
    body = b"x" * LARGE if length else chunked(LARGE)
    framing = b"Content-Length: %d\r\n" % len(body) if length else b"Transfer-Encoding: chunked\r\n"
    with server.connect() as sock:
        sock.sendall(HEAD + key + framing + more + b"\r\n")
        sock.sendall(body)
        answer = raw_answer(sock)
    assert answer.startswith(b"HTTP/1.1 %d" % status), answer[:100]
    assert code in answer
    wait_until(lambda: not server.server.server_state.connections, "the connection to be closed")


@pytest.mark.parametrize(
    "start",
    [b"no head at all\n\n", HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"],
)
def test_a_client_that_keeps_sending_after_a_malformed_head_reads_the_error(server, start):
    with server.connect() as sock:
        sock.sendall(start)
        sock.sendall(b"x" * LARGE)
        assert raw_answer(sock).startswith(b"HTTP/1.1 400")


def test_httpx_and_curl_read_the_error(server, tmp_path):
    text = "x" * LARGE
    with server.client() as client:
        answer = client.post("/v1/completions", json={"prompt": text})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        assert client.get("/v1/models").status_code == 200
    with openai.OpenAI(
        base_url=f"{server.base_url}/v1", api_key=KEYS[0], max_retries=0, timeout=60
    ) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(model="any", prompt=text)
        assert caught.value.status_code == 413
    if curl := shutil.which("curl"):
        (tmp_path / "body").write_text(text)
        command = [
            curl,
            "-sS",
            "-H",
            KEY.decode().strip(),
            "--data-binary",
            f"@{tmp_path / 'body'}",
        ]
        for options in ([], ["-H", "Expect:"], ["-H", "Transfer-Encoding: chunked"]):
            done = subprocess.run(
                [*command, *options, f"{server.base_url}/v1/completions"],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert "request_too_large" in done.stdout, done


def test_expect_100_continue_gets_the_error_before_the_body(server):
    expects = HEAD + KEY + b"Expect: 100-continue\r\n"
    with server.connect() as sock:
        sock.sendall(expects + b"Content-Length: 50000000\r\n\r\n")
        assert raw_answer(sock).startswith(b"HTTP/1.1 413")
    with server.connect() as sock:
        sock.sendall(HEAD + b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 401")
    with server.connect() as sock:
        sock.sendall(expects + b"Connection: close\r\nContent-Length: 32\r\n\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 100")
        sock.sendall(b'{"prompt": "a", "max_tokens": 1}')
        assert raw_answer(sock).startswith(b"HTTP/1.1 200")
    with server.connect() as sock:
        sock.sendall(HEAD + KEY + b"Expect: the-best\r\nContent-Length: 50000000\r\n\r\n")
        answer = raw_answer(sock)
    assert answer.startswith(b"HTTP/1.1 417")
    assert b'"code": "unknown_expectation"' in answer


def test_a_silent_client_is_disconnected(server, monkeypatch):
    monkeypatch.setattr(lingering_close, "QUIET_SECONDS", 0.2)
    with server.connect() as sock:
        sock.sendall(HEAD + KEY + b"Content-Length: 50000000\r\n\r\n" + b"x" * 100_000)
        assert raw_answer(sock).startswith(b"HTTP/1.1 413")
        wait_until(
            lambda: not server.server.server_state.connections, "the connection to be closed", 10
        )


def test_a_client_that_sends_too_much_is_disconnected(server, monkeypatch):
    monkeypatch.setattr(lingering_close, "_MOST_BYTES", 1_000_000)
    with server.connect() as sock:
        sock.sendall(HEAD + KEY + b"Content-Length: 5000000000\r\n\r\n")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            sock.sendall(bytes(500_000_000))
    wait_until(lambda: not server.server.server_state.connections, "the connection to be closed")


def test_a_lingering_connection_does_not_delay_shutdown(demo_engine):
    with serving(demo_engine, max_body_bytes=20_000) as server:
        sock = server.connect()
        sock.sendall(HEAD + b"Content-Length: 50000000\r\n\r\n")
        assert raw_answer(sock).startswith(b"HTTP/1.1 413")
        stop = threading.Event()

        def trickle():
            with contextlib.suppress(OSError):
                while not stop.wait(0.01):
                    sock.sendall(b"x")

        sender = threading.Thread(target=trickle)
        sender.start()
    stop.set()
    sender.join(10)
    sock.close()
    assert not server.server.server_state.connections


def test_a_refused_connection_reads_the_reason(demo_engine):
    """The client sends its request after the server has rejected the connection."""
    with serving(demo_engine, max_connections=1) as server, server.connect() as first:
        first.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert first.recv(65536).startswith(b"HTTP/1.1 200")
        with contextlib.ExitStack() as stack:
            second, third = (stack.enter_context(server.connect()) for _ in range(2))
            second.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % LARGE + b"x" * LARGE)
            assert raw_answer(second).startswith(b"HTTP/1.1 503")
            assert raw_answer(third).startswith(b"HTTP/1.1 503")
