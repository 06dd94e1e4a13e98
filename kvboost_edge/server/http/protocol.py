"""uvicorn's HTTP/1.1 protocol with additional deadlines and strict parsing.

A request head must be complete within `header_seconds`, and a body within `body_seconds`. The
deadline of an upload is extended as long as it advances. A client that reads nothing for
`write_seconds` is disconnected. The number of connections is limited. Each
deadline is a single timer of the event loop, so slow clients do not slow down others.

The server rejects ambiguous requests (with two Content-Length headers, or one together with
Transfer-Encoding). It also rejects bare line feeds, folded headers, more than 100 headers, and
bodies of many tiny chunks.

A client may shut down its sending side after its requests are complete, and still gets the
responses. To the server, this looks like a closed connection, and only a later write reveals the
difference. The server therefore probes such a client with bytes that have no effect. Before the
response, it sends interim responses (100 Continue, which every HTTP/1.1 client skips). Between the
chunks of a stream, it sends leading zeros of the next chunk's length. HTTP/1.0 allows neither, so
the server notices such a client's disconnect only when it writes the response.

None of the maintained ASGI servers has all three deadlines (checked in November 2026):

- uvicorn has none of them (its issue 157; pull request 1685 was closed).
- Granian 2.8 has one for the head only and declined one for the body (its issue 728).
- Hypercorn 0.18 limits each single read, so a client that sends a byte per minute is never late,
  and it does not limit writes.

Without a deadline for the body, a client can hold memory and a connection indefinitely. Without one
for writes, it can block a model's stream. A reverse proxy has both deadlines, but local servers
usually run without a proxy.
"""

from __future__ import annotations

import asyncio
import http
import json
import re
from typing import Any, cast

import h11
from h11._receivebuffer import ReceiveBuffer
from h11._writers import ChunkedWriter
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState as UvicornState

from kvboost_edge.server.api_errors import ApiError, error_body
from kvboost_edge.server.error_shapes import id_headers
from kvboost_edge.server.http.headers import SECURITY_HEADERS
from kvboost_edge.server.http.lingering_close import QUIET_SECONDS, LingeringTransport
from kvboost_edge.server.http.middleware import UPLOAD_PATH, account, new_request_id
from kvboost_edge.server.models.server import ServerState
from kvboost_edge.server.settings import ServerSettings

__all__ = ["make_protocol"]

_MAX_HEADERS = 100
_MAX_HEAD_BYTES = 16 * 1024
# Seconds until a client that stopped sending is probed again. The time doubles after each probe.
_FIRST_ASK = 0.02
_LONGEST_ASK = 5.0
_MOST_ZEROS = 8  # zeros before the length of a chunk; some clients read 16 digits
_MAX_PIPELINED = 64 * 1024  # bytes kept of pipelined requests
# Maximum number of tiny chunks in a body. Each chunk takes about 12 us of the event loop, so
# further chunks must have _MEAN_CHUNK bytes on average.
_FEW_CHUNKS = 1000
_MEAN_CHUNK = 64
_VERSIONS = (b"1.0", b"1.1")
_UPLOAD_BYTES = 1 << 20  # minimum number of bytes of an upload in each `body_seconds`
# Documented by h11, but not in its __all__.
_WAITING = (h11.DONE, h11.MIGHT_SWITCH_PROTOCOL)  # type: ignore[attr-defined]
_MESSAGES = {
    400: ("the HTTP request is malformed; check its request line and headers", "malformed_request"),
    408: (
        "the request did not arrive in time (--header-seconds, --body-seconds); send it faster",
        "request_timeout",
    ),
    417: (
        "the Expect header is not supported; use 100-continue or leave it out",
        "unknown_expectation",
    ),
    431: ("the request's head is too large; send fewer or shorter headers", "headers_too_large"),
    505: ("the HTTP version is not supported; use HTTP/1.0 or HTTP/1.1", "http_version"),
    503: (
        "the server has reached its limit of connections (--max-connections); try again later",
        "too_many_connections",
    ),
}


# A bare line feed, or a folded header: a line that starts with whitespace and continues the
# previous header.
_AMBIGUOUS = re.compile(rb"(?<!\r)\n|\n[ \t]")
_LENGTH = re.compile(rb"^content-length[ \t]*:.*", re.IGNORECASE | re.MULTILINE)


class _StrictBuffer(ReceiveBuffer):
    """h11's receive buffer, without its tolerance for ambiguous heads and trailers.

    It rejects bare line feeds, folded headers, and more than one Content-Length header.
    """

    def maybe_extract_lines(self) -> list[bytearray] | None:
        searched = max(0, self._multiple_lines_search - 3)
        if self._data[:2] == b"\r\n":
            self._extract(2)
            return []
        end = self._data.find(b"\r\n\r\n", searched)
        # Search from a position instead of in a slice, because the lookbehind needs the byte before
        # it.
        if _AMBIGUOUS.search(
            self._data, max(0, searched - 1), len(self._data) if end < 0 else end + 2
        ):
            raise h11.RemoteProtocolError(
                "the head has a bare line feed or a folded header; "
                "end lines with CRLF and do not fold headers"
            )
        if end < 0:
            self._multiple_lines_search = len(self._data)
            return None
        lines = self._extract(end + 4)[:-4]
        lengths = _LENGTH.findall(lines)
        if len(lengths) > 1 or any(b"," in length for length in lengths):
            raise h11.RemoteProtocolError("the head has more than one Content-Length; send one")
        return lines.split(b"\r\n")


class _StrictConnection(h11.Connection):
    """h11's server connection, which rejects ambiguous requests and reports its progress."""

    def __init__(self, protocol: DeadlineProtocol) -> None:
        super().__init__(h11.SERVER, _MAX_HEAD_BYTES)
        self._receive_buffer = _StrictBuffer()
        self._protocol = protocol
        self._chunks = self._chunk_bytes = 0
        self._zeros = 0
        self.error_status = 400

    @property
    def num_body_bytes(self) -> int:
        """Number of bytes of the request's body so far."""
        return self._chunk_bytes

    @property
    def num_buffered(self) -> int:
        """Number of bytes that were received but not parsed yet."""
        return len(self._receive_buffer)

    def next_event(self) -> Any:
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                _check_head(event)
                event = _origin_form(event)
            elif isinstance(event, h11.Data):
                self._count(event)
        except h11.RemoteProtocolError as error:
            self.error_status = (
                error.error_status_hint if error.error_status_hint in _MESSAGES else 400
            )
            raise
        if isinstance(event, h11.Request):
            self._chunks = self._chunk_bytes = 0
            self._protocol.head_complete()
        elif isinstance(event, h11.EndOfMessage):
            self._protocol.body_complete()
        return event

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        """Return the bytes of an event. h11's `send` calls this method."""
        pieces = super().send_with_data_passthrough(event)
        if pieces:
            self._zeros = 0
        return pieces

    def ask(self) -> bytes:
        """Return bytes that probe a client and have no effect on it, or b"" if none can be sent
        now.
        """
        if self.their_http_version == b"1.0":
            return b""
        if self.our_state is h11.SEND_RESPONSE:
            again = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            return self.send(again) or b""
        if isinstance(self._writer, ChunkedWriter) and self._zeros < _MOST_ZEROS:
            self._zeros += 1
            return b"0"
        return b""

    def _count(self, data: h11.Data) -> None:
        self._chunks += data.chunk_start
        self._chunk_bytes += len(data.data)
        if self._chunks > _FEW_CHUNKS and self._chunk_bytes < self._chunks * _MEAN_CHUNK:
            raise h11.RemoteProtocolError("the body has too many tiny chunks; send larger chunks")


class DeadlineProtocol(H11Protocol):
    """Protocol of one connection. `make_protocol` sets the attributes `kv` and `settings`."""

    kv: ServerState
    settings: ServerSettings
    conn: _StrictConnection

    def __init__(
        self,
        config: Config,
        server_state: UvicornState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = _StrictConnection(self)
        self.access_log = False
        # uvicorn declares an integer, but only passes the value to a timer.
        self.timeout_keep_alive = self.settings.keep_alive_seconds  # type: ignore[assignment]
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._ask_timer: asyncio.TimerHandle | None = None
        self._half_closed = False
        self._uploaded = 0  # bytes of an upload when its deadline was set
        self._surplus: int | None = None  # bytes received of a body after its response was sent
        self._reading_since = self.loop.time()

    # Start and end of the connection.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._closing = LingeringTransport(
            transport,
            self.loop,
            may_send=lambda: self.conn.their_state is h11.SEND_BODY,
            seconds=self.settings.body_seconds,
        )
        super().connection_made(cast(asyncio.Transport, self._closing))
        if len(self.connections) > self.settings.max_connections:
            self._refuse(503)
            if len(self.connections) > 2 * self.settings.max_connections:
                # Close without waiting until the client has read the response.
                self._closing.close_now()
            return
        self._read_within(self.settings.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_reading_clock()
        self._stop_writing_clock()
        if self._ask_timer is not None:
            self._ask_timer.cancel()
        self._closing.stop_clocks()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    # Reading.

    def data_received(self, data: bytes) -> None:
        if self._closing.is_lingering:
            self._closing.drop(data)
            return
        if self.transport.is_closing():
            return
        if self._surplus is not None:
            self._surplus += len(data)
            if self._surplus > self.settings.max_body_bytes:
                self._close(self.settings.body_seconds)
                return
        if self._read_timer is None and self._between_requests():
            self._reading_since = self.loop.time()
            self._read_within(self.settings.header_seconds)
        super().data_received(data)
        if self.flow.read_paused and self.conn.their_state in _WAITING:
            # h11 parses pipelined requests only after the response. Keep reading nevertheless,
            # because only a read detects a disconnect. A client that pipelines more than the limit
            # is disconnected.
            if self.conn.num_buffered > _MAX_PIPELINED:
                self.transport.abort()
                return
            self.flow.resume_reading()

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn's closes
        """Note that the client stopped sending, and return whether the connection stays open."""
        if self.transport.is_closing() or not self._owes_answer():
            return False
        if not self._half_closed:
            self._half_closed = True
            self._ask_timer = self.loop.call_later(_FIRST_ASK, self._ask, _FIRST_ASK)
        return True

    def _owes_answer(self) -> bool:
        """Return whether a complete request waits for its response."""
        return not self._between_requests() and self.conn.their_state is not h11.SEND_BODY

    def _ask(self, seconds: float) -> None:
        """Probe whether a client that stopped sending has disconnected."""
        if self.transport.is_closing():
            return
        # If the client's system has closed the connection, it replies with a reset, and the next
        # write fails.
        self.transport.write(self.conn.ask())
        self._ask_timer = self.loop.call_later(seconds, self._ask, min(2 * seconds, _LONGEST_ASK))

    def head_complete(self) -> None:
        """Start the deadline of the body after the head is complete."""
        self._uploaded = 0
        self._read_within(self.settings.body_seconds)
        # If the transport has not paused writing, the client has read the earlier responses.
        if not self.flow.write_paused:
            self._stop_writing_clock()

    def body_complete(self) -> None:
        """Stop the deadline of the body after the request is complete."""
        self._stop_reading_clock()
        self._surplus = None

    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _read_within(self, seconds: float) -> None:
        self._stop_reading_clock()
        self._read_timer = self.loop.call_later(seconds, self._too_slow)

    def _stop_reading_clock(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _too_slow(self) -> None:
        self._read_timer = None
        if self.transport.is_closing():
            return
        count = self.conn.num_body_bytes
        if self._is_upload() and count - self._uploaded >= _UPLOAD_BYTES:
            self._uploaded = count
            self._read_within(self.settings.body_seconds)
        else:
            self._refuse(408)

    def _is_upload(self) -> bool:
        """Return whether the request in progress uploads a file."""
        if self._between_requests() or self.kv.batches is None:
            return False
        scope = self.cycle.scope
        return bool(scope["method"] == "POST" and scope["path"] == UPLOAD_PATH)

    # Writing.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._drain_within(self.settings.write_seconds)

    def resume_writing(self) -> None:
        self._stop_writing_clock()
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._half_closed and not self._owes_answer():
            self.transport.close()
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            # The response was sent before the end of the body. If the body ends soon, the
            # connection stays open.
            self._surplus = 0
            self._read_within(QUIET_SECONDS)
        self._drain_before_idle()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._drain_before_idle()

    def shutdown(self) -> None:
        if self._closing.is_lingering:
            self._closing.close_now()
        else:
            super().shutdown()
        self._drain_before_idle()

    def _drain_before_idle(self) -> None:
        """Set the write deadline for pending data if nothing more will be written soon."""
        if self.transport.get_write_buffer_size():
            self._drain_within(self.settings.write_seconds)

    def _drain_within(self, seconds: float) -> None:
        if self._write_timer is None:
            size = self.transport.get_write_buffer_size()
            self._write_timer = self.loop.call_later(seconds, self._check_progress, seconds, size)

    def _stop_writing_clock(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _check_progress(self, seconds: float, size: int) -> None:
        """Disconnect a client that has read nothing since `size` bytes were pending.

        A client that has read something gets another deadline.
        """
        self._write_timer = None
        # Nothing is written while the timer runs, so the amount of pending data can only shrink.
        waiting = self.transport.get_write_buffer_size()
        if waiting >= size > 0:
            self.transport.abort()
        elif waiting:
            self._drain_within(seconds)

    # Rejected requests.

    def _should_upgrade(self) -> bool:
        return False

    def send_400_response(self, msg: str) -> None:
        """Reject a request that h11 could not parse. uvicorn calls this method."""
        self._refuse(self.conn.error_status)

    def _refuse(self, status: int) -> None:
        """Send an error response if no response has begun, and close the connection."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self._close(QUIET_SECONDS)
            return
        message, code = _MESSAGES[status]
        # Before the head is complete, the API is unknown, and the error has OpenAI's format.
        path = "" if self._between_requests() else self.cycle.scope["path"]
        body = json.dumps(error_body(ApiError(status, message, code=code), path)).encode()
        request_id = self._account(status)
        headers = {
            **SECURITY_HEADERS,
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
        }
        headers |= {
            "Connection": "close",
            **{name.decode(): request_id for name in id_headers(path)},
        }
        if status == 503:
            headers["Retry-After"] = str(self.kv.retry_after())
        start = h11.Response(
            status_code=status,
            reason=http.HTTPStatus(status).phrase.encode(),
            headers=[(name.encode(), value.encode()) for name, value in headers.items()],
        )
        events = (start, h11.Data(data=body), h11.EndOfMessage())
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self._close(QUIET_SECONDS)

    def _account(self, status: int) -> str:
        """Count and log a rejected request, and return its id."""
        if not self._between_requests():
            # The app has started this request and will count it.
            scope: Any = self.cycle.scope
            facts: dict[str, Any] = scope.setdefault("kvboost", {"id": new_request_id()})
            facts["refused"] = status
            return str(facts["id"])
        request_id = new_request_id()
        account(self.kv, "unread", status, self.loop.time() - self._reading_since, id=request_id)
        return request_id

    def _close(self, seconds: float) -> None:
        """Close the connection, dropping incoming data for `seconds`. The app sees a disconnect."""
        self._stop_reading_clock()
        self._closing.linger(seconds)
        if not self._between_requests():
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._drain_before_idle()


def make_protocol(state: ServerState, settings: ServerSettings) -> type[DeadlineProtocol]:
    """Return the protocol class for uvicorn, bound to this server."""
    return type("BoundProtocol", (DeadlineProtocol,), {"kv": state, "settings": settings})


def _origin_form(request: h11.Request) -> h11.Request:
    """Convert a request for "http://host/path" to one for "/path" with that Host (RFC 9112)."""
    scheme, separator, rest = request.target.partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        return request
    end = min((at for at in (rest.find(b"/"), rest.find(b"?")) if at >= 0), default=len(rest))
    path = rest[end:]
    return h11.Request(
        method=request.method,
        target=path if path.startswith(b"/") else b"/" + path,
        headers=[
            (name, rest[:end] if name == b"host" else value) for name, value in request.headers
        ],
        http_version=request.http_version,
    )


def _check_head(request: h11.Request) -> None:
    """Check the HTTP version and the size, number and combination of headers."""
    if request.http_version not in _VERSIONS:
        raise h11.RemoteProtocolError(
            f"HTTP version {request.http_version!r} is not supported; use 1.0 or 1.1",
            error_status_hint=505,
        )
    names = [name for name, _ in request.headers]
    # h11 limits only incomplete heads. Measure the head here, in case it arrived in one piece.
    if (
        len(request.target) + sum(len(name) + len(value) for name, value in request.headers)
        > _MAX_HEAD_BYTES
    ):
        raise h11.RemoteProtocolError(
            f"the head is larger than {_MAX_HEAD_BYTES} bytes; send shorter headers",
            error_status_hint=431,
        )
    if len(names) > _MAX_HEADERS:
        raise h11.RemoteProtocolError(
            f"the head has {len(names)} headers; at most {_MAX_HEADERS} are allowed",
            error_status_hint=431,
        )
    if b"transfer-encoding" in names and b"content-length" in names:
        raise h11.RemoteProtocolError(
            "the head has both Content-Length and Transfer-Encoding; send one of them"
        )
    if any(
        name == b"expect" and value.strip().lower() != b"100-continue"
        for name, value in request.headers
    ):
        raise h11.RemoteProtocolError(
            "the Expect header is not supported; use 100-continue or leave it out",
            error_status_hint=417,
        )
