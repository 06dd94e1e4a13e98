"""Routes of OpenAI's Responses API: create, retrieve and delete responses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Send

from kvboost_edge.errors import RequestError
from kvboost_edge.server.api.bodies import JsonRoute
from kvboost_edge.server.api.bounds import BOUNDS, COUNTS
from kvboost_edge.server.api.chat_requests import RenderedChat
from kvboost_edge.server.api.checks import respond_when_loaded
from kvboost_edge.server.api.compat.responses.items import references
from kvboost_edge.server.api.compat.responses.schemas import ResponseRequest
from kvboost_edge.server.api.compat.responses.translate import FIELDS, to_chat
from kvboost_edge.server.api.compat.responses.writer import ResponsesWriter
from kvboost_edge.server.api.compat.translated import renamed
from kvboost_edge.server.api.generation import respond
from kvboost_edge.server.api.listing import page_of
from kvboost_edge.server.api.schemas.chat import ChatRequest
from kvboost_edge.server.api.schemas.strict import bad_field
from kvboost_edge.server.api.turns import named_by_field
from kvboost_edge.server.api_errors import ApiError
from kvboost_edge.server.models.server import server_of
from kvboost_edge.server.response_types import ERRORS
from kvboost_edge.server.state import ModelState, tenant_of
from kvboost_edge.server.work.bridge import off_loop
from kvboost_edge.server.work.stored_responses import StoredResponse
from kvboost_edge.server.work.streams import dumps_long, json_response

__all__ = ["router"]

router = APIRouter(route_class=JsonRoute, responses=ERRORS)

# (name, JSON data) of an event
_EVENT = {"type": "object", "properties": {"event": {"type": "string"}, "data": {"type": "string"}}}
_STREAM = {"content": {"text/event-stream": {"schema": _EVENT}}}
Json = dict[str, Any]
_LONG = 1 << 14  # characters or bytes that translate in a fraction of a millisecond
ResponseId = Annotated[str, Path(min_length=1, max_length=256)]


@router.post(
    "/v1/responses",
    response_class=JSONResponse,
    responses={200: _STREAM},
)
async def create(request: Request, body: ResponseRequest) -> Response:
    """Generate a response to a conversation, which may continue a stored response.

    With `stream`, the answer is a stream of server-sent events.
    """

    async def work(state: ModelState, send: Send) -> None:
        if body.stream_options is not None and not body.stream:
            raise bad_field("stream_options", "stream_options is only allowed when stream is true")
        tenant = tenant_of(request)
        turns = _conversation(state, tenant, body.previous_response_id)
        holders = _holders(state, tenant, body.input)
        with renamed(FIELDS):

            def read() -> tuple[list[Json], ChatRequest]:
                sent = _resolved(body.input, holders)
                return sent, to_chat(body, [*_items(turns), *sent])

            size = body.size + sum(turn.size for turn in (*turns, *holders))
            sent, chat = read() if size < _LONG else await off_loop(read, size)

            def keep(name: str, answer: bytes, items: Sequence[Json]) -> bool:
                ids = frozenset(item["id"] for item in (*sent, *items))
                turn = StoredResponse(
                    answer, json.dumps(sent).encode(), body.previous_response_id, ids
                )
                return state.remembered.keep(tenant, name, turn)

            kept = keep if body.store is not False else None
            try:
                rendered = RenderedChat(state, chat)
                writer = ResponsesWriter(state, body, kept, rendered.body.stop or ())
                await respond(request, send, rendered, writer)
            except RequestError as error:
                raise named_by_field(error, chat) from error

    return respond_when_loaded(request, body.model, work)


@router.get(
    "/v1/responses/{response_id}",
    response_class=JSONResponse,
)
async def retrieve(
    request: Request, response_id: ResponseId, stream: Annotated[bool, Query()] = False
) -> Response:
    """Return a stored response."""
    turn = _found(request, response_id)
    if stream:
        raise bad_field("stream", "stream=true is not supported for stored responses; leave it out")
    return Response(turn.answer, media_type="application/json")


@router.delete(
    "/v1/responses/{response_id}",
    response_class=JSONResponse,
)
async def delete(request: Request, response_id: ResponseId) -> Response:
    """Delete a stored response. Later responses of its conversation can no longer be continued."""
    if not server_of(request).shared.remembered.forget(tenant_of(request), response_id):
        raise _unknown(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.get(
    "/v1/responses/{response_id}/input_items",
    response_class=JSONResponse,
)
async def input_items(
    request: Request,
    response_id: ResponseId,
    limit: Annotated[int, Query(ge=int(BOUNDS["listed"].low), le=int(BOUNDS["listed"].high))] = 20,
    order: Annotated[Literal["asc", "desc"], Query()] = "desc",
    after: Annotated[str | None, Query(max_length=256)] = None,
) -> Response:
    """List the input items of a stored response.

    Items of earlier responses in the conversation are not included.
    """
    turn = _found(request, response_id)

    def listed() -> bytes:
        items = json.loads(turn.sent)
        return dumps_long(page_of(items if order == "asc" else items[::-1], limit, after))

    return Response(await off_loop(listed), media_type="application/json")


def _conversation(state: ModelState, tenant: str | None, name: str | None) -> list[StoredResponse]:
    """Return the stored turns that a request continues.

    Raises:
        ApiError: a turn is not stored (404).
    """
    if name is None:
        return []
    try:
        return state.remembered.conversation(tenant, name)
    except KeyError as error:
        missing = str(error.args[0])
        raise _unknown(
            missing, "" if missing == name else f", which {name[:80]!r} continues,"
        ) from None


def _holders(state: ModelState, tenant: str | None, items: Sequence[Json]) -> list[StoredResponse]:
    """Return the stored turns that hold the items which a request refers to.

    Raises:
        ApiError: an item is not stored (404).
    """
    try:
        return state.remembered.holding(tenant, references(items))
    except KeyError as error:
        message = (
            f"the item {str(error.args[0])[:80]!r} is not stored here: its response was created "
            "with store=false or another key, deleted, or evicted; send the item itself"
        )
        raise ApiError(404, message, code="item_not_found", param="input") from None


def _resolved(items: Sequence[Json], holders: Sequence[StoredResponse]) -> list[Json]:
    """Replace references by the items of the turns that hold them."""
    stored: dict[str, Json] = {}
    for turn in reversed(holders):
        stored |= {item["id"]: item for item in _items_of(turn)}
    return [stored[item["id"]] if item["type"] == "item_reference" else item for item in items]


def _items_of(turn: StoredResponse) -> list[Json]:
    """Return the input and output items of a turn."""
    return [*json.loads(turn.sent), *json.loads(turn.answer)["output"]]


def _items(turns: list[StoredResponse]) -> list[Json]:
    """Return the items of all turns in order.

    Raises:
        ApiError: there are too many items (400).
    """
    # No context holds this many items, and reading more would delay other requests.
    items: list[Json] = []
    for turn in turns:
        items += _items_of(turn)
        if len(items) > COUNTS["continued"].high:
            message = (
                f"the conversation has more than {COUNTS['continued'].high} items; begin a new one"
            )
            raise ApiError(400, message, code="request_too_large", param="previous_response_id")
    return items


def _found(request: Request, name: str) -> StoredResponse:
    turn = server_of(request).shared.remembered.find(tenant_of(request), name)
    if turn is None:
        raise _unknown(name)
    return turn


def _unknown(name: str, which: str = "") -> ApiError:
    message = (
        f"the response {name[:80]!r}{which} is not stored here: it was created with store=false or "
        "another key, deleted, or evicted; send the whole conversation"
    )
    return ApiError(404, message, code="response_not_found", param="previous_response_id")
