"""Reading JSON bodies: what is no JSON, or far more of it than a request needs, is refused before it costs anything."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from kvboost_edge.server.api.bounds import COUNTS
from kvboost_edge.server.errors import ApiError

__all__ = ["JsonRoute", "parse_json"]


class JsonRoute(APIRoute):
    """A route that reads its body by `parse_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_request(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_request


class _JsonRequest(Request):
    async def json(self) -> Any:
        return parse_json(await self.body())


def parse_json(body: bytes) -> Any:
    """The value in a body; ApiError 400 for what is not JSON, or holds more values than the table of bounds allows.

    Python reads JSON without letting another thread run, so the number of values, not of bytes, bounds how long
    everybody waits. It is bounded by what separates values; the same characters inside of texts count too.
    """
    containers = body.count(b"[") + body.count(b"{")
    values = containers + body.count(b",")
    for name, count in (("json_containers", containers), ("json_values", values)):
        limit = int(COUNTS[name].high)
        if count > limit:
            what = "brackets" if name == "json_containers" else "brackets and commas"
            message = f"the body holds {count} {what}; at most {limit} are read; send less at once"
            raise ApiError(400, message, code="request_too_large")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:  # bad UTF-8, a number of thousands of digits, nesting
        raise ApiError(400, f"the body is not valid JSON: {_reason(error)}", code="invalid_json") from error


def _reason(error: Exception) -> str:
    """Why, without a word of what was sent."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    if isinstance(error, UnicodeDecodeError):
        return f"no UTF-8 at byte {error.start}"
    return "it is nested too deep" if isinstance(error, RecursionError) else "a number has too many digits"
