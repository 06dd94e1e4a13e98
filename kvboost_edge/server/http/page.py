"""Web page at `/`, served from a fixed table of files in the package.

The files are read once, when the module is imported. Each file has a separate route, so a request's
path never reaches the file system. The files contain no secrets and need no API key, but the API
calls of the page do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import NamedTuple

from fastapi import APIRouter, Request, Response

from kvboost_edge.server.http.headers import PAGE_HEADERS

__all__ = ["STATIC_FILES", "router"]

_HTML = "text/html; charset=utf-8"
_SCRIPT = "text/javascript; charset=utf-8"

# Media type of each file. The first file is the page.
STATIC_FILES = {
    "index.html": _HTML,
    "style.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "answer.js": _SCRIPT,
    "api.js": _SCRIPT,
    "bar.js": _SCRIPT,
    "causes.js": _SCRIPT,
    "chat.js": _SCRIPT,
    "chatexport.js": _SCRIPT,
    "chats.js": _SCRIPT,
    "commands.js": _SCRIPT,
    "confirm.js": _SCRIPT,
    "conversation.js": _SCRIPT,
    "dialog.js": _SCRIPT,
    "difference.js": _SCRIPT,
    "dom.js": _SCRIPT,
    "errorbox.js": _SCRIPT,
    "figures.js": _SCRIPT,
    "format.js": _SCRIPT,
    "jsonfields.js": _SCRIPT,
    "jsontext.js": _SCRIPT,
    "keys.js": _SCRIPT,
    "live.js": _SCRIPT,
    "main.js": _SCRIPT,
    "modelactions.js": _SCRIPT,
    "modelpicker.js": _SCRIPT,
    "modelrow.js": _SCRIPT,
    "models.js": _SCRIPT,
    "modelsview.js": _SCRIPT,
    "palette.js": _SCRIPT,
    "poolmap.js": _SCRIPT,
    "presetchoice.js": _SCRIPT,
    "presets.js": _SCRIPT,
    "progress.js": _SCRIPT,
    "promptrow.js": _SCRIPT,
    "prompts.js": _SCRIPT,
    "pulls.js": _SCRIPT,
    "pullview.js": _SCRIPT,
    "reasoning.js": _SCRIPT,
    "sampling.js": _SCRIPT,
    "settings.js": _SCRIPT,
    "sparkline.js": _SCRIPT,
    "sse.js": _SCRIPT,
    "storage.js": _SCRIPT,
    "theme.js": _SCRIPT,
    "tiers.js": _SCRIPT,
    "toolcalls.js": _SCRIPT,
    "turn.js": _SCRIPT,
}


class _Asset(NamedTuple):
    """A file that is ready to send, with an entity tag computed from its bytes."""

    body: bytes
    media_type: str
    etag: str


def _read(name: str) -> _Asset:
    body = (files("kvboost_edge.server.http") / "static" / name).read_bytes()
    return _Asset(body, STATIC_FILES[name], f'"{hashlib.sha256(body).hexdigest()[:32]}"')


def _answer(asset: _Asset, request: Request) -> Response:
    """Return the file, a 304 if the client has the same version, or only headers for HEAD."""
    headers = {**PAGE_HEADERS, "ETag": asset.etag, "Cache-Control": "no-cache"}
    if _matches(request.headers.get("if-none-match", ""), asset.etag):
        return Response(status_code=304, headers=headers)
    if request.method == "HEAD":
        headers["Content-Length"] = str(len(asset.body))
        return Response(headers=headers, media_type=asset.media_type)
    return Response(asset.body, headers=headers, media_type=asset.media_type)


def _matches(if_none_match: str, etag: str) -> bool:
    """Return whether If-None-Match contains this entity tag."""
    # RFC 9110 requires the weak comparison for this header.
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return etag in tags or "*" in tags


def _handler(asset: _Asset) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        return _answer(asset, request)

    return serve


def _build() -> APIRouter:
    made = APIRouter()
    for name in STATIC_FILES:
        path = "/" if name == "index.html" else f"/static/{name}"
        made.add_api_route(
            path, _handler(_read(name)), methods=["GET", "HEAD"], include_in_schema=False
        )
    return made


router = _build()
