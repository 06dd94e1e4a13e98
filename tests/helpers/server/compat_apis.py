"""Table of the APIs that generate: the format of their requests, and the places of text, calls and
usage in answers, streams and errors.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from helpers.server.scripted_model import ASK

# ruff: noqa: RUF012

MODEL = "fake"
Json = dict[str, Any]

# Members that differ between two answers to the same request.
_PASSING = {
    "id",
    "call_id",
    "item_id",
    "created",
    "created_at",
    "completed_at",
    "timings",
    "generation_settings",
}
_PASSING |= {f"{name}_duration" for name in ("total", "load", "prompt_eval", "eval")} | {"kvboost"}


class Said(NamedTuple):
    """The content of an answer of any API. Calls have their arguments as text; the finish reason is
    OpenAI's word for it.
    """

    thought: str
    text: str
    calls: list[tuple[str, str]]
    reason: str
    prompt: int
    cached: int
    output: int


def lasting(value):
    """Return a JSON value without the members in _PASSING."""
    if isinstance(value, dict):
        return {name: lasting(one) for name, one in value.items() if name not in _PASSING}
    return [lasting(one) for one in value] if isinstance(value, list) else value


def _named(answer):
    """Return the events of a stream, after checking that each event name matches its data."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def _data(answer):
    """Return the events of a stream without event names."""
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = answer.text.removesuffix("\n\n").split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks if block != "data: [DONE]"]


class Api:
    """An API with its routes and formats. Tests use one name per request parameter for all APIs;
    `places` maps it to the API's own, with dots for nested members.

    Attributes:
        plain: members of every request.
        has: supported parameters and features: "tools", "choice" of tools, "thinks", "form" of the
            answer.
    """

    path: str
    plain: Json = {"temperature": 0}
    places: dict[str, str] = {}
    has = frozenset({"tools", "choice", "thinks"})

    def body(self, *, tools=None, thinks=None, choice="", **terms):
        """Return the body of a request.

        Args:
            thinks: whether the model reasons; None leaves the API's default.
            choice: tool choice in OpenAI's words, or the name of a tool.
            form: a JSON schema for the answer.
        """
        found = {**self.plain, **self.question()}
        if tools:
            found["tools"] = self.tools(tools)
        if choice:
            found |= self.choice(choice)
        if thinks is not None:
            found |= self.thinks(thinks)
        if "form" in terms:
            terms["form"] = self.form(terms["form"])
        for name, value in terms.items():
            *outer, last = self.places.get(name, name).split(".")
            place = found
            for one in outer:
                place[one] = dict(place.get(one, {}))
                place = place[one]
            place[last] = value
        return found

    def question(self):
        return {"messages": ASK}

    def tools(self, tools):
        return tools

    def choice(self, choice):
        named = choice not in ("auto", "none", "required")
        return {
            "tool_choice": {"type": "function", "function": {"name": choice}} if named else choice
        }

    def one_call(self, body):
        """Limit the answer to at most one call."""
        return {**body, "parallel_tool_calls": False}

    def thinks(self, thinks):
        raise NotImplementedError

    def form(self, schema):
        return schema

    async def ask(self, app, body, *, streams=False):
        """Send a request and return the complete answer. For a stream, it is assembled from the
        events.
        """
        answer = await app.post(
            self.path, json={**body, "stream": streams, **(self.streamed() if streams else {})}
        )
        assert answer.status_code == 200, answer.text
        if streams:
            return self.gather(self.events(answer))
        return answer.json()

    def streamed(self):
        return {}

    def events(self, answer):
        return _data(answer)

    def gather(self, events):
        """Assemble a stream's events into an answer as clients do."""
        raise NotImplementedError

    def said(self, answer):
        raise NotImplementedError

    def stopped_by(self, answer):
        """Return the stop string that ended the answer; "" if this API does not report it."""
        return ""

    def went_wrong(self, events):
        """Return whether the last event reports an error."""
        return bool(events[-1].get("error"))

    def next_turn(self, body, answer, results):
        """Return the body of the next turn with the answer and the results of its calls."""
        message = answer["choices"][0]["message"]
        sent = [
            {"role": "tool", "tool_call_id": call["id"], "content": text}
            for call, text in zip(message["tool_calls"], results, strict=True)
        ]
        return {**body, "messages": [*body["messages"], message, *sent]}

    def parts(self, thought, text, name, values):
        """Return the expected part of an answer with reasoning, text and a call, exact except for
        ids.
        """
        raise NotImplementedError

    def told(self, answer):
        """Return the part of an answer that `parts` describes."""
        raise NotImplementedError


class Chat(Api):
    path = "/v1/chat/completions"
    places = {"limit": "max_tokens", "form": "guided_json"}

    def thinks(self, thinks):
        return {"chat_template_kwargs": {"enable_thinking": thinks}}

    def streamed(self):
        return {"stream_options": {"include_usage": True}}

    def gather(self, events):
        message = {"role": "assistant", "content": "", "refusal": None}
        reason = None
        for event in events:
            for choice in event["choices"]:
                reason = choice["finish_reason"] or reason
                delta = choice["delta"]
                for name in ("content", "reasoning_content"):
                    if delta.get(name):
                        message[name] = message.get(name, "") + delta[name]
                for call in delta.get("tool_calls", ()):
                    calls = message.setdefault("tool_calls", [])
                    if "id" in call:
                        assert call["index"] == len(calls)
                        calls.append(
                            {
                                "id": call["id"],
                                "type": call["type"],
                                "function": dict(call["function"]),
                            }
                        )
                    else:
                        assert call["function"].keys() == {"arguments"}
                        calls[call["index"]]["function"]["arguments"] += call["function"][
                            "arguments"
                        ]
        if "tool_calls" in message:
            message["content"] = message["content"] or None
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
        return {**events[-1], "object": "chat.completion", "choices": [choice]}

    def said(self, answer):
        (choice,) = answer["choices"]
        usage = answer["usage"]
        message = choice["message"]
        functions = [call["function"] for call in message.get("tool_calls", ())]
        # Some templates require ids of nine letters and digits.
        assert all(
            len(call["id"]) == 9 and call["id"].isalnum() for call in message.get("tool_calls", ())
        )
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        thought = message.get("reasoning_content", "")
        assert (usage["completion_tokens_details"]["reasoning_tokens"] > 0) == bool(thought)
        return Said(
            thought,
            message["content"] or "",
            [(one["name"], one["arguments"]) for one in functions],
            choice["finish_reason"],
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["completion_tokens"],
        )

    def parts(self, thought, text, name, values):
        call = {
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(values, ensure_ascii=False)},
        }
        return {
            "role": "assistant",
            "content": text,
            "refusal": None,
            "reasoning_content": thought,
            "tool_calls": [call],
        }

    def told(self, answer):
        return answer["choices"][0]["message"]


class Completions(Api):
    path = "/v1/completions"
    places = {"limit": "max_tokens", "form": "guided_json"}
    plain = {"temperature": 0, "max_tokens": 300}
    has = frozenset()

    def question(self):
        return {"prompt": "<|assistant|>"}

    def streamed(self):
        return {"stream_options": {"include_usage": True}}

    def gather(self, events):
        pieces = [choice for event in events for choice in event["choices"] if choice["index"] == 0]
        choice = {**pieces[-1], "text": "".join(piece["text"] for piece in pieces)}
        return {**events[-1], "choices": [choice]}

    def said(self, answer):
        (choice,) = answer["choices"]
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Said(
            "",
            choice["text"],
            [],
            choice["finish_reason"],
            usage["prompt_tokens"],
            cached,
            usage["completion_tokens"],
        )


class Messages(Api):
    path = "/v1/messages"
    places = {"limit": "max_tokens", "stop": "stop_sequences", "form": "output_config"}
    plain = {"temperature": 0, "max_tokens": 300}
    reasons = {
        "end_turn": "stop",
        "stop_sequence": "stop",
        "max_tokens": "length",
        "tool_use": "tool_calls",
    }

    def tools(self, tools):
        functions = [tool["function"] for tool in tools]
        return [
            {"name": one["name"], "input_schema": one.get("parameters", {"type": "object"})}
            for one in functions
        ]

    def choice(self, choice):
        kinds = {"auto": "auto", "none": "none", "required": "any"}
        return {
            "tool_choice": {"type": kinds[choice]}
            if choice in kinds
            else {"type": "tool", "name": choice}
        }

    def one_call(self, body):
        return {**body, "tool_choice": {**body["tool_choice"], "disable_parallel_tool_use": True}}

    def thinks(self, thinks):
        return {
            "thinking": {"type": "enabled", "budget_tokens": 1024}
            if thinks
            else {"type": "disabled"}
        }

    def form(self, schema):
        return {"format": {"type": "json_schema", "schema": schema}}

    def events(self, answer):
        return _named(answer)

    def gather(self, events):
        ends = [event["type"] for event in events[:1] + events[-2:]]
        assert ends == ["message_start", "message_delta", "message_stop"]
        message = events[0]["message"]
        arguments = {}
        is_open = False
        for event in events[1:-2]:
            kind = event["type"].removeprefix("content_block_")
            at = event["index"]
            assert (at, is_open) == (len(message["content"]) - (kind != "start"), kind != "start")
            is_open = kind != "stop"
            if kind == "start":
                message["content"].append(event["content_block"])
            elif kind == "delta":
                delta = dict(event["delta"])
                sort = delta.pop("type").removesuffix("_delta")
                ((name, text),) = delta.items()
                if sort == "input_json":
                    arguments[at] = arguments.get(at, "") + text
                else:
                    assert sort == name
                    message["content"][-1][name] += text
        for at, text in arguments.items():
            message["content"][at]["input"] = json.loads(text) if _is_whole(text) else {}
        assert not is_open
        for name in (
            "input_tokens",
            "cache_creation",
            "cache_creation_input_tokens",
            "cache_read_input_tokens",
        ):
            assert message["usage"][name] == events[-2]["usage"][name]
        last = {
            name: value
            for name, value in events[-2].items()
            if name not in ("type", "delta", "usage")
        }
        return {
            **message,
            **last,
            **events[-2]["delta"],
            "usage": {**message["usage"], **events[-2]["usage"]},
        }

    def said(self, answer):
        blocks = answer["content"]
        usage = answer["usage"]
        cached = usage["cache_read_input_tokens"]
        thought = "".join(one.get("thinking", "") for one in blocks)
        assert (usage["output_tokens_details"]["thinking_tokens"] > 0) == bool(thought)
        return Said(
            thought,
            "".join(one.get("text", "") for one in blocks),
            [
                (one["name"], json.dumps(one["input"], ensure_ascii=False))
                for one in blocks
                if "input" in one
            ],
            self.reasons[answer["stop_reason"]],
            usage["input_tokens"] + cached + usage["cache_creation_input_tokens"],
            cached,
            usage["output_tokens"],
        )

    def stopped_by(self, answer):
        return answer["stop_sequence"]

    def next_turn(self, body, answer, results):
        calls = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
        sent = [
            {"type": "tool_result", "tool_use_id": call, "content": text}
            for call, text in zip(calls, results, strict=True)
        ]
        said = [
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": sent},
        ]
        return {**body, "messages": [*body["messages"], *said]}

    def parts(self, thought, text, name, values):
        return [
            {"type": "thinking", "thinking": thought, "signature": "unsigned"},
            {"type": "text", "text": text},
            {"type": "tool_use", "name": name, "input": values},
        ]

    def told(self, answer):
        return answer["content"]


class Responses(Api):
    path = "/v1/responses"
    places = {"limit": "max_output_tokens", "form": "text"}
    plain = {"temperature": 0, "store": False}

    def question(self):
        return {"input": ASK}

    def tools(self, tools):
        return [{"type": "function", **tool["function"]} for tool in tools]

    def choice(self, choice):
        named = choice not in ("auto", "none", "required")
        return {"tool_choice": {"type": "function", "name": choice} if named else choice}

    def thinks(self, thinks):
        return {"reasoning": {"effort": "high" if thinks else "none"}}

    def form(self, schema):
        return {"format": {"type": "json_schema", "name": "form", "schema": schema, "strict": True}}

    def events(self, answer):
        events = _named(answer)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        return events

    def gather(self, events):
        assert [event["type"] for event in events[:2]] == [
            "response.created",
            "response.in_progress",
        ]
        answer = events[-1]["response"]
        assert events[-1]["type"] == f"response.{answer['status']}"
        assert answer["id"] == events[0]["response"]["id"]
        assert answer["output"] == self.items(events)
        return answer

    @staticmethod
    def items(events):
        """Assemble the items of a stream from its events, by the indices that the events give."""
        items = []
        for event in events:
            match event["type"].removeprefix("response."):
                case "output_item.added":
                    assert event["output_index"] == len(items)
                    items.append(event["item"])
                case "content_part.added":
                    assert event["content_index"] == len(items[-1]["content"])
                    items[-1]["content"].append(event["part"])
                case "output_text.delta" | "reasoning_text.delta":
                    items[event["output_index"]]["content"][event["content_index"]]["text"] += (
                        event["delta"]
                    )
                case "function_call_arguments.delta":
                    items[event["output_index"]]["arguments"] += event["delta"]
                case "output_text.done" | "reasoning_text.done":
                    assert items[event["output_index"]]["content"][0]["text"] == event["text"]
                case "output_item.done":
                    items[event["output_index"]]["status"] = event["item"]["status"]
                    assert items[event["output_index"]] == event["item"]
            assert event.get("item_id") in (None, items[-1]["id"] if items else None)
        return items

    def said(self, answer):
        found = {"reasoning": [], "message": [], "function_call": []}
        for item in answer["output"]:
            found[item["type"]].append(item)
        texts = [
            "".join(part["text"] for item in found[kind] for part in item["content"])
            for kind in ("reasoning", "message")
        ]
        usage = answer["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert (usage["output_tokens_details"]["reasoning_tokens"] > 0) == bool(texts[0])
        reason = "tool_calls" if found["function_call"] else "stop"
        if answer["status"] == "incomplete":
            assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
            assert answer["output"][-1]["status"] == "incomplete"
            reason = "length"
        return Said(
            *texts,
            [(one["name"], one["arguments"]) for one in found["function_call"]],
            reason,
            usage["input_tokens"],
            usage["input_tokens_details"]["cached_tokens"],
            usage["output_tokens"],
        )

    def went_wrong(self, events):
        assert events[-1]["response"]["error"]["code"] == "server_error"
        return [event["type"] for event in events[-2:]] == ["error", "response.failed"]

    def next_turn(self, body, answer, results):
        calls = [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]
        sent = [
            {"type": "function_call_output", "call_id": call, "output": text}
            for call, text in zip(calls, results, strict=True)
        ]
        return {**body, "input": [*body["input"], *answer["output"], *sent]}

    def parts(self, thought, text, name, values):
        written = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return [
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": thought}],
                "status": "completed",
            },
            {"type": "message", "role": "assistant", "content": [written], "status": "completed"},
            {
                "type": "function_call",
                "name": name,
                "arguments": json.dumps(values, ensure_ascii=False),
                "status": "completed",
            },
        ]

    def told(self, answer):
        return answer["output"]


class OllamaChat(Api):
    path = "/api/chat"
    places = {
        "limit": "options.num_predict",
        "seed": "options.seed",
        "stop": "options.stop",
        "form": "format",
    }
    places |= {"temperature": "options.temperature"}
    plain = {"model": MODEL, "options": {"temperature": 0}}
    has = frozenset({"tools", "thinks"})

    def thinks(self, thinks):
        return {"think": thinks}

    def events(self, answer):
        assert answer.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in answer.text.splitlines()]

    def gather(self, events):
        assert [line["done"] for line in events] == [False] * (len(events) - 1) + [True]
        messages = [line["message"] for line in events]
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        thought = "".join(message.get("thinking", "") for message in messages)
        message = {
            "role": "assistant",
            "content": "".join(message["content"] for message in messages),
        }
        message |= {
            name: value for name, value in (("thinking", thought), ("tool_calls", calls)) if value
        }
        return {**events[-1], "message": message}

    def said(self, answer):
        message = answer["message"]
        return self._told(
            answer,
            message.get("thinking", ""),
            message["content"],
            [
                (
                    call["function"]["name"],
                    json.dumps(call["function"]["arguments"], ensure_ascii=False),
                )
                for call in message.get("tool_calls", ())
            ],
        )

    @staticmethod
    def _told(answer, thought, text, calls):
        cached = sum(answer["kvboost"]["hit_tokens"].values())
        assert (
            answer["total_duration"]
            >= answer["prompt_eval_duration"] + answer["eval_duration"]
            > 10_000
        )
        reason = "tool_calls" if calls else answer["done_reason"]
        return Said(
            thought, text, calls, reason, answer["prompt_eval_count"], cached, answer["eval_count"]
        )

    def next_turn(self, body, answer, results):
        """Return the body of the next turn. Results are matched to calls by their order."""
        assert len(results) == len(answer["message"]["tool_calls"])
        sent = [{"role": "tool", "content": text} for text in results]
        return {**body, "messages": [*body["messages"], answer["message"], *sent]}

    def parts(self, thought, text, name, values):
        call = {"function": {"index": 0, "name": name, "arguments": values}}
        return {"role": "assistant", "content": text, "thinking": thought, "tool_calls": [call]}

    def told(self, answer):
        return answer["message"]


class OllamaGenerate(OllamaChat):
    path = "/api/generate"
    has = frozenset({"thinks"})

    def question(self):
        return {"prompt": ASK[0]["content"]}

    def gather(self, events):
        assert [line["done"] for line in events] == [False] * (len(events) - 1) + [True]
        thought, text = (
            "".join(line.get(name, "") for line in events) for name in ("thinking", "response")
        )
        return {**events[-1], "response": text, **({"thinking": thought} if thought else {})}

    def said(self, answer):
        return self._told(answer, answer.get("thinking", ""), answer["response"], [])


class LlamaCompletion(Api):
    path = "/completion"
    places = {"limit": "n_predict", "form": "json_schema"}
    plain = {"temperature": 0, "return_tokens": True}
    has = frozenset()

    def question(self):
        return {"prompt": "<|assistant|>"}

    def gather(self, events):
        assert [one["stop"] for one in events] == [False] * (len(events) - 1) + [True]
        tokens = [token for one in events for token in one["tokens"]]
        return {
            **events[-1],
            "content": "".join(one["content"] for one in events),
            "tokens": tokens,
        }

    def stopped_by(self, answer):
        return answer["stopping_word"] or None

    def said(self, answer):
        reason = {"eos": "stop", "word": "stop", "limit": "length"}[answer["stop_type"]]
        assert len(answer["tokens"]) == answer["tokens_predicted"]
        assert answer["has_new_line"] == ("\n" in answer["content"])
        return Said(
            "",
            answer["content"],
            [],
            reason,
            answer["tokens_evaluated"],
            answer["tokens_cached"],
            answer["tokens_predicted"],
        )


def _is_whole(text):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


_ALL = (
    *(
        Chat(),
        Completions(),
        Messages(),
        Responses(),
        OllamaChat(),
        OllamaGenerate(),
        LlamaCompletion(),
    ),
)
APIS = {api.path: api for api in _ALL}
