"""Bodies and answers of /api/embed and its older form /api/embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, PlainValidator, WithJsonSchema

from kvboost_edge.engine.request.results import GenerationResult
from kvboost_edge.server.api.bounds import COUNTS, bounded
from kvboost_edge.server.api.compat.ollama.schemas import ModelRequest
from kvboost_edge.server.api.schemas.embeddings import inputs_of
from kvboost_edge.server.api.schemas.shared import BoundedText, is_text
from kvboost_edge.server.api.schemas.strict import field_error
from kvboost_edge.server.work.streams import dumps

__all__ = ["OllamaEmbed", "OllamaEmbeddings", "embed_answer"]

_MOST_CHARACTERS = int(COUNTS["text"].high)


def _texts(value: Any) -> list[str | list[int]]:
    """Convert one or more texts to a list. An empty text stands for none."""
    if value is None or value in ("", []):
        return []
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(map(is_text, texts)):
        raise field_error("input", "must be a string or a list of strings")
    return inputs_of(texts)


class OllamaEmbed(ModelRequest):
    """Body of /api/embed. Without an input, the model is only loaded."""

    input: Annotated[
        list[str | list[int]],
        PlainValidator(_texts),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string", "maxLength": _MOST_CHARACTERS},
                    {
                        "type": "array",
                        "maxItems": int(COUNTS["inputs"].high),
                        "items": {
                            "type": "string",
                            "minLength": 1,
                            "maxLength": _MOST_CHARACTERS,
                        },
                    },
                    {"type": "null"},
                ]
            }
        ),
    ] = Field(default_factory=list, description="A text, or a list of texts.")
    truncate: bool | None = Field(
        None,
        description=(
            "Cut off the end of a text that exceeds the context, the KV cache, or num_ctx of the "
            "options. By default, a text that exceeds the context or the KV cache is an error."
        ),
    )
    dimensions: Annotated[int, bounded("ollama_dimensions")] | None = Field(
        None, description="Number of leading values of each embedding; 0 returns all."
    )


class OllamaEmbeddings(ModelRequest):
    """Body of /api/embeddings. Without a prompt, the model is only loaded."""

    prompt: BoundedText | None = None


def embed_answer(
    model: str,
    vectors: npt.NDArray[np.float32],
    results: Sequence[GenerationResult],
    load_seconds: float,
    total_seconds: float,
) -> bytearray:
    """Encode the answer to /api/embed as JSON. Run this in a worker thread.

    Vectors are [num_inputs, dimensions] and encoded one at a time, so that other threads run in
    between.
    """
    body = bytearray(b'{"embeddings":[')
    for index, row in enumerate(vectors):
        body += b"," if index else b""
        body += dumps(row.tolist())
    facts = {
        "model": model,
        "total_duration": round(total_seconds * 1e9),
        "load_duration": round(load_seconds * 1e9),
        "prompt_eval_count": sum(result.prompt_tokens for result in results),
    }
    return body + b"]," + dumps(facts)[1:]
