"""Error bodies in the format of each API."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from kvboost_edge.server.response_types import ErrorResponse

__all__ = ["ErrorInfo", "id_headers", "shape_of"]


class ErrorInfo(Protocol):
    """Content of an error response, see `ApiError`."""

    status_code: int
    message: str
    kind: str
    code: str
    param: str | None


Shape = Callable[[ErrorInfo], Mapping[str, Any]]

_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _openai(error: ErrorInfo) -> ErrorResponse:
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        }
    }


def _anthropic(error: ErrorInfo) -> dict[str, Any]:
    kind = _ANTHROPIC_KINDS.get(
        error.status_code, "api_error" if error.status_code >= 500 else "invalid_request_error"
    )
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _ollama(error: ErrorInfo) -> dict[str, Any]:
    return {"error": error.message}


def _llama_cpp(error: ErrorInfo) -> dict[str, Any]:
    return {"error": {"code": error.status_code, "message": error.message, "type": error.kind}}


_BY_PATH: Mapping[str, Shape] = {
    "/v1/messages": _anthropic,
    **dict.fromkeys(("/completion", "/infill", "/props", "/slots", "/apply-template"), _llama_cpp),
}
_WITH_PARAMETERS = ("/v1/messages", "/slots")  # paths below these have the same format


# The path decides, because an error may occur before a route is matched.
def shape_of(path: str) -> Shape:
    """Return the error format of the API that a path belongs to. OpenAI's format is the default."""
    if path.startswith("/api/"):
        return _ollama
    api = next((api for api in _WITH_PARAMETERS if path.startswith(f"{api}/")), path)
    return _BY_PATH.get(api, _openai)


def id_headers(path: str) -> tuple[bytes, ...]:
    """Return the names of the response headers for the request id, in the API of a path."""
    return (b"x-request-id", b"request-id") if shape_of(path) is _anthropic else (b"x-request-id",)
