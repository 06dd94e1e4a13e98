"""Parsing and validation of JSON bodies, with early rejection of oversized ones.

- Long bodies are parsed and validated in one worker thread, one at a time. Python parses JSON
  without releasing the GIL, so the event loop waits for at most one body.
- The table of bounds limits how many values, containers and strings a body may hold.
- The number of digits of an integer is limited, because parsing time grows with its square.
- Validation stops at the first error.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from kvboost_edge.server.api.bounds import COUNTS
from kvboost_edge.server.api_errors import ApiError, as_api_error
from kvboost_edge.server.models.server import server_of

__all__ = ["JsonRoute", "parse_json"]

_SHORT = 1 << 14  # bytes; parsing them takes a fraction of a millisecond
_JSON = (b"content-type", b"application/json")
_MOST_DIGITS = 20
# A longer integer is cut to this many digits. Its value is still out of range for every field, so
# the error names the field.
_KEPT_DIGITS = 40
_AS_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_TOO_LONG = b"0" * (_MOST_DIGITS + 1)


class JsonRoute(APIRoute):
    """A route that parses its body as JSON with `parse_json`, whatever the Content-Type.

    `curl -d` sends the Content-Type of a form. Browsers send such a body without a CORS preflight,
    but requests with a foreign Origin header are refused elsewhere.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        field = self.body_field

        def validated(body: bytes, content_type: str) -> Any:
            try:
                value, refusal = parse_json(body)
            except ApiError as error:
                if error.code == "invalid_json" and "json" not in content_type:
                    given = f", not {content_type}" if content_type else ""
                    error.message += f"; send JSON with Content-Type: application/json{given}"
                raise
            model, errors = (
                (value, []) if field is None else field.validate(value, {}, loc=("body",))
            )
            if errors:
                raise as_api_error(RequestValidationError(errors))
            if refusal is not None:
                raise refusal
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
        if len(body) <= _SHORT:
            return self._read(body)
        async with server_of(self).bodies.reading:
            return await asyncio.get_running_loop().run_in_executor(_reader(), self._read, body)


@functools.cache
def _reader() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="ThreadPoolExecutor-read")


def parse_json(body: bytes) -> tuple[Any, ApiError | None]:
    """Count the values of a body, then parse it as JSON.

    The counts are estimates from the raw bytes. Values are counted by separators, including those
    inside strings. Strings and field names are counted by unescaped quotes.

    Returns:
        The parsed value, and an error if an integer has too many digits, else None. The caller
            reports a field error first if there is one.

    Raises:
        ApiError: the body is not JSON, or holds more values than the table of bounds allows (400).
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
            message = (
                f"the body holds {count} {what}; at most {limit} are allowed; send a smaller body"
            )
            raise ApiError(400, message, code="request_too_large")
    # UTF-16 and UTF-32 put zero bytes between digits, so their integers are always checked.
    # Checking doubles the parsing time and is skipped if no run of digits is too long, in or out of
    # strings.
    may_be_long = b"\0" in body or _TOO_LONG in body.translate(_AS_ZEROS)
    integers = _Integers()
    try:
        value = json.loads(body, parse_int=integers.read if may_be_long else None)
    except (ValueError, RecursionError) as error:  # covers invalid UTF-8 and deep nesting too
        raise _not_json(_reason(error)) from error
    too_long = f"an integer has more than {_MOST_DIGITS} digits"
    return value, _not_json(too_long) if integers.has_long else None


class _Integers:
    """Parser of integers that remembers whether one was too long.

    Attributes:
        has_long: whether an integer had too many digits.
    """

    def __init__(self) -> None:
        self.has_long = False

    def read(self, digits: str) -> int:
        """Convert digits to an integer, and cut a long one short."""
        self.has_long = self.has_long or len(digits.lstrip("-")) > _MOST_DIGITS
        return int(digits[:_KEPT_DIGITS])


def _not_json(reason: str) -> ApiError:
    return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")


def _reason(error: Exception) -> str:
    """Describe a parsing error without quoting the client's input."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    if isinstance(error, UnicodeDecodeError):
        return f"invalid UTF-8 at byte {error.start}"
    return "it is nested too deeply"
