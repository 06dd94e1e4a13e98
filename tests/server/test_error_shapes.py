"""Tests of the error format: every API uses its own, whichever part of the server raises the error."""

import pytest

from kvboost_edge.server.api_errors import ApiError, error_body

REFUSED = ApiError(404, "the model 'x' is not served here", code="model_not_found", param="model")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {
                "error": {
                    "message": REFUSED.message,
                    "type": "not_found_error",
                    "param": "model",
                    "code": "model_not_found",
                }
            },
        ),
        (
            "/v1/messages",
            {"type": "error", "error": {"type": "not_found_error", "message": REFUSED.message}},
        ),
        (
            "/v1/messages/count_tokens",
            {"type": "error", "error": {"type": "not_found_error", "message": REFUSED.message}},
        ),
        ("/v1/messages_of_others", None),
        ("/api/chat", {"error": REFUSED.message}),
        (
            "/completion",
            {"error": {"code": 404, "message": REFUSED.message, "type": "not_found_error"}},
        ),
    ],
)
def test_an_error_has_its_apis_format(path, body):
    assert error_body(REFUSED, path) == (error_body(REFUSED) if body is None else body)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (413, "request_too_large"),
        (418, "invalid_request_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_anthropic_error_types_follow_the_status(status, kind):
    assert error_body(ApiError(status, "no", code="x"), "/v1/messages")["error"]["type"] == kind
