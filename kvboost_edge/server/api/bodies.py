"""Reading JSON bodies: what is no JSON, or far more of it than a request needs, is refused before
it costs anything.

Long bodies are read and validated in a worker thread. Python reads JSON without letting another
thread run, so the table of bounds says how many values, containers and strings one may hold;
validation stops at the first error.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from kvboost_edge.server.api.bounds import COUNTS
from kvboost_edge.server.errors import ApiError, as_api_error

__all__ = ["JsonRoute", "parse_json"]

_SHORT = 1 << 14  # bytes; reading as many takes a fraction of a millisecond
_JSON = (b"content-type", b"application/json")


class JsonRoute(APIRoute):
    """A route that reads its body by `parse_json`, whatever the Content-Type says: `curl -d` names
    a form's. (A page of another site, which could send such a body without being asked first, is
    refused by its Origin.)
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        field = self.body_field

        def validated(body: bytes, content_type: str) -> Any:
            try:
                value = parse_json(body)
            except ApiError as error:
                if error.code == "invalid_json" and "json" not in content_type:
                    error.message += (
                        "; send JSON with Content-Type: application/json, not "
                        f"{content_type or 'without'}"
                    )
                raise
            if field is None:
                return value
            model, errors = field.validate(value, {}, loc=("body",))
            if errors:
                raise as_api_error(RequestValidationError(errors))
            return model

        async def handle_request(request: Request) -> Response:
            headers = [
                header for header in request.scope["headers"] if header[0] != b"content-type"
            ]
            scope = {**request.scope, "headers": [*headers, _JSON]}
            given = request.headers.get("content-type", "")[:100]
            return await handle(
                _JsonRequest(scope, request.receive, lambda body: validated(body, given))
            )

        return handle_request


class _JsonRequest(Request):
    def __init__(self, scope: Any, receive: Any, read: Callable[[bytes], Any]) -> None:
        super().__init__(scope, receive)
        self._read = read

    async def json(self) -> Any:
        body = await self.body()
        return (
            self._read(body) if len(body) <= _SHORT else await asyncio.to_thread(self._read, body)
        )


def parse_json(body: bytes) -> Any:
    """The value in a body; ApiError 400 for what is not JSON, or holds more values than the table
    of bounds allows.

    Values are counted by what separates them; the same characters inside of texts count too.
    Strings, which names of fields are among, are counted by their quotes: inside of a text a quote
    has a backslash and does not count.
    """
    containers = body.count(b"[") + body.count(b"{")
    quotes = body.count(b'"')
    counts = {
        "json_containers": (containers, "brackets"),
        "json_values": (containers + body.count(b","), "brackets and commas"),
        "json_strings": ((quotes - body.count(b'\\"') + 1) // 2, "names and strings"),
    }
    for name, (count, what) in counts.items():
        limit = int(COUNTS[name].high)
        if count > limit:
            message = f"the body holds {count} {what}; at most {limit} are read; send less at once"
            raise ApiError(400, message, code="request_too_large")
    try:
        return json.loads(body)
    except (
        ValueError,
        RecursionError,
    ) as error:  # bad UTF-8, a number of thousands of digits, nesting
        raise ApiError(
            400, f"the body is not valid JSON: {_reason(error)}", code="invalid_json"
        ) from error


def _reason(error: Exception) -> str:
    """Why, without a word of what was sent."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    if isinstance(error, UnicodeDecodeError):
        return f"no UTF-8 at byte {error.start}"
    return (
        "it is nested too deep"
        if isinstance(error, RecursionError)
        else "a number has too many digits"
    )
