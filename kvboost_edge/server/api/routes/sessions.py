"""Routes of named sessions: save, list, read, restore and delete."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Send

from kvboost_edge.server.api.bodies import JsonRoute
from kvboost_edge.server.api.bounds import COUNTS
from kvboost_edge.server.api.checks import check_prefill, check_priority, respond_when_loaded
from kvboost_edge.server.api.schemas.sessions import RestoreRequest, SessionRequest
from kvboost_edge.server.api.session_saving import (
    delete_session,
    keep_session,
    missing_session,
    saved_prefill,
    saved_view,
    session_view,
)
from kvboost_edge.server.models.server import server_of
from kvboost_edge.server.response_types import (
    ERRORS,
    DeleteSessionResponse,
    SavedSession,
    SessionContents,
    SessionList,
)
from kvboost_edge.server.state import ModelState, tenant_of
from kvboost_edge.server.work.bridge import off_loop
from kvboost_edge.server.work.streams import dumps, dumps_long, json_response, send_json
from kvboost_edge.tiers.disk.session_records import Session

__all__ = ["router"]

router = APIRouter(route_class=JsonRoute, responses=ERRORS)

_NO_STORE = {"Cache-Control": "no-store"}
Name = Annotated[
    str,
    Path(
        min_length=1,
        max_length=int(COUNTS["session_name"].high),
        description="Name of a session.",
    ),
]
Salt = Annotated[str | None, Query(min_length=1, max_length=int(COUNTS["cache_salt"].high))]


@router.post("/v1/sessions", response_class=JSONResponse, responses={200: {"model": SavedSession}})
async def save(request: Request, body: SessionRequest) -> Response:
    """Save a conversation's cached prefix under a name.

    The prefix is computed where it is not cached, and pinned until the session ends. A session of
    the same name is replaced.
    """

    async def work(state: ModelState, send: Send) -> None:
        body.check_together()
        kept = await keep_session(
            request,
            state,
            body.name,
            body,
            cache_salt=body.cache_salt,
            prefill=check_prefill(state, body.prefill),
            ttl=body.ttl,
            pin=body.pin,
            priority=check_priority(state, body.priority),
        )
        await send_json(send, dumps(saved_view(state.sessions, kept)))

    return respond_when_loaded(request, body.model, work)


@router.get("/v1/sessions", response_class=JSONResponse, responses={200: {"model": SessionList}})
async def sessions(request: Request, cache_salt: Salt = None) -> Response:
    """List this API key's sessions with one salt, by name, with the size of each in bytes."""
    store = server_of(request).shared.sessions
    tenant = tenant_of(request)
    found, (count, size) = await off_loop(
        lambda: (store.all(tenant, cache_salt), store.usage(tenant))
    )
    answer: SessionList = {
        "object": "list",
        "data": [session_view(store, info) for info in found],
        "sessions": count,
        "max_sessions": store.max_sessions,
        "bytes": size,
        "max_bytes": store.max_bytes,
    }
    return json_response(answer, headers=_NO_STORE)


@router.get(
    "/v1/sessions/{name}",
    response_class=JSONResponse,
    responses={200: {"model": SessionContents}},
)
async def session(request: Request, name: Name, cache_salt: Salt = None) -> Response:
    """Return a session with its messages, to continue the conversation."""
    store = server_of(request).shared.sessions
    found = await _found(request, name, cache_salt)
    content = found.content
    answer: SessionContents = {
        **session_view(store, found.info),
        "messages": content.get("messages"),
        "tools": content.get("tools"),
        "chat_template_kwargs": content.get("chat_template_kwargs"),
    }
    body = await off_loop(lambda: dumps_long(answer))
    return Response(body, headers=_NO_STORE, media_type="application/json")


@router.post(
    "/v1/sessions/{name}/restore",
    response_class=JSONResponse,
    responses={200: {"model": SavedSession}},
)
async def restore(request: Request, name: Name, body: RestoreRequest | None = None) -> Response:
    """Bring a session's prefix into the pool, pin it, and start its lifetime again.

    The prefix is computed with the prefill that the session was saved with.
    What the tiers no longer hold is recomputed.
    """
    given = RestoreRequest.model_validate({}) if body is None else body
    found = await _found(request, name, given.cache_salt)

    async def work(state: ModelState, send: Send) -> None:
        kept = await keep_session(
            request,
            state,
            name,
            found,
            cache_salt=given.cache_salt,
            prefill=saved_prefill(state, found.info, "name"),
            ttl=given.ttl,
            pin=given.pin,
            priority=check_priority(state, given.priority),
        )
        await send_json(send, dumps(saved_view(state.sessions, kept)))

    return respond_when_loaded(request, found.info.model, work)


@router.delete(
    "/v1/sessions/{name}",
    response_class=JSONResponse,
    responses={200: {"model": DeleteSessionResponse}},
)
async def delete(request: Request, name: Name, cache_salt: Salt = None) -> Response:
    """Delete a session and unpin its blocks. They stay cached until they are evicted."""
    unpinned = await delete_session(request, cache_salt, name)
    answer: DeleteSessionResponse = {
        "object": "session.deleted",
        "name": name,
        "deleted": True,
        "blocks_unpinned": unpinned,
    }
    return json_response(answer)


async def _found(request: Request, name: str, cache_salt: str | None) -> Session:
    """Return the tenant's session. Raises ApiError 404 if there is none."""
    store = server_of(request).shared.sessions
    tenant = tenant_of(request)
    found = await off_loop(lambda: store.find(tenant, cache_salt, name))
    if found is None:
        raise missing_session(name)
    return found
