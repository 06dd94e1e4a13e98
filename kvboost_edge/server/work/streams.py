"""Streamed responses such as server-sent events, and complete JSON responses."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Send

from kvboost_edge.server.api_errors import ApiError, error_body

__all__ = [
    "EVENTS",
    "PING",
    "ChunkStream",
    "EventStream",
    "dumps",
    "dumps_long",
    "event",
    "json_response",
    "send_json",
]

EVENTS = "text/event-stream; charset=utf-8"
PING = b": ping\n\n"  # a comment, which readers of events ignore
_DONE = b"data: [DONE]\n\n"
_SEND_BYTES = 1 << 18
# Number of characters or entries encoded as JSON at once, in less than a millisecond.
_SLICE = 1 << 14
_ROWS = 1 << 7  # number of nested entries encoded at once
_DEPTH = 2  # nesting depth of the members of a choice's logprobs


class EventStream:
    """A response that is sent in pieces.

    Nothing is sent before the first `flush`, so an earlier error can still set the status.

    Attributes:
        started: True once the status and headers are sent.
    """

    def __init__(
        self,
        send: Send,
        failure: Callable[[ApiError], bytes],
        *,
        last: bytes = b"",
        content_type: str = EVENTS,
    ) -> None:
        """Create a stream.

        Args:
            send: the ASGI send function.
            failure: function that encodes an error that occurs after the start.
            last: bytes to send at the end.
            content_type: value of the Content-Type header.
        """
        self.started = False
        self._send = send
        self._failure = failure
        self._last = last
        self._content_type = content_type
        self._waiting: list[bytes] = []
        self._sent_at = time.monotonic()

    def is_silent(self, seconds: float) -> bool:
        """Return whether nothing is pending, and nothing was sent for this many seconds."""
        return not self._waiting and time.monotonic() - self._sent_at >= seconds

    def add(self, *pieces: bytes) -> None:
        """Add pieces to the pending data."""
        self._waiting += pieces

    async def flush(self) -> None:
        """Send the pending data, if any, in one message."""
        if self._waiting:
            await self._write(more=True)

    async def end(self) -> None:
        """Send the pending data and the last bytes, and end the response."""
        self.add(self._last)
        await self._write(more=False)

    async def fail(self, error: ApiError) -> None:
        """Send an error after the stream has started, and end the stream."""
        self.add(self._failure(error))
        await self.end()

    async def _write(self, *, more: bool) -> None:
        if not self.started:
            self.started = True
            headers = [
                (b"content-type", self._content_type.encode()),
                (b"cache-control", b"no-store"),
            ]
            # Tells proxies such as nginx not to buffer events.
            headers.append((b"x-accel-buffering", b"no"))
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        data = b"".join(self._waiting)
        self._waiting = []
        self._sent_at = time.monotonic()
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


class ChunkStream(EventStream):
    """Server-sent events in OpenAI's format."""

    def __init__(self, send: Send, head: Mapping[str, Any], *, include_usage: bool) -> None:
        """Create a stream.

        Args:
            send: the ASGI send function.
            head: members at the start of every chunk.
            include_usage: True to add a `usage` member to every chunk, which is null in all but the
                last.
        """
        super().__init__(send, lambda error: event(error_body(error)), last=_DONE)
        members = json.dumps(dict(head), separators=(",", ":"), ensure_ascii=False)
        self._head = f"data: {members[:-1]},".encode()
        self._include_usage = include_usage

    def chunk(
        self, choices: Sequence[Mapping[str, Any]], *, long: bool = False, **members: Any
    ) -> None:
        """Add a chunk to the pending data. `long` encodes its choices with `dumps_long`."""
        if self._include_usage:
            members.setdefault("usage", None)
        written = b",".join(map(dumps_long if long else dumps, choices))
        rest = b"," + dumps(members)[1:] if members else b"}"
        self.add(self._head, b'"choices":[', written, b"]", rest, b"\n\n")


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """Encode a server-sent event. If it has a name, add an `event` line."""
    kind = f"event: {name}\n".encode() if name else b""
    return kind + b"data: " + dumps(data) + b"\n\n"


def json_response(
    value: Mapping[str, Any], *, headers: Mapping[str, str] | None = None
) -> Response:
    """Return the JSON response of a route that does not stream."""
    return Response(dumps(value), headers=dict(headers or {}), media_type="application/json")


async def send_json(send: Send, body: bytes | bytearray) -> None:
    """Send a complete JSON response. A large one is sent in pieces, as fast as the client reads."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for start in range(0, len(body) - _SEND_BYTES, _SEND_BYTES):
        await send(
            {
                "type": "http.response.body",
                "body": body[start : start + _SEND_BYTES],
                "more_body": True,
            }
        )
        # Let other tasks run, and notice a lost connection before writing more.
        await asyncio.sleep(0)
    rest = body[(len(body) - 1) // _SEND_BYTES * _SEND_BYTES :]
    await send({"type": "http.response.body", "body": rest, "more_body": False})


def dumps(value: Mapping[str, Any]) -> bytes:
    """Encode an object as compact JSON in UTF-8."""
    return _plain(value)


def dumps_long(value: Mapping[str, Any] | list[dict[str, Any]]) -> bytes:
    """Encode an object, or a list of objects, with long texts. Meant for worker threads.

    It is encoded in slices. Other threads can run between them.
    """
    return b"".join(_sliced(value, 0))


def _sliced(item: Any, depth: int) -> Iterator[bytes]:
    if isinstance(item, Mapping) and depth < _DEPTH:
        for number, (name, member) in enumerate(item.items()):
            yield (b"," if number else b"{") + _plain(name) + b":"
            yield from _sliced(member, depth + 1)
        yield b"}" if item else b"{}"
    elif isinstance(item, (str, list)):
        # The first entry may be None.
        nested = any(isinstance(entry, (dict, list)) for entry in item[:2])
        size = _ROWS if nested else _SLICE
        begin, end = (b'"', b'"') if isinstance(item, str) else (b"[", b"]")
        yield begin
        for start in range(0, len(item), size):
            between = b"," if start and end == b"]" else b""
            yield between + _plain(item[start : start + size])[1:-1]
        yield end
    else:
        yield _plain(item)


def _plain(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
