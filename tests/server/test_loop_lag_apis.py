"""The event loop goes on whatever API is asked, whatever is remembered, and however much is compared."""

from __future__ import annotations

import gc
import json
import random
from typing import Any

import httpx
import pytest

from helpers.engine.fake_runner import fake_engine
from helpers.server.api_bodies import ASKED, asked, said
from helpers.server.live_servers import LiveServer, serving, wait_until
from helpers.server.loop_lag import check, in_threads, least_lag
from helpers.server.scripted_model import TEMPLATE
from kvboost_edge.server.serve import freeze_heap

pytestmark = pytest.mark.alone

WORDS = ("mill", "water", "river", "a", "of", "house", "yesterday", "grinding", "corn.", "\n", "— é 漢字")
CONTEXT = 60_000


@pytest.fixture(scope="module")
def server(demo_engine: Any) -> Any:
    """A real model, whose context is far shorter than what is sent: that is told after all was tokenized."""
    with serving(demo_engine, max_queue_tokens=1 << 24) as server:
        freeze_heap()
        yield server
        gc.unfreeze()


@pytest.fixture(scope="module")
def large() -> Any:
    """A model that costs nothing, with a long context: what the server itself does remains."""
    with fake_engine(num_blocks=8192, max_context=CONTEXT, max_batch_tokens=8192, debug_checks=False) as engine:
        engine.tokenizer.chat_template = TEMPLATE
        with serving(engine, model_name="kvboost-edge/demo", max_queue_tokens=1 << 24) as server:
            freeze_heap()
            yield server
            gc.unfreeze()


def test_the_loop_goes_on_while_every_api_tokenizes(server: LiveServer) -> None:
    """Long texts to each route that takes one, a few at a time, while short requests go on beside them."""
    text = " ".join(random.Random(0).choices(WORDS, k=70_000))[:300_000]
    paths = [path for path in ASKED if "hello" in json.dumps(ASKED[path]("hello")) and path != "/infill"]
    assert len(paths) == 14
    done: dict[str, int] = {}

    def long(number: int) -> None:
        with server.client() as client:
            for path in paths[number::3]:
                done[path] = client.post(path, json=asked(path, text), timeout=120).status_code

    def load() -> None:
        threads = in_threads(long, 3)
        with server.client() as client:
            while any(thread.is_alive() for thread in threads):
                assert client.post("/v1/messages/count_tokens", json=asked("/v1/messages", "x")).status_code in (
                    200,
                    400,
                )

    late = least_lag(server, load)
    assert {path for path, status in done.items() if status == 200} == {
        *("/v1/messages/count_tokens", "/tokenize", "/apply-template", "/v1/unpin"),
    }
    assert set(done.values()) == {200, 400}
    check(late)


def many_messages(path: str, count: int) -> dict[str, Any]:
    """A body of many messages, each of some words."""
    text = "word " * 12
    if path == "/v1/responses":
        return asked(path, "", input=said(text) * count)
    turns = [*said(text), {"role": "assistant", "content": text}] * (count // 2)
    return asked(path, "", messages=turns + said(text))


TALKING = [path for path in ASKED if "messages" in ASKED[path]("x")] + ["/v1/responses"]


@pytest.mark.parametrize("path", TALKING)
def test_the_most_messages_do_not_stop_the_loop(server: LiveServer, path: str) -> None:
    """Well-formed, and far longer than the context."""
    content = json.dumps(many_messages(path, 9_990)).encode()

    def load() -> None:
        with server.client() as client:
            answer = client.post(path, content=content, timeout=120)
            assert answer.status_code == 400 or path not in ("/v1/messages", "/v1/responses", "/api/chat")

    check(least_lag(server, load))


def bad_bodies(path: str) -> dict[str, bytes]:
    """Bodies that cost a server far more than who sends them, for any route."""
    field = next(name for name, value in ASKED[path]("hello").items() if "hello" in json.dumps(value))
    names = ",".join(f'"unknown_{i}":1' for i in range(60_000))
    fields = ",".join(f'"unknown_{i}":1' for i in range(100))
    inside = {
        "60,000 unknown fields inside": "{" + names + "}",
        "some unknown fields of many": listed("{" + fields + "}", 600),
        "9,999 without anything": listed("{}", 9_999),
        "a bad one after good ones": json.dumps([*(said("a") * 9_998), {}]),
        "many numbers": listed("12345", 327_000),
        "many texts": listed('"a"', 65_000),
        "many lists": listed("[]", 262_000),
        "a depth of 100,000": "[" * 100_000 + "]" * 100_000,
    }
    bodies = {name: f'{{"{field}":{value},"x":1}}'.encode() for name, value in inside.items()}
    return {"60,000 unknown fields": b"{" + names.encode() + b"}", **bodies}


def listed(one: str, count: int) -> str:
    """A list of as many alike, as JSON."""
    return "[" + ",".join([one] * count) + "]"


@pytest.mark.parametrize("path", [path for path in ASKED if path not in ("/api/show", "/detokenize", "/cache/reset")])
def test_no_bad_body_stops_the_loop(server: LiveServer, path: str) -> None:
    bodies = bad_bodies(path) if path != "/api/show" else {}

    def load() -> None:
        with server.client() as client:
            for name, body in bodies.items():
                answer = client.post(path, content=body)
                assert answer.status_code == 400, (name, answer.text[:300])
                assert len(answer.content) < 1000, name

    check(least_lag(server, load))


def test_a_long_query_with_many_documents_is_refused_before_it_is_written_down(server: LiveServer) -> None:
    """Each document is judged behind the query: together they would be a thousand times as long as the body."""
    body = {"query": "word " * 200_000, "documents": ["a"] * 1024}
    refused: list[httpx.Response] = []

    def load() -> None:
        with server.client() as client:
            refused.append(client.post("/v1/rerank", json=body, timeout=120))

    check(least_lag(server, load))
    assert {answer.status_code for answer in refused} <= {400, 503}


def test_large_responses_are_remembered_shown_and_continued(large: LiveServer) -> None:
    """Conversations as long as the context, of many small items, kept, listed and gone on with."""
    items = [*said("w" * 20), {"role": "assistant", "content": "y" * 20}] * 700
    body = {"input": items, "instructions": "i" * 4000, "max_output_tokens": 1}

    def load() -> None:
        with large.client() as client:
            last = None
            for _ in range(3):
                answer = client.post("/v1/responses", json={**body, "previous_response_id": last}, timeout=120)
                last = answer.json().get("id", last)
                body["input"] = said("more")
            for path in (f"/v1/responses/{last}", f"/v1/responses/{last}/input_items?limit=100"):
                assert client.get(path).status_code == 200
            stream = client.post("/v1/responses", json={**body, "stream": True}, timeout=120)
            assert b"response.completed" in stream.content or b"response.incomplete" in stream.content

    check(least_lag(large, load))
    wait_until(large.idle, "the server to be idle")


def test_as_much_as_is_remembered_is_read_beside_others(large: LiveServer) -> None:
    """What was sent with one response, as large as a body may be, is listed page by page; and a whole memory of them
    is continued."""
    from kvboost_edge.server.work.remembered import Turn

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
    remembered, before = large.state.remembered, None
    for number in range(9):
        assert remembered.keep(None, f"resp_{number}", Turn(answer, sent, before))
        before = f"resp_{number}"

    def load() -> None:
        with large.client() as client:
            for number in range(9):
                listed = client.get(f"/v1/responses/resp_{number}/input_items?limit=100")
                assert len(listed.json()["data"]) == 100
                assert client.get(f"/v1/responses/resp_{number}").status_code == 200
            asked = {"input": "x", "previous_response_id": before, "max_output_tokens": 1}
            refused = client.post("/v1/responses", json=asked, timeout=120)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")

    try:
        check(least_lag(large, load))
    finally:
        for number in range(9):
            remembered.forget(None, f"resp_{number}")


def test_comparing_with_all_that_is_kept_does_not_stop_the_loop(large: LiveServer) -> None:
    """Prompts of 30,000 tokens that are alike up to their ends, as many of them as are kept, and the list of them."""
    ids = random.Random(3).choices(range(256), k=30_000)
    headers = {"content-type": "application/json"}

    def ask(client: httpx.Client, number: int) -> None:
        prompt = json.dumps([*ids, number % 256, number // 256])
        content = f'{{"prompt": {prompt}, "max_tokens": 1, "kvboost": {{"explain": true}}}}'
        answer = client.post("/v1/completions", content=content, headers=headers)
        assert answer.status_code == 200, answer.text

    def load() -> None:
        def some(first: int) -> None:
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
