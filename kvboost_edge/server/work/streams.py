"""Answers in pieces, such as server-sent events, and the JSON answers beside them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Send

from kvboost_edge.server.errors import ApiError, error_body

__all__ = [
    "EVENTS",
    "ChunkStream",
    "EventStream",
    "dumps",
    "dumps_long",
    "event",
    "json_response",
    "send_json",
]

EVENTS = "text/event-stream; charset=utf-8"
_DONE = b"data: [DONE]\n\n"
_SEND_BYTES = 1 << 18
_SLICE = 1 << 14  # characters or entries written as JSON in one go: less than a millisecond
_ROWS = 1 << 7  # the same for entries that hold others
_DEPTH = 2  # a choice's members and those of its logprobs


class EventStream:
    """An answer that is sent piece by piece. Nothing is sent before the first `flush`, so an error
    before it can still have its own status.

    Attributes:
        failure: what an error that comes later is told as.
        last: bytes behind everything.
    """

    def __init__(
        self,
        send: Send,
        failure: Callable[[ApiError], bytes],
        *,
        last: bytes = b"",
        content_type: str = EVENTS,
    ) -> None:
        self.started = False
        self._send = send
        self._failure = failure
        self._last = last
        self._content_type = content_type
        self._waiting: list[bytes] = []

    def add(self, *pieces: bytes) -> None:
        """Add to what is sent next."""
        self._waiting += pieces

    async def flush(self) -> None:
        """Send what waits, if anything, in one piece."""
        if self._waiting:
            await self._write(more=True)

    async def end(self) -> None:
        """What waits, the last bytes, and the end of the answer."""
        self.add(self._last)
        await self._write(more=False)

    async def fail(self, error: ApiError) -> None:
        """Tell of an error after the stream began, and end it."""
        self.add(self._failure(error))
        await self.end()

    async def _write(self, *, more: bool) -> None:
        if not self.started:
            self.started = True
            headers = [
                (b"content-type", self._content_type.encode()),
                (b"cache-control", b"no-store"),
            ]
            # Asks proxies such as nginx to pass each event on at once.
            headers.append((b"x-accel-buffering", b"no"))
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        data = b"".join(self._waiting)
        self._waiting = []
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


class ChunkStream(EventStream):
    """Server-sent events in OpenAI's format.

    `head`: the members that every chunk begins with. `include_usage`: every chunk has a usage
      member, null in all but the last.
    """

    def __init__(self, send: Send, head: Mapping[str, Any], *, include_usage: bool) -> None:
        super().__init__(send, lambda error: event(error_body(error)), last=_DONE)
        members = json.dumps(dict(head), separators=(",", ":"), ensure_ascii=False)
        self._head = f"data: {members[:-1]},".encode()
        self._include_usage = include_usage

    def chunk(
        self, choices: Sequence[Mapping[str, Any]], *, long: bool = False, **members: Any
    ) -> None:
        """Add one chunk to what is sent next; a long one is written as `dumps_long` does."""
        if self._include_usage:
            members.setdefault("usage", None)
        written = b",".join(map(dumps_long if long else dumps, choices))
        rest = b"," + dumps(members)[1:] if members else b"}"
        self.add(self._head, b'"choices":[', written, b"]", rest, b"\n\n")


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """A server-sent event, of a kind where it has a name."""
    kind = f"event: {name}\n".encode() if name else b""
    return kind + b"data: " + dumps(data) + b"\n\n"


def json_response(
    value: Mapping[str, Any], *, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON answer of a route that does not stream."""
    return Response(dumps(value), headers=dict(headers or {}), media_type="application/json")


async def send_json(send: Send, body: bytes | bytearray) -> None:
    """A whole JSON answer, a large one at the pace of who reads it."""
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
        await asyncio.sleep(
            0
        )  # others go on, and a connection that was lost meanwhile is known before more is written
    rest = body[(len(body) - 1) // _SEND_BYTES * _SEND_BYTES :]
    await send({"type": "http.response.body", "body": rest, "more_body": False})


def dumps(value: Mapping[str, Any]) -> bytes:
    """Compact JSON in UTF-8."""
    return _plain(value)


def dumps_long(value: Mapping[str, Any]) -> bytes:
    """`dumps` of an object with long texts and lists, for worker threads: between slices other
    threads run.
    """
    return b"".join(_sliced(value, 0))


def _sliced(item: Any, depth: int) -> Iterator[bytes]:
    if isinstance(item, Mapping) and depth < _DEPTH:
        for number, (name, member) in enumerate(item.items()):
            yield (b"," if number else b"{") + _plain(name) + b":"
            yield from _sliced(member, depth + 1)
        yield b"}" if item else b"{}"
    elif isinstance(item, (str, list)):
        nested = any(isinstance(entry, (dict, list)) for entry in item[:2])  # the first may be None
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
