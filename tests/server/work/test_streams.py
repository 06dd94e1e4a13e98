"""Tests of streams: exact OpenAI format, the same content as a whole response, and the end after a
disconnect.
"""

import json
import socket
import threading
from contextlib import contextmanager

from helpers.server.live_servers import wait_until
from kvboost_edge.server.work.streams import dumps, dumps_long, send_json

MODEL = "kvboost-edge/demo"
MESSAGES = [{"role": "user", "content": "What grinds the corn?"}]
CHAT = ("/v1/chat/completions", {"messages": MESSAGES})
TEXT = ("/v1/completions", {"prompt": "The water mill of the old town"})


def events(answer):
    """Check the format of a stream; return its events."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-request-id"]
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


async def test_chat_chunks_have_the_exact_format(tiny_app):
    body = {**CHAT[1], "max_tokens": 5, "temperature": 0, "stream": True, "ignore_eos": True}
    chunks = events(await tiny_app.post(CHAT[0], json=body))
    head = {"id", "object", "created", "model", "system_fingerprint", "choices"}
    assert (
        len(
            {
                (chunk["id"], chunk["created"], chunk["model"], chunk["system_fingerprint"])
                for chunk in chunks
            }
        )
        == 1
    )
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"] == [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": "", "refusal": None},
            "logprobs": None,
            "finish_reason": None,
        }
    ]
    for chunk in chunks[:-1]:
        assert set(chunk) == head, "chunks must have no usage unless it was requested"
        assert chunk["choices"][0]["finish_reason"] is None
    for chunk in chunks[1:-1]:
        assert list(chunk["choices"][0]["delta"]) == ["content"]
        assert chunk["choices"][0]["delta"]["content"]
    last = chunks[-1]["choices"][0]
    assert (last["delta"], last["finish_reason"]) == ({}, "length")
    assert set(chunks[-1]) == head | {"timings", "kvboost"}
    whole = (await tiny_app.post(CHAT[0], json={**body, "stream": False})).json()
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]


async def test_usage_is_the_last_chunk_without_choices(tiny_app):
    for path, base in (CHAT, TEXT):
        body = {
            **base,
            "max_tokens": 4,
            "stream": True,
            "stream_options": {"include_usage": True},
            "n": 2,
        }
        chunks = events(await tiny_app.post(path, json=body))
        assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks[:-1])
        last = chunks[-1]
        assert last["choices"] == []
        assert (
            last["usage"]["total_tokens"]
            == last["usage"]["prompt_tokens"] + last["usage"]["completion_tokens"]
        )
        assert last["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
        assert {"timings", "kvboost"} <= set(last)
        reasons = [
            choice["finish_reason"]
            for chunk in chunks
            for choice in chunk["choices"]
            if choice["finish_reason"]
        ]
        assert len(reasons) == 2


async def test_streams_equal_whole_answers(tiny_app):
    """The cases cover choices, prompts, echo, stop strings, log probabilities and token ids on both
    endpoints.
    """
    shared = [
        {},
        {"n": 3, "seed": 1, "temperature": 1.3},
        {"stop": ["e", "th"]},
        {"return_token_ids": True, "n": 2},
    ]
    cases = [(CHAT, case) for case in [*shared, {"logprobs": True, "top_logprobs": 2}]]
    cases += [
        (TEXT, case)
        for case in [*shared, {"logprobs": 2}, {"echo": True}, {"echo": True, "logprobs": 1}]
    ]
    cases += [
        (TEXT, {"echo": True, "max_tokens": 0}),
        (TEXT, {"echo": True, "max_tokens": 0, "logprobs": 0}),
    ]
    cases += [
        (TEXT, {"prompt": ["one two", "three"], "n": 2, "echo": True}),
        (TEXT, {"prompt": [5, 6, 7], "echo": True}),
    ]
    for (path, base), case in cases:
        body = {**base, "max_tokens": 8, "temperature": 0, **case}
        whole = (await tiny_app.post(path, json=body)).json()
        chunks = events(await tiny_app.post(path, json={**body, "stream": True}))
        built = [assemble(chunks, choice["index"], path == CHAT[0]) for choice in whole["choices"]]
        expected = [flatten(choice) for choice in whole["choices"]]
        assert built == expected, case


def flatten(choice):
    """Return a whole choice in the form that `assemble` returns."""
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return {
        "text": text,
        "reason": choice["finish_reason"],
        "logprobs": choice["logprobs"],
        "token_ids": choice.get("token_ids", []),
    }


def assemble(chunks, index, chat):
    """Return the choice `index`, assembled from its chunks."""
    pieces = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    lists = {}
    for piece in pieces:
        for name, values in (piece["logprobs"] or {}).items():
            if values is not None:
                lists.setdefault(name, []).extend(values)
    logprobs = {**lists, "refusal": None} if chat and lists else lists or None
    return {
        "text": "".join(
            piece["delta"].get("content", "") if chat else piece["text"] for piece in pieces
        ),
        "reason": pieces[-1]["finish_reason"],
        "logprobs": logprobs,
        "token_ids": [i for piece in pieces for i in piece.get("token_ids", [])],
    }


@contextmanager
def posted(server, path, body):
    """Send a request and close the connection at the end of the block."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {server.host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((server.host, server.port), timeout=30) as connection:
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        yield


def test_a_disconnect_during_tokenization_cancels_the_request(live_server, monkeypatch):
    engine = live_server.engine
    release = threading.Event()
    entered = threading.Event()
    encode = engine.tokenizer.codec.encode

    def slow(text, add_special_tokens):
        entered.set()
        assert release.wait(30)
        return encode(text, add_special_tokens)

    submitted = []
    monkeypatch.setattr(engine.tokenizer.codec, "encode", slow)
    monkeypatch.setattr(engine, "submit", lambda *args, **kwargs: submitted.append(args))
    with posted(
        live_server, TEXT[0], {"prompt": "a text that is long enough for a thread of its own " * 40}
    ):
        assert entered.wait(30)
    wait_until(lambda: live_server.state.admission.sequences == 0, "the request to be given up")
    release.set()
    monkeypatch.undo()
    assert live_server.engine.generate("x", max_new_tokens=1).generated_tokens == 1
    assert not submitted


def test_long_json_is_encoded_identically_in_pieces():
    text = 'a"\\\n\0é🙂\u2028' * 9000
    for value in (
        {"a b": text, "n": 1},
        {"tokens": list(range(40_000)), "s": ""},
        {"x": [], "y": [{"a": text}] * 2},
    ):
        assert dumps_long(value) == dumps(value)


async def test_a_large_answer_is_sent_in_pieces():
    for size in (1, 2**18 - 1, 2**18, 2**18 + 1, 2**20):
        sent = []

        async def send(message, into=sent):
            into.append(message)

        body = bytes(index % 251 for index in range(size))
        await send_json(send, body)
        pieces = [message["body"] for message in sent[1:]]
        assert b"".join(pieces) == body
        assert max(map(len, pieces)) <= 2**18
        assert [message["more_body"] for message in sent[1:]] == [True] * (len(pieces) - 1) + [
            False
        ]


def test_streamed_text_offsets_equal_the_whole_answers(live_server):
    """Tokens that a stop string cuts off, wholly or partly, have the offset of the end of the text."""
    base = {
        "prompt": "The water mill of the old town",
        "max_tokens": 24,
        "temperature": 0,
        "logprobs": 1,
    }
    with live_server.client() as client:
        text = client.post("/v1/completions", json=base).json()["choices"][0]["text"]
        cut = 0
        for first in range(3, 15):
            for echo in (False, True):
                body = {**base, "stop": [text[first : first + 6], "\u2603"], "echo": echo}
                whole = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
                chunks = events(client.post("/v1/completions", json={**body, "stream": True}))
                found = [
                    piece["logprobs"]
                    for chunk in chunks
                    for piece in chunk["choices"]
                    if piece["logprobs"]
                ]
                for name in ("tokens", "text_offset", "token_logprobs"):
                    assert [item for logprobs in found for item in logprobs[name]] == whole[name], (
                        first,
                        name,
                    )
                cut += len(set(whole["text_offset"])) < len(whole["text_offset"])
        assert cut, "no stop string cut off a token: the test shows nothing"
