"""The API's routes. Each checks its body by a schema and hands over to the module that does the work."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Send

from kvboost_edge.server.api.answers import ChatAnswer, CompletionAnswer
from kvboost_edge.server.api.bodies import JsonRoute
from kvboost_edge.server.api.chat import chat_order
from kvboost_edge.server.api.checks import check_model
from kvboost_edge.server.api.completions import completion_order
from kvboost_edge.server.api.generation import respond
from kvboost_edge.server.api.routes import cache, text
from kvboost_edge.server.api.schemas.chat import ChatRequest
from kvboost_edge.server.api.schemas.completions import CompletionRequest
from kvboost_edge.server.api.schemas.text import ERRORS
from kvboost_edge.server.state import state_of
from kvboost_edge.server.work.bridge import Answer

__all__ = ["router"]

router = APIRouter(route_class=JsonRoute)

_STREAM = {"content": {"text/event-stream": {"schema": {"type": "string"}}}}


@router.post(
    "/v1/completions", response_class=JSONResponse, responses={200: {"model": CompletionAnswer, **_STREAM}, **ERRORS}
)
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continue one prompt or several."""

    async def work(send: Send) -> None:
        state = state_of(request)
        check_model(state, body.model)
        await respond(request, send, completion_order(state, body))

    return Answer(work)


@router.post(
    "/v1/chat/completions", response_class=JSONResponse, responses={200: {"model": ChatAnswer, **_STREAM}, **ERRORS}
)
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation."""

    async def work(send: Send) -> None:
        state = state_of(request)
        check_model(state, body.model)
        await respond(request, send, chat_order(state, body))

    return Answer(work)


# Routes are tried in order, so the busy ones come first.
router.include_router(text.router)
router.include_router(cache.router)
