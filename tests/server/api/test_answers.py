"""Tests of the response types in the OpenAPI document: the routes send the same keys, including
nested ones.
"""

import dataclasses

import pytest
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from typing_extensions import get_type_hints, is_typeddict

from kvboost_edge.server import response_types
from kvboost_edge.server.app import ROUTERS
from kvboost_edge.server.response_types import (
    BatchList,
    BatchObject,
    ChatResponseChoice,
    CompletionResponseChoice,
    DeleteFileResponse,
    ErrorResponse,
    FileList,
    FileObject,
    RerankResponse,
    TokenizeResponse,
)

MESSAGES = [{"role": "user", "content": "hello"}]
EXPLAINED = {"return_token_ids": True, "kvboost": {"explain": True}}
SHOWN = {"max_tokens": 3, "logprobs": 2, **EXPLAINED}
CHAT = {"messages": MESSAGES, "max_tokens": 3, "logprobs": True, "top_logprobs": 2, **EXPLAINED}
# Bodies that request every optional part of a response; None: GET; a string: another method.
ASKED = [
    ("/v1/completions", {"prompt": "hello", **SHOWN}),
    ("/v1/completions", {"prompt": ["hello", "world"], "n": 2, "echo": True, **SHOWN}),
    ("/v1/chat/completions", CHAT),
    ("/v1/models", None),
    ("/v1/models/tiny", None),
    ("/tokenize", {"content": "hello", "with_pieces": True, "return_token_strs": True}),
    ("/tokenize", {"messages": MESSAGES, "return_token_strs": True}),
    ("/detokenize", {"tokens": [1, 2]}),
    ("/v1/embeddings", {"input": ["hello", "world"]}),
    ("/v1/warm", {"text": "A text of more than one block. " * 3}),
    ("/v1/warm", {"messages": MESSAGES}),
    ("/v1/unpin", {"text": "A text of more than one block. " * 3}),
    ("/v1/sessions", {"name": "notes", "text": "A text of more than one block. " * 3}),
    ("/v1/sessions/notes/restore", {}),
    ("/v1/sessions", None),
    ("/v1/sessions/notes", None),
    ("/v1/sessions/notes", "DELETE"),
    ("/v1/requests", None),
    ("/v1/requests/last/cache", None),
    ("/v1/stats", None),
    ("/v1/blocks", None),
    ("/cache/reset", {}),
]

ANSWERS = {
    (route.path, method): route.responses[200]["model"]
    for router in ROUTERS
    for route in router.routes
    for method in getattr(route, "methods", ())
    if isinstance(route, APIRoute) and "model" in route.responses.get(200, {})
}
"""The response type that each path and method declares."""


def method_of(body):
    return "POST" if isinstance(body, dict) else body or "GET"


def type_of(path, body):
    named = {
        "/v1/models/tiny": "/v1/models/{name:path}",
        "/v1/requests/last/cache": "/v1/requests/{request_id}/cache",
        "/v1/sessions/notes": "/v1/sessions/{name}",
        "/v1/sessions/notes/restore": "/v1/sessions/{name}/restore",
    }
    return ANSWERS[named.get(path, path), method_of(body)]


async def ask(app, path, body):
    return await app.request(method_of(body), path, json=body if isinstance(body, dict) else None)


# Types that need another app; test_embeddings.py and batches/test_service.py check them.
ASKED_ELSEWHERE = {RerankResponse, BatchObject, BatchList, FileObject, DeleteFileResponse, FileList}


def test_every_declared_response_type_is_tested():
    assert {type_of(path, body) for path, body in ASKED} == {*ANSWERS.values()} - ASKED_ELSEWHERE


def test_response_types_allow_no_additional_keys():
    kinds = [
        kind
        for kind in vars(response_types).values()
        if is_typeddict(kind) and kind.__module__ == response_types.__name__
    ]
    assert len(kinds) > 40
    for kind in kinds:
        assert TypeAdapter(kind).json_schema()["additionalProperties"] is False, kind


@pytest.mark.parametrize(("path", "body"), ASKED)
async def test_answers_match_their_response_types(tiny_app, path, body):
    if "requests" in path:
        assert (
            await ask(tiny_app, "/v1/completions", {"prompt": "hello", "max_tokens": 1})
        ).status_code == 200
    if "notes" in path:
        text = {"name": "notes", "text": "A text of more than one block. " * 3}
        assert (await ask(tiny_app, "/v1/sessions", text)).status_code == 200
    answer = await ask(tiny_app, path, body)
    assert answer.status_code == 200, answer.text
    TypeAdapter(type_of(path, body)).validate_json(answer.content, strict=True)


@pytest.mark.parametrize(
    ("path", "body", "kind", "optional"),
    [
        (
            "/v1/completions",
            {"prompt": "hello", "max_tokens": 1},
            CompletionResponseChoice,
            "token_ids",
        ),
        (
            "/v1/chat/completions",
            {"messages": MESSAGES, "max_tokens": 1},
            ChatResponseChoice,
            "token_ids",
        ),
        ("/tokenize", {"content": "hello"}, TokenizeResponse, "token_strs"),
    ],
)
async def test_optional_keys_are_absent_unless_requested(tiny_app, path, body, kind, optional):
    answer = (await tiny_app.post(path, json=body)).json()
    shown = answer if path == "/tokenize" else answer["choices"][0]
    assert set(get_type_hints(kind)) - set(shown) == {optional}
    assert set(shown) == set(TypeAdapter(kind).json_schema()["required"])


@pytest.mark.parametrize(("path", "status"), [("/v1/models/other", 404), ("/nowhere", 404)])
async def test_errors_match_their_response_type(tiny_app, path, status):
    answer = await tiny_app.get(path)
    assert answer.status_code == status
    TypeAdapter(ErrorResponse).validate_json(answer.content, strict=True)


async def test_warm_returns_the_engines_result(tiny_app, tiny_engine):
    text = "A text of more than one block. " * 3
    answer = (await tiny_app.post("/v1/warm", json={"text": text})).json()
    stored = dataclasses.asdict(tiny_engine.warm(text))
    assert stored["chunks_stored"] > 0
    assert {name: answer[name] for name in stored} == stored
    more = {"object", "usage", "timings", "kvboost", "pinned_tokens"}
    assert set(answer) - set(stored) == more
