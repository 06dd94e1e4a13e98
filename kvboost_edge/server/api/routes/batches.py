"""Routes for batches of requests, in OpenAI's format."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import JSONResponse, Response

from kvboost_edge.server.api.bodies import JsonRoute
from kvboost_edge.server.api.bounds import BOUNDS
from kvboost_edge.server.api.listing import page_of
from kvboost_edge.server.api.routes.files import lifetime
from kvboost_edge.server.api.schemas.batches import BatchRequest, window_seconds
from kvboost_edge.server.models.server import batches_of, space_of
from kvboost_edge.server.response_types import ERRORS, BatchList, BatchObject
from kvboost_edge.server.work.bridge import off_loop
from kvboost_edge.server.work.streams import json_response

__all__ = ["router"]

router = APIRouter(route_class=JsonRoute, responses=ERRORS)

BatchId = Annotated[str, Path(min_length=1, max_length=256)]


@router.post("/v1/batches", response_class=JSONResponse, responses={200: {"model": BatchObject}})
async def create(request: Request, body: BatchRequest) -> Response:
    """Answer all lines of an uploaded file in the background."""
    space = space_of(request)
    service = batches_of(request)
    asked = body.output_expires_after
    seconds = service.retention
    if asked is not None:
        seconds = lifetime(request, asked.seconds, "output_expires_after")
    batch = await off_loop(
        lambda: space.create_batch(
            body.input_file_id,
            body.endpoint,
            body.completion_window,
            window_seconds(body.completion_window),
            seconds,
            body.metadata,
        )
    )
    service.start()
    return json_response(batch.as_answer())


@router.get("/v1/batches", response_class=JSONResponse, responses={200: {"model": BatchList}})
async def batches(
    request: Request,
    limit: Annotated[int, Query(ge=int(BOUNDS["listed"].low), le=int(BOUNDS["listed"].high))] = 20,
    after: Annotated[str | None, Query(max_length=256)] = None,
) -> Response:
    """List the batches, newest first."""
    found = [one.as_answer() for one in space_of(request).batches()]
    return json_response(page_of(found, limit, after))


@router.get(
    "/v1/batches/{batch_id}", response_class=JSONResponse, responses={200: {"model": BatchObject}}
)
async def batch(request: Request, batch_id: BatchId) -> Response:
    """Return a batch and its progress."""
    return json_response(space_of(request).batch(batch_id).as_answer())


@router.post(
    "/v1/batches/{batch_id}/cancel",
    response_class=JSONResponse,
    responses={200: {"model": BatchObject}},
)
async def cancel(request: Request, batch_id: BatchId) -> Response:
    """Cancel a batch. The answers so far become its output file."""
    space = space_of(request)
    found = space.batch(batch_id)
    await batches_of(request).cancel(space, found)
    return json_response(found.as_answer())
