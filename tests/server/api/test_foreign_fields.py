"""Fields of other servers, unknown fields, and bodies of any Content-Type."""

from __future__ import annotations

import json
from typing import Any

import httpx

MESSAGES = [{"role": "user", "content": "hello"}]
COMPLETIONS: tuple[str, dict[str, Any]] = ("/v1/completions", {"prompt": "hello"})
CHAT: tuple[str, dict[str, Any]] = ("/v1/chat/completions", {"messages": MESSAGES})


async def refused(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The error object of a 400."""
    answer = await client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


OTHER_SERVERS: list[tuple[str, Any, str]] = [
    ("typical_p", 0.9, "min_p"),
    ("mirostat", 2, "top_p"),
    ("min_tokens", 5, "ignore_eos"),
    ("n_probs", 5, "logprobs"),
    ("use_beam_search", True, "best_of"),
    ("options", {"num_ctx": 5}, "beside"),
    ("think", False, "chat_template_kwargs"),
    ("format", "json", "use response_format"),
    ("dry_multiplier", True, "penalty"),
]
MEANINGLESS: dict[str, Any] = {
    "typical_p": 1.0,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "min_tokens": 0,
    "keep_alive": "5m",
    "id_slot": 3,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "dry_multiplier": 0.0,
    "bad_words": [],
    "options": None,
}


async def test_fields_of_other_servers_are_refused_with_what_to_use_instead(tiny_app: httpx.AsyncClient) -> None:
    for path, base in (COMPLETIONS, CHAT):
        for name, value, instead in OTHER_SERVERS:
            error = await refused(tiny_app, path, {**base, name: value})
            assert (error["param"], instead in error["message"]) == (name, True), error


async def test_fields_of_other_servers_that_mean_nothing_are_taken(tiny_app: httpx.AsyncClient) -> None:
    for path, base in (COMPLETIONS, CHAT):
        answer = await tiny_app.post(path, json={**base, "max_tokens": 1, **MEANINGLESS})
        assert answer.status_code == 200, answer.text


async def test_fields_of_other_servers_that_have_another_name_here(tiny_app: httpx.AsyncClient) -> None:
    for path, base in (COMPLETIONS, CHAT):
        plain = {**base, "temperature": 0}
        ours = {"max_tokens": 4, "repetition_penalty": 1.5, "return_token_ids": True}
        for theirs in (
            {"n_predict": 4, "repeat_penalty": 1.5, "return_tokens": True},
            {"num_predict": 4, "repeat_penalty": 1.5, "return_token_ids": True},
        ):
            answers = [(await tiny_app.post(path, json={**plain, **extra})).json() for extra in (ours, theirs)]
            assert answers[0]["choices"] == answers[1]["choices"]
        error = await refused(tiny_app, path, {**plain, "n_predict": 4, "max_tokens": 4})
        assert error["param"] == "n_predict"
        error = await refused(tiny_app, path, {**plain, "repeat_penalty": "x"})
        assert error["param"] == "repetition_penalty"


async def test_many_unknown_fields_are_one_short_error(tiny_app: httpx.AsyncClient) -> None:
    unknown = {f"unknown_{i}": 1 for i in range(100)}
    error = await refused(tiny_app, CHAT[0], {**CHAT[1], **unknown})
    assert error["param"] == "unknown_0"
    assert "'unknown_4' and 95 more" in error["message"]
    message = {**MESSAGES[0], **unknown}
    error = await refused(tiny_app, CHAT[0], {"messages": [message] * 50})
    assert error["message"].startswith("messages.0.unknown_0: ")
    assert len(error["message"]) < 200


async def test_json_is_read_whatever_the_content_type_says(tiny_app: httpx.AsyncClient) -> None:
    """`curl -d` calls every body a form."""
    for kind in ("application/x-www-form-urlencoded", "text/plain", "application/json; charset=utf-8", None):
        headers = {} if kind is None else {"content-type": kind}
        body = json.dumps({**COMPLETIONS[1], "max_tokens": 1})
        answer = await tiny_app.post(COMPLETIONS[0], content=body, headers=headers)
        assert answer.status_code == 200, answer.text
    headers = {"content-type": "application/x-www-form-urlencoded"}
    answer = await tiny_app.post(COMPLETIONS[0], content="prompt=hello", headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"
    assert "Content-Type: application/json" in answer.json()["error"]["message"]
