"""ASGI middleware around all routes. It passes on disconnects and does not buffer streams.

`Envelope` is the outermost middleware. It assigns the request id, checks host and origin, adds the
security headers, converts exceptions to error responses and logs the request. `AuthMiddleware`
answers OPTIONS requests, checks the API key and limits the body. While the queue is full, it
rejects generating requests before it reads their bodies.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Iterable

from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvboost_edge.server.api_errors import (
    ApiError,
    ClientGone,
    as_api_error,
    error_response,
    log_failure,
)
from kvboost_edge.server.error_shapes import id_headers
from kvboost_edge.server.http.headers import SECURITY_HEADERS
from kvboost_edge.server.http.hosts import HostList
from kvboost_edge.server.http.keys import KeyRing
from kvboost_edge.server.logs import log_facts
from kvboost_edge.server.models.server import ServerState
from kvboost_edge.server.state import MODEL_FACT
from kvboost_edge.server.traces import TRACE_FACT

__all__ = [
    "ADMIN_PATHS",
    "ADMITTED_PATHS",
    "UPLOAD_PATH",
    "AuthMiddleware",
    "Envelope",
    "account",
    "is_admitted",
    "new_request_id",
]

# Routes that show or change data of all tenants. Even the total numbers of hits and blocks would
# reveal the activity of other tenants.
ADMIN_PATHS = frozenset(
    {
        "/api/copy",
        "/api/create",
        "/api/delete",
        "/api/pull",
        "/cache/reset",
        "/metrics",
        "/slots",
        "/v1/blocks",
        "/v1/stats",
    }
)
# Routes that work inside `admit`. If the queue is full, their requests are rejected before the
# bodies are read.
ADMITTED_PATHS = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
        "/api/chat",
        "/api/generate",
        "/api/embed",
        "/api/embeddings",
        "/api/show",
        "/completion",
        "/infill",
        "/apply-template",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/warm",
        "/v1/unpin",
        "/v1/sessions",
        "/tokenize",
        "/detokenize",
    }
)
_ADMITTED_PATTERN = re.compile(r"/slots/[^/]+|/v1/sessions/[^/]+/restore")


def is_admitted(path: str) -> bool:
    """Return whether requests to a path wait in the queue, and are refused while it is full."""
    return path in ADMITTED_PATHS or _ADMITTED_PATTERN.fullmatch(path) is not None


UPLOAD_PATH = "/v1/files"
_FORM_BYTES = 1 << 16  # bytes of a form besides its file
_RAW_HEADERS = [(name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
_CLIENT_GONE = 499


class Envelope:
    """Outermost middleware, for request id, host and origin checks, headers, errors and the log."""

    def __init__(self, app: ASGIApp, state: ServerState, hosts: HostList) -> None:
        self._app = app
        self._state = state
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        facts = scope.setdefault("kvboost", {"id": new_request_id()})
        traces = self._state.shared.traces
        trace = None
        if traces is not None and is_admitted(scope["path"]):
            trace = facts[TRACE_FACT] = traces.begin(scope, facts["id"])
        started = time.perf_counter()
        status = _CLIENT_GONE
        method = scope["method"]
        if method == "HEAD":  # routes handle HEAD as GET, and the protocol omits the body
            scope = {**scope, "method": "GET"}

        async def send_dressed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = list(message["headers"])
                names = {name.lower() for name, _ in headers}
                headers += [header for header in _RAW_HEADERS if header[0] not in names]
                message["headers"] = [
                    *headers,
                    *((name, facts["id"].encode()) for name in id_headers(scope["path"])),
                ]
            await send(message)

        try:
            self._hosts.check(scope)
            await self._app(scope, receive, send_dressed)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            answer = as_api_error(error, engine_alive=self._state.engine_alive(scope))
            if answer.status_code == 500:
                log_failure(scope, error)
            if status == _CLIENT_GONE:  # no response was sent yet
                await error_response(answer, scope["path"])(scope, receive, send_dressed)
        finally:
            facts.pop(MODEL_FACT, None)
            facts.pop(TRACE_FACT, None)
            facts = {name: value for name, value in facts.items() if name != "tenant"}
            # If the body was incomplete or malformed, the protocol has sent an error with this
            # status.
            status = facts.pop("refused", status)
            route = getattr(scope.get("route"), "path", "unmatched")
            if trace is not None:
                facts["trace_id"] = trace.trace_id
                trace.end(route, status)
            account(
                self._state, route, status, time.perf_counter() - started, method=method, **facts
            )


def new_request_id() -> str:
    """Return a new request id, to show to the client and in logs."""
    return f"req-{secrets.token_hex(12)}"


def account(
    state: ServerState, route: str, status: int, seconds: float, *, id: str, **facts: object
) -> None:
    """Record one response in the metrics and the log."""
    state.metrics.observe_http(route, status, seconds)
    shown = {"route": route, "status": status, "ms": round(seconds * 1e3, 2)}
    log_facts(logging.INFO, "request", request_id=id, **{**facts, **shown})


class AuthMiddleware:
    """Middleware that checks the API key, the size of the body and the queue."""

    def __init__(
        self,
        app: ASGIApp,
        state: ServerState,
        keys: KeyRing,
        open_paths: Iterable[str],
        routes: Iterable[BaseRoute],
    ) -> None:
        """Create the middleware.

        Args:
            app: the inner application.
            state: state of the server.
            keys: accepted API keys.
            open_paths: paths that need no key.
            routes: routes of the application.
        """
        self._app = app
        self._routes = [route for route in routes if isinstance(route, Route)]
        self._state = state
        self._keys = keys
        # Compare with the raw path, byte by byte. A path that equals an open path only after
        # decoding or normalization needs a key.
        self._open_paths = frozenset(path.encode("ascii") for path in open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "OPTIONS" and (methods := self._methods(scope["path"])):
            answer = Response(status_code=204, headers={"Allow": ", ".join(sorted(methods))})
            await answer(scope, receive, send)
            return
        try:
            self._let_in(scope)
        except ApiError as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        limit = None if self._takes_file(scope) else self._state.settings.max_body_bytes
        body = _Body(receive, self._state, scope["kvboost"].get("tenant"), limit)
        try:
            await self._app(scope, body.receive, send)
        finally:
            self._state.bodies.free(body.tenant, body.num_bytes)

    def _takes_file(self, scope: Scope) -> bool:
        """Return whether the body is a file, which the route limits and writes to disk."""
        is_upload = scope["method"] == "POST" and scope["path"] == UPLOAD_PATH
        return is_upload and self._state.batches is not None

    def _methods(self, path: str) -> set[str]:
        """Return the allowed methods of a path, or an empty result if no route has this path."""
        # The methods are not secret, because docs/apis.md lists the routes.
        found = {
            method
            for route in self._routes
            if route.path_regex.match(path)
            for method in route.methods or ()
        }
        if "GET" in found:
            found.add("HEAD")
        return found | {"OPTIONS"} if found else found

    def _let_in(self, scope: Scope) -> None:
        """Raise ApiError for a request that is not allowed, before its body is read."""
        if self._keys and scope["raw_path"] not in self._open_paths:
            tenant = scope["kvboost"]["tenant"] = self._keys.tenant(scope["headers"])
            if scope["path"] in ADMIN_PATHS:  # the decoded path, which routing uses
                self._keys.check_admin(tenant)
        limit = self._state.settings.max_body_bytes
        if self._takes_file(scope):
            limit = self._state.settings.max_file_bytes + _FORM_BYTES
        for name, value in scope["headers"]:
            if name == b"content-length" and int(value) > limit:
                raise _too_large(limit)
            if name == b"content-encoding" and value.lower() not in (b"", b"identity"):
                raise _compressed(value)
        if scope["method"] == "POST" and is_admitted(scope["path"]):
            self._state.check_queue(scope["kvboost"].get("tenant"))


class _Body:
    """Body of a request, with a size limit. Its bytes count towards the limit for all bodies until
    the request ends. Without a limit, the route does not keep the body and its bytes do not count.
    """

    def __init__(
        self, receive: Receive, state: ServerState, tenant: str | None, limit: int | None
    ) -> None:
        self.tenant = tenant
        self.num_bytes = 0
        self._receive = receive
        self._bodies = state.bodies
        self._limit = limit
        self._is_complete = False

    async def receive(self) -> Message:
        """Return the next ASGI message.

        Raises:
            ApiError: the body exceeds its limit (413), or all bodies together exceed theirs (503).
            ClientGone: the client disconnected before the body was complete.
        """
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self._is_complete:
            raise ClientGone
        self._is_complete = not message.get("more_body", False)
        if self._limit is None:
            return message
        size = len(message.get("body", b""))
        if self.num_bytes + size > self._limit:
            raise _too_large(self._limit)
        self._bodies.hold(self.tenant, size)
        self.num_bytes += size
        return message


def _compressed(encoding: bytes) -> ApiError:
    message = (
        f"the body has the Content-Encoding {encoding.decode('latin-1')[:64]!r}, which is not "
        "supported; send the body uncompressed"
    )
    headers = {"Accept-Encoding": "identity"}
    return ApiError(415, message, code="unsupported_content_encoding", headers=headers)


def _too_large(limit: int) -> ApiError:
    message = f"the body is larger than {limit} bytes; send less, or raise --max-body-bytes"
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})
