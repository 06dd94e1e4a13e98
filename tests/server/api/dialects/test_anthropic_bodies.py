"""Bodies of /v1/messages: what is taken, what is refused by name, what becomes of it; and a client that goes away."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from helpers.engine import fake_runner
from helpers.engine.fake_runner import fake_engine
from helpers.server.live_servers import HeldForward, LiveServer, app_client, raw_answer, wait_until
from kvboost_edge.server.api.bounds import BOUNDS
from kvboost_edge.server.api.dialects.anthropic.schemas import CountTokensRequest, MessagesRequest
from kvboost_edge.server.api.dialects.anthropic.translate import translated
from kvboost_edge.server.app import create_app
from kvboost_edge.server.errors import ApiError
from kvboost_edge.server.settings import ServerSettings
from server.api.dialects.test_anthropic import ASK, PATH, TOOLS, ask, gathered, refused
from server.api.test_tools import TEMPLATE, Speaker

RECORDED = Path(__file__).parents[3] / "data" / "agents"
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://localhost/x.png"}}
CALL = {"type": "tool_use", "id": "a", "name": "clock", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "ten"}


def user(*blocks: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(blocks)}]


def chat_of(**body: Any) -> list[dict[str, Any]]:
    """The messages as templates get them."""
    whole = MessagesRequest.model_validate({"max_tokens": 9, "messages": ASK, **body})
    return [message.for_template() for message in translated(whole).messages]


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def test_system_messages_come_first_or_are_the_users() -> None:
    system = [text("One."), text("Two.")]
    later = {"role": "system", "content": "Be quick."}
    assert chat_of(system=system, messages=[*ASK, later, *ASK]) == [
        {"role": "system", "content": "One.\nTwo."},
        {"role": "user", "content": "And the weather?\n<system>\nBe quick.\n</system>\nAnd the weather?"},
    ]


def test_calls_results_and_thoughts() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    hidden = {"type": "redacted_thinking", "data": "0000"}
    said = {"role": "assistant", "content": [thought, hidden, text("Let "), text("me."), CALL]}
    failed = {**RESULT, "content": [text("no"), text("clock")], "is_error": True}
    assert chat_of(messages=[*ASK, said, *user(failed, text("So?"))], tools=TOOLS)[1:] == [
        {
            "role": "assistant",
            "content": "Let me.",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "clock", "arguments": {}}}],
            "reasoning_content": "Hm.",
        },
        {"role": "tool", "content": "Error: no\nclock", "tool_call_id": "a"},
        {"role": "user", "content": "So?"},
    ]
    empty = {**RESULT, "content": None}
    assert chat_of(messages=[*ASK, said, *user(empty)], tools=TOOLS)[-1]["content"] == ""


def test_messages_of_one_role_are_one() -> None:
    said = [{"role": "assistant", "content": one} for one in ("Yes", ", fine.")]
    assert chat_of(messages=[*ASK, *ASK, *said, *user()])[1:] == [
        {"role": "assistant", "content": "Yes, fine."},
        {"role": "user", "content": ""},
    ]


def test_a_null_is_not_given_where_a_field_is_optional() -> None:
    for model, base in ((MessagesRequest, {"messages": ASK, "max_tokens": 1}), (CountTokensRequest, {"messages": ASK})):
        for name, field in model.model_fields.items():
            if not field.is_required():
                translated(model.model_validate({**base, name: None}))


def test_every_number_of_the_body_has_a_bound() -> None:
    base = {"messages": ASK, "max_tokens": 1}
    for name in MessagesRequest.model_fields:
        for huge in (10**30, 1e300, [10**30], {"1": 10**30}):
            with pytest.raises(ValidationError):
                MessagesRequest.model_validate({**base, name: huge})
    bounds = {"temperature": "anthropic_temperature", "top_p": "top_p", "top_k": "top_k", "max_tokens": "max_tokens"}
    for name, bound in bounds.items():
        assert getattr(MessagesRequest.model_validate({**base, name: BOUNDS[bound].high}), name) == BOUNDS[bound].high


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": user(IMAGE)}, "'image' are not built"),
    ({"messages": user({"type": "document"})}, "'document' are not built"),
    ({"messages": [*ASK, {"role": "assistant", "content": [{"type": "server_tool_use"}]}]}, "'server_tool_use'"),
    ({"messages": user({**RESULT, "content": [IMAGE]})}, "'image' are not built"),
    ({"messages": user(CALL)}, "'tool_use' are not built here in this place"),
    ({"messages": [*ASK, {"role": "assistant", "content": [RESULT]}]}, "'tool_result'"),
    ({"messages": user(text("x"), RESULT)}, "results come first"),
    ({"messages": user({"type": "text"})}, "text: Field required"),
    ({"messages": user({**text("x"), "txt": 1})}, "txt"),
    ({"messages": user(text("\ud800"))}, "surrogate"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
    ({"messages": user({**RESULT, "tool_use_id": "x" * 300})}, "256"),
    ({"messages": [*ASK, {"role": "assistant", "content": [{**CALL, "name": "no name"}]}]}, "name"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305' are Anthropic's own"),
    ({"tools": [{"name": "x", "input_schema": {"type": "string"}}]}, "object"),
    ({"tools": [{"name": "x", "input_schema": {}}] * 2}, "twice"),
    ({"tools": [{**TOOLS[0], "defer_loading": True}]}, "defer_loading"),
    ({"tool_choice": {"type": "any"}}, "needs tools"),
    ({"tool_choice": {"type": "tool"}, "tools": TOOLS}, "name"),
    ({"tool_choice": {"type": "tool", "name": "other"}, "tools": TOOLS}, "'other'"),
    ({"temperature": 1.5}, "temperature"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"thinking": {"type": "on"}}, "thinking"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "budget_tokens"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"container": "x"}, "container"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format"),
    ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "ttl"),
    ({"system": [{**text("x"), "cache_control": {"type": "ephemeral"}}] * 5}, "5 places"),
    ({"logprobs": True}, "logprobs"),
]


@pytest.mark.parametrize(("body", "named"), REFUSED)
async def test_refused_by_name(app: httpx.AsyncClient, body: dict[str, Any], named: str) -> None:
    message = await refused(app, **body)
    assert named in message
    assert len(message) < 400


MEANINGLESS: dict[str, Any] = {
    "metadata": {"user_id": "somebody"},
    "service_tier": "auto",
    "speed": "standard",
    "mcp_servers": [],
    "inference_geo": "here",
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "tools": [{**TOOLS[0], "type": "custom", "strict": True, "eager_input_streaming": True, "input_examples": [{}]}],
}


async def test_what_means_nothing_here_is_taken(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = "Fine."
    assert (await ask(app, **MEANINGLESS))["content"] == [text("Fine.")]


HOSTILE = {
    "deep": b'{"max_tokens": 1, "messages": ' + b"[" * 100_000,
    "no text": b'{"max_tokens": 1, "messages": [{"role": "user", "content": "\xff"}]}',
    "not a number": b'{"max_tokens": NaN, "messages": []}',
    "list": b"[]",
    "many blocks": json.dumps({"max_tokens": 1, "messages": user(*[text("")] * 10_001)}).encode(),
    "deep schema": json.dumps({"max_tokens": 1, "messages": ASK, "tools": [{"name": "x", "input_schema": "SCHEMA"}]})
    .replace('"SCHEMA"', '{"properties": {"a": ' * 200 + "{}" + "}}" * 200)
    .encode(),
    "deep input": json.dumps({"max_tokens": 1, "messages": [*ASK, {"role": "assistant", "content": [CALL]}, *ASK]})
    .replace('"input": {}', '"input": ' + '{"a": ' * 500 + "{}" + "}" * 500)
    .encode(),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_bodies_are_refused_soon(app: httpx.AsyncClient, speaker: Speaker, name: str) -> None:
    began = time.monotonic()
    for path in (PATH, f"{PATH}/count_tokens"):
        answer = await app.post(path, content=HOSTILE[name])
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert time.monotonic() - began < 5


async def test_what_claude_code_sends_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests as it sent them, texts shortened: the second has the call that answers the first, and its result."""
    first, second = (json.loads((RECORDED / f"claude_code_{name}.json").read_text()) for name in ("first", "result"))
    *_, said, _ = second["body"]["messages"]
    arguments = said["content"][1]["input"]
    with fake_engine(num_blocks=2000, max_context=15_000) as engine:
        engine.tokenizer.chat_template = TEMPLATE
        speaker = Speaker(engine)
        monkeypatch.setattr(fake_runner, "token_logits", speaker.logits)
        app = create_app(engine, ServerSettings(model_name="fake", model_aliases=(first["body"]["model"],)))
        async with app_client(app) as client:
            call = json.dumps({"name": "Bash", "arguments": arguments})
            speaker.text = f"<think>\nHm.\n</think>\n\nLet me look.\n<tool_call>\n{call}\n</tool_call>"
            answer = await client.post(
                first["path"], json={**first["body"], "temperature": 0}, headers=first["headers"]
            )
            assert answer.status_code == 200, answer.text
            message = gathered([json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")])
            assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
            assert message["content"][2]["input"] == arguments
            assert message["usage"]["cache_creation_input_tokens"] > 5000
            prompt = sum(message["usage"][name] for name in ("input_tokens", "cache_creation_input_tokens"))
            for block in second["body"]["messages"][-2]["content"][1:]:
                block["id"] = message["content"][2]["id"]
            second["body"]["messages"][-1]["content"][0]["tool_use_id"] = message["content"][2]["id"]
            speaker.text = "Done."
            answer = await client.post(second["path"], json={**second["body"], "temperature": 0, "stream": False})
            assert answer.status_code == 200, answer.text
            assert answer.json()["content"] == [text("Done.")]
            assert answer.json()["usage"]["cache_read_input_tokens"] >= prompt - 16


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_goes_ends_the_work_within_a_step(live_server: LiveServer, streams: bool) -> None:
    held = HeldForward(live_server.engine)
    try:
        body = {"messages": user(text(f"Tell me of {streams}. " * 100)), "max_tokens": 100, "stream": streams}
        with live_server.connect() as sock:
            sock.sendall(live_server.request_bytes(PATH, body))
            wait_until(lambda: held.steps, "the first pass")
        wait_until(lambda: not live_server.state.admission.tickets, "the ticket to be given back")
        held.step(2)
        wait_until(live_server.idle, "the blocks to be given back")
    finally:
        held.release()


def test_an_error_behind_the_beginning_of_a_stream_is_an_event(
    live_server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise ApiError(503, "gone", code="shutting_down")

    monkeypatch.setattr("kvboost_edge.server.api.dialects.anthropic.writer.AnthropicWriter.closed", fail)
    # So many that the beginning is sent before the end is made, however late the loop comes to it.
    body = {"messages": ASK, "max_tokens": 100, "stream": True}
    with live_server.connect() as sock:
        sock.sendall(live_server.request_bytes(PATH, body, "Connection: close"))
        answer = raw_answer(sock)
    assert b"event: message_start" in answer
    last = answer.rstrip(b"\r\n0").rpartition(b"event: ")[2]
    assert last.startswith(b"error\ndata: ")
    told = json.loads(last.partition(b"data: ")[2].split(b"\n")[0])
    assert told == {"type": "error", "error": {"type": "overloaded_error", "message": "gone"}}
