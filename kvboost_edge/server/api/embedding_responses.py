"""Response bodies of /v1/embeddings (OpenAI's format) and /v1/rerank (Cohere's)."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from kvboost_edge.engine.request.results import GenerationResult
from kvboost_edge.server.api.usage import approximations_of
from kvboost_edge.server.response_types import (
    InputUsage,
    Labels,
    RerankResponse,
    RerankResult,
    Vector,
)
from kvboost_edge.server.work.streams import dumps

__all__ = ["embedding_answer", "rerank_answer"]


def embedding_answer(
    model: str,
    vectors: npt.NDArray[np.float32],
    results: Sequence[GenerationResult],
    *,
    as_base64: bool,
) -> bytearray:
    """Encode the answer to an embedding request as JSON.

    Vectors are [num_inputs, dimensions], each written as a list or as base64. Run this in a worker
    thread. Vectors are encoded one at a time, so other threads run in between and memory grows
    gradually.
    """
    body = bytearray(b'{"object":"list","data":[')
    for index, row in enumerate(vectors):
        body += b"," if index else b""
        body += dumps(_vector(index, row, as_base64=as_base64))
    body += b"]," + dumps({"model": model, **_counted(results)})[1:]
    return body


def _vector(index: int, row: npt.NDArray[np.float32], *, as_base64: bool) -> Vector:
    numbers: list[float] | str = (
        base64.b64encode(row.astype("<f4").tobytes()).decode() if as_base64 else row.tolist()
    )
    return {"object": "embedding", "index": index, "embedding": numbers}


def rerank_answer(
    model: str,
    scores: Sequence[float],
    texts: Sequence[str] | None,
    top_n: int,
    results: Sequence[GenerationResult],
) -> RerankResponse:
    """Return the `top_n` best documents, best first. Equal scores keep the input order.

    Args:
        model: name of the model.
        scores: score of each document.
        texts: document texts to include; None to leave them out.
        top_n: number of documents to return.
        results: engine results, from which the usage is computed.
    """
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[:top_n]
    ranked: list[RerankResult] = [
        {"index": index, "relevance_score": scores[index]} for index in order
    ]
    for item in ranked if texts is not None else ():
        item["document"] = {"text": (texts or ())[item["index"]]}
    return {"object": "list", "model": model, "results": ranked, **_counted(results)}


class _Counted(TypedDict):
    usage: InputUsage
    kvboost: Labels


def _counted(results: Sequence[GenerationResult]) -> _Counted:
    """Return the token counts and labels of an answer."""
    tokens = sum(result.prompt_tokens for result in results)
    cached = sum(result.exact_cached_tokens for result in results)
    usage: InputUsage = {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    labels = approximations_of(results)
    if labels:
        usage["approximate"] = True
    return {"usage": usage, "kvboost": {"approximate": bool(labels), "approximations": labels}}
