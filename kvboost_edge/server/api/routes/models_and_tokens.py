"""Routes for model listings, tokenization and detokenization."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Send

from kvboost_edge.engine.request.answer_ids import KeptAnswers
from kvboost_edge.server.api.bodies import JsonRoute
from kvboost_edge.server.api.bounds import COUNTS
from kvboost_edge.server.api.checks import respond_when_loaded, served_model
from kvboost_edge.server.api.prompt_encoding import (
    encode_prompt,
    encode_text,
    estimate_messages,
    estimate_tokens,
    prompt_only,
    size_of,
)
from kvboost_edge.server.api.schemas.shared import check_in_vocabulary
from kvboost_edge.server.api.schemas.strict import bad_field
from kvboost_edge.server.api.schemas.tokenization import DetokenizeRequest, TokenizeRequest
from kvboost_edge.server.models.server import server_of
from kvboost_edge.server.models.shown import model_entry, model_list
from kvboost_edge.server.response_types import (
    ERRORS,
    DetokenizeResponse,
    Model,
    ModelList,
    Piece,
    TokenizeResponse,
)
from kvboost_edge.server.state import ModelState, tenant_of
from kvboost_edge.server.work.bridge import off_loop
from kvboost_edge.server.work.streams import dumps_long, json_response, send_json
from kvboost_edge.text.token_texts import TokenTexts

__all__ = ["router"]

router = APIRouter(route_class=JsonRoute, responses=ERRORS)


@router.get("/v1/models", response_class=JSONResponse, responses={200: {"model": ModelList}})
async def models(request: Request) -> Response:
    """List all served models under each of their names, loaded or not."""
    return json_response(model_list(server_of(request), tenant_of(request)))


@router.get(
    "/v1/models/{name:path}", response_class=JSONResponse, responses={200: {"model": Model}}
)
async def model(request: Request, name: str) -> Response:
    """Return the model with this name, or 404 if it is not served."""
    served = served_model(request, name)
    return json_response(model_entry(served, server_of(request), name, tenant_of(request)))


@router.post("/tokenize", response_class=JSONResponse, responses={200: {"model": TokenizeResponse}})
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """Tokenize a text, or messages as the prompt of a chat."""

    async def work(state: ModelState, send: Send) -> None:
        body.check_together()
        text = body.content or body.prompt or ""
        messages = body.messages or []
        async with state.admit(
            request, estimate_tokens(text) + estimate_messages(messages, body.tools)
        ) as admission:
            answers = state.engine.kept_answers(tenant=admission.tenant, cache_salt=None)
            answer = await off_loop(
                lambda: dumps_long(_tokenize(state, body, answers)),
                len(text) + size_of(messages, body.tools),
            )
        await send_json(send, answer)

    return respond_when_loaded(request, body.model, work)


@router.post(
    "/detokenize", response_class=JSONResponse, responses={200: {"model": DetokenizeResponse}}
)
async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    """Convert token ids to text."""

    async def work(state: ModelState, send: Send) -> None:
        check_in_vocabulary("tokens", body.tokens, state.engine.runner_info.vocab_size)
        async with state.admit(request, len(body.tokens)):
            answer = await off_loop(lambda: _detokenize(state, body.tokens), len(body.tokens))
        await send_json(send, answer)

    return respond_when_loaded(request, body.model, work)


def _detokenize(state: ModelState, ids: list[int]) -> bytes:
    text = state.engine.tokenizer.decode(ids, skip_special_tokens=False)
    answer: DetokenizeResponse = {"content": text, "prompt": text}
    return dumps_long(answer)


def _tokenize(state: ModelState, body: TokenizeRequest, answers: KeptAnswers) -> TokenizeResponse:
    tokenizer = state.engine.tokenizer
    text = body.prompt if body.content is None else body.content
    if body.messages is not None:
        chat = prompt_only(body.messages, body)
        ids = encode_prompt(state, chat, answers)
    elif text:
        ids = encode_text(
            tokenizer,
            text,
            body.with_special_tokens,
            "content" if body.prompt is None else "prompt",
            parse_special=body.parse_special,
        )
    else:
        ids = []
    most = int(COUNTS["pieces"].high)
    if len(ids) > most and (body.with_pieces or body.return_token_strs):
        field = "with_pieces" if body.with_pieces else "return_token_strs"
        raise bad_field(
            field,
            f"the text has {len(ids)} tokens, but at most {most} can be returned one by one; "
            "send a shorter text",
        )
    texts = TokenTexts(tokenizer)
    pieces: list[Piece] = (
        [{"id": i, "piece": texts.piece(i)} for i in ids] if body.with_pieces else []
    )
    answer: TokenizeResponse = {
        "tokens": pieces if body.with_pieces else ids,
        "count": len(ids),
        "max_model_len": state.usable_context,
    }
    if body.return_token_strs:
        answer["token_strs"] = [texts.text(i) for i in ids]
    return answer
