"""What /v1/embeddings (OpenAI's shape) and /v1/rerank (Cohere's) answer, and the OpenAPI document's
models of it.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from kvboost_edge.engine.request.results import GenerationResult

__all__ = ["EmbeddingAnswer", "RerankAnswer", "embedding_answer", "rerank_answer"]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class CachedTokens(_Answer):
    cached_tokens: int


class InputUsage(_Answer):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Vector(_Answer):
    """`embedding` is a list of numbers, or base64 of them as little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingAnswer(_Answer):
    object: Literal["list"]
    data: list[Vector]
    model: str
    usage: InputUsage


class RankedText(_Answer):
    text: str


class Ranked(_Answer):
    """`index` is the document's place in the request; `document` is there if it was asked for."""

    index: int
    relevance_score: float
    document: RankedText | None = None


class RerankAnswer(_Answer):
    object: Literal["list"]
    model: str
    results: list[Ranked]
    usage: InputUsage


def embedding_answer(
    model: str,
    vectors: npt.NDArray[np.float32],
    results: Sequence[GenerationResult],
    *,
    as_base64: bool,
) -> dict[str, Any]:
    """Of vectors [num_inputs, dimensions], each as a list or as base64."""
    rows = [
        base64.b64encode(row.astype("<f4").tobytes()).decode() if as_base64 else row.tolist()
        for row in vectors
    ]
    data = [
        {"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)
    ]
    return {"object": "list", "data": data, "model": model, "usage": _usage(results)}


def rerank_answer(
    model: str,
    scores: Sequence[float],
    texts: Sequence[str] | None,
    top_n: int,
    results: Sequence[GenerationResult],
) -> dict[str, Any]:
    """The `top_n` best, the best first and equal ones in their order; with their texts if these are
    given.
    """
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[:top_n]
    ranked: list[dict[str, Any]] = [
        {"index": index, "relevance_score": scores[index]} for index in order
    ]
    for item in ranked if texts is not None else ():
        item["document"] = {"text": (texts or ())[item["index"]]}
    return {"object": "list", "model": model, "results": ranked, "usage": _usage(results)}


def _usage(results: Sequence[GenerationResult]) -> dict[str, Any]:
    tokens = sum(result.prompt_tokens for result in results)
    cached = sum(result.cached_tokens for result in results)
    return {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
