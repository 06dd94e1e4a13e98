"""Web page at `/`, and its files at `/static`.

The files are read once, when the module is imported. Each file has a separate route, so a request's
path never reaches the file system. The files contain no secrets and need no API key, but the API
calls of the page do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import PurePath
from typing import NamedTuple

from fastapi import APIRouter, Request, Response

from kvboost_edge.server.http.headers import PAGE_HEADERS

__all__ = ["STATIC_FILES", "router"]

_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_FOLDER = files("kvboost_edge.server.http") / "static"

# Files with other suffixes, such as an editor's copies, are not served.
STATIC_FILES = sorted(
    entry.name for entry in _FOLDER.iterdir() if PurePath(entry.name).suffix in _MEDIA_TYPES
)
"""Names of the files."""


class _Asset(NamedTuple):
    """A file that is ready to send, with an entity tag computed from its bytes."""

    body: bytes
    media_type: str
    etag: str


def _read(name: str) -> _Asset:
    body = (_FOLDER / name).read_bytes()
    media_type = _MEDIA_TYPES[PurePath(name).suffix]
    return _Asset(body, media_type, f'"{hashlib.sha256(body).hexdigest()[:32]}"')


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
