"""Routes of cache-miss reports."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from kvboost_edge.server.api_errors import ApiError
from kvboost_edge.server.cache_report.recent_requests import RequestRecord
from kvboost_edge.server.models.server import server_of
from kvboost_edge.server.response_types import ERRORS, PromptCache, PromptCaches
from kvboost_edge.server.state import tenant_of
from kvboost_edge.server.work.bridge import off_loop
from kvboost_edge.server.work.streams import json_response

__all__ = ["router"]

router = APIRouter(responses=ERRORS)

_SHOWN = 50
_NO_STORE = {"Cache-Control": "no-store"}


@router.get("/v1/requests", response_class=JSONResponse, responses={200: {"model": PromptCaches}})
async def requests(request: Request) -> Response:
    """List cache-miss reports on the last 50 prompts of this API key, latest first.

    These reports contain no texts. /v1/requests/{request_id}/cache returns the texts of one
    request.
    """
    records = _latest(request)
    kept = server_of(request).settings.request_history
    data = [
        record.diagnosis.as_json() for record in records[:_SHOWN] if record.diagnosis is not None
    ]
    answer: PromptCaches = {"object": "list", "data": data, "kept_seconds": kept}
    return json_response(answer, headers=_NO_STORE)


@router.get(
    "/v1/requests/{request_id}/cache",
    response_class=JSONResponse,
    responses={200: {"model": PromptCache}},
)
async def request_cache(request: Request, request_id: str) -> Response:
    """Return the cache-miss report of a request: first diverging token, texts and cause.

    The id is the x-request-id header of the answer or an unambiguous beginning of it, or "last" for
    the latest request.
    """
    server = server_of(request)
    tenant = tenant_of(request)
    kept = server.settings.request_history
    if not kept:
        raise ApiError(
            404,
            "requests are not kept, because the server runs with --request-history 0; "
            "restart it with a higher value",
            code="not_found",
        )
    latest = _latest(request)
    ids = [one.request_id for one in latest]
    begun = [one for one in ids if one.startswith(request_id)]
    wanted = request_id
    if ids and request_id == "last":
        wanted = ids[0]
    elif len(begun) == 1:
        wanted = begun[0]
    found = None
    for one in server.models.all:
        record = one.history.find(tenant, wanted)
        if record is not None and record.diagnosis is not None:
            # Decoding the texts needs the model's tokenizer.
            explained = None if one.state is None else one.state.doctor.explained(tenant, record)
            found = record.diagnosis if explained is None else await off_loop(explained)
    if found is None:
        raise ApiError(
            404,
            f"no finished request {request_id[:64]!r} of this API key is kept, or several ids "
            f"begin with this text; requests are kept for {kept:g} seconds (--request-history)",
            code="not_found",
        )
    return json_response(found.as_json(), headers=_NO_STORE)


def _latest(request: Request) -> list[RequestRecord]:
    """Return finished requests of this tenant on all models, latest first."""
    tenant = tenant_of(request)
    found = []
    for one in server_of(request).models.all:
        if one.state is not None:
            one.state.doctor.settle()
        found += [record for record in one.history.latest(tenant) if record.diagnosis is not None]
    return sorted(found, key=lambda record: record.at, reverse=True)
