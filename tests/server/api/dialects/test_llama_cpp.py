"""llama.cpp's own routes in its shape. The model says what a test wrote."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from kvboost_edge.server.api.dialects.llama_cpp import translate
from kvboost_edge.server.api.dialects.llama_cpp.answers import Completed
from server.api.test_tools import ASK, TOOLS, Speaker

PATH = "/completion"
TURN = "<|assistant|>"


async def ask(app: httpx.AsyncClient, path: str = PATH, **more: Any) -> dict[str, Any]:
    body = {"temperature": 0, **({"prompt": TURN} if path == PATH else {}), **more}
    answer = await app.post(path, json=body)
    assert answer.status_code == 200, answer.text
    Completed.model_validate_json(answer.content, strict=True)
    found: dict[str, Any] = answer.json()
    return found


async def events(app: httpx.AsyncClient, **more: Any) -> list[dict[str, Any]]:
    answer = await app.post(PATH, json={"prompt": TURN, "temperature": 0, "stream": True, **more})
    assert answer.status_code == 200, answer.text
    found = [json.loads(block.removeprefix("data: ")) for block in answer.text.removesuffix("\n\n").split("\n\n")]
    assert [one["stop"] for one in found] == [False] * (len(found) - 1) + [True]
    return found


def lasting(answer: dict[str, Any]) -> dict[str, Any]:
    """What two answers to one question have in common."""
    passing = ("content", "tokens", "timings", "kvboost", "tokens_cached", "generation_settings")
    return {name: item for name, item in answer.items() if name not in passing}


ENDS: list[tuple[dict[str, Any], str, str, str]] = [
    ({}, "Sun, später\nRegen 🌧.", "eos", ""),
    ({"n_predict": 4}, "Sun,", "limit", ""),
    ({"stop": ["zz", " sp"]}, "Sun,", "word", " sp"),
    ({"n_predict": -1}, "Sun, später\nRegen 🌧.", "eos", ""),
]


@pytest.mark.parametrize(("fields", "text", "kind", "word"), ENDS)
async def test_a_stream_adds_up_to_the_whole(
    app: httpx.AsyncClient, speaker: Speaker, fields: dict[str, Any], text: str, kind: str, word: str
) -> None:
    speaker.text = "Sun, später\nRegen 🌧."
    whole, found = await ask(app, return_tokens=True, **fields), await events(app, return_tokens=True, **fields)
    assert whole["content"] == "".join(one["content"] for one in found) == text
    assert (whole["stop_type"], whole["stopping_word"], whole["truncated"]) == (kind, word, False)
    assert lasting(found[-1]) == lasting(whole)
    assert [token for one in found for token in one["tokens"]] == whole["tokens"]
    assert len(whole["tokens"]) == whole["tokens_predicted"]
    assert whole["prompt"] == TURN
    assert whole["has_new_line"] == ("\n" in text)
    assert (await ask(app, **fields))["tokens"] == []


async def test_a_prompt_may_be_ids_or_texts_and_ids(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = "Sun."
    ids = (await app.post("/tokenize", json={"content": TURN})).json()["tokens"]
    for prompt in (ids, [*ids[:3], TURN[3:]] if len(ids) == len(TURN) else ids, ["", *ids][1:], [TURN]):
        answer = await ask(app, prompt=prompt)
        assert (answer["content"], answer["prompt"]) == ("Sun.", TURN)
    hot = await ask(app, prompt=["x" * 64, *ids])
    assert hot["tokens_evaluated"] > hot["tokens_cached"]
    again = await ask(app, prompt=["x" * 64, *ids])
    assert again["tokens_cached"] >= 64 - 16
    assert (await ask(app, prompt=["x" * 64, *ids], cache_prompt=False))["tokens_cached"] == 0


async def test_the_settings_of_the_answer_are_those_that_ran(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = "Sun."
    settings = (await ask(app, temperature=None, seed=7))["generation_settings"]
    assert (settings["seed"], settings["temperature"], settings["top_k"], settings["min_p"]) == (7, 0.8, 40, 0.05)
    assert (await app.get("/props")).json()["default_generation_settings"]["params"]["temperature"] == 0.8


async def test_a_schema_and_a_grammar_bind(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = "no"
    schema = {"type": "object", "properties": {"n": {"const": 7}}, "required": ["n"], "additionalProperties": False}
    assert json.loads((await ask(app, json_schema=schema, n_predict=60))["content"]) == {"n": 7}
    assert (await ask(app, grammar='root ::= "yes"', n_predict=60))["content"] == "yes"


async def test_infill_is_prefix_suffix_and_middle(
    app: httpx.AsyncClient, speaker: Speaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"input_prefix": "def f(", "input_suffix": "): pass", "prompt": "a", "n_predict": 2}
    answer = await app.post("/infill", json=fields)
    assert (answer.status_code, "no tokens for infill" in answer.json()["error"]["message"]) == (400, True)
    # Of three letters, as the tokens of this model's vocabulary are letters.
    monkeypatch.setattr(translate, "_INFILL", (("missing", "b", "c"), ("P", "S", "M")))
    found = await ask(app, "/infill", **fields)
    assert found["prompt"] == "Pdef f(aS): passM"


async def test_a_template_is_applied_as_chat_does(app: httpx.AsyncClient) -> None:
    for more in ({}, {"tools": TOOLS}, {"add_generation_prompt": False}):
        text = (await app.post("/apply-template", json={"messages": ASK, **more})).json()["prompt"]
        ids = (await app.post("/tokenize", json={"messages": ASK, **more})).json()["tokens"]
        assert (await app.post("/detokenize", json={"tokens": ids})).json()["content"] == text
        assert ("weather" in text.split("And the")[0]) == ("tools" in more)


async def test_slots_are_the_admin_s_where_there_are_several_keys(
    app: httpx.AsyncClient, keyed_app: httpx.AsyncClient
) -> None:
    slots = (await app.get("/slots")).json()
    assert len(slots) == (await app.get("/props")).json()["total_slots"]
    assert not any(slot["is_processing"] for slot in slots)
    refused = await keyed_app.get("/slots", headers={"Authorization": "Bearer first-key"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, 403)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [10**6]}, "prompt"),
    ({"prompt": ["a", -1]}, "prompt"),
    ({"prompt": ["a", [1]]}, "prompt"),
    ({"prompt": "x" * 9000}, "the model's context"),
    ({"n_predict": -3}, "n_predict"),
    ({"n_predict": 10**6}, "n_predict"),
    ({"n_probs": 3}, "n_probs"),
    ({"mirostat": 2}, "mirostat"),
    ({"logit_bias": [[1, 2]]}, "logit_bias"),
    ({"repeat_penalty": 0}, "repeat_penalty"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"unknown": 1}, "unknown"),
    ({"grammar": "root ::= ("}, "grammar"),
]


@pytest.mark.parametrize(("body", "word"), BAD)
async def test_bad_fields_are_named_in_llama_cpp_s_shape(
    app: httpx.AsyncClient, body: dict[str, Any], word: str
) -> None:
    answer = await app.post(PATH, json={"prompt": "hello", **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == (400, "invalid_request_error")
    assert word in error["message"]
    missing = await app.post(PATH, json={"prompt": "hello", "model": "other"})
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
