"""Routes for embeddings and reranking."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Send

from kvboost_edge.server.api.bodies import JsonRoute
from kvboost_edge.server.api.checks import respond_when_loaded
from kvboost_edge.server.api.embedding_requests import computed, embed_inputs
from kvboost_edge.server.api.embedding_responses import embedding_answer, rerank_answer
from kvboost_edge.server.api.prompt_encoding import estimate_tokens
from kvboost_edge.server.api.schemas.embeddings import EmbeddingRequest, RerankRequest
from kvboost_edge.server.response_types import ERRORS, EmbeddingResponse, RerankResponse
from kvboost_edge.server.state import ModelState
from kvboost_edge.server.work.bridge import off_loop
from kvboost_edge.server.work.streams import dumps_long, send_json

__all__ = ["router"]

router = APIRouter(route_class=JsonRoute, responses=ERRORS)


@router.post(
    "/v1/embeddings", response_class=JSONResponse, responses={200: {"model": EmbeddingResponse}}
)
async def embeddings(request: Request, body: EmbeddingRequest) -> Response:
    """Compute the embedding of each input."""

    async def work(state: ModelState, send: Send) -> None:
        vectors, results = await embed_inputs(
            state,
            request,
            body.input,
            body.dimensions,
            priority=body.priority,
            cache_salt=body.cache_salt,
        )
        model = body.model or state.model_name
        as_base64 = body.encoding_format == "base64"
        answer = await off_loop(
            lambda: embedding_answer(model, vectors, results, as_base64=as_base64)
        )
        await send_json(send, answer)

    return respond_when_loaded(request, body.model, work)


@router.post("/v1/rerank", response_class=JSONResponse, responses={200: {"model": RerankResponse}})
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
        scores, results = await computed(
            state,
            request,
            compute,
            "documents",
            estimates,
            sum(lengths),
            priority=body.priority,
            cache_salt=body.cache_salt,
        )
        texts = body.documents if body.return_documents else None
        model = body.model or state.model_name
        count = body.top_n or len(scores)
        answer = await off_loop(
            lambda: dumps_long(rerank_answer(model, scores, texts, count, results))
        )
        await send_json(send, answer)

    return respond_when_loaded(request, body.model, work)
