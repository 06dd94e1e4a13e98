"""Small valid bodies of each API: one for every route that takes a body, and the format of errors
and streams. They are written independently of the server, so that tests can compare the two.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from kvboost_edge.server.app import ROUTERS

MODEL = "kvboost-edge/demo"
Json = dict[str, Any]


def said(text: Any) -> list[Json]:
    """Return a conversation of one message."""
    return [{"role": "user", "content": text}]


ASKED: dict[str, Callable[[str], Json]] = {
    "/v1/completions": lambda text: {"prompt": text, "max_tokens": 2},
    "/v1/chat/completions": lambda text: {"messages": said(text), "max_tokens": 2},
    "/v1/messages": lambda text: {"messages": said(text), "max_tokens": 2},
    "/v1/messages/count_tokens": lambda text: {"messages": said(text)},
    "/v1/responses": lambda text: {"input": text, "max_output_tokens": 2},
    "/api/chat": lambda text: {
        "model": MODEL,
        "messages": said(text),
        "options": {"num_predict": 2},
    },
    "/api/generate": lambda text: {"model": MODEL, "prompt": text, "options": {"num_predict": 2}},
    "/api/embed": lambda text: {"model": MODEL, "input": text},
    "/api/embeddings": lambda text: {"model": MODEL, "prompt": text},
    "/api/show": lambda text: {"model": MODEL},
    "/completion": lambda text: {"prompt": text, "n_predict": 2},
    "/infill": lambda text: {"input_prefix": text, "input_suffix": ".", "n_predict": 2},
    "/apply-template": lambda text: {"messages": said(text)},
    "/tokenize": lambda text: {"prompt": text},
    "/detokenize": lambda text: {"tokens": [1, 2, 3]},
    "/v1/embeddings": lambda text: {"input": text},
    "/v1/rerank": lambda text: {"query": text, "documents": [text]},
    "/v1/warm": lambda text: {"messages": said(text)},
    "/v1/unpin": lambda text: {"text": text},
    "/cache/reset": lambda text: {},
    "/v1/sessions": lambda text: {"name": "x", "messages": said(text)},
}
"""Of each path the body that asks about a text; of those that generate, for two tokens."""

GENERATING: dict[str, str] = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/api/chat": "options.num_predict",
    "/api/generate": "options.num_predict",
    "/completion": "n_predict",
}
"""The paths that generate, and the field that says how many tokens. (/infill does with other
models.)
"""

TEXTS = [path for path in ASKED if "hello" in json.dumps(ASKED[path]("hello"))]
"""The paths whose bodies hold the text itself."""

_ROUTES = [(route.path, route.methods) for router in ROUTERS for route in router.routes]
PATHS = tuple(dict.fromkeys(path for path, methods in _ROUTES if "POST" in methods))
READ = tuple(
    dict.fromkeys(
        (path, method) for path, methods in _ROUTES for method in sorted(methods - {"POST", "HEAD"})
    )
)
"""The server's own routes: paths that take a body, and (path, method) of those that take none."""


def asked(path: str, text: str, *, tokens: int | None = None, **more: Any) -> Json:
    """Return the body for a path with other fields, and with another token limit if the route
    generates.
    """
    body = {**ASKED[path](text), **more}
    if tokens is not None and path in GENERATING:
        *outer, name = GENERATING[path].split(".")
        (body.setdefault(outer[0], {}) if outer else body)[name] = tokens
    return body


def error_text(path: str, content: bytes) -> str:
    """Return the message of an error, after checking that it has the format of the path's API."""
    answer = json.loads(content)
    if path.startswith("/api/"):
        assert answer.keys() == {"error"}, answer
        message = answer["error"]
    elif path.startswith("/v1/messages"):
        assert (answer.keys(), answer["type"]) == ({"type", "error"}, "error"), answer
        assert answer["error"].keys() == {"type", "message"}, answer
        message = answer["error"]["message"]
    elif path in ("/completion", "/infill", "/props", "/apply-template") or path.startswith(
        "/slots"
    ):
        assert answer.keys() == {"error"}, answer
        assert answer["error"].keys() == {"code", "message", "type"}, answer
        message = answer["error"]["message"]
    else:
        assert answer.keys() == {"error"}, answer
        assert answer["error"].keys() == {"message", "type", "param", "code"}, answer
        message = answer["error"]["message"]
    assert isinstance(message, str), answer
    return message
