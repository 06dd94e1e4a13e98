"""Routes of Anthropic's Messages API."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Send

from kvboost_edge.errors import RequestError
from kvboost_edge.server.api.bodies import JsonRoute
from kvboost_edge.server.api.checks import respond_when_loaded
from kvboost_edge.server.api.compat.anthropic.messages import RenderedMessages
from kvboost_edge.server.api.compat.anthropic.schemas import CountTokensRequest, MessagesRequest
from kvboost_edge.server.api.compat.anthropic.translate import translated
from kvboost_edge.server.api.compat.anthropic.writer import AnthropicWriter
from kvboost_edge.server.api.generation import respond
from kvboost_edge.server.api.prompt_encoding import encode_prompt, estimate_messages, size_of
from kvboost_edge.server.api.turns import named_by_field
from kvboost_edge.server.response_types import UNDECLARED_ERRORS
from kvboost_edge.server.state import ModelState
from kvboost_edge.server.work.bridge import off_loop
from kvboost_edge.server.work.streams import dumps, send_json

__all__ = ["router"]

router = APIRouter(route_class=JsonRoute, responses=UNDECLARED_ERRORS)

# (name, JSON data) of an event
_EVENT = {"type": "object", "properties": {"event": {"type": "string"}, "data": {"type": "string"}}}
_STREAM = {"content": {"text/event-stream": {"schema": _EVENT}}}


@router.post(
    "/v1/messages",
    response_class=JSONResponse,
    responses={200: _STREAM},
)
async def messages(request: Request, body: MessagesRequest) -> Response:
    """Generate the next message of a conversation, in Anthropic's format.

    With `stream`, the answer is a stream of server-sent events.
    """

    async def work(state: ModelState, send: Send) -> None:
        rendered = await off_loop(lambda: RenderedMessages(state, body))
        writer = AnthropicWriter(state, body, rendered.kept, rendered.body.stop or ())
        try:
            await respond(request, send, rendered, writer)
        except RequestError as error:
            raise named_by_field(error, rendered.body) from error

    return respond_when_loaded(request, body.model, work)


@router.post("/v1/messages/count_tokens", response_class=JSONResponse)
async def count(request: Request, body: CountTokensRequest) -> Response:
    """Count the prompt tokens of a conversation."""

    async def work(state: ModelState, send: Send) -> None:
        chat = await off_loop(lambda: translated(body))
        async with state.admit(request, estimate_messages(chat.messages, chat.tools)) as admission:
            answers = state.engine.kept_answers(tenant=admission.tenant, cache_salt=None)
            ids = await off_loop(
                lambda: encode_prompt(state, chat, answers), size_of(chat.messages, chat.tools)
            )
        await send_json(send, dumps({"input_tokens": len(ids)}))

    return respond_when_loaded(request, body.model, work)
