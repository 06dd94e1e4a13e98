"""Calls of the server's routes inside this process, without HTTP."""

from __future__ import annotations

import asyncio
import json
import secrets
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message

from kvboost_edge.server.api_errors import as_api_error, error_body, log_failure

__all__ = ["LineAnswer", "LineCaller"]


class LineAnswer(NamedTuple):
    """The answer of a route.

    Attributes:
        status: HTTP status.
        body: the JSON body.
        request_id: id of the request in logs and cache-miss reports.
        code: code of an error; None for an answer.
        retry_after: seconds of the Retry-After header; None without it.
    """

    status: int
    body: bytes
    request_id: str
    code: str | None = None
    retry_after: float | None = None


class LineCaller:
    """Caller of the routes of an ASGI app.

    Args:
        app: app with the routes, without the middleware for HTTP.
        background: kind of background requests, see the engine's `Terms`; None for requests that
            compete with all others.
    """

    def __init__(self, app: ASGIApp, background: str | None) -> None:
        self._app = app
        self._background = background

    async def __call__(
        self, path: str, body: dict[str, Any], *, tenant: str | None, seconds: float
    ) -> LineAnswer:
        """Call a route and return its answer. Cancelling the call cancels the request.

        Args:
            path: path of the route.
            body: body of the request.
            tenant: the tenant; None without API keys.
            seconds: time limit of the request.
        """
        data = json.dumps(body).encode()
        facts: dict[str, Any] = {"id": f"req-{secrets.token_hex(12)}", "timeout": seconds}
        if tenant is not None:
            facts["tenant"] = tenant
        if self._background is not None:
            facts["background"] = self._background
        request_id = facts["id"]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(data)).encode()),
            ],
            "client": None,
            "server": None,
            "kvboost": facts,
        }
        pending = [{"type": "http.request", "body": data, "more_body": False}]
        never = asyncio.Event()
        messages: list[Message] = []

        async def receive() -> Message:
            if pending:
                return pending.pop()
            await never.wait()  # this client never disconnects
            raise AssertionError("unreachable")

        async def send(message: Message) -> None:
            messages.append(message)

        try:
            await self._app(scope, receive, send)
        except Exception as error:
            refusal = as_api_error(error)
            if refusal.status_code == 500:
                log_failure(scope, error)
            text = json.dumps(error_body(refusal, path)).encode()
            return LineAnswer(refusal.status_code, text, request_id, refusal.code)
        start = messages[0]
        status = start["status"]
        text = b"".join(message.get("body", b"") for message in messages[1:])
        after = dict(start["headers"]).get(b"retry-after")
        code = None if status == 200 else json.loads(text)["error"]["code"]
        return LineAnswer(status, text, request_id, code, None if after is None else float(after))
