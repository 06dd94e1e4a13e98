"""Construction of OpenAI request bodies from the bodies of other APIs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from kvboost_edge.server.api.schemas.chat import ChatRequest
from kvboost_edge.server.api.schemas.completions import CompletionRequest
from kvboost_edge.server.api_errors import ApiError, as_api_error

__all__ = ["SAMPLING_FIELDS", "chat_request", "completion_request", "renamed"]

SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
)
"""Sampling fields with the same name and meaning in OpenAI's, Ollama's and llama.cpp's APIs."""

Body = TypeVar("Body", bound=BaseModel)


def chat_request(**fields: Any) -> ChatRequest:
    """Build a chat request from the fields that are not None.

    Raises:
        ApiError: a value is out of bounds (400). The error has OpenAI's field name, see `renamed`.
    """
    return _validated(ChatRequest, fields)


def completion_request(**fields: Any) -> CompletionRequest:
    """Build a completion request, see `chat_request`."""
    return _validated(CompletionRequest, fields)


def _validated(kind: type[Body], fields: Mapping[str, Any]) -> Body:
    try:
        return kind.model_validate(
            {name: value for name, value in fields.items() if value is not None}
        )
    except ValidationError as error:
        problems = [
            {**problem, "loc": ("body", *problem["loc"])}
            for problem in error.errors(include_url=False)
        ]
        raise as_api_error(RequestValidationError(problems)) from error


@contextmanager
def renamed(fields: Mapping[str, str]) -> Iterator[None]:
    """Replace OpenAI's field names in errors with those of another API.

    Args:
        fields: the other API's name of each OpenAI field.
    """
    try:
        yield
    except ApiError as error:
        if (theirs := fields.get(error.param or "")) is not None:
            error.message = re.sub(rf"\b{re.escape(error.param or '')}\b", theirs, error.message)
            error.param = theirs
        raise
