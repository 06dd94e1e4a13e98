"""Tests of OpenAI's routes: fields that require or exclude each other, field names of other
servers, and bodies of any Content-Type.
"""

import json

import openai.types as openai_types
import pytest
from openai.types import chat as openai_chat
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as Chat
from openai.types.chat.parsed_chat_completion import ParsedChatCompletionMessage
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as Completion
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming

from kvboost_edge.server.api.bounds import BOUNDS
from kvboost_edge.server.api.compat.responses.schemas import Reasoning, ResponseRequest
from kvboost_edge.server.api.schemas.chat import ChatMessage, ChatRequest
from kvboost_edge.server.api.schemas.completions import CompletionRequest
from kvboost_edge.server.api.schemas.embeddings import EmbeddingRequest
from kvboost_edge.server.api.schemas.shared import PromptCacheOptions
from kvboost_edge.server.api_errors import ApiError

MESSAGES = [{"role": "user", "content": "hello"}]
COMPLETIONS = ("/v1/completions", {"prompt": "hello"})
CHAT = ("/v1/chat/completions", {"messages": MESSAGES})


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (CompletionRequest, Completion.__annotations__),
        (ChatRequest, Chat.__annotations__),
        (ResponseRequest, ResponseCreateParamsNonStreaming.__annotations__),
        (EmbeddingRequest, openai_types.EmbeddingCreateParams.__annotations__),
        (Reasoning, openai_types.Reasoning.model_fields),
        (
            PromptCacheOptions,
            openai_chat.completion_create_params.PromptCacheOptions.__annotations__,
        ),
        (ChatMessage, ParsedChatCompletionMessage.model_fields),
        (ChatMessage, openai_chat.ChatCompletionAssistantMessageParam.__annotations__),
        (ChatMessage, openai_chat.ChatCompletionToolMessageParam.__annotations__),
        (ChatMessage, openai_chat.ChatCompletionUserMessageParam.__annotations__),
    ],
)
def test_every_field_of_openais_client_is_known(model, fields):
    """Each is accepted, ignored or refused with advice, but none is unknown."""
    assert fields
    assert fields.keys() - {*model.wire_names(), *model.unsupported} == set()


def test_parts_of_openais_messages_become_text():
    marked = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    parts = [{"type": "text", "text": "a", **marked}, {"type": "refusal", "refusal": "b"}]
    message = ChatMessage.model_validate({"role": "assistant", "content": parts, "parsed": [1]})
    assert message.for_template() == {"role": "assistant", "content": "a\nb"}
    sent = [
        {"role": "user", "content": [{"type": "input_text", "text": "a", **marked}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "b", "parsed": [1]}]},
    ]
    items = ResponseRequest.model_validate({"input": sent}).input
    assert [item["content"] for item in items] == [
        [{"type": "input_text", "text": "a"}],
        [{"type": "output_text", "text": "b"}],
    ]


@pytest.mark.parametrize(
    ("model", "body", "param"),
    [
        (CompletionRequest, {"prompt": "a", "n": 3, "best_of": 2}, "best_of"),
        (CompletionRequest, {"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
        (CompletionRequest, {"prompt": ["a"] * 200, "n": 2}, "n"),
        (
            ChatRequest,
            {"messages": MESSAGES, "max_tokens": 5, "max_completion_tokens": 6},
            "max_tokens",
        ),
    ],
)
def test_contradictory_fields_are_refused(model, body, param):
    with pytest.raises(ApiError) as caught:
        model.model_validate(body).check_together()
    assert (caught.value.status_code, caught.value.param) == (400, param)
    CompletionRequest.model_validate(
        {"prompt": "a", "max_tokens": 0, "echo": True}
    ).check_together()


def test_developer_messages_become_system_messages():
    """Templates know the role only by its older name."""
    messages = [{"role": "developer", "content": "Be brief."}, *MESSAGES]
    body = ChatRequest.model_validate({"messages": messages})
    roles = [message.for_template()["role"] for message in body.messages]
    assert roles == ["system", "user"]


async def test_a_returned_message_may_be_sent_back_unchanged(tiny_app):
    """Clients send back the output of `model_dump`, including fields that are null or empty."""
    answered = {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "annotations": None,
        "audio": None,
    }
    answered |= {"function_call": None, "tool_calls": None}
    choices = []
    for message in (
        {"role": "assistant", "content": "hi"},
        answered,
        {**answered, "annotations": [], "tool_calls": []},
    ):
        body = {"messages": [*MESSAGES, message, *MESSAGES], "max_tokens": 4, "temperature": 0}
        choices.append((await tiny_app.post(CHAT[0], json=body)).json()["choices"])
    assert choices[0] == choices[1] == choices[2]


async def test_a_seed_of_minus_1_is_random_and_others_wrap_to_64_bits(tiny_app):
    """The engine draws a new seed for each -1. Other seeds are reported as the 64-bit values that
    they wrap to.
    """

    async def seeds(**fields):
        answer = await tiny_app.post(
            COMPLETIONS[0], json={**COMPLETIONS[1], "max_tokens": 1, **fields}
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["kvboost"]["seeds"]

    assert len({*await seeds(seed=-1, n=2), *await seeds(seed=-1)}) == 3
    assert await seeds(seed=-2, n=3) == [2**64 - 2, 2**64 - 1, 0]
    assert await seeds(seed=-(2**63)) == [2**63]
    assert await seeds(seed=2**63 - 1, n=2) == [2**63 - 1, 2**63]


@pytest.mark.parametrize(("path", "base"), [COMPLETIONS, CHAT])
async def test_other_servers_field_names_are_aliases(tiny_app, path, base):
    spellings = (
        {"max_tokens": 4, "repetition_penalty": 1.5, "return_token_ids": True},
        {"n_predict": 4, "repeat_penalty": 1.5, "return_tokens": True},
        {"num_predict": 4, "repeat_penalty": 1.5, "return_token_ids": True},
    )
    ours, *theirs = [
        (await tiny_app.post(path, json={**base, "temperature": 0, **more})).json()
        for more in spellings
    ]
    assert [one["choices"] for one in theirs] == [ours["choices"]] * 2


async def test_json_is_parsed_with_any_content_type(tiny_app):
    """`curl -d` labels every body as a form."""
    form = {"content-type": "application/x-www-form-urlencoded"}
    for headers in (
        form,
        {"content-type": "text/plain"},
        {"content-type": "application/json; charset=utf-8"},
        {},
    ):
        body = json.dumps({**COMPLETIONS[1], "max_tokens": 1})
        answer = await tiny_app.post(COMPLETIONS[0], content=body, headers=headers)
        assert answer.status_code == 200, answer.text
    answer = await tiny_app.post(COMPLETIONS[0], content="prompt=hello", headers=form)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


async def test_the_openapi_document_has_both_bodies(tiny_app):
    bodies = (await tiny_app.get("/openapi.json")).json()["components"]["schemas"]
    assert (
        bodies["ChatRequest"]["properties"]["temperature"]["anyOf"][0]["maximum"]
        == BOUNDS["temperature"].high
    )
    assert bodies["CompletionRequest"]["additionalProperties"] is False


async def test_the_openapi_document_describes_every_schema_and_route(tiny_app):
    document = (await tiny_app.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    operations = [one for path in document["paths"].values() for one in path.values()]
    # Each name is a noun, apart from the route's own name "embed".
    assert [name for name in schemas if name.endswith("ed")] == ["OllamaEmbed"]
    texts = [one.get("description", "") for one in (*schemas.values(), *operations)]
    assert all(one["description"] for one in operations)
    internal = ("ApiError", "Args:", "Attributes:", "Raises:", "Returns:")
    assert [text for text in texts for word in internal if word in text] == []
    fields = schemas["CostReport"]["properties"]  # including those of its base class
    assert "recomputed" in fields["recomputed_tokens"]["description"]
    assert "by default" in schemas["CompletionRequest"]["properties"]["max_tokens"]["description"]
