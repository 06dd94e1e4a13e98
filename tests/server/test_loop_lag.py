"""Tests that the event loop is never blocked by requests to any API, by stored responses or by
comparisons with the request history.
"""

import asyncio
import contextlib
import gc
import json
import random
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from helpers.engine.fake_runner import fake_engine
from helpers.server.api_bodies import ASKED, TEXTS, asked, said
from helpers.server.live_servers import raw_answer, serving, wait_until
from helpers.server.loop_lag import check, in_threads, lags, least_lag, most_lag
from helpers.server.scripted_model import TEMPLATE
from kvboost_edge.server.api import bodies
from kvboost_edge.server.serve import freeze_heap


def mostly_full(paths, *kept):
    """Return the paths as cases. `make test` runs the kept ones only; the others are marked `full`."""
    return [pytest.param(path, marks=() if path in kept else pytest.mark.full) for path in paths]


def listed(one, count):
    """Return a JSON list of `count` equal items."""
    return "[" + ",".join([one] * count) + "]"


CONTEXT = 60_000
WORDS = (
    "mill",
    "water",
    "river",
    "a",
    "of",
    "house",
    "yesterday",
    "grinding",
    "corn.",
    "\n",
    "— é 漢字",
)


@pytest.mark.parametrize("path", TEXTS)
async def test_long_bodies_are_parsed_and_tokenized_off_the_event_loop(
    tiny_app, tiny_engine, monkeypatch, path
):
    threads = {"read": set(), "tokenized": set()}

    def noting(kind, work):
        return lambda *arguments: threads[kind].add(threading.current_thread()) or work(*arguments)

    codec = tiny_engine.tokenizer.codec
    monkeypatch.setattr(bodies, "parse_json", noting("read", bodies.parse_json))
    monkeypatch.setattr(codec, "encode", noting("tokenized", codec.encode))
    answer = await tiny_app.post(path, json={**asked(path, "word " * 20_000), "model": "tiny"})
    assert answer.status_code in (200, 400), answer.text[:300]
    assert threads["read"]
    assert threads["tokenized"] or path in ("/infill", "/apply-template")
    assert threading.current_thread() not in threads["read"] | threads["tokenized"]


async def test_long_bodies_are_parsed_one_at_a_time(tiny_app, monkeypatch):
    """Python's JSON parser holds the GIL, so the event loop would wait for all bodies."""
    read = bodies.parse_json
    inside = []
    met = threading.Event()

    def reading(body):
        inside.append(body)
        if len(inside) > 1:
            met.set()
        met.wait(0.05)  # until another one enters
        inside.pop()
        return read(body)

    monkeypatch.setattr(bodies, "parse_json", reading)
    body = {"prompt": "word " * 20_000, "model": "tiny"}
    answers = await asyncio.gather(*(tiny_app.post("/v1/completions", json=body) for _ in range(4)))
    assert [answer.status_code for answer in answers] == [400] * 4
    assert not met.is_set()


async def test_a_long_body_waits_for_an_iteration_of_the_event_loop(tiny_app, monkeypatch):
    """Otherwise the event loop would wait for another body each time it releases the GIL."""
    loop = asyncio.get_running_loop()
    read = bodies.parse_json
    begun = threading.Event()
    met = []

    def reading(body):
        begun.set()
        time.sleep(0.1)  # meanwhile the event loop accepts the other requests
        value = read(body)
        begun.clear()
        loop.call_soon_threadsafe(lambda: met.append(begun.wait(0.05)))
        return value

    monkeypatch.setattr(bodies, "parse_json", reading)
    body = {"prompt": "word " * 20_000, "model": "tiny"}
    answers = await asyncio.gather(*(tiny_app.post("/v1/completions", json=body) for _ in range(4)))
    assert [answer.status_code for answer in answers] == [400] * 4
    assert met == [False] * 4


@pytest.fixture(scope="module")
def server(demo_engine):
    """Server with a frozen heap, as in the server process."""
    with serving(demo_engine, max_queue_tokens=10_000_000) as server:
        freeze_heap()
        yield server
        gc.unfreeze()


@pytest.mark.alone
def test_long_prompts_do_not_block_the_event_loop(server):
    context = server.engine.runner_info.max_context
    rng = random.Random(1)

    def long(number):
        ids = rng.choices(range(256), k=context - 8)
        with server.client() as client:
            answer = client.post(
                "/v1/completions", json={"prompt": ids, "max_tokens": 8, "stream": True}
            )
            assert answer.status_code == 200

    def load():
        for thread in in_threads(long, 3):
            thread.join(60)

    late = least_lag(server, load)
    assert np.percentile(late, 99) < most_lag(), lags(late)
    wait_until(server.idle, "the server to be idle")


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.alone
@pytest.mark.full
def test_the_largest_messages_do_not_block_the_event_loop(server):
    """The well-formed body of 6.9 MB exceeds the context, which is known only after tokenization. A
    second body contains the text of special tokens.
    """
    message = {"role": "user", "content": "word " * 130}
    marked = {"role": "user", "content": "<|im_start|> " + "word " * 180_000}
    bodies = [
        {"messages": [message] * 9_990, "max_tokens": 1},
        {"messages": [marked] * 7, "max_tokens": 1},
    ]

    def load():
        with server.client() as client:
            for body in bodies:
                answer = client.post("/v1/chat/completions", json=body, timeout=120)
                assert answer.status_code == 400
                assert "context" in answer.json()["error"]["message"]

    check(least_lag(server, load))


@pytest.mark.alone
@pytest.mark.parametrize(
    "data",
    [
        CHUNKED + b"1\r\nx\r\n" * 60_000 + b"0\r\n\r\n",
        pytest.param(
            CHUNKED + (b"40\r\n" + b" " * 64 + b"\r\n") * 100_000 + b"0\r\n\r\n",
            marks=pytest.mark.full,
        ),
        HEAD + b"Content-Length: 50000000\r\n\r\n" + bytes(50_000_000),
        pytest.param(
            b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000, marks=pytest.mark.full
        ),
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: a\r\n" * 200_000,
    ],
    ids=[
        "60,000 chunks of a byte",
        "100,000 chunks of 64",
        "50 MB refused",
        "pipelined",
        "200,000 headers",
    ],
)
def test_invalid_bytes_do_not_block_the_event_loop(server, data):
    def load():
        for _ in range(3):
            with (
                server.connect() as sock,
                contextlib.suppress(BrokenPipeError, ConnectionResetError),
            ):
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                raw_answer(sock)

    check(least_lag(server, load))


@pytest.mark.alone
@pytest.mark.parametrize(
    ("stream", "choices"),
    [(True, 5), *(pytest.param(one, 27, marks=pytest.mark.full) for one in (False, True))],
)
def test_large_answers_do_not_block_the_event_loop(server, stream, choices):
    """The prompts are echoed with 20 log probabilities per token. With 27 choices the response has
    the maximum size.
    """
    rng = random.Random(2)
    body = {
        "prompt": rng.choices(range(256), k=900),
        "max_tokens": 4,
        "echo": True,
        "logprobs": 20,
        "n": choices,
    }
    sizes = []

    def load():
        with server.client() as client:
            answer = client.post("/v1/completions", json={**body, "stream": stream}, timeout=120)
            sizes.append(len(answer.content))
            assert answer.status_code == 200, answer.text

    late = least_lag(server, load)
    assert sizes[0] > choices * 400_000
    check(late)


@pytest.fixture(scope="module")
def large():
    """Server of a model without cost and with a long context, so that only the server's own work
    remains.
    """
    with fake_engine(
        num_blocks=8192, max_context=CONTEXT, max_batch_tokens=8192, debug_checks=False
    ) as engine:
        engine.tokenizer.chat_template = TEMPLATE
        with serving(engine, model_name="kvboost-edge/demo", max_queue_tokens=1 << 24) as server:
            freeze_heap()
            yield server
            gc.unfreeze()


@pytest.mark.alone
def test_tokenization_in_every_api_does_not_block_the_event_loop(server):
    """Each route gets a long text, three at a time, while short requests continue."""
    text = " ".join(random.Random(0).choices(WORDS, k=70_000))[:300_000]
    paths = [path for path in TEXTS if path != "/infill"]
    assert len(paths) == 17
    done = {}

    def long(number):
        with server.client() as client:
            for path in paths[number::3]:
                done[path] = client.post(path, json=asked(path, text), timeout=120).status_code

    def load():
        threads = in_threads(long, 3)
        with server.client() as client:
            while any(thread.is_alive() for thread in threads):
                assert client.post(
                    "/v1/messages/count_tokens", json=asked("/v1/messages", "x")
                ).status_code in (
                    200,
                    400,
                )

    late = least_lag(server, load)
    assert {path for path, status in done.items() if status == 200} == {
        *("/v1/messages/count_tokens", "/tokenize", "/apply-template", "/v1/unpin"),
    }
    assert set(done.values()) == {200, 400}
    check(late)


def many_messages(path, count):
    """Return a body with many messages of a few words each."""
    text = "word " * 12
    if path == "/v1/responses":
        return asked(path, "", input=said(text) * count)
    turns = [*said(text), {"role": "assistant", "content": text}] * (count // 2)
    return asked(path, "", messages=turns + said(text))


BAD = ("/v1/chat/completions", "/v1/embeddings")
TALKING = [path for path in ASKED if "messages" in ASKED[path]("x")] + ["/v1/responses"]


@pytest.mark.alone
@pytest.mark.parametrize("path", mostly_full(TALKING, "/v1/chat/completions"))
def test_the_maximum_number_of_messages_does_not_block_the_event_loop(server, path):
    """The body is well-formed and far longer than the context."""
    content = json.dumps(many_messages(path, 9_990)).encode()

    def load():
        with server.client() as client:
            answer = client.post(path, content=content, timeout=120)
            assert answer.status_code == 400 or path not in (
                "/v1/messages",
                "/v1/responses",
                "/api/chat",
            )

    check(least_lag(server, load))


def bad_bodies(path):
    """Return bodies, for any route, that cost the server far more than the client."""
    field = next(
        name for name, value in ASKED[path]("hello").items() if "hello" in json.dumps(value)
    )
    names = ",".join(f'"unknown_{i}":1' for i in range(60_000))
    fields = ",".join(f'"unknown_{i}":1' for i in range(100))
    inside = {
        "60,000 unknown fields inside": "{" + names + "}",
        "some unknown fields of many": listed("{" + fields + "}", 600),
        "9,999 without anything": listed("{}", 9_999),
        "a bad one after good ones": json.dumps([*(said("a") * 9_998), {}]),
        "many unknown fields of many": listed("{" + fields + "}", 4_500),
        "as many numbers as are read": listed("12345", 327_000),
        "more numbers than are read": listed("12345", 1_000_000),
        "many texts": listed('"a"', 65_000),
        "many lists": listed("[]", 262_000),
        "a depth of 100,000": "[" * 100_000 + "]" * 100_000,
    }
    bodies = {name: f'{{"{field}":{value},"x":1}}'.encode() for name, value in inside.items()}
    bodies["500,000 biases"] = (
        b'{"logit_bias":{' + ",".join(f'"{i}":1' for i in range(500_000)).encode() + b"}}"
    )
    bodies["a depth of 100,000 objects"] = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    return {"60,000 unknown fields": b"{" + names.encode() + b"}", **bodies}


@pytest.mark.alone
@pytest.mark.parametrize("path", mostly_full(TEXTS, *BAD))
def test_invalid_bodies_do_not_block_the_event_loop(server, path):
    bodies = bad_bodies(path)
    seconds = {}

    def load():
        with server.client() as client:
            for name, body in bodies.items():
                started = time.perf_counter()
                answer = client.post(path, content=body)
                seconds[name] = min(time.perf_counter() - started, seconds.get(name, 60.0))
                assert answer.status_code == 400, (name, answer.text[:300])
                assert len(answer.content) < 1000, name

    check(least_lag(server, load))
    assert max(seconds.values()) < 1.0, seconds


@pytest.fixture
def busy():
    """Another process that computes all the time."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield
    process.kill()
    process.wait()


IDS = json.dumps(random.Random(4).choices(range(256), k=100_000))


@pytest.mark.alone
@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        ("/v1/completions", f'{{"prompt": {IDS}, "max_tokens": 1}}', 50),
        pytest.param("/v1/embeddings", f'{{"input": {IDS}}}', 50, marks=pytest.mark.full),
        ("/v1/completions", f'{{"prompt": {listed("12345", 327_000)}, "x": 1}}', 8),
    ],
    ids=["prompts of ids", "inputs of ids", "as many values as are read"],
)
@pytest.mark.usefixtures("busy")
def test_concurrent_large_bodies_do_not_block_the_event_loop(server, path, body, count):
    """Another process occupies one processor meanwhile."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    answers = []

    def ask(number):
        with server.connect(60) as sock:
            sock.sendall(request)
            answers.append(raw_answer(sock)[9:12])

    def load():
        for thread in in_threads(ask, count):
            thread.join(60)

    late = least_lag(server, load)
    assert set(answers) == {b"400"}
    check(late)


@pytest.mark.alone
@pytest.mark.full
@pytest.mark.usefixtures("busy")
def test_the_largest_embeddings_answer_does_not_block_the_event_loop(server, monkeypatch):
    """The embeddings are as wide as those of a large model."""
    embed = server.engine.embed
    wide = np.random.default_rng(0).standard_normal((2048, 1024), np.float32)

    def embed_wide(*arguments, **options):
        embed(*arguments, **options)
        return wide

    monkeypatch.setattr(server.engine, "embed", embed_wide)
    body = {"input": [[number % 250] for number in range(2048)]}

    def load():
        with (
            server.client() as client,
            client.stream("POST", "/v1/embeddings", json=body, timeout=120) as answer,
        ):
            assert answer.status_code == 200
            assert sum(map(len, answer.iter_raw())) > 30_000_000

    check(least_lag(server, load))


@pytest.mark.alone
def test_a_long_query_with_many_documents_is_refused_before_expansion(server):
    """Each document is appended to the query, so the inputs would be a thousand times as long as
    the body.
    """
    body = {"query": "word " * 200_000, "documents": ["a"] * 1024}
    refused = []

    def load():
        with server.client() as client:
            refused.append(client.post("/v1/rerank", json=body, timeout=120))

    check(least_lag(server, load))
    assert {answer.status_code for answer in refused} <= {400, 503}


@pytest.mark.alone
def test_large_stored_responses_do_not_block_the_event_loop(large):
    """Conversations as long as the context, with many small items, are stored, listed and
    continued.
    """
    items = [*said("w" * 20), {"role": "assistant", "content": "y" * 20}] * 700
    body = {"input": items, "instructions": "i" * 4000, "max_output_tokens": 1}

    def load():
        with large.client() as client:
            last = None
            for _ in range(3):
                answer = client.post(
                    "/v1/responses", json={**body, "previous_response_id": last}, timeout=120
                )
                last = answer.json().get("id", last)
                body["input"] = said("more")
            for path in (f"/v1/responses/{last}", f"/v1/responses/{last}/input_items?limit=100"):
                assert client.get(path).status_code == 200
            stream = client.post("/v1/responses", json={**body, "stream": True}, timeout=120)
            assert (
                b"response.completed" in stream.content or b"response.incomplete" in stream.content
            )

    check(least_lag(large, load))
    wait_until(large.idle, "the server to be idle")


@pytest.mark.alone
def test_reading_the_largest_stored_responses_does_not_block_the_event_loop(large):
    """The input of a response of maximum size is listed page by page. Then a request continues the
    full store.
    """
    from kvboost_edge.server.work.stored_responses import StoredResponse

    sent = json.dumps(
        [
            {
                "id": f"msg_{n}",
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "é" * 100}],
            }
            for n in range(9_000)
        ]
    ).encode()
    answer = json.dumps({"output": [], "instructions": "i" * 1_000_000}).encode()
    remembered = large.state.remembered
    before = None
    for number in range(9):
        assert remembered.keep(None, f"resp_{number}", StoredResponse(answer, sent, before))
        before = f"resp_{number}"

    def load():
        with large.client() as client:
            for number in range(9):
                listed = client.get(f"/v1/responses/resp_{number}/input_items?limit=100")
                assert len(listed.json()["data"]) == 100
                assert client.get(f"/v1/responses/resp_{number}").status_code == 200
            asked = {"input": "x", "previous_response_id": before, "max_output_tokens": 1}
            refused = client.post("/v1/responses", json=asked, timeout=120)
            assert (refused.status_code, refused.json()["error"]["param"]) == (
                400,
                "previous_response_id",
            )

    try:
        check(least_lag(large, load))
    finally:
        for number in range(9):
            remembered.forget(None, f"resp_{number}")


@pytest.mark.alone
@pytest.mark.full
def test_comparing_with_the_whole_history_does_not_block_the_event_loop(large):
    """The history is full of prompts of 30,000 tokens that differ only at the end. It is also
    listed.
    """
    ids = random.Random(3).choices(range(256), k=30_000)
    headers = {"content-type": "application/json"}

    def ask(client, number):
        prompt = json.dumps([*ids, number % 256, number // 256])
        content = f'{{"prompt": {prompt}, "max_tokens": 1, "kvboost": {{"explain": true}}}}'
        answer = client.post("/v1/completions", content=content, headers=headers)
        assert answer.status_code == 200, answer.text

    def load():
        def some(first):
            with large.client() as client:
                for number in range(40):
                    ask(client, first * 40 + number)
                    listed = client.get("/v1/requests").json()["data"]
                    assert listed[0]["prompt_tokens"] == 30_002
                    assert client.get("/v1/requests/last/cache").status_code == 200

        for thread in in_threads(some, 3):
            thread.join(120)

    check(least_lag(large, load))
    assert large.state.doctor.history.nbytes < 20 << 20
