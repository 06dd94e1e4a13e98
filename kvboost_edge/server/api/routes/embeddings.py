"""Routes for embeddings and reranking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Send

from kvboost_edge.engine.handle import Handles
from kvboost_edge.engine.request.results import GenerationResult
from kvboost_edge.errors import KVBoostError, RequestError
from kvboost_edge.server.api.bodies import JsonRoute
from kvboost_edge.server.api.checks import check_priority, respond_when_loaded
from kvboost_edge.server.api.embedding_responses import embedding_answer, rerank_answer
from kvboost_edge.server.api.prompt_encoding import estimate_tokens
from kvboost_edge.server.api.schemas.embeddings import EmbeddingRequest, RerankRequest
from kvboost_edge.server.api.schemas.strict import bad_field
from kvboost_edge.server.response_types import ERRORS, EmbeddingAnswer, RerankAnswer
from kvboost_edge.server.state import ModelState
from kvboost_edge.server.work.bridge import off_loop, to_its_end, wait_all
from kvboost_edge.server.work.streams import dumps_long, send_json

__all__ = ["router"]

T = TypeVar("T")

router = APIRouter(route_class=JsonRoute, responses=ERRORS)


@router.post(
    "/v1/embeddings", response_class=JSONResponse, responses={200: {"model": EmbeddingAnswer}}
)
async def embeddings(request: Request, body: EmbeddingRequest) -> Response:
    """Compute the embedding of each input."""

    async def work(state: ModelState, send: Send) -> None:
        size = state.engine.embedding_size
        if body.dimensions is not None and body.dimensions > size > 0:
            raise bad_field(
                "dimensions",
                f"dimensions={body.dimensions} must be in 1..{size}, the size of the model's "
                "embeddings",
            )

        def compute(**options: Any) -> Any:
            return state.engine.embed(body.input, body.dimensions, **options)

        estimates = [
            estimate_tokens(item) if isinstance(item, str) else len(item) for item in body.input
        ]
        size = sum(map(len, body.input))
        vectors, results = await _computed(state, request, body, compute, "input", estimates, size)
        model = body.model or state.model_name
        as_base64 = body.encoding_format == "base64"
        answer = await off_loop(
            lambda: embedding_answer(model, vectors, results, as_base64=as_base64)
        )
        await send_json(send, answer)

    return respond_when_loaded(request, body.model, work)


@router.post("/v1/rerank", response_class=JSONResponse, responses={200: {"model": RerankAnswer}})
async def rerank(request: Request, body: RerankRequest) -> Response:
    """Rank documents by their relevance to a query, best first."""

    async def work(state: ModelState, send: Send) -> None:
        own = {} if body.instruction is None else {"instruction": body.instruction}

        def compute(**options: Any) -> list[float]:
            return state.engine.rerank(body.query, body.documents, **own, **options)

        # Each document is computed together with the query, so the query counts once per document.
        # Tokenization starts only after admission.
        query = estimate_tokens(body.query)
        lengths = [len(body.query) + len(document) for document in body.documents]
        estimates = [query + estimate_tokens(document) for document in body.documents]
        scores, results = await _computed(
            state, request, body, compute, "documents", estimates, sum(lengths)
        )
        texts = body.documents if body.return_documents else None
        model = body.model or state.model_name
        count = body.top_n or len(scores)
        answer = await off_loop(
            lambda: dumps_long(rerank_answer(model, scores, texts, count, results))
        )
        await send_json(send, answer)

    return respond_when_loaded(request, body.model, work)


async def _computed(
    state: ModelState,
    request: Request,
    body: EmbeddingRequest | RerankRequest,
    compute: Callable[..., T],
    field: str,
    estimates: Sequence[int],
    size: int,
) -> tuple[T, list[GenerationResult]]:
    """Run `compute` in a worker thread; return its outcome and the results of its requests.

    The work stops if the client disconnects.

    Args:
        state: the model.
        request: the HTTP request.
        body: the request body.
        compute: function that submits the inputs to the engine and waits for them.
        field: field that errors name.
        estimates: approximate number of tokens of each input.
        size: number of characters or tokens to read.
    """
    # The engine queues only part of the inputs at a time, so one batch of places is enough.
    places = min(len(estimates), state.admission.batch)
    priority = check_priority(state, body.priority)
    async with state.admit(request, sum(estimates), places) as admission:
        handles = Handles()

        def run() -> T:
            try:
                return compute(
                    handles=handles,
                    tenant=admission.tenant,
                    weight=admission.weight,
                    background=admission.background,
                    cache_salt=body.cache_salt,
                    priority=priority,
                    deadline=admission.deadline,
                )
            except RequestError as error:
                raise bad_field(field, str(error)) from error

        try:
            found = await to_its_end(run, size, handles)
        except KVBoostError:
            await wait_all(admission, handles)  # raises the reason of a cancelled request
            raise
        return found, await wait_all(admission, handles)
