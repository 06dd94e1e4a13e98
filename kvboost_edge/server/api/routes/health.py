"""What a supervisor asks: /health (does it live), /ready (send it work), /version, and /metrics for
Prometheus.

/health and /ready tell the truth about the engine thread. /metrics needs the API key when keys are
set, an admin key when there are several: it names the model and shows how the server is used.
"""

from __future__ import annotations

import asyncio
import contextlib

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from kvboost_edge import __version__
from kvboost_edge.server.errors import ApiError
from kvboost_edge.server.models.exposition import CONTENT_TYPE
from kvboost_edge.server.models.server import server_of

__all__ = ["OPEN_PATHS", "router"]

OPEN_PATHS = frozenset({"/health", "/ready", "/version"})
_NO_STORE = {"Cache-Control": "no-store"}

router = APIRouter()


@router.api_route("/health", methods=["GET", "HEAD"], include_in_schema=False)
async def health(request: Request) -> Response:
    """200 while the engines of all loaded models compute requests, 503 with the reason when it does
    not.
    """
    error = server_of(request).stopped()
    if error is not None:
        raise error
    return JSONResponse({"status": "ok"}, headers=_NO_STORE)


@router.api_route("/ready", methods=["GET", "HEAD"], include_in_schema=False)
async def ready(request: Request) -> Response:
    """200 while new requests are welcome; 503 from the moment the server was told to end."""
    trouble = server_of(request).trouble()
    if trouble is not None:
        raise ApiError(503, trouble, code="not_ready", headers=_NO_STORE)
    return JSONResponse({"status": "ready"}, headers=_NO_STORE)


@router.api_route("/version", methods=["GET", "HEAD"], include_in_schema=False)
async def version() -> Response:
    """The package's version."""
    return JSONResponse({"version": __version__})


@router.api_route("/metrics", methods=["GET", "HEAD"], include_in_schema=False)
async def metrics(request: Request) -> Response:
    """Prometheus text. Reading the engine may wait for its bookkeeping, so it happens beside the
    event loop.
    """
    server = server_of(request)
    with contextlib.ExitStack() as looks:
        for state in server.models.loaded:
            looks.enter_context(state.looks.begin())
        body = await asyncio.to_thread(server.metrics.render)
    return Response(body, headers=_NO_STORE, media_type=CONTENT_TYPE)
