"""What became of requests in the cache: why a prompt was read again."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from kvboost_edge.server.api.answers import ERRORS
from kvboost_edge.server.doctor.shown import PromptCache, PromptCaches
from kvboost_edge.server.errors import ApiError
from kvboost_edge.server.state import state_of
from kvboost_edge.server.work.bridge import off_loop
from kvboost_edge.server.work.streams import json_response

__all__ = ["router"]

router = APIRouter(responses=ERRORS)

_SHOWN = 50
_NO_STORE = {"Cache-Control": "no-store"}


@router.get("/v1/requests", response_class=JSONResponse, responses={200: {"model": PromptCaches}})
async def requests(request: Request) -> Response:
    """What became of the last prompts of this API key, the latest first; texts are in the route of each."""
    doctor = state_of(request).doctor
    records = doctor.latest(_tenant(request), _SHOWN)
    data = [record.diagnosis.as_json() for record in records if record.diagnosis is not None]
    kept = doctor.history.seconds
    return json_response({"object": "list", "data": data, "kept_seconds": kept}, headers=_NO_STORE)


@router.get("/v1/requests/{request_id}/cache", response_class=JSONResponse, responses={200: {"model": PromptCache}})
async def request_cache(request: Request, request_id: str) -> Response:
    """Where the prompt of a request left what was asked before, and why; the id is the x-request-id of its answer,
    "last" the latest."""
    doctor, tenant = state_of(request).doctor, _tenant(request)
    if not doctor.history.seconds:
        raise ApiError(404, "no request is kept: the server runs with --request-history 0", code="not_found")
    latest = request_id == "last"
    record = next(iter(doctor.latest(tenant, 1)), None) if latest else doctor.find(tenant, request_id)
    explained = None if record is None else doctor.explained(tenant, record)
    if explained is None:
        raise ApiError(
            404,
            f"no finished request {request_id[:64]!r} of this API key is kept; they are for "
            f"{doctor.history.seconds:g} seconds (--request-history)",
            code="not_found",
        )
    return json_response((await off_loop(explained)).as_json(), headers=_NO_STORE)


def _tenant(request: Request) -> str | None:
    tenant: str | None = request.scope["kvboost"].get("tenant")
    return tenant
