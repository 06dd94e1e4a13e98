"""Request body of /v1/batches."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from kvboost_edge.server.api.bounds import bounded
from kvboost_edge.server.api.schemas.shared import Metadata
from kvboost_edge.server.api.schemas.strict import Strict, field_error

__all__ = ["BatchRequest", "ExpiresAfter", "window_seconds"]

_WINDOW = re.compile(r"([1-9][0-9]{0,2})([hd])")
_HOURS = {"h": 1, "d": 24}
_MAX_HOURS = 30 * 24
# The same windows for the OpenAPI document, which cannot compare numbers.
_PATTERN = "^([1-9][0-9]?|[1-6][0-9][0-9]|7[01][0-9]|720)h$|^([1-9]|[12][0-9]|30)d$"


def window_seconds(window: str) -> int:
    """Return the seconds of a valid completion window."""
    found = _WINDOW.fullmatch(window)
    assert found is not None
    return int(found[1]) * _HOURS[found[2]] * 3600


def _window(text: str) -> str:
    found = _WINDOW.fullmatch(text)
    if found is None or int(found[1]) * _HOURS[found[2]] > _MAX_HOURS:
        raise field_error("completion_window", "must be hours or days up to 30d, such as 24h or 7d")
    return text


class ExpiresAfter(Strict):
    """Lifetime of a file."""

    anchor: Literal["created_at"] = Field(description="Start of the lifetime.")
    seconds: Annotated[int, bounded("expires_seconds")] = Field(
        description="Lifetime, at most the server's --batch-retention."
    )


class BatchRequest(Strict):
    """Body of /v1/batches: an uploaded file, and the route that answers its lines."""

    input_file_id: Annotated[str, Field(min_length=1, max_length=256)] = Field(
        description="File with one request per line."
    )
    endpoint: Literal[
        "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"
    ] = Field(description="Route that answers the lines.")
    completion_window: Annotated[
        str, AfterValidator(_window), WithJsonSchema({"type": "string", "pattern": _PATTERN})
    ] = Field(description="Time limit in hours or days, such as `24h`, at most `30d`.")
    metadata: Metadata | None = Field(None, description="Labels that the batch shows.")
    output_expires_after: ExpiresAfter | None = Field(
        None, description="Lifetime of the output files. Default: --batch-retention."
    )
