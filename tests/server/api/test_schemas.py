"""Every bounded field against the one table: what is outside of it is refused, by name."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from kvboost_edge.server.api.bounds import BOUNDS
from kvboost_edge.server.api.schemas.chat import ChatRequest
from kvboost_edge.server.api.schemas.completions import CompletionRequest
from kvboost_edge.server.api.schemas.shared import SamplingFields
from kvboost_edge.server.errors import ApiError

MESSAGES = [{"role": "user", "content": "hello"}]
COMPLETIONS = ("/v1/completions", {"prompt": "hello"})
CHAT = ("/v1/chat/completions", {"messages": MESSAGES})

SHARED = ["temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "n", "top_k", "min_p"]
SHARED += ["repetition_penalty", "priority", "max_tokens"]
FIELDS = [(COMPLETIONS, name) for name in [*SHARED, "best_of", "logprobs"]]
FIELDS += [(CHAT, name) for name in [*SHARED, "max_completion_tokens", "top_logprobs"]]
BAD = ["below", "above", "least", "nan", "infinity", "string", "list", "object", "true", "huge"]


def bad_value(name: str, kind: str) -> str:
    """The value as JSON text, so that NaN, 1e400 and integers beyond 64 bits are among them."""
    bound = BOUNDS[name]
    values = {
        "below": bound.low - 1,
        "above": bound.high + 1,
        "least": -(2**63) - (bound.low == -(2**63)),
        "string": "1",
        "list": [],
        "object": {},
        "true": True,
    }
    spelled = {"nan": "NaN", "infinity": "1e400", "huge": "1" * 400}
    return spelled[kind] if kind in spelled else json.dumps(values[kind])


async def refused(client: httpx.AsyncClient, path: str, body: dict[str, Any] | str) -> dict[str, Any]:
    """The error object of a 400."""
    content = body if isinstance(body, str) else json.dumps(body)
    answer = await client.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400, (content[:300], answer.text)
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize("kind", BAD)
async def test_every_number_has_a_bound(tiny_app: httpx.AsyncClient, kind: str) -> None:
    for (path, base), name in FIELDS:
        body = json.dumps(base)[:-1] + f', "{name}": {bad_value(name, kind)}}}'
        error = await refused(tiny_app, path, body)
        assert error["param"] == name, (path, body, error)
        assert name in error["message"]
        if kind in ("below", "above"):
            assert error["message"].endswith(f", not {bad_value(name, kind)}"), "the value beside its limit"


@pytest.mark.parametrize(("model", "base"), [(CompletionRequest, COMPLETIONS[1]), (ChatRequest, CHAT[1])])
def test_the_bounds_themselves_are_allowed(model: type[SamplingFields], base: dict[str, Any]) -> None:
    for name in set(model.model_fields) & set(BOUNDS):
        bound = BOUNDS[name]
        if name in ("logit_bias", "logprobs", "best_of") and model is ChatRequest:
            continue
        values = [bound.high] if bound.open_low else [bound.low, bound.high]
        for value in values:
            if name == "logit_bias":
                value = {"0": value}
            assert getattr(model.model_validate({**base, name: value}), name) is not None
    assert model.model_validate({**base, "top_p": 5e-324}).top_p == 5e-324


@pytest.mark.parametrize(("model", "base"), [(CompletionRequest, COMPLETIONS[1]), (ChatRequest, CHAT[1])])
def test_every_number_of_the_schemas_is_in_the_table(model: type[SamplingFields], base: dict[str, Any]) -> None:
    """A field that takes 10^30 has no bound. What is in a JSON schema is the engine's to bound, by bytes and depth."""
    for name in model.model_fields.keys() - {"json_schema", "guided_json"}:
        for huge in (10**30, 1e300, [10**30], {"1": 10**30}, {"1": 1e300}):
            with pytest.raises(ValidationError):
                model.model_validate({**base, name: huge})


def test_null_is_not_given_where_a_field_is_optional() -> None:
    for model, base in ((CompletionRequest, COMPLETIONS[1]), (ChatRequest, CHAT[1])):
        optional = [name for name, field in model.model_fields.items() if not field.is_required()]
        for name in set(optional) - {"add_special_tokens"}:
            model.model_validate({**base, name: None}).check_together()
    for model, base in ((CompletionRequest, {"prompt": None}), (ChatRequest, {"messages": None})):
        with pytest.raises(ValidationError):
            model.model_validate(base)


NOT_BUILT: list[tuple[Any, str, Any]] = [
    (COMPLETIONS, "suffix", "x"),
    (COMPLETIONS, "store", True),
    (COMPLETIONS, "guided_json", 3),
    (CHAT, "tools", [{"type": "web_search_preview"}]),
    (CHAT, "tools", [{}]),
    (CHAT, "tool_choice", "auto"),
    (CHAT, "functions", [{}]),
    (CHAT, "function_call", "auto"),
    (CHAT, "response_format", {"type": "yaml"}),
    (CHAT, "response_format", {"type": "json_schema", "json_schema": {"schema": []}}),
    (CHAT, "audio", {"voice": "alloy", "format": "wav"}),
    (CHAT, "modalities", ["text", "audio"]),
    (CHAT, "prediction", {}),
    (CHAT, "reasoning_effort", "low"),
    (CHAT, "web_search_options", {}),
    (CHAT, "store", True),
    (CHAT, "temprature", 0.5),
    (CHAT, "prompt", "x"),
    (CHAT, "best_of", 2),
    (CHAT, "echo", True),
]


async def test_what_is_not_built_is_refused_by_name(tiny_app: httpx.AsyncClient) -> None:
    for (path, base), name, value in NOT_BUILT:
        error = await refused(tiny_app, path, {**base, name: value})
        assert error["param"] == name, (name, error)


NEUTRAL = {
    "user": "somebody",
    "metadata": {"team": "one"},
    "store": False,
    "service_tier": "auto",
    "safety_identifier": "id",
    "prompt_cache_key": "key",
    "prompt_cache_retention": "in_memory",
}


EMPTY: dict[str, Any] = {
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "function_call": "none",
    "parallel_tool_calls": False,
    "logprobs": False,
    "top_logprobs": 0,
    "best_of": 1,
    "logit_bias": {},
    "seed": -1,
    "metadata": {},
}


async def test_values_that_mean_nothing_are_accepted(tiny_app: httpx.AsyncClient) -> None:
    """As clients send them: switches that are off, and an answer's message put back as it came (model_dump)."""
    answered = {"role": "assistant", "content": "hi", "refusal": None, "annotations": None, "audio": None}
    answered |= {"function_call": None, "tool_calls": None}
    messages = [*MESSAGES, answered, {**answered, "annotations": [], "tool_calls": []}, *MESSAGES]
    plain = {"messages": messages, "max_tokens": 4, "temperature": 0}
    answers = [await tiny_app.post(CHAT[0], json={**plain, **extra}) for extra in ({}, EMPTY)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
    assert answers[0].json()["choices"] == answers[1].json()["choices"]
    for name, value in (("annotations", [{}]), ("tool_calls", [{}])):
        error = await refused(tiny_app, CHAT[0], {"messages": [{**answered, name: value}]})
        assert error["param"].partition(".")[0] == "messages"


async def test_negative_seeds(tiny_app: httpx.AsyncClient) -> None:
    """-1 is drawn by the engine, another one each time; others are seeds like any, told as what they count as."""

    async def seeds(**fields: Any) -> list[int]:
        answer = await tiny_app.post(COMPLETIONS[0], json={**COMPLETIONS[1], "max_tokens": 1, **fields})
        assert answer.status_code == 200, answer.text
        found: list[int] = answer.json()["kvboost"]["seeds"]
        return found

    assert len({*await seeds(seed=-1, n=2), *await seeds(seed=-1)}) == 3
    assert await seeds(seed=-2, n=3) == [2**64 - 2, 2**64 - 1, 0]
    assert await seeds(seed=-(2**63)) == [2**63]
    assert await seeds(seed=2**63 - 1, n=2) == [2**63 - 1, 2**63]


async def test_neutral_fields_change_nothing(tiny_app: httpx.AsyncClient) -> None:
    for path, base in (COMPLETIONS, CHAT):
        plain = {**base, "max_tokens": 4, "temperature": 0}
        answers = [await tiny_app.post(path, json={**plain, **extra}) for extra in ({}, NEUTRAL)]
        assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
        assert answers[0].json()["choices"] == answers[1].json()["choices"]
        extra = {"response_format": {"type": "text"}, "modalities": ["text"]}
        if path == CHAT[0]:
            assert (await tiny_app.post(path, json={**plain, **extra})).json()["choices"] == answers[0].json()[
                "choices"
            ]


BAD_FIELDS: list[tuple[Any, str, Any]] = [
    (COMPLETIONS, "prompt", value)
    for value in (
        "",
        [],
        [""],
        ["a", 1],
        [1, "a"],
        [[]],
        [[1], []],
        [[1], "a"],
        [-1],
        [2**31],
        [1.0],
        [True],
        {},
        5,
        "\ud800",
    )
]
BAD_FIELDS += [(COMPLETIONS, "prompt", ["a"] * 257), (COMPLETIONS, "prompt", [10**6]), (COMPLETIONS, "max_tokens", 0)]
BAD_FIELDS += [(COMPLETIONS, "best_of", 0), (COMPLETIONS, "stop", [1]), (COMPLETIONS, "stop", "")]
BAD_FIELDS += [(COMPLETIONS, "stop", ["x"] * 65), (COMPLETIONS, "stop", "x" * 1025), (COMPLETIONS, "stop", "\udfff")]
BAD_FIELDS += [(COMPLETIONS, "cache_salt", ""), (COMPLETIONS, "cache_salt", "x" * 257), (COMPLETIONS, "metadata", [])]
BAD_FIELDS += [
    (COMPLETIONS, "logit_bias", value) for value in ({"a": 1}, {"-1": 1}, {"5": 101}, {"5": "1"}, {"5": True})
]
BAD_FIELDS += [(COMPLETIONS, "logit_bias", {"10000000": 1}), (COMPLETIONS, "stop_token_ids", [10**7])]
BAD_FIELDS += [(COMPLETIONS, "logit_bias", {str(i): 1 for i in range(1025)})]
BAD_FIELDS += [(COMPLETIONS, "stop_token_ids", value) for value in ([-1], ["1"], [1.5], 5, [0] * 1025)]
BAD_FIELDS += [(COMPLETIONS, "stream", 1), (COMPLETIONS, "echo", "yes"), (COMPLETIONS, "user", 5)]
BAD_FIELDS += [(COMPLETIONS, "stream_options", {"include_usage": True}), (CHAT, "stream_options", {})]
BAD_FIELDS += [(CHAT, "top_logprobs", 1), (CHAT, "max_tokens", 0), (CHAT, "logprobs", 1)]
BAD_FIELDS += [(CHAT, "chat_template_kwargs", value) for value in ({"tools": 1}, {"a b": 1}, {"a": []}, [], {"__x": 1})]
BAD_FIELDS += [
    (CHAT, "chat_template_kwargs", {name: 1})
    for name in ("self", "messages", "raise_exception", "namespace", "range", "loop", "bos_token", "a" * 65, "")
]
BAD_FIELDS += [
    (CHAT, "chat_template_kwargs", value)
    for value in (
        {"a": "\ud800"},
        {"a": "x" * 4097},
        {"a": 2**60},
        {"a": {"b": 1}},
        {"a": None},
        {f"name_{i}": 1 for i in range(65)},
    )
]


LABELS = ("user", "service_tier", "safety_identifier", "prompt_cache_key")
BAD_FIELDS += [(CHAT, "prompt_cache_retention", value) for value in ("1h", "", 24)]
BAD_FIELDS += [(COMPLETIONS, name, value) for name in LABELS for value in ("x" * 1025, "\ud800", 1)]
BAD_FIELDS += [(CHAT, name, "\udfff") for name in ("model", "cache_salt")]
BAD_FIELDS += [
    (CHAT, "metadata", value)
    for value in (
        {str(i): "x" for i in range(17)},
        {"x" * 65: "x"},
        {"": "x"},
        {"x": "x" * 513},
        {"x": "\ud800"},
        {"\ud800": "x"},
        {"x": 1},
    )
]
BAD_FIELDS += [(CHAT, "seed", -(2**63) - 1), (CHAT, "seed", 2**63), (CHAT, "best_of", True), (CHAT, "tool_choice", 0)]


async def test_other_bad_values_name_their_field(tiny_app: httpx.AsyncClient) -> None:
    for (path, base), name, value in BAD_FIELDS:
        error = await refused(tiny_app, path, {**base, name: value})
        assert error["param"].split(".")[0] == name, (name, value if len(str(value)) < 99 else "...", error)


BAD_MESSAGES: list[tuple[Any, str]] = [
    ([], "messages"),
    ({}, "messages"),
    ("hello", "messages"),
    (["hello"], "messages.0"),
    ([{"content": "x"}], "messages.0.role"),
    ([{"role": "user"}], "messages.0.content"),
    ([{"role": "user", "content": None}], "messages.0.content"),
    ([{"role": "user", "content": 5}], "messages.0.content"),
    ([{"role": "user", "content": []}], "messages.0.content"),
    ([{"role": "user", "content": ["x"]}], "messages.0.content"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content"),
    ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages.0.content"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages.0.content"),
    ([{"role": "user", "content": "\ud800"}], "messages.0.content"),
    ([{"role": "tool", "content": "x"}], "messages.0.tool_call_id"),
    ([{"role": "user", "content": "x", "tool_call_id": "1"}], "messages.0.tool_call_id"),
    ([{"role": "function", "content": "x"}], "messages.0.role"),
    ([{"role": "king", "content": "x"}], "messages.0.role"),
    ([*MESSAGES, {"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages.1.tool_calls"),
    ([{"role": "user", "content": "x", "name": ""}], "messages.0.name"),
    ([{"role": "user", "content": "x", "colour": "red"}], "messages.0.colour"),
]


async def test_bad_messages_name_their_place(tiny_app: httpx.AsyncClient) -> None:
    for messages, place in BAD_MESSAGES:
        error = await refused(tiny_app, CHAT[0], {"messages": messages})
        assert error["param"] == "messages"
        assert error["message"].startswith(f"{place}: "), (messages, error)


def test_fields_that_do_not_go_together() -> None:
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (CompletionRequest, {"prompt": "a", "n": 3, "best_of": 2}, "best_of"),
        (CompletionRequest, {"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
        (CompletionRequest, {"prompt": ["a"] * 200, "n": 2}, "n"),
        (ChatRequest, {"messages": MESSAGES, "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ]
    for model, body, param in cases:
        with pytest.raises(ApiError) as caught:
            model.model_validate(body).check_together()
        assert (caught.value.status_code, caught.value.param) == (400, param)
    CompletionRequest.model_validate({"prompt": "a", "max_tokens": 0, "echo": True}).check_together()


async def test_the_openapi_document_has_both_bodies(tiny_app: httpx.AsyncClient) -> None:
    document = (await tiny_app.get("/openapi.json")).json()
    bodies = document["components"]["schemas"]
    assert bodies["ChatRequest"]["properties"]["temperature"]["anyOf"][0]["maximum"] == BOUNDS["temperature"].high
    assert bodies["CompletionRequest"]["additionalProperties"] is False
