"""Routes of OpenAI's completions and chat completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Send

from kvboost_edge.errors import RequestError
from kvboost_edge.server.api.bodies import JsonRoute
from kvboost_edge.server.api.chat_requests import RenderedChat
from kvboost_edge.server.api.checks import respond_when_loaded
from kvboost_edge.server.api.completion_requests import RenderedCompletion
from kvboost_edge.server.api.generation import respond
from kvboost_edge.server.api.openai_writer import OpenAIWriter
from kvboost_edge.server.api.schemas.chat import ChatRequest
from kvboost_edge.server.api.schemas.completions import CompletionRequest
from kvboost_edge.server.api.turns import named_by_field
from kvboost_edge.server.response_types import ERRORS, ChatResponse, CompletionResponse
from kvboost_edge.server.state import ModelState

__all__ = ["router"]

router = APIRouter(route_class=JsonRoute, responses=ERRORS)

_STREAM = {"content": {"text/event-stream": {"schema": {"type": "string"}}}}


@router.post(
    "/v1/completions",
    response_class=JSONResponse,
    responses={200: {"model": CompletionResponse, **_STREAM}},
)
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continue one or more prompts.

    With `stream`, the answer is a stream of server-sent events.
    """

    async def work(state: ModelState, send: Send) -> None:
        rendered = RenderedCompletion(state, body)
        await respond(request, send, rendered, OpenAIWriter(rendered))

    return respond_when_loaded(request, body.model, work)


@router.post(
    "/v1/chat/completions",
    response_class=JSONResponse,
    responses={200: {"model": ChatResponse, **_STREAM}},
)
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """Generate the next message of a conversation.

    With `stream`, the answer is a stream of server-sent events.
    """

    async def work(state: ModelState, send: Send) -> None:
        try:
            rendered = RenderedChat(state, body)
            await respond(request, send, rendered, OpenAIWriter(rendered))
        except RequestError as error:
            raise named_by_field(error, body) from error

    return respond_when_loaded(request, body.model, work)
