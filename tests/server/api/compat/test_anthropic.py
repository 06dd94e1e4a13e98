"""Tests of features specific to /v1/messages: content blocks, thinking, limits, headers, and
requests recorded from Claude Code.
"""

import json
from pathlib import Path

import pytest

from helpers.server.api_bodies import error_text
from helpers.server.compat_apis import APIS
from helpers.server.live_servers import app_client
from helpers.server.scripted_model import ASK, FORMATS, scripted
from kvboost_edge.server.api.compat.anthropic.schemas import MessagesRequest
from kvboost_edge.server.api.compat.anthropic.translate import translated
from kvboost_edge.server.app import create_app
from kvboost_edge.server.settings import ServerSettings

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
API = APIS[PATH]
RECORDED = Path(__file__).parents[3] / "data" / "agents"
CLOCK = [{"name": "clock", "input_schema": {"type": "object"}}]
CALL = {"type": "tool_use", "id": "a", "name": "clock", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "ten"}


def user(*blocks):
    return [{"role": "user", "content": list(blocks)}]


def text(words):
    return {"type": "text", "text": words}


def chat_of(**body):
    """Return the messages of a request in the form that chat templates receive."""
    whole = MessagesRequest.model_validate({"max_tokens": 9, "messages": ASK, **body})
    return [message.for_template() for message in translated(whole).messages]


def test_system_messages_move_first_or_into_the_next_user_turn():
    later = {"role": "system", "content": "Be quick."}
    assert chat_of(system=[text("One."), text("Two.")], messages=[*ASK, later, *ASK]) == [
        {"role": "system", "content": "One.\nTwo."},
        {
            "role": "user",
            "content": "And the weather?\n<system>\nBe quick.\n</system>\nAnd the weather?",
        },
    ]


def test_tool_calls_results_and_thinking_are_translated():
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    hidden = {"type": "redacted_thinking", "data": "0000"}
    said = {"role": "assistant", "content": [thought, hidden, text("Let "), text("me."), CALL]}
    failed = {**RESULT, "content": [text("no"), text("clock")], "is_error": True}
    assert chat_of(messages=[*ASK, said, *user(failed, text("So?"))], tools=CLOCK)[1:] == [
        {
            "role": "assistant",
            "content": "Let me.",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "clock", "arguments": {}}}
            ],
            "reasoning_content": "Hm.",
        },
        {"role": "tool", "content": "Error: no\nclock", "tool_call_id": "a"},
        {"role": "user", "content": "So?"},
    ]
    empty = {**RESULT, "content": None}
    assert chat_of(messages=[*ASK, said, *user(empty)], tools=CLOCK)[-1]["content"] == ""


def test_consecutive_messages_of_one_role_are_merged():
    said = [{"role": "assistant", "content": one} for one in ("Yes", ", fine.")]
    assert chat_of(messages=[*ASK, *ASK, *said, *user()])[1:] == [
        {"role": "assistant", "content": "Yes, fine."},
        {"role": "user", "content": ""},
    ]


async def test_thinking_is_omitted_on_request(app, speaker):
    speaker.text = FORMATS["hermes"].turn(thought="It may rain.", text="Fine.")
    body = API.body(thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"})
    for streams in (False, True):
        answer = await API.ask(app, body, streams=streams)
        assert [block.get("thinking") for block in answer["content"]] == ["", None]


@pytest.mark.parametrize("kind", [None, "disabled", "adaptive", "enabled"])
async def test_thinking_field_sets_enable_thinking_in_the_template(
    app, speaker, spoken_engine, kind
):
    thinking = kind and {"type": kind}
    prompt = spoken_engine.tokenizer.encode_chat(
        ASK, variables={"enable_thinking": kind not in (None, "disabled")}
    )
    usage = (await API.ask(app, API.body(thinking=thinking)))["usage"]
    assert usage["input_tokens"] == len(prompt)
    counted = await app.post(COUNT, json={"messages": ASK, "thinking": thinking})
    assert counted.json() == {"input_tokens": len(prompt)}


async def test_max_tokens_may_exceed_the_context(app, speaker, spoken_engine):
    """Agents send such limits. A response that fills the context has its own stop reason."""
    body = API.body(limit=1_000_000)
    assert (await API.ask(app, body))["stop_reason"] == "end_turn"
    speaker.text = "x" * 9000
    answer = await API.ask(app, {**body, "messages": [{"role": "user", "content": "y" * 7900}]})
    assert answer["stop_reason"] == "model_context_window_exceeded"
    used = answer["usage"]["input_tokens"] + answer["usage"]["output_tokens"]
    assert used == spoken_engine.runner_info.max_context


async def test_max_tokens_0_caches_the_prompt_without_generating(app, speaker):
    body = {
        **API.body(),
        "messages": [{"role": "user", "content": "A text of more than one block. " * 4}],
    }
    for streams in (False, True):
        answer = await API.ask(app, {**body, "max_tokens": 0}, streams=streams)
        ending = (answer["content"], answer["stop_reason"], answer["usage"]["output_tokens"])
        assert ending == ([], "max_tokens", 0)
    assert API.said(await API.ask(app, body)).cached > 100


async def test_a_final_assistant_message_is_continued(app, speaker):
    speaker.text = "It is fine."
    begun = {"role": "assistant", "content": [text("It is")]}
    answer = await API.ask(app, {**API.body(thinks=True), "messages": [*ASK, begun]})
    assert answer["content"] == [text(" fine.")]


async def test_anthropic_request_and_response_headers(app, speaker):
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b", "x-api-key": "anything"}
    answer = await app.post(f"{PATH}?beta=true", json=API.body(), headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert "request-id" not in (await app.get("/v1/models")).headers


async def test_a_wrong_method_returns_405_in_anthropics_error_format(app):
    wrong = await app.get(PATH)
    assert wrong.status_code == 405
    assert error_text(PATH, wrong.content)


async def test_unsupported_tool_fields_are_accepted_without_effect(app, speaker):
    more = {"type": "custom", "strict": True, "eager_input_streaming": True, "input_examples": [{}]}
    answer = await API.ask(app, {**API.body(thinks=True), "tools": [{**CLOCK[0], **more}]})
    assert answer["content"] == [text("Good day.")]


async def test_recorded_claude_code_requests_are_answered(monkeypatch):
    """Claude Code sent these two requests, shortened here. The second one contains the tool call of
    the first response and its result.
    """
    first, second = (
        json.loads((RECORDED / f"claude_code_{name}.json").read_text())
        for name in ("first", "result")
    )
    *_, said, _ = second["body"]["messages"]
    arguments = said["content"][1]["input"]
    form = FORMATS["hermes"]
    with scripted(monkeypatch, form, 2000, 15_000) as (engine, speaker):
        app = create_app(
            engine, ServerSettings(model_name="fake", model_aliases=(first["body"]["model"],))
        )
        async with app_client(app) as client:
            client.headers.update(first["headers"])
            speaker.text = form.turn("Hm.", "Let me look.", [("Bash", arguments)])
            message = await API.ask(client, {**first["body"], "temperature": 0}, streams=True)
            assert [block["type"] for block in message["content"]] == [
                "thinking",
                "text",
                "tool_use",
            ]
            assert message["content"][2]["input"] == arguments
            assert message["usage"]["cache_creation_input_tokens"] > 5000
            for block in second["body"]["messages"][-2]["content"][1:]:
                block["id"] = message["content"][2]["id"]
            second["body"]["messages"][-1]["content"][0]["tool_use_id"] = message["content"][2][
                "id"
            ]
            speaker.text = "Done."
            answer = await API.ask(client, {**second["body"], "temperature": 0})
            assert answer["content"] == [text("Done.")]
            assert API.said(answer).cached >= API.said(message).prompt - 16
