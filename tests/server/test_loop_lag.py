"""The event loop goes on while long texts are tokenized and long prompts are computed."""

from __future__ import annotations

import contextlib
import gc
import random
import socket
import time
from typing import Any

import numpy as np
import pytest

from helpers.server.live_servers import LiveServer, raw_answer, serving, wait_until
from helpers.server.loop_lag import MOST_LAG, check, in_threads, lags, least_lag
from kvboost_edge.server.serve import freeze_heap

pytestmark = pytest.mark.alone

WORDS = ("mill", "water", "river", "a", "of", "house", "yesterday", "grinding", "corn.", "\n", "— é 漢字")


@pytest.fixture(scope="module")
def server(demo_engine: Any) -> Any:
    """It freezes the garbage collector's oldest generation, as the server process does."""
    with serving(demo_engine, max_queue_tokens=10_000_000) as server:
        freeze_heap()
        yield server
        gc.unfreeze()


def test_the_loop_goes_on_while_long_texts_are_tokenized(server: LiveServer) -> None:
    """Several of 1 MB at once, to each endpoint that tokenizes, while short requests go on beside them."""
    text = " ".join(random.Random(0).choices(WORDS, k=190_000))[:1_000_000]
    assert len(text) == 1_000_000
    bodies = {
        "/tokenize": {"prompt": text},
        "/v1/completions": {"prompt": text},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}]},
    }
    done: list[int] = []
    short: list[float] = []

    def long(number: int) -> None:
        path = list(bodies)[number]
        with server.client() as client:
            done.append(client.post(path, json=bodies[path]).status_code)

    def load() -> None:
        threads = in_threads(long, len(bodies))
        with server.client() as client:
            while any(thread.is_alive() for thread in threads):
                started = time.perf_counter()
                assert client.post("/tokenize", json={"content": "short"}).status_code == 200
                short.append(time.perf_counter() - started)

    late = least_lag(server, load)
    assert set(done) == {200, 400}, "two are longer than the context, which is told after tokenizing"
    assert np.percentile(late, 99) < MOST_LAG, lags(late)
    assert np.median(short) < MOST_LAG, lags(short)


def test_the_loop_goes_on_while_long_prompts_are_computed(server: LiveServer) -> None:
    context = server.engine.runner_info.max_context
    rng = random.Random(1)

    def long(number: int) -> None:
        ids = rng.choices(range(256), k=context - 8)
        with server.client() as client:
            answer = client.post("/v1/completions", json={"prompt": ids, "max_tokens": 8, "stream": True})
            assert answer.status_code == 200

    def load() -> None:
        for thread in in_threads(long, 3):
            thread.join(60)

    late = least_lag(server, load)
    assert np.percentile(late, 99) < MOST_LAG, lags(late)
    wait_until(server.idle, "the server to be idle")


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def bad_bodies() -> dict[str, bytes]:
    """Bodies that cost a server far more than who sends them."""
    names = ",".join(f'"unknown_{i}":1' for i in range(100))
    numbers = ",".join(f'"{i}":1' for i in range(500_000))
    many = ",".join(f'"unknown_{i}":1' for i in range(100_000))
    message = '{"role":"user","content":"a"}'
    return {
        "unknown fields of 9,999 messages": f'{{"messages":[{",".join(["{" + names + "}"] * 4_500)}]}}'.encode(),
        "some unknown fields of messages": f'{{"messages":[{",".join(["{" + names + "}"] * 900)}]}}'.encode(),
        "messages without anything": f'{{"messages":[{",".join(["{}"] * 9_999)}]}}'.encode(),
        "a bad message after good ones": f'{{"messages":[{",".join([message] * 9_998)},{{}}]}}'.encode(),
        "500,000 biases": f'{{"prompt":"a","logit_bias":{{{numbers}}}}}'.encode(),
        "100,000 unknown fields": f'{{"prompt":"a",{many}}}'.encode(),
        "a million numbers": f'{{"prompt":[{",".join(["12345"] * 1_000_000)}],"x":1}}'.encode(),
        "as many numbers as are read": f'{{"prompt":[{",".join(["12345"] * 327_000)}],"x":1}}'.encode(),
        "as many strings as are read": f'{{"prompt":"a",{many[: many.index("unknown_65000") - 2]}}}'.encode(),
        "200,000 lists": f'{{"prompt":[{",".join(["[]"] * 200_000)}]}}'.encode(),
        "as many lists as are read": f'{{"prompt":[{",".join(["[]"] * 262_000)}]}}'.encode(),
        "a depth of 100,000": b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "a depth of 100,000 objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    }


def test_the_largest_messages_do_not_stop_the_loop(server: LiveServer) -> None:
    """Well-formed, 6.9 MB, far longer than the context, which is told after all was tokenized; one of them with the
    texts of special tokens in it."""
    message = {"role": "user", "content": "word " * 130}
    marked = {"role": "user", "content": "<|im_start|> " + "word " * 180_000}
    bodies = [{"messages": [message] * 9_990, "max_tokens": 1}, {"messages": [marked] * 7, "max_tokens": 1}]

    def load() -> None:
        with server.client() as client:
            for body in bodies:
                answer = client.post("/v1/chat/completions", json=body, timeout=120)
                assert answer.status_code == 400
                assert "context" in answer.json()["error"]["message"]

    check(least_lag(server, load))


@pytest.mark.parametrize(
    "data",
    [
        CHUNKED + b"1\r\nx\r\n" * 60_000 + b"0\r\n\r\n",
        CHUNKED + (b"40\r\n" + b" " * 64 + b"\r\n") * 100_000 + b"0\r\n\r\n",
        HEAD + b"Content-Length: 50000000\r\n\r\n" + bytes(50_000_000),
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000,
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: a\r\n" * 200_000,
    ],
    ids=["60,000 chunks of a byte", "100,000 chunks of 64", "50 MB refused", "pipelined", "200,000 headers"],
)
def test_no_bytes_stop_the_loop(server: LiveServer, data: bytes) -> None:
    def load() -> None:
        for _ in range(3):
            with server.connect() as sock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                raw_answer(sock)

    check(least_lag(server, load))


@pytest.mark.parametrize("name", bad_bodies())
def test_no_bad_body_stops_the_loop(server: LiveServer, name: str) -> None:
    body = bad_bodies()[name]
    seconds: list[float] = []

    def load() -> None:
        with server.client(headers={"content-type": "application/json"}) as client:
            for path in ("/v1/chat/completions", "/v1/completions"):
                started = time.perf_counter()
                answer = client.post(path, content=body)
                seconds.append(time.perf_counter() - started)
                assert answer.status_code == 400, answer.text
                assert len(answer.content) < 1000

    check(least_lag(server, load))
    assert min(seconds) < 1.0


@pytest.mark.parametrize("stream", [False, True])
def test_large_answers_do_not_stop_the_loop(server: LiveServer, stream: bool) -> None:
    """Echoed prompts with twenty log probabilities a token, as many as an answer may have."""
    rng = random.Random(2)
    body = {"prompt": rng.choices(range(256), k=900), "max_tokens": 4, "echo": True, "logprobs": 20, "n": 27}
    sizes: list[int] = []

    def load() -> None:
        with server.client() as client:
            answer = client.post("/v1/completions", json={**body, "stream": stream}, timeout=120)
            sizes.append(len(answer.content))
            assert answer.status_code == 200, answer.text

    late = least_lag(server, load)
    assert sizes[0] > 10_000_000
    check(late)
