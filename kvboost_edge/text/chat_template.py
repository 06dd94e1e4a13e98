"""Sandboxed rendering of chat messages with the model's Jinja template.

The template comes with the model and is not trusted. It runs in the environment of
`template_sandbox`, sees only plain copies of the data, and has a budget per rendering.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from kvboost_edge.errors import ModelFormatError, RequestError
from kvboost_edge.text.template_budget import MAX_CHARS, TemplateLimit
from kvboost_edge.text.template_sandbox import MAX_SOURCE, environment

__all__ = ["ChatTemplate", "is_reserved", "plain_messages", "plain_tools"]

_MAX_REASON = 1000  # characters shown of an error that the template raises
# Variables of every rendering, and names with a meaning in Jinja.
_GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_JINJA_NAMES = frozenset(
    {"self", "super", "caller", "varargs", "kwargs", "loop", "true", "false", "none", "None"}
)


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the Jinja template. Invalid Jinja raises ModelFormatError.
        model_name: model name shown in error messages.
        variables: special tokens as text (bos_token, eos_token, ...).
    """

    def __init__(self, source: str, *, model_name: str, variables: Mapping[str, str]) -> None:
        """Compile the template.

        Raises:
            ModelFormatError: the template is too long or is not valid Jinja.
        """
        self.source = source
        self._model_name = model_name
        self._variables = dict(variables)
        if len(source) > MAX_SOURCE:
            raise ModelFormatError(
                f"the chat template of {model_name} has {len(source)} characters, over the limit "
                f"of {MAX_SOURCE}"
            )
        try:
            self._template = environment().from_string(source)
        except (
            jinja2.TemplateError,
            SyntaxError,
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
            MemoryError,
            AttributeError,
            RecursionError,
        ) as error:
            raise ModelFormatError(
                f"the chat template of {model_name} is not valid: {_reason(error)}"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the messages and return the prompt text.

        Raises:
            RequestError: the template or the sandbox rejects the messages, the rendering exceeds
                its budget, or a variable has a reserved name (see `is_reserved`).
        """
        given = _plain(dict(variables or {}), "a template variable")
        for name in given:
            if is_reserved(name):
                raise RequestError(f"template variable {name!r} has a reserved name; rename it")
        context = {
            **self._variables,
            **given,
            "messages": plain_messages(messages),
            "tools": plain_tools(tools) if tools is not None else None,
            "documents": None,
            "add_generation_prompt": bool(add_generation_prompt),
        }
        try:
            parts: list[str] = []
            size = 0
            # Passed as one positional dict, because keywords could clash with Jinja's own
            # parameters.
            for part in self._template.generate(context):
                size += len(part)
                if size > MAX_CHARS:
                    raise TemplateLimit(f"it writes more than {MAX_CHARS} characters")
                parts.append(part)
        except TemplateLimit as error:
            raise RequestError(
                f"the chat template of {self._model_name} exceeded its limits: {error}; send "
                "shorter messages, or use the model with another template"
            ) from error
        except (
            jinja2.TemplateError,
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
            MemoryError,
        ) as error:
            raise RequestError(
                f"the chat template of {self._model_name} refused the messages: {_reason(error)}"
            ) from error
        except (AttributeError, RecursionError) as error:
            raise RequestError(
                f"the chat template of {self._model_name} failed: {_reason(error)}"
            ) from error
        return "".join(parts)


def _reason(error: Exception) -> str:
    return str(error)[:_MAX_REASON]


def is_reserved(name: str) -> bool:
    """Return whether callers may not use this name for a template variable.

    Reserved names are the variables of every template (messages, special tokens such as bos_token),
    Jinja's own names and functions, and strings that are not identifiers.
    """
    if not name.isidentifier() or name.startswith("_") or name.endswith("_token"):
        return True
    return name in _GIVEN or name in _JINJA_NAMES or name in _global_names()


@functools.cache
def _global_names() -> frozenset[str]:
    """Return the names of functions that every template can call, such as raise_exception."""
    return frozenset(environment().globals)


def plain_messages(messages: object) -> list[dict[str, Any]]:
    """Return a deep copy of the chat messages that contains only plain types.

    Raises:
        RequestError: the messages are invalid.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise RequestError(f"chat messages must be a list of dicts, got {type(messages).__name__}")
    if not messages:
        raise RequestError(
            "chat messages are empty; give at least one {'role': ..., 'content': ...}"
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"chat message {i} must be a dict, got {type(message).__name__}")
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise RequestError(
                f"chat message {i} needs a 'role' string, got {message.get('role')!r}"
            )
        if "content" not in message and "tool_calls" not in message:
            raise RequestError(f"chat message {i} (role {message['role']!r}) needs 'content'")
        if not isinstance(message.get("content"), (str, list, type(None))):
            kind = type(message["content"]).__name__
            raise RequestError(
                f"content of chat message {i} must be a string or a list of parts, got {kind}"
            )
    return [_plain(message, f"chat message {i}") for i, message in enumerate(messages)]


def plain_tools(tools: object) -> list[dict[str, Any]]:
    """Return a deep copy of the tools that contains only plain types.

    Raises:
        RequestError: the tools are invalid.
    """
    if not isinstance(tools, (list, tuple)):
        raise RequestError(f"tools must be a list of dicts, got {type(tools).__name__}")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise RequestError(f"tool {i} must be a dict, got {type(tool).__name__}")
    return [_plain(tool, f"tool {i}") for i, tool in enumerate(tools)]


def _plain(value: Any, what: str, depth: int = 0) -> Any:
    """Return a deep copy that contains only str, int, float, bool, None, list and dict."""
    if depth > 64:
        raise RequestError(f"{what} is nested deeper than 64 levels")
    if type(value) is str or value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, what, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, what, depth + 1) for item in value]
    raise RequestError(f"{what} contains a {type(value).__name__}; only JSON values are allowed")
