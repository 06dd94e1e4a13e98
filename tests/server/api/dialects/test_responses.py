"""/v1/responses in OpenAI's shape: items, events, tools, reasoning. The model says what a test wrote."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from helpers.server.api_bodies import named_events
from kvboost_edge.server.api.dialects.responses.answers import ResponseAnswer
from server.api.test_tools import ARGUMENTS, CALL, WEATHER, Speaker

PATH = "/v1/responses"
TOOLS = [{"type": "function", **WEATHER}]
THOUGHT = "<think>\nIt may rain.\n</think>\n\n"


async def ask(app: httpx.AsyncClient, **more: Any) -> dict[str, Any]:
    answer = await app.post(PATH, json={"input": "And the weather?", "temperature": 0, "store": False, **more})
    assert answer.status_code == 200, answer.text
    ResponseAnswer.model_validate_json(answer.content, strict=True)
    found: dict[str, Any] = answer.json()
    return found


async def told(app: httpx.AsyncClient, **more: Any) -> list[dict[str, Any]]:
    """The events of a stream; each is named as its data says, and they are numbered one by one."""
    body = {"input": "And the weather?", "temperature": 0, "store": False, "stream": True, **more}
    events = named_events(await app.post(PATH, json=body))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def refused(app: httpx.AsyncClient, status: int = 400, **more: Any) -> dict[str, Any]:
    body = json.dumps({"input": "hello", **more})  # ASCII, so that it may hold a lone surrogate
    answer = await app.post(PATH, content=body)
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """What two answers to one question have in common."""
    kept = {name: item for name, item in response.items() if not name.endswith("_at") and name != "id"}
    kept["output"] = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
    del kept["timings"], kept["kvboost"], kept["usage"]["input_tokens_details"]
    return kept


def rebuilt(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that the pieces of a stream add up to, by the events' own places."""
    items: list[dict[str, Any]] = []
    for event in events:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(items)
                items.append(event["item"])
            case "content_part.added":
                assert event["content_index"] == len(items[-1]["content"])
                items[-1]["content"].append(event["part"])
            case "output_text.delta" | "reasoning_text.delta":
                items[event["output_index"]]["content"][event["content_index"]]["text"] += event["delta"]
            case "function_call_arguments.delta":
                items[event["output_index"]]["arguments"] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert items[event["output_index"]]["content"][0]["text"] == event["text"]
            case "output_item.done":
                items[event["output_index"]]["status"] = event["item"]["status"]
                assert items[event["output_index"]] == event["item"]
        assert event.get("item_id") in (None, items[-1]["id"] if items else None)
    return items


SAID = {
    "text": "Sun, später Regen 🌧.",
    "thoughts": f"{THOUGHT}Sun.",
    "call": f"{THOUGHT}Let me look.\n{CALL}",
    "calls": f"{CALL}\n{CALL}",
    "nothing": "",
}


@pytest.mark.parametrize("said", SAID)
async def test_a_stream_adds_up_to_the_whole(app: httpx.AsyncClient, speaker: Speaker, said: str) -> None:
    speaker.text = SAID[said]
    tools: dict[str, Any] = {"tools": TOOLS} if "call" in said else {}
    whole, events = await ask(app, **tools), await told(app, **tools)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    last = events[-1]["response"]
    assert rebuilt(events) == last["output"]
    assert without_ids(last) == without_ids(whole)
    assert last["id"] == events[0]["response"]["id"]
    assert whole["status"] == "completed"


async def test_reasoning_text_and_calls_are_items_in_this_order(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = SAID["call"]
    answer = await ask(app, tools=TOOLS)
    reasoning, message, call = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "It may rain."}]
    assert message["content"] == [{"type": "output_text", "text": "Let me look.", "annotations": [], "logprobs": []}]
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "weather", ARGUMENTS)
    usage = answer["usage"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


@pytest.mark.parametrize("limit", [1, 30, 60, 80])
async def test_an_answer_cut_short_is_incomplete(app: httpx.AsyncClient, speaker: Speaker, limit: int) -> None:
    speaker.text = SAID["call"]
    whole = await ask(app, tools=TOOLS, max_output_tokens=limit)
    events = await told(app, tools=TOOLS, max_output_tokens=limit)
    assert events[-1]["type"] == "response.incomplete"
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    assert rebuilt(events) == events[-1]["response"]["output"]
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["output"][-1]["status"] == "incomplete"
    assert whole["usage"]["output_tokens"] == limit


async def test_results_sent_back_are_read_from_the_cache(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = SAID["call"]
    first = await ask(app, tools=TOOLS)
    asked = [{"role": "user", "content": "And the weather?"}, *first["output"]]
    result = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "Rain."}
    speaker.text = "It rains."
    second = await ask(app, tools=TOOLS, input=[*asked, result])
    assert second["output"][-1]["content"][0]["text"] == "It rains."
    written = first["usage"]["total_tokens"] - first["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert second["usage"]["input_tokens"] > written
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > first["usage"]["input_tokens"] - 17


async def test_the_form_of_the_text_binds(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = "no JSON"
    schema = {"type": "object", "properties": {"n": {"const": 7}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "name": "seven", "schema": schema, "strict": True}
    answer = await ask(app, text={"format": form}, reasoning={"effort": "none"}, max_output_tokens=50)
    assert json.loads(answer["output"][-1]["content"][0]["text"]) == {"n": 7}
    assert answer["text"] == {"format": form}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
async def test_a_tool_that_has_to_be_called(app: httpx.AsyncClient, speaker: Speaker, choice: Any) -> None:
    speaker.text = CALL
    (call,) = (await ask(app, tools=TOOLS, tool_choice=choice))["output"]
    assert call["name"] == "weather"
    speaker.text = "No."
    (message,) = (await ask(app, tools=TOOLS, tool_choice="none"))["output"]
    assert message["type"] == "message"


async def test_functions_of_a_namespace_are_called_by_both_names(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = CALL.replace('"weather"', '"sky.weather"')
    tools = [{"type": "namespace", "name": "sky", "description": "", "tools": TOOLS}]
    answer = await ask(app, tools=tools)
    (call,) = answer["output"]
    assert (call["namespace"], call["name"]) == ("sky", "weather")
    parts = [{"type": "input_text", "text": "x"}]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": parts}
    speaker.text = "Done."
    again = await ask(app, tools=tools, input=[{"role": "user", "content": "?"}, call, output])
    assert again["output"][0]["content"][0]["text"] == "Done."


async def test_effort_none_turns_thinking_off(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = f"{THOUGHT}Sun."
    on, off = await ask(app, reasoning={"effort": "high"}), await ask(app, reasoning={"effort": "none"})
    assert [item["type"] for item in on["output"]] == ["reasoning", "message"]
    assert [item["type"] for item in off["output"]] == ["message"]
    assert off["usage"]["input_tokens"] > on["usage"]["input_tokens"]  # the closed block is in the prompt
    assert [one["reasoning"]["effort"] for one in (on, off)] == ["high", "none"]


IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]
BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": None}, "input"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input"),
    ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input"),
    ({"input": [{"type": "function_call", "call_id": "x", "name": "y", "arguments": "{"}]}, "input"),
    ({"input": [{"role": "user", "content": "\ud800"}]}, "input"),
    ({"input": IMAGE}, "input"),
    ({"input": [{"role": "user", "content": "x" * 9000}]}, "input"),
    ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "x"}}]}, "tools"),
    ({"tools": [{"type": "function", "name": "x y"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "clock"}}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema"}}}, "text"),
    ({"text": {"verbosity": "low"}}, "text"),
    ({"truncation": "auto"}, "truncation"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"background": True}, "background"),
    ({"conversation": "x"}, "conversation"),
    ({"reasoning": {"effort": "most"}}, "reasoning"),
    ({"temperature": 3}, "temperature"),
    ({"stream_options": {}}, "stream_options"),
    ({"unknown": 1}, "unknown"),
]


@pytest.mark.parametrize(("body", "field"), BAD)
async def test_bad_fields_are_named(app: httpx.AsyncClient, body: dict[str, Any], field: str) -> None:
    error = await refused(app, **body)
    assert error["param"] == field, error
    assert field in error["message"] or error["code"] == "context_length_exceeded"


async def test_what_clients_send_without_need_is_taken(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = "Hello."
    neutral = {
        "include": ["reasoning.encrypted_content"],
        "truncation": "disabled",
        "metadata": {"a": "b"},
        "user": "u",
        "text": {"verbosity": "medium"},
        "service_tier": "auto",
        "client_metadata": {"x": "y"},
        "tools": [],
        "prompt_cache_key": "k",
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "background": False,
        "reasoning": {"summary": "auto"},
    }
    answer = await ask(app, **neutral)
    assert (answer["metadata"], answer["user"], answer["tools"]) == ({"a": "b"}, "u", [])


async def test_another_model_is_not_found(app: httpx.AsyncClient) -> None:
    error = await refused(app, status=404, model="other")
    assert (error["code"], error["param"]) == ("model_not_found", "model")


async def test_an_error_behind_the_first_event_is_told_and_ends_the_stream(
    app: httpx.AsyncClient, speaker: Speaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvboost_edge.server.api.dialects.responses.writer import ResponsesWriter

    def broken(*_: Any) -> None:
        raise RuntimeError("secret")

    speaker.text = "Hello. " * 40  # more than one batch of tokens
    monkeypatch.setattr(ResponsesWriter, "closed", broken)
    events = await told(app)
    error, failed = events[-2:]
    assert (error["type"], error["code"]) == ("error", "internal_error")
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"]["code"] == "server_error"
    assert "secret" not in json.dumps(events)
