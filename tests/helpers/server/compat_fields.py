"""Fields of each API that are refused by name, and fields that have no effect."""

from __future__ import annotations

from typing import Any

from helpers.server.scripted_model import TOOLS

Json = dict[str, Any]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
OLLAMA = "/api/chat"
GENERATE = "/api/generate"
LLAMA = "/completion"
ASK = [{"role": "user", "content": "hello"}]


def user(*blocks: Any) -> list[Json]:
    return [{"role": "user", "content": list(blocks)}]


def text(words: str) -> Json:
    return {"type": "text", "text": words}


def function(name: Any, **more: Any) -> Json:
    return {"type": "function", "function": {"name": name, **more}}


def several(name: str, *values: Any) -> list[tuple[Json, str]]:
    """Return a case for each value of a field."""
    return [({name: value}, name) for value in values]


def messages(place: str, *given: Any) -> tuple[Json, str, str]:
    """Return a case of messages with an error at a place."""
    return {"messages": list(given)}, "messages", f"{place}: "


_IMAGE = {"type": "image", "source": {"type": "url", "url": "http://localhost/x.png"}}
_CALL = {"type": "tool_use", "id": "a", "name": "clock", "input": {}}
_RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "ten"}
_TOOL = {"name": "weather", "input_schema": {"type": "object"}}
_RESPONSES = [{"type": "function", **tool["function"]} for tool in TOOLS]
_UNANSWERED = {"function": {"name": "a"}}
_BROKEN = {"function": {"name": "a", "arguments": "\ud800"}}
_NAMED = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
_LABELS = ("user", "service_tier", "safety_identifier", "prompt_cache_key")
_PROGRESS = several("return_progress", "true", 1, 0, 1.0, [], {}, [True], "")
_NO_PROGRESS = several("return_progress", True)
_REUSE = {"mode": "chunk_kv_reuse"}
_NO_REUSE = [("recompute_strategy", "all"), ("ratio", 0.1)]
_NO_REUSE += [("recompute_overlap", value) for value in (-1, 4097, 1.5)]
_NO_REUSE += [("recompute_ratio", value) for value in (1.01, True)]
_OF_BOTH = [
    *_PROGRESS,
    ({"response_format": {"type": "xml"}}, "response_format", "must be"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "must be"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
        "response_format",
        "an object",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
        "response_format",
        "an object",
    ),
    ({"response_format": "json"}, "response_format", "must be"),
    ({"json_schema": 3}, "json_schema", "an object"),
    ({"guided_json": 3}, "guided_json"),
    ({"guided_choice": "a"}, "guided_choice", "a list of strings"),
    ({"structured_outputs": {"xml": 1}}, "structured_outputs", "with one of"),
    ({"grammar": 'root ::= "a"', "guided_regex": "b"}, "guided_regex", "both given"),
    ({"response_format": _NAMED, "json_schema": {"type": "null"}}, "json_schema", "both given"),
    ({"json_schema": {"type": "object", "not": {}}}, "", "not supported"),
    ({"json_schema": {"type": "objct"}}, "", "the schema is invalid: Invalid type: objct"),
    ({"max_token": 5}, "max_token", "did you mean 'max_tokens'?"),
    ({"temprature": 1, "zzz": 1}, "temprature", "did you mean 'temperature'?; unknown fields: "),
    ({"guided_regex": "("}, "", "regex is not supported"),
    ({"kvboost": {"speculation": "often"}}, "kvboost", "speculation"),
    *(({"kvboost": {"mode": mode}}, "kvboost", "kvboost.mode") for mode in ("chunks", 1)),
    *(
        ({"kvboost": {**_REUSE, name: value}}, "kvboost", f"kvboost.{name}")
        for name, value in _NO_REUSE
    ),
    ({"kvboost": {"recompute_ratio": 0.1}}, "kvboost", "kvboost.recompute_ratio"),
    (
        {"kvboost": {"mode": "prefix_cache", "recompute_overlap": 0}},
        "kvboost",
        "kvboost.recompute_overlap",
    ),
    *several("kvboost", "chunk_kv_reuse", []),
    ({"kvboost": {"max_draft_tokens": 64}}, "kvboost", "max_draft_tokens"),
    (
        {"speculative.n_max": 4, "kvboost": {"max_draft_tokens": 4}},
        "speculative.n_max",
        "kvboost.max_draft_tokens are both given",
    ),
    *(
        ({"prompt_cache_retention": value}, "prompt_cache_retention", "'24h'")
        for value in ("1h", "24H", "", 24, True)
    ),
    # Parameters of other servers, refused with a hint at what to use here.
    ({"typical_p": 0}, "typical_p", "greater than 0"),
    ({"mirostat": 1}, "mirostat", "use 2"),
    ({"tfs_z": 0.9}, "tfs_z", "min_p"),
    ({"speculative.n_min": -1}, "speculative.n_min"),
    ({"speculative.p_min": 2}, "speculative.p_min"),
    ({"samplers": ["fill"]}, "samplers", "'fill', which is not one of penalties, dry,"),
    ({"samplers": ["tfs_z"]}, "samplers", "samplers holds 'tfs_z'"),
    ({"samplers": 5}, "samplers", "a list of names"),
    ({"dry_sequence_breakers": "x"}, "dry_sequence_breakers", "a list of strings"),
    ({"dry_sequence_breakers": ["x" * 41]}, "dry_sequence_breakers", "1..40 characters, not 41"),
    ({"dry_sequence_breakers": ["\ud800"]}, "dry_sequence_breakers", "lone surrogate"),
    ({"dry_sequence_breakers": ["x"] * 33}, "dry_sequence_breakers", "0..32 strings, not 33"),
    ({"bad_words": [3]}, "bad_words", "a list of strings"),
    ({"bad_words": [""]}, "bad_words", "1..256 characters, not 0"),
    ({"bad_words": ["x"] * 257}, "bad_words", "0..256 strings, not 257"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "use at most 8"),
    *several("min_tokens", -1),
    *several("include_stop_str_in_output", 1),
    ({"n_indent": 2}, "n_indent", "only /infill and /completion have it"),
    ({"t_max_predict_ms": 500}, "t_max_predict_ms", "only /infill and /completion have it"),
    ({"n_cache_reuse": 256}, "n_cache_reuse", "chunk_kv_reuse"),
    ({"min_tokens": 10**6}, "min_tokens", "use at most"),
    ({"n_probs": 5}, "n_probs", "logprobs"),
    ({"use_beam_search": True}, "use_beam_search", "best_of"),
    ({"options": {"num_ctx": 5}}, "options", "top level"),
    ({"think": False}, "think", "reasoning_effort"),
    ({"reasoning_budget": -2}, "reasoning_budget"),
    ({"thinking_token_budget": 2.5}, "reasoning_budget"),
    ({"reasoning_budget_message": "x" * 1025, "reasoning_budget": 5}, "reasoning_budget_message"),
    ({"format": "json"}, "format", "use response_format"),
    ({"dry_multiplier": True}, "dry_multiplier"),
    ({"n_predict": 4, "max_tokens": 4}, "n_predict"),
    ({"repeat_penalty": "x"}, "repetition_penalty"),
    # Too expensive to compile.
    ({"json_schema": {"type": "integer", "multipleOf": 999_983}}, "", "multipleOf 999983"),
    (
        {"json_schema": {"anyOf": [{"const": f"{number:09}"} for number in range(9000)]}},
        "",
        "objects",
    ),
]
_TEMPLATE_NAMES = (
    "self",
    "messages",
    "raise_exception",
    "namespace",
    "range",
    "loop",
    "bos_token",
    "a" * 65,
    "",
)
_TEMPLATE_VALUES = ("\ud800", "x" * 4097, 2**60, {"b": 1}, None)

REFUSED: dict[str, list[Any]] = {
    CHAT: [
        *_OF_BOTH,
        *several("tools", [{"type": "web_search_preview"}], [{}]),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"prediction": {}}, "prediction"),
        ({"moderation": {"model": "x"}}, "moderation", "not supported"),
        *several("verbosity", "low", "high", 1),
        *several("prompt_cache_options", "24h", {"mode": "other"}, {"breakpoints": 1}),
        *several("reasoning_effort", "much", 3),
        ({"web_search_options": {}}, "web_search_options"),
        ({"store": True}, "store"),
        ({"temprature": 0.5}, "temprature"),
        ({"prompt": "x"}, "prompt"),
        *several("best_of", 2, True),
        ({"echo": True}, "echo"),
        ({"stream_options": {}}, "stream_options"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10_000}, "max_tokens", "context"),
        ({"logprobs": 1}, "logprobs"),
        *several("chat_template_kwargs", {"tools": 1}, {"a b": 1}, {"a": []}, [], {"__x": 1}),
        *several("chat_template_kwargs", *({name: 1} for name in _TEMPLATE_NAMES)),
        *several("chat_template_kwargs", *({"a": value} for value in _TEMPLATE_VALUES)),
        *several("chat_template_kwargs", {f"name_{number}": 1 for number in range(65)}),
        ({"model": "\udfff"}, "model"),
        *several("cache_salt", "\udfff", "", "x" * 257),
        *several(
            "metadata",
            {str(number): "x" for number in range(17)},
            {"x" * 65: "x"},
            {"": "x"},
            {"x": "x" * 513},
        ),
        *several("metadata", {"x": "\ud800"}, {"\ud800": "x"}, {"x": 1}),
        *several("seed", -(2**63) - 1, 2**63),
        ({"tool_choice": 0}, "tool_choice"),
        ({f"unknown_{number}": 1 for number in range(100)}, "unknown_0", "'unknown_4' and 95 more"),
        # Tools.
        ({"tools": TOOLS, "tool_choice": function("nobody")}, "tool_choice", "nobody"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", "must be"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "twice"),
        ({"tools": [{"type": "web_search"}]}, "tools", "not supported"),
        ({"tools": [function("a b")]}, "tools", "name"),
        ({"tools": [function("a", parameters=[])]}, "tools", "object"),
        ({"tools": [function("a", parameters={"not": {}})]}, "tools", "enforced"),
        ({"tools": [function("a", parameters={"type": "array"})]}, "tools", "object"),
        ({"tools": TOOLS, "guided_regex": "a+"}, "tools", "combined with a JSON schema"),
        ({"tools": TOOLS, "json_schema": "true"}, "tools", "JSON schemas true and false"),
        # Messages, by position.
        *several("messages", [], {}, "hello"),
        messages("messages.0", "hello"),
        messages("messages.0.role", {"content": "x"}),
        messages("messages.0.content", {"role": "user"}),
        *(
            messages("messages.0.content", {"role": "user", "content": given})
            for given in (None, 5, [], ["x"])
        ),
        *(
            messages("messages.0.content", *user(given))
            for given in (
                *({"type": "text"}, {"type": "text", "text": 5}),
                *({"type": "refusal", "text": "x"}, {"type": "text", "text": "x", "refusal": "x"}),
            )
        ),
        (
            {"messages": user({"type": "image_url", "image_url": {"url": "x"}})},
            "messages",
            "messages.0.content: images are not supported; this server takes text only",
        ),
        messages("messages.0.content", {"role": "user", "content": "\ud800"}),
        messages("messages.0.tool_call_id", {"role": "tool", "content": "x"}),
        messages("messages.0.tool_call_id", {"role": "user", "content": "x", "tool_call_id": "1"}),
        messages("messages.0.role", {"role": "function", "content": "x"}),
        messages("messages.0.role", {"role": "king", "content": "x"}),
        messages(
            "messages.1.tool_calls", *ASK, {"role": "assistant", "content": "x", "tool_calls": [{}]}
        ),
        messages("messages.0.name", {"role": "user", "content": "x", "name": ""}),
        messages("messages.0.colour", {"role": "user", "content": "x", "colour": "red"}),
        messages(
            "messages.0.unknown_0",
            *[{**ASK[0], **{f"unknown_{number}": 1 for number in range(100)}}] * 50,
        ),
        ({"messages": [*ASK, {"role": "tool", "content": "x"}]}, "messages", "tool_call_id"),
        ({"messages": [*ASK, {"role": "assistant", "content": None}]}, "messages", "content"),
        (
            {"messages": [{**ASK[0], "tool_calls": [{"function": {"name": "a"}}]}]},
            "messages",
            "role",
        ),
        (
            {"messages": [*ASK, {"role": "assistant", "tool_calls": [_BROKEN]}]},
            "messages",
            "arguments",
        ),
        (
            {
                "messages": [
                    *ASK,
                    {"role": "assistant", "tool_calls": [{"function": {"name": "a"}}]},
                ]
            },
            "messages",
            "the result of each call",
        ),
        ({"messages": [{"role": "assistant", "content": "x", "annotations": [{}]}]}, "messages"),
    ],
    COMPLETIONS: [
        *_OF_BOTH,
        ({"json_schema": {"$ref": "#"}}, "", "matches no value"),
        ({"suffix": "x"}, "suffix"),
        ({"store": True}, "store"),
        *several(
            "prompt",
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
        ),
        *several("prompt", {}, 5, "\ud800", ["a"] * 257, [10**6]),
        *several("max_tokens", 0),
        *several("best_of", 0),
        *several("stop", [1], "", ["x"] * 65, "x" * 1025, "\udfff"),
        *several(
            "logit_bias", {"a": 1}, {"-1": 1}, {"5": 101}, {"5": "1"}, {"5": True}, {"10000000": 1}
        ),
        *several("logit_bias", {str(number): 1 for number in range(1025)}),
        *several("stop_token_ids", [10**7], [-1], ["1"], [1.5], 5, [0] * 1025),
        *several("metadata", []),
        *several("stream", 1),
        *several("echo", "yes"),
        *several("stream_options", {"include_usage": True}),
        *(({name: value}, name) for name in _LABELS for value in ("x" * 1025, "\ud800", 1)),
    ],
    MESSAGES: [
        *_PROGRESS,
        ({"messages": user(_IMAGE)}, "images are not supported"),
        ({"messages": user({"type": "document"})}, "'document' are not supported"),
        (
            {"messages": [*ASK, {"role": "assistant", "content": [{"type": "server_tool_use"}]}]},
            "'server_tool_use'",
        ),
        ({"messages": user({**_RESULT, "content": [_IMAGE]})}, "images are not supported"),
        ({"messages": user(_CALL)}, "'tool_use' are not supported here"),
        ({"messages": [*ASK, {"role": "assistant", "content": [_RESULT]}]}, "'tool_result'"),
        ({"messages": user(text("x"), _RESULT)}, "put tool results first"),
        ({"messages": user({"type": "text"})}, "text: Field required"),
        ({"messages": user({**text("x"), "txt": 1})}, "txt"),
        ({"messages": user(text("\ud800"))}, "surrogate"),
        ({"messages": user(*[text("")] * 10_001)}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"messages": user({**_RESULT, "tool_use_id": "x" * 300})}, "256"),
        (
            {"messages": [*ASK, {"role": "assistant", "content": [{**_CALL, "name": "no name"}]}]},
            "name",
        ),
        ({"messages": [{"role": "user", "content": "y" * 8000}]}, "context is 8000"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "'web_search_20250305' are Anthropic's own",
        ),
        ({"tools": [{"name": "x", "input_schema": {"type": "string"}}]}, "object"),
        ({"tools": [{"name": "x", "input_schema": {}}] * 2}, "twice"),
        ({"tools": [{**_TOOL, "defer_loading": True}]}, "defer_loading"),
        ({"tool_choice": {"type": "any"}}, "needs tools"),
        ({"tool_choice": {"type": "tool"}, "tools": [_TOOL]}, "name"),
        ({"tool_choice": {"type": "tool", "name": "other"}, "tools": [_TOOL]}, "'other'"),
        ({"temperature": 1.5}, "temperature"),
        *several("max_tokens", -1, None),
        *several("stop_sequences", ["x"] * 65, [""], "x"),
        ({"thinking": {"type": "on"}}, "thinking"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "budget_tokens"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "x"}, "container"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management",
        ),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format"),
        (
            {"output_config": {"task_budget": {"type": "tokens", "total": 64_000}}},
            "output_config.task_budget",
            "max_tokens",
        ),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "ttl"),
        ({"system": [{**text("x"), "cache_control": {"type": "ephemeral"}}] * 5}, "given 5 times"),
        ({"logprobs": True}, "logprobs"),
    ],
    RESPONSES: [
        *_NO_PROGRESS,
        *several(
            "input",
            [],
            None,
            [{"role": "tool", "content": "x"}],
            [{"type": "item_reference"}],
            [{"type": "item_reference", "id": "x"}] * 2,
        ),
        *several("input", [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]),
        *several("input", [{"type": "function_call_output", "call_id": "x", "output": "y"}]),
        *several(
            "input", [{"type": "function_call", "call_id": "x", "name": "y", "arguments": {}}]
        ),
        *several(
            "input",
            [{"role": "user", "content": "\ud800"}],
        ),
        (
            {"input": user({"type": "input_image", "image_url": "data:"})},
            "input",
            "images are not supported",
        ),
        ({"input": [{"role": "user", "content": "x" * 9000}]}, "input", "context"),
        *several("max_output_tokens", 10**6, 0),
        *several("max_tokens", 5),
        *several(
            "tools",
            [{"type": "web_search"}],
            [function("x")],
            [{"type": "function", "name": "x y"}],
        ),
        *several("tool_choice", "required", {"type": "web_search"}),
        (
            {"tools": _RESPONSES[:1], "tool_choice": {"type": "function", "name": "clock"}},
            "tool_choice",
        ),
        *several("text", {"format": {"type": "json_schema"}}, {"verbosity": "low"}),
        *several("truncation", "auto"),
        *several("include", ["message.output_text.logprobs"]),
        *several("background", True),
        *several("conversation", "x"),
        *several("reasoning", {"effort": "most"}, {"context": "all_turns"}, {"mode": "pro"}),
        *several("prompt_cache_options", {"mode": "other"}),
        *several("temperature", 3),
        *several("stream_options", {}),
        *several("stop", ["x"]),
        *several("unknown", 1),
    ],
    OLLAMA: [
        *_NO_PROGRESS,
        (
            {"messages": [{**ASK[0], "images": ["aGk="]}]},
            "messages.0.images: images are not supported; this server takes text only",
        ),
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [function("x", arguments="{}")]}]},
            "arguments",
        ),
        (
            {"messages": [*ASK, {"role": "tool", "content": "rain"}]},
            "a tool result without a call before it",
        ),
        ({"options": {"num_predict": -3}}, "options.num_predict"),
        ({"options": {"num_predict": 2**24 + 1}}, "options.num_predict"),
        ({"options": {"temperature": 9}}, "options.temperature"),
        ({"options": {"mirostat": 1}}, "options.mirostat"),
        ({"options": {"repeat_last_n": -2}}, "options.repeat_last_n"),
        ({"options": {"unknown": 1}}, "options.unknown"),
        *several("format", "yaml", {"type": "nothing"}),
        *several("think", "much", -2, 2.5),
        ({"tools": [{"type": "web"}]}, "tools"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, "the model's context"),
        ({"model": None}, "model"),
    ],
    GENERATE: [
        *_NO_PROGRESS,
        *several("template", "x"),
        *several("context", [1, 2]),
        *several("images", ["aGk="]),
        *several("suffix", "x"),
        ({"raw": True, "system": "x"}, "system"),
        *several("unknown", 1),
    ],
    LLAMA: [
        *_PROGRESS,
        *several("prompt", "", [], [True], [10**6], ["a", -1], ["a", []], ["a", ""], {}),
        *several("prompt", [["a", "b"]], [[1], [10**6]], [[[1]]], ["a"] * 257, ["a", {}]),
        ({"prompt": ["a", "b"], "stream": True}, "prompt", "cannot be streamed"),
        ({"prompt": ["a"] * 200, "n_cmpl": 2}, "n", "400 sequences"),
        ({"prompt": "x" * 9000}, "the model's context"),
        *several("n_predict", -3, 2**24 + 1),
        *several("n_probs", 3),
        *several("mirostat", 1, 3),
        *several("samplers", ["tfs_z"], "z"),
        *several("logit_bias", [[1, 2]]),
        *several("repeat_penalty", 0),
        *several("max_tokens", 5),
        *several("unknown", 1),
        *several("grammar", "root ::= ("),
    ],
    "/infill": [
        *_PROGRESS,
        *several("input_extra", {}, "x", ["x"], [{}], [{"text": 1}], [{"text": "\ud800"}]),
        *several("input_extra", [{"text": "x", "filename": 1}], [{"text": "x", "file": "y"}]),
        *several("input_extra", [{"text": "x"}] * 1025),
        *several("response_fields", "content", [1], ["x" * 257], ["x"] * 65, ["\ud800"]),
        *several("n_cmpl", 0, 10**6),
        ({"n_cmpl": 2, "stream": True}, "n_cmpl", "cannot be streamed"),
        *several("n_cache_reuse", 256),
        *several("lora", [{"id": 0, "scale": 0.5}]),
        *several("chunks", [{"text": "x"}]),
    ],
    "/v1/messages/count_tokens": _NO_PROGRESS,
    "/v1/embeddings": _NO_PROGRESS,
}
"""Of each path: fields, the field at fault ("": none is named), and words of the message."""

_NEUTRAL = {
    "user": "somebody",
    "metadata": {"team": "one"},
    "store": False,
    "service_tier": "auto",
    "safety_identifier": "id",
    "prompt_cache_key": "key",
    "prompt_cache_retention": "in_memory",
    "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
}
_MEANINGLESS = {
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
_EMPTY = {
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
TAKEN: dict[str, list[Json]] = {
    COMPLETIONS: [_NEUTRAL, _MEANINGLESS],
    CHAT: [
        _NEUTRAL,
        _MEANINGLESS,
        _EMPTY,
        {"response_format": {"type": "text"}, "modalities": ["text"], "verbosity": "medium"},
        *({"response_format": None}, {"grammar": ""}, {"moderation": None, "verbosity": None}),
    ],
    MESSAGES: [
        {
            "metadata": {"user_id": "somebody"},
            "service_tier": "auto",
            "speed": "standard",
            "mcp_servers": [],
            "inference_geo": "here",
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        }
    ],
    RESPONSES: [
        {
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
            "reasoning": {"summary": "auto", "context": "auto", "mode": "standard"},
            "prompt_cache_options": {"mode": "implicit"},
        }
    ],
    OLLAMA: [
        {
            "options": {
                "num_ctx": 4096,
                "num_gpu": 1,
                "num_thread": 2,
                "use_mmap": True,
                "num_keep": 4,
                "mirostat": 0,
                "tfs_z": 1.0,
                "repeat_last_n": -1,
                "seed": 7,
                "repeat_penalty": 1.0,
                "temperature": 0,
                "num_predict": -1,
            },
            "keep_alive": -1,
            "tools": [],
            "format": "",
        }
    ],
    GENERATE: [{"keep_alive": "5m", "format": ""}],
    LLAMA: [
        {"mirostat": 0, "n_probs": 0, "logit_bias": [], "id_slot": -1, "grammar": ""},
        {"n_cache_reuse": 0, "t_max_prompt_ms": 1, "t_max_predict_ms": -1, "n_indent": 0}
        | {"n_cmpl": 1, "response_fields": []},
    ],
}
"""Of each path: fields with which the answer is as without."""
