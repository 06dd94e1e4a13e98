"""API errors and their responses, in the format of the API that was called (error_shapes.py).

Routes and admission raise `ApiError`. `install_error_handlers` converts these errors, the engine's
errors, validation errors and unknown routes into responses. Internal details such as tracebacks and
library messages appear only in the log.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kvboost_edge.errors import CapacityError, KVBoostError, RequestError
from kvboost_edge.server.engines import Engine, SupportsReplicas
from kvboost_edge.server.error_shapes import shape_of
from kvboost_edge.server.logs import failure_place, log_facts

__all__ = [
    "ApiError",
    "ClientGone",
    "DeadlineExceeded",
    "EngineStopped",
    "NoReplica",
    "QueueFull",
    "ShuttingDown",
    "as_api_error",
    "error_body",
    "error_response",
    "install_error_handlers",
    "log_failure",
    "stopped",
]

_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}
_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_MAX_MESSAGE = 2000
_MAX_CLOSE = 3  # maximum number of routes that a 404 suggests
_SHORT = 1e30  # largest number that a message quotes


class ApiError(HTTPException):
    """An error response.

    Attributes:
        message: human-readable description.
        code: machine-readable identifier.
        param: name of the invalid field.
        kind: OpenAI's error type; by default, the type that belongs to the status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.message = message
        self.code = code
        self.param = param
        self.kind = kind or _KINDS.get(
            status, "invalid_request_error" if status < 500 else "server_error"
        )


class QueueFull(ApiError):
    """503: the server has reached its limit of requests or tokens in flight."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(503, message, code="queue_full", headers={"Retry-After": str(retry_after)})


class ShuttingDown(ApiError):
    """503: the server is shutting down and accepts no new requests."""

    def __init__(self) -> None:
        headers = {"Retry-After": "5", "Connection": "close"}
        super().__init__(503, "the server is shutting down", code="shutting_down", headers=headers)


class EngineStopped(ApiError):
    """503: the engine thread has stopped, and the server must be restarted."""

    def __init__(self) -> None:
        super().__init__(
            503, "the engine stopped after an error; restart the server", code="engine_stopped"
        )


class NoReplica(ApiError):
    """503: no replica accepts requests."""

    def __init__(self) -> None:
        message = "no replica accepts requests at the moment; Ray restarts failed ones"
        super().__init__(503, message, code="no_replica", headers={"Retry-After": "5"})


def stopped(engine: Engine) -> ApiError:
    """Return the error for an engine that no longer runs."""
    return NoReplica() if isinstance(engine, SupportsReplicas) else EngineStopped()


class DeadlineExceeded(ApiError):
    """504: the request took longer than --request-timeout and was stopped.

    Args:
        seconds: the time limit.
        in_stream: whether the limit applies to the time since the last part of a stream.
    """

    def __init__(self, seconds: float, *, in_stream: bool = False) -> None:
        problem = "the stream paused for more than" if in_stream else "the request took longer than"
        super().__init__(
            504,
            f"{problem} {seconds:g} seconds (--request-timeout) and was stopped; raise the limit. "
            "The computed part of the prompt stays cached, so a retry continues there",
            code="deadline_exceeded",
        )


class ClientGone(ApiError):
    """499, only logged: the client closed the connection and the request was cancelled."""

    def __init__(self) -> None:
        super().__init__(499, "the client closed the connection", code="client_closed_request")


def as_api_error(error: BaseException, *, engine_alive: bool = True) -> ApiError:
    """Convert an exception to an ApiError. Unexpected exceptions become a 500 without details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        code = _CODES.get(error.status_code, "http_error")
        return ApiError(error.status_code, _plain(error), code=code, headers=error.headers)
    if isinstance(error, RequestError):
        code = "invalid_request" if error.option is None else "invalid_value"
        return ApiError(400, str(error)[:_MAX_MESSAGE], code=code, param=error.option)
    if isinstance(error, CapacityError):
        return ApiError(400, str(error)[:_MAX_MESSAGE], code="capacity_exceeded")
    if isinstance(error, RequestValidationError):
        return _validation_error(error)
    if not engine_alive:
        return ApiError(
            500,
            "the engine stopped after an error while running this request",
            code="engine_stopped",
        )
    if isinstance(error, KVBoostError):
        return ApiError(500, str(error)[:_MAX_MESSAGE], code="engine_error")
    return ApiError(
        500, "internal error; search the server's log for the request id", code="internal_error"
    )


def error_body(error: ApiError, path: str = "") -> Mapping[str, Any]:
    """Return the JSON body of an error in the format of the API that `path` belongs to.

    Streams send this body as an event.
    """
    return shape_of(path)(error)


def error_response(error: ApiError, path: str = "") -> Response:
    """Return the response to an error in the format of the API that `path` belongs to."""
    # ASCII only, because unpaired surrogates in the client's input cannot be encoded as UTF-8.
    body = json.dumps(error_body(error, path)).encode("ascii")
    return Response(
        body, status_code=error.status_code, headers=error.headers, media_type="application/json"
    )


def install_error_handlers(app: FastAPI, paths: Iterable[str]) -> None:
    """Install handlers that convert every exception in the app into an error response.

    Args:
        app: the application.
        paths: paths of the routes, to suggest in 404 responses.
    """
    known = [path for path in paths if "{" not in path]

    async def answer(request: Request, error: Exception) -> Response:
        alive = request.app.state.kv.engine_alive(request.scope)
        api_error = as_api_error(error, engine_alive=alive)
        if "route" not in request.scope and api_error.status_code == 404:
            api_error = _no_route(request.scope["path"], known)
        if api_error.status_code == 500:
            log_failure(request.scope, error)
        return error_response(api_error, request.scope["path"])

    for kind in (HTTPException, RequestValidationError, KVBoostError):
        app.add_exception_handler(kind, answer)


def log_failure(scope: Mapping[str, Any], error: BaseException) -> None:
    """Log the type and source line of an unexpected exception, with the request's id."""
    request_id = scope.get("kvboost", {}).get("id")
    log_facts(
        logging.ERROR,
        "failure",
        request_id=request_id,
        error=type(error).__name__,
        place=failure_place(error),
    )


def _no_route(path: str, known: Sequence[str]) -> ApiError:
    """Return the 404 error for an unknown path, with suggestions of similar routes."""
    close = _close_routes(path, known)
    meant = f"did you mean {' or '.join(close)}? " if close else ""
    message = f"there is no such route; {meant}/openapi.json lists the routes"
    return ApiError(404, message, code=_CODES[404])


def _close_routes(path: str, known: Sequence[str]) -> list[str]:
    """Return up to three suggested routes: those with the same ending first, then similar ones."""
    path = path.rstrip("/").lower()
    if not path:
        return []
    same_end = [one for one in known if one != "/" and (one.endswith(path) or path.endswith(one))]
    similar = difflib.get_close_matches(path, known)
    return list(dict.fromkeys([*same_end, *similar]))[:_MAX_CLOSE]


def _plain(error: HTTPException) -> str:
    if error.status_code == 404:
        return "there is no such route; /openapi.json lists the routes"
    return str(error.detail)[:_MAX_MESSAGE]


def _given(value: object) -> str:
    """Return ", not VALUE" for a rejected value that is a short number, otherwise ""."""
    # Other values may be long or contain the prompt.
    return f", not {value}" if isinstance(value, int | float) and abs(value) < _SHORT else ""


def _validation_error(error: RequestValidationError) -> ApiError:
    """Convert pydantic's first validation error. The message names the field by its path in the
    body.
    """
    problems: Sequence[Any] = error.errors()
    first: Mapping[str, Any] = (
        problems[0] if problems else {"loc": (), "msg": "the request is invalid", "type": ""}
    )
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is not valid JSON", code="invalid_json")
    path = [str(part) for part in first["loc"][1:]]
    path += [first["ctx"]["field"]] if first["type"] == "unsupported_field" else []
    field = path[0] if path else "body"
    message = f"{'.'.join(path) or 'body'}: {first['msg']}{_given(first.get('input', ''))}"
    return ApiError(400, message[:_MAX_MESSAGE], code="invalid_request", param=field)
