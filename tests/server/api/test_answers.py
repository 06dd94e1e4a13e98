"""The models of the OpenAPI document against what the routes send: the same keys, nested ones
too.
"""

import dataclasses

import pytest
from pydantic import BaseModel, TypeAdapter

from helpers.server.compat_apis import ANSWERS
from kvboost_edge.server.api import answers
from kvboost_edge.server.api.dialects.responses.answers import DeletedResponse, ItemList
from kvboost_edge.server.api.vectors import RerankAnswer

MESSAGES = [{"role": "user", "content": "hello"}]
EXPLAINED = {"return_token_ids": True, "kvboost": {"explain": True}}
SHOWN = {"max_tokens": 3, "logprobs": 2, **EXPLAINED}
CHAT = {"messages": MESSAGES, "max_tokens": 3, "logprobs": True, "top_logprobs": 2, **EXPLAINED}
# Bodies that ask for all an answer may hold; None: GET.
ASKED = [
    ("/v1/completions", {"prompt": "hello", **SHOWN}),
    ("/v1/completions", {"prompt": ["hello", "world"], "n": 2, "echo": True, **SHOWN}),
    ("/v1/chat/completions", CHAT),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 3}),
    ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 3}),
    (
        "/api/chat",
        {"model": "tiny", "messages": MESSAGES, "stream": False, "options": {"num_predict": 3}},
    ),
    ("/api/chat", {"model": "tiny:latest"}),
    (
        "/api/generate",
        {"model": "tiny", "prompt": "hello", "stream": False, "options": {"num_predict": 3}},
    ),
    ("/api/tags", None),
    ("/api/ps", None),
    ("/api/show", {"model": "tiny"}),
    ("/api/version", None),
    ("/completion", {"prompt": "hello", "n_predict": 3}),
    ("/apply-template", {"messages": MESSAGES}),
    ("/props", None),
    ("/slots", None),
    ("/v1/models", None),
    ("/v1/models/tiny", None),
    ("/tokenize", {"content": "hello", "with_pieces": True, "return_token_strs": True}),
    ("/tokenize", {"messages": MESSAGES, "return_token_strs": True}),
    ("/detokenize", {"tokens": [1, 2]}),
    ("/v1/embeddings", {"input": ["hello", "world"]}),
    ("/v1/warm", {"text": "A text of more than one block. " * 3}),
    ("/v1/warm", {"messages": MESSAGES}),
    ("/v1/unpin", {"text": "A text of more than one block. " * 3}),
    ("/v1/requests", None),
    ("/v1/requests/last/cache", None),
    ("/v1/stats", None),
    ("/v1/blocks", None),
    ("/cache/reset", {}),
]


def model_of(path):
    named = {
        "/v1/models/tiny": "/v1/models/{name:path}",
        "/v1/requests/last/cache": "/v1/requests/{request_id}/cache",
    }
    return ANSWERS[named.get(path, path)]


async def ask(app, path, body):
    return await (app.get(path) if body is None else app.post(path, json=body))


def test_every_route_is_asked():
    elsewhere = {
        RerankAnswer,
        DeletedResponse,
        ItemList,
    }  # in test_embeddings.py and test_responses.py
    assert {model_of(path) for path, _ in ASKED} == {*ANSWERS.values()} - elsewhere


def test_no_model_lets_a_key_pass_that_it_does_not_name():
    models = [
        kind
        for kind in vars(answers).values()
        if isinstance(kind, type) and issubclass(kind, BaseModel)
    ]
    assert len(models) > 20
    assert {kind.__name__ for kind in models if kind.model_config.get("extra") != "forbid"} == {
        "BaseModel"
    }


@pytest.mark.parametrize(("path", "body"), ASKED)
async def test_answers_have_the_keys_of_their_models(tiny_app, path, body):
    if "requests" in path:
        assert (
            await ask(tiny_app, "/v1/completions", {"prompt": "hello", "max_tokens": 1})
        ).status_code == 200
    answer = await ask(tiny_app, path, body)
    assert answer.status_code == 200, answer.text
    TypeAdapter(model_of(path)).validate_json(answer.content, strict=True)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_what_nobody_asks_for_is_left_out(tiny_app, path):
    bodies = {
        "/v1/completions": {"prompt": "hello", "max_tokens": 1},
        "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
        "/tokenize": {"content": "hello"},
    }
    answer = (await ask(tiny_app, path, bodies[path])).json()
    model = model_of(path)
    name = "token_strs"
    shown = answer
    if path != "/tokenize":
        model = model.model_fields["choices"].annotation.__args__[0]
        name = "token_ids"
        shown = answer["choices"][0]
    assert set(model.model_fields) - set(shown) == {name}
    assert set(shown) == set(model.model_json_schema()["required"])


@pytest.mark.parametrize(("path", "status"), [("/v1/models/other", 404), ("/nowhere", 404)])
async def test_errors_have_the_keys_of_their_model(tiny_app, path, status):
    answer = await tiny_app.get(path)
    assert answer.status_code == status
    answers.ErrorAnswer.model_validate_json(answer.content, strict=True)


async def test_a_warmed_text_is_told_as_the_engine_tells_it(tiny_app, tiny_engine):
    text = "A text of more than one block. " * 3
    answer = (await tiny_app.post("/v1/warm", json={"text": text})).json()
    stored = dataclasses.asdict(tiny_engine.warm(text))
    assert stored["chunks_stored"] > 0
    assert {name: answer[name] for name in stored} == stored
    assert set(answer) - set(stored) == {"object", "usage", "timings", "kvboost"}
