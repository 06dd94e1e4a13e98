"""Routes for supervisors: /health (liveness), /ready (readiness), /version and /metrics.

/health and /ready report the state of the engine thread. /metrics reveals the model and the use of
the server, so it needs an API key if keys are configured, and an admin key if there are several.
"""

from __future__ import annotations

import asyncio
import contextlib

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from kvboost_edge import __version__
from kvboost_edge.server.api_errors import ApiError
from kvboost_edge.server.models.exposition import CONTENT_TYPE
from kvboost_edge.server.models.server import server_of

__all__ = ["OPEN_PATHS", "router"]

OPEN_PATHS = frozenset({"/health", "/ready", "/version"})
_NO_STORE = {"Cache-Control": "no-store"}

router = APIRouter()


@router.api_route("/health", methods=["GET", "HEAD"], include_in_schema=False)
async def health(request: Request) -> Response:
    """Return 200 while the engines of all loaded models run, or 503 with the reason."""
    error = server_of(request).stopped()
    if error is not None:
        raise error
    return JSONResponse({"status": "ok"}, headers=_NO_STORE)


@router.api_route("/ready", methods=["GET", "HEAD"], include_in_schema=False)
async def ready(request: Request) -> Response:
    """Return 200 while the server accepts requests, or 503 once it shuts down."""
    trouble = server_of(request).trouble()
    if trouble is not None:
        raise ApiError(503, trouble, code="not_ready", headers=_NO_STORE)
    return JSONResponse({"status": "ready"}, headers=_NO_STORE)


@router.api_route("/version", methods=["GET", "HEAD"], include_in_schema=False)
async def version() -> Response:
    """Return the version of KVBoost Edge."""
    return JSONResponse({"version": __version__})


@router.api_route("/metrics", methods=["GET", "HEAD"], include_in_schema=False)
async def metrics(request: Request) -> Response:
    """Return the server's metrics in the Prometheus text format."""
    # Reading the statistics may wait for an engine's lock, so a thread does it.
    server = server_of(request)
    with contextlib.ExitStack() as looks:
        for state in server.models.loaded:
            looks.enter_context(state.looks.begin())
        body = await asyncio.to_thread(server.metrics.render)
    return Response(body, headers=_NO_STORE, media_type=CONTENT_TYPE)
