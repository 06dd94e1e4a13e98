"""Tests of chats longer than the context: an error with the token counts, or dropped oldest turns,
which the response reports.
"""

import itertools

import pytest

from helpers.server.cache_miss_cases import CHAT, app_of
from helpers.server.scripted_model import scripted

CONTEXT = 600
MESSAGES = "/v1/messages"
DROP = {"context_overflow": "drop_oldest"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture
def engine(monkeypatch):
    with scripted(monkeypatch, num_blocks=512, max_context=CONTEXT) as (engine, _):
        yield engine


@pytest.fixture
async def app(engine):
    async with app_of(engine) as client:
        yield client


def body(messages, **fields):
    return {"messages": messages, "max_tokens": 20, "temperature": 0, **fields}


async def test_an_overlong_chat_is_an_error_with_the_calculation_by_default(app):
    messages = [
        SYSTEM,
        *[{"role": "user", "content": "x" * 100}, {"role": "assistant", "content": "y"}] * 9,
    ]
    answer = await app.post(CHAT, json=body([*messages, {"role": "user", "content": "z"}]))
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert str(CONTEXT) in answer.json()["error"]["message"]


async def test_a_truncated_chat_continues_and_hits_the_cache(app):
    messages = [SYSTEM]
    dropped = []
    cached = []
    for turn in range(30):
        messages.append({"role": "user", "content": f"Turn {turn}: tell me more of it."})
        answer = (await app.post(CHAT, json=body(messages, kvboost=DROP))).json()
        dropped.append(answer["kvboost"]["dropped_messages"])
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert answer["usage"]["prompt_tokens"] + 20 <= CONTEXT
        messages.append(answer["choices"][0]["message"])
        assert messages[-1]["content"] == "Good day."
    assert dropped[0] == 0
    assert dropped[-1] > 0
    assert dropped == sorted(dropped)
    cuts = sum(one != other for one, other in itertools.pairwise(dropped))
    assert cuts <= 8
    # If the same turns are dropped as in the turn before, all but the new turn is a cache hit.
    stayed = [
        hit
        for hit, now, before in zip(cached[1:], dropped[1:], dropped, strict=False)
        if now == before
    ]
    assert min(stayed[2:]) > 100


async def test_truncation_keeps_the_system_message_and_the_last_turn(app):
    long = [
        SYSTEM,
        {"role": "user", "content": "old"},
        {"role": "assistant", "content": "older"},
        {"role": "user", "content": "x" * CONTEXT},
    ]
    answer = await app.post(CHAT, json=body(long, kvboost=DROP))
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_truncation_as_server_default_is_reported_in_streams(engine):
    turns = [{"role": "user", "content": "x" * 90}, {"role": "assistant", "content": "y"}] * 9
    asked = body([SYSTEM, *turns, {"role": "user", "content": "z"}], stream=True)
    async with app_of(engine, context_overflow="drop_oldest") as client:
        answer = await client.post(CHAT, json=asked)
        refused = await client.post(CHAT, json={**asked, "kvboost": {"context_overflow": "error"}})
    assert answer.status_code == 200
    assert '"dropped_messages":0' not in answer.text
    assert '"dropped_messages":' in answer.text
    assert refused.status_code == 400


@pytest.mark.parametrize("max_tokens", [20, CONTEXT - 1, CONTEXT, CONTEXT + 1, 32_000])
async def test_messages_reserves_no_more_than_an_eighth_of_the_context(engine, max_tokens):
    """The max_tokens of /v1/messages may exceed the context. Turns are dropped only if the rest of
    the context is shorter than that share.
    """
    turns = [{"role": "user", "content": "x" * 90}, {"role": "assistant", "content": "y"}]
    last = {"role": "user", "content": "z"}
    reserved = min(max_tokens, CONTEXT // 8)
    dropped = []
    async with app_of(engine, context_overflow="drop_oldest") as client:
        for num_turns in range(1, 8):
            asked = {"messages": [*turns * num_turns, last]}
            size = (await client.post(f"{MESSAGES}/count_tokens", json=asked)).json()
            answer = await client.post(MESSAGES, json={**asked, "max_tokens": max_tokens})
            assert answer.status_code == 200, answer.text
            gone = answer.json()["kvboost"]["dropped_messages"]
            assert (gone > 0) == (size["input_tokens"] > CONTEXT - reserved)
            dropped.append(gone)
    assert dropped[0] == 0
    assert dropped[-1] > 0


@pytest.mark.parametrize("default", ["error", "drop_oldest"])
@pytest.mark.parametrize(
    ("truncate", "limit"), [(True, 20), (True, CONTEXT), (True, -1), (False, 20), (None, 20)]
)
async def test_ollamas_truncate_overrides_the_default_of_the_server(
    engine, default, truncate, limit
):
    turns = [{"role": "user", "content": "x" * 90}, {"role": "assistant", "content": "y"}] * 9
    asked = {
        "model": "fake",
        "messages": [SYSTEM, *turns, {"role": "user", "content": "z"}],
        "options": {"temperature": 0, "num_predict": limit},
        "stream": False,
        "truncate": truncate,
        "shift": truncate,
    }
    async with app_of(engine, context_overflow=default) as client:
        answer = await client.post("/api/chat", json=asked)
        short = await client.post("/api/chat", json={**asked, "messages": turns[:1]})
    assert short.json()["kvboost"]["dropped_messages"] == 0
    if default == "drop_oldest" if truncate is None else truncate:
        assert answer.json()["kvboost"]["dropped_messages"] > 0
    else:
        assert (answer.status_code, str(CONTEXT) in answer.json()["error"]) == (400, True)


async def test_truncate_has_no_effect_on_a_prompt_without_turns(engine):
    asked = {"model": "fake", "stream": False, "options": {"num_predict": 4, "temperature": 0}}
    async with app_of(engine) as client:
        for raw, length in itertools.product((True, False), (20, CONTEXT)):
            body = {**asked, "raw": raw, "prompt": "x" * length}
            plain, truncated = [
                await client.post("/api/generate", json={**body, "truncate": truncate})
                for truncate in (None, True)
            ]
            assert truncated.status_code == plain.status_code == (200 if length == 20 else 400)
            assert truncated.json().get("response") == plain.json().get("response")


@pytest.mark.parametrize("max_tokens", [0, 1, 32_000])
@pytest.mark.parametrize("stream", [False, True])
async def test_messages_refuses_an_overlong_prompt_in_anthropics_words(app, max_tokens, stream):
    """Clients match these words and shorten the conversation."""
    one = {"messages": [{"role": "user", "content": "x"}]}
    around = (await app.post(f"{MESSAGES}/count_tokens", json=one)).json()["input_tokens"] - 1
    longest = CONTEXT if max_tokens == 0 else CONTEXT - 1

    async def asked(size):
        messages = [{"role": "user", "content": "x" * (size - around)}]
        fields = {"messages": messages, "max_tokens": max_tokens, "stream": stream}
        return await app.post(MESSAGES, json=fields)

    assert (await asked(longest)).status_code == 200
    answer = await asked(longest + 1)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    words = f"prompt is too long: {longest + 1} tokens > {longest} maximum: "
    assert error["message"].startswith(words)
