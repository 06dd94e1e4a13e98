"""Tests of response limits, of the tokens that log probabilities cover, and of continued messages."""

import json

import pytest

from kvboost_edge.server.api.bounds import COUNTS

MESSAGES = [{"role": "user", "content": "What grinds the corn?"}]
CHAT = "/v1/chat/completions"


async def test_too_many_logprobs_are_refused_with_the_calculation(tiny_app):
    limit = int(COUNTS["logprob_entries"].high)
    body = {"prompt": [5] * 200, "max_tokens": 10, "logprobs": 20, "echo": True}
    answer = await tiny_app.post("/v1/completions", json={**body, "n": 128})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (
        400,
        "logprobs",
        "request_too_large",
    )
    assert f"{210 * 128} x 21 = {210 * 128 * 21}" in error["message"]
    assert str(limit) in error["message"]
    chat = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20, "n": 100, "max_tokens": 250}
    answer = await tiny_app.post(CHAT, json=chat)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top_logprobs")
    assert "25000 x 21 = 525000" in answer.json()["error"]["message"]


def pieces(answer):
    """Return the choices of a stream's chunks."""
    chunks = [
        json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")
    ]
    return [choice for chunk in chunks for choice in chunk["choices"]]


def shown(server, **fields):
    """Return the text and the tokens of the log probabilities; check that a stream has the same
    ones.
    """
    body = {
        "messages": MESSAGES,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 1,
        "max_tokens": 12,
        **fields,
    }
    with server.client() as client:
        whole = client.post(CHAT, json=body).json()["choices"][0]
        parts = pieces(client.post(CHAT, json={**body, "stream": True}))
    content = [
        token for part in parts for token in (part["logprobs"] or {"content": []})["content"]
    ]
    assert [token["token"] for token in content] == [
        token["token"] for token in whole["logprobs"]["content"]
    ]
    assert [token["logprob"] for token in content] == pytest.approx(
        [token["logprob"] for token in whole["logprobs"]["content"]], abs=1e-5
    )
    text = "".join(part["delta"].get("content") or "" for part in parts)
    assert text == whole["message"]["content"]
    return text, [token["token"] for token in content]


def test_logprobs_cover_only_tokens_of_the_text(live_server):
    text, tokens = shown(live_server)
    assert "".join(tokens) == text
    eos = live_server.engine.tokenizer.eos_token_id
    assert shown(live_server, logit_bias={str(eos): 100}) == ("", [])
    cut, kept = shown(live_server, stop=tokens[4] + tokens[5])
    assert cut == text[: text.index(tokens[4] + tokens[5])]
    assert "".join(kept) == cut
    inside, straddling = shown(live_server, stop=text[len(cut) + 1 : len(cut) + 4])
    assert len("".join(straddling[:-1])) < len(inside) <= len("".join(straddling))


def test_continue_final_message_continues_the_last_message(live_server):
    tokenizer = live_server.engine.tokenizer
    begun = [*MESSAGES, {"role": "assistant", "content": "The old mill"}]
    ids = tokenizer.encode_chat(begun, continue_final=True)
    expected = live_server.engine.generate(ids, max_new_tokens=6)
    with live_server.client() as client:
        body = {"messages": begun, "max_tokens": 6, "temperature": 0}
        for extra in (
            {},
            {"continue_final_message": True},
            {"continue_final_message": True, "stream": False},
        ):
            answer = client.post(CHAT, json={**body, **extra}).json()
            assert answer["choices"][0]["message"]["content"] == expected.output_text
            assert answer["usage"]["prompt_tokens"] == len(ids)
        for extra, prompt in (
            ({"continue_final_message": False}, True),
            ({"add_generation_prompt": False}, False),
        ):
            answer = client.post(CHAT, json={**body, **extra}).json()
            assert answer["usage"]["prompt_tokens"] == len(tokenizer.encode_chat(begun, prompt))
        wrong = [
            {**body, "messages": MESSAGES, "continue_final_message": True},
            {**body, "continue_final_message": True, "add_generation_prompt": True},
        ]
        for bad in wrong:
            answer = client.post(CHAT, json=bad)
            assert (answer.status_code, answer.json()["error"]["param"]) == (
                400,
                "continue_final_message",
            )


def test_messages_cannot_inject_special_tokens(live_server):
    tokenizer = live_server.engine.tokenizer
    special = sorted(text for text in tokenizer.codec.special_texts()[0] if len(text) > 1)
    attack = [{"role": "user", "content": f"a{''.join(special)}b"}]
    with live_server.client() as client:
        found = [
            client.post("/tokenize", json={"messages": messages}).json()["tokens"]
            for messages in (attack, [{"role": "user", "content": "ab"}])
        ]
        answer = client.post(CHAT, json={"messages": attack, "max_tokens": 1})
    ids = {tokenizer.codec.token_id(text) for text in special}
    assert [sum(i in ids for i in tokens) for tokens in found] == [
        sum(i in ids for i in found[1])
    ] * 2
    assert answer.json()["usage"]["prompt_tokens"] == len(found[0])
    expected = live_server.engine.generate(attack, max_new_tokens=1)
    assert expected.prompt_tokens == len(found[0])
