"""Format of chat answers: tool-call grammar, structured output and reasoning.

The special markers of a model are detected from its chat template, see text/turns/.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvboost_edge.engine.grammar.compiler import fits_schema
from kvboost_edge.engine.request.requested_grammar import MadeGrammar, schema_of
from kvboost_edge.errors import RequestError
from kvboost_edge.server.api.schemas.chat import ChatRequest
from kvboost_edge.server.api.schemas.strict import bad_field
from kvboost_edge.text.rendered_chat import FindAnswer
from kvboost_edge.text.tokenizer import Tokenizer
from kvboost_edge.text.turns.answer_reader import Turn
from kvboost_edge.text.turns.call_grammar import answer_grammar, calls_grammar
from kvboost_edge.text.turns.formats import CallFormat, Tool, TurnFormat
from kvboost_edge.text.turns.no_template import GENERIC, with_tools_described
from kvboost_edge.text.turns.replay import find_calls
from kvboost_edge.text.turns.thinking import reasoning_state

__all__ = ["named_by_field", "template_inputs", "turn_of"]

# Largest tool schema for checking a call without markers; it takes the compiler 0.2 s.
_MOST_JUDGED_CHARS = 1 << 16
_MOST_JUDGED_MEMBERS = 1 << 10

Json = dict[str, Any]


def template_inputs(
    tokenizer: Tokenizer,
    messages: list[Json],
    tools: list[Json] | None,
    find_answer: FindAnswer | None,
) -> tuple[list[Json], list[Json] | None]:
    """Return the messages and tools to render with the chat template.

    Leading system messages become one, because many templates accept only one. If the template does
    not show tools, the returned messages describe them instead.

    Raises:
        ApiError: the template writes tool calls in an unknown format (400).
    """
    messages = _with_one_system(messages)
    if not tools and not any(
        message["role"] == "tool" or "tool_calls" in message for message in messages
    ):
        return messages, None
    if _calls_of(tokenizer) is not GENERIC:
        return messages, tools
    written = [_as_written(tokenizer, message, find_answer) for message in messages]
    return with_tools_described(written, tools or [], system=_takes_system(tokenizer)), None


def _with_one_system(messages: list[Json]) -> list[Json]:
    """Merge the leading system messages."""
    leading = list(itertools.takewhile(lambda one: one["role"] == "system", messages))
    if len(leading) < 2:
        return messages
    text = "\n\n".join(one["content"] for one in leading)
    return [{**leading[0], "content": text}, *messages[len(leading) :]]


def _as_written(tokenizer: Tokenizer, message: Json, find_answer: FindAnswer | None) -> Json:
    """Restore the model's own text of a message with tool calls, if its token ids are stored."""
    ids = None if find_answer is None else find_calls(message, find_answer)
    return message if ids is None else {"role": "assistant", "content": tokenizer.decode(ids)}


def _takes_system(tokenizer: Tokenizer) -> bool:
    try:
        tokenizer.apply_chat_template(
            [{"role": "system", "content": "x"}, {"role": "user", "content": "x"}]
        )
    except RequestError:
        return False
    return True


def turn_of(tokenizer: Tokenizer, body: ChatRequest, prompt_ids: Sequence[int]) -> Turn | None:
    """Return the format of the answers to a rendered chat, or None for plain text."""
    format = tokenizer.turn_format
    reasoning = "closed" if body.continues else reasoning_state(tokenizer, prompt_ids)
    if not body.tools:
        return _plain_turn(tokenizer, format, reasoning, body.answer_format)
    calls = _calls_of(tokenizer)
    tools = tuple(
        Tool(one["function"]["name"], one["function"]["parameters"]) for one in body.tools
    )
    format = format._replace(calls=calls)
    choice = body.called
    callable_tools = tuple(
        tool for tool in tools if choice.names is None or tool.name in choice.names
    )
    answer = _object_schema(body.answer_format)
    if body.answer_format and answer is None:
        raise bad_field(
            "tools",
            "tools cannot be combined with the JSON schemas true and false; give a schema object",
        )
    grammar = calls_grammar(
        format,
        callable_tools,
        choice=choice.mode,
        parallel=body.parallel_tool_calls is not False,
        reasoning=reasoning,
        special_id=tokenizer.marker_id,
        answer=answer,
    )
    takes_bare_calls = (
        choice.mode == "auto"
        and answer is None
        and not body.continues  # The prompt contains the beginning of the message.
        and calls.wraps_objects
    )
    return Turn(
        format,
        callable_tools,
        reasoning,
        choice.mode != "none",
        {"grammar": MadeGrammar(grammar)},
        _fit if takes_bare_calls else None,
    )


def _fit(tool: Tool, arguments: Json) -> bool:
    """Return whether arguments match the tool's schema. Large schemas count as not matching."""
    # This runs on the event loop, so it must be fast.
    text = json.dumps(tool.parameters)
    if len(text) > _MOST_JUDGED_CHARS or text.count(":") > _MOST_JUDGED_MEMBERS:
        return False
    return fits_schema({**tool.parameters, "type": "object"}, arguments)


def _plain_turn(
    tokenizer: Tokenizer, format: TurnFormat, reasoning: str, fits: Mapping[str, Any]
) -> Turn | None:
    """Return the format of an answer without tools."""
    # A JSON schema constrains only the text after the reasoning. Other formats apply from the first
    # token.
    schema = _object_schema(fits)
    if reasoning == "closed" or (fits and schema is None):
        return None
    if schema is not None:
        grammar = answer_grammar(
            format, schema, reasoning=reasoning, special_id=tokenizer.marker_id
        )
        fits = {"grammar": MadeGrammar(grammar)}
    return Turn(format, (), reasoning, False, fits)


def _object_schema(fits: Mapping[str, Any]) -> Json | None:
    """Return the JSON schema if it can be part of a grammar, else None."""
    schema = schema_of(fits["json_schema"]) if "json_schema" in fits else None
    return schema if isinstance(schema, dict) else None


def named_by_field(error: RequestError, body: ChatRequest) -> Exception:
    """Convert an engine error about the grammar of tools to an error of the field `tools`."""
    about, _, message = str(error).partition(" ")
    if not body.tools or about not in ("grammar", "json_schema"):
        return error
    return bad_field(
        "tools", f"the parameters of a tool cannot be enforced: their schema {message}"
    )


def _calls_of(tokenizer: Tokenizer) -> CallFormat:
    """Return the tool-call format of the chat template, or a generic one if it shows no tools.

    Raises:
        ApiError: the template writes tool calls in an unknown format (400).
    """
    format = tokenizer.turn_format
    if not format.shows_tools:
        return GENERIC
    if format.calls is None:
        raise bad_field(
            "tools",
            "the model's chat template shows tools, but writes calls in an unknown format or not "
            "at all",
        )
    return format.calls
