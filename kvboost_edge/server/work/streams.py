"""Server-sent events in OpenAI's format, and the JSON answers beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Send

from kvboost_edge.server.errors import ApiError, error_body

__all__ = ["EventStream", "dumps", "dumps_long", "json_response", "send_json"]

_DONE = b"data: [DONE]\n\n"
_SEND_BYTES = 1 << 18
_SLICE = 1 << 14  # characters or entries written as JSON in one go: less than a millisecond


class EventStream:
    """One SSE answer. Nothing is sent before the first `flush`, so an error before it can still have its own status.

    `head`: the members that every chunk begins with. `include_usage`: every chunk has a usage member, null in all but
    the last.
    """

    def __init__(self, send: Send, head: Mapping[str, Any], *, include_usage: bool) -> None:
        self.started = False
        self._send = send
        members = json.dumps(dict(head), separators=(",", ":"), ensure_ascii=False)
        self._head = f"data: {members[:-1]},".encode()
        self._include_usage = include_usage
        self._waiting: list[bytes] = []

    def chunk(self, choices: Sequence[Mapping[str, Any]], **members: Any) -> None:
        """Add one chunk to what is sent next."""
        if self._include_usage:
            members.setdefault("usage", None)
        body = dumps({"choices": choices, **members})
        self._waiting += (self._head, body[1:], b"\n\n")

    async def flush(self) -> None:
        """Send the chunks that wait, if any, in one piece."""
        if self._waiting:
            await self._write(more=True)

    async def end(self) -> None:
        """What waits, the last event, and the end of the answer."""
        self._waiting.append(_DONE)
        await self._write(more=False)

    async def fail(self, error: ApiError) -> None:
        """Tell of an error after the stream began, and end it."""
        self._waiting += (b"data: ", dumps(error_body(error)), b"\n\n")
        await self.end()

    async def _write(self, *, more: bool) -> None:
        if not self.started:
            self.started = True
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
            # Asks proxies such as nginx to pass each event on at once.
            headers.append((b"x-accel-buffering", b"no"))
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        data, self._waiting = b"".join(self._waiting), []
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


def json_response(value: Mapping[str, Any], *, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer of a route that does not stream."""
    return Response(dumps(value), headers=dict(headers or {}), media_type="application/json")


async def send_json(send: Send, body: bytes) -> None:
    """A whole JSON answer, a large one at the pace of who reads it."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for start in range(0, len(body) - _SEND_BYTES, _SEND_BYTES):
        await send({"type": "http.response.body", "body": body[start : start + _SEND_BYTES], "more_body": True})
    rest = body[(len(body) - 1) // _SEND_BYTES * _SEND_BYTES :]
    await send({"type": "http.response.body", "body": rest, "more_body": False})


def dumps(value: Mapping[str, Any]) -> bytes:
    """Compact JSON in UTF-8."""
    return _plain(value)


def dumps_long(value: Mapping[str, Any]) -> bytes:
    """`dumps` of an object with long texts and lists, for worker threads: between slices other threads run."""
    members = (dumps({name: None})[1:-5] + _sliced(item) for name, item in value.items())
    return b"{" + b",".join(members) + b"}"


def _sliced(item: Any) -> bytes:
    if not isinstance(item, (str, list)):
        return _plain(item)
    parts = [_plain(item[start : start + _SLICE])[1:-1] for start in range(0, len(item), _SLICE)]
    return b'"' + b"".join(parts) + b'"' if isinstance(item, str) else b"[" + b",".join(parts) + b"]"


def _plain(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
