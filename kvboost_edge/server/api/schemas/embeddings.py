"""Request bodies of /v1/embeddings and /v1/rerank."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema

from kvboost_edge.server.api.bounds import COUNTS, bounded, counted
from kvboost_edge.server.api.schemas.shared import (
    CacheSalt,
    ModelName,
    check_text,
    check_token_ids,
    is_text,
    number_schema,
)
from kvboost_edge.server.api.schemas.strict import Strict, field_error
from kvboost_edge.server.api.schemas.unsupported_fields import GENERATING, UnsupportedField

__all__ = ["EmbeddingRequest", "RerankRequest", "inputs_of"]

_NOT_TRUNCATED = UnsupportedField("documents are never truncated; shorten them before sending")
_UNSUPPORTED_TO_RERANK = {
    **dict.fromkeys(("max_tokens_per_doc", "max_chunks_per_doc"), _NOT_TRUNCATED),  # Cohere
    "truncate_prompt_tokens": GENERATING["truncate_prompt_tokens"],  # vLLM
}
_KINDS = "must be a string, a list of strings, a list of token ids, or a list of such lists"


def inputs_of(value: Any) -> list[str | list[int]]:
    """Convert one or more inputs to a list of texts and token ids."""
    count = COUNTS["inputs"]
    tokens = COUNTS["prompt_tokens"]
    if isinstance(value, list) and value and type(value[0]) is int:
        value = [value]
    inputs = [value] if isinstance(value, str) else value
    if not isinstance(inputs, list):
        raise field_error("input", _KINDS)
    if not count.low <= len(inputs) <= count.high:
        raise field_error("input", f"must hold {count.describe()} inputs, not {len(inputs)}")
    for number, item in enumerate(inputs):
        if isinstance(item, list):
            if not tokens.low <= len(check_token_ids(item)) <= tokens.high:
                raise field_error(
                    "input", f"input {number} has {len(item)} token ids, not {tokens.describe()}"
                )
        elif not is_text(item):
            raise field_error("input", _KINDS)
        elif not 1 <= len(item) <= COUNTS["text"].high:
            limit = int(COUNTS["text"].high)
            raise field_error(
                "input", f"input {number} has {len(item)} characters; 1..{limit} are allowed"
            )
    return inputs


def _document(value: Any) -> str:
    """Return the text of a document. Cohere's clients send an object with the text."""
    text = value["text"] if isinstance(value, dict) and set(value) == {"text"} else value
    if not is_text(text) or not 1 <= len(text) <= COUNTS["text"].high:
        limit = int(COUNTS["text"].high)
        raise field_error(
            "document", f"must be a string of 1..{limit} characters, or an object with it as text"
        )
    return str(text)


_TEXT = {"type": "string", "minLength": 1, "maxLength": int(COUNTS["text"].high)}
_IDS = {"type": "array", "minItems": 1, "items": number_schema("token_id")}
_MANY = {"type": "array", "minItems": 1, "maxItems": int(COUNTS["inputs"].high)}
_TEXT_OBJECT = {
    "type": "object",
    "properties": {"text": _TEXT},
    "required": ["text"],
    "additionalProperties": False,
}

Inputs = Annotated[
    list[str | list[int]],
    PlainValidator(inputs_of),
    WithJsonSchema({"anyOf": [_TEXT, {**_MANY, "items": _TEXT}, _IDS, {**_MANY, "items": _IDS}]}),
]
Document = Annotated[
    str, PlainValidator(_document), WithJsonSchema({"anyOf": [_TEXT, _TEXT_OBJECT]})
]
Query = Annotated[
    str, AfterValidator(check_text), Field(min_length=1, max_length=int(COUNTS["text"].high))
]


class _Common(Strict):
    model: ModelName | None = None
    user: Annotated[str, counted("label")] | None = None
    priority: Annotated[int, bounded("priority")] | None = None
    cache_salt: CacheSalt | None = None


class EmbeddingRequest(_Common):
    """Body of /v1/embeddings: texts or token ids to embed."""

    input: Inputs = Field(description="A text, token ids, or a list of either.")
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, bounded("dimensions")] | None = None


class RerankRequest(_Common):
    """Body of /v1/rerank: a query, and documents to rank."""

    unsupported = _UNSUPPORTED_TO_RERANK

    query: Query
    documents: Annotated[list[Document], counted("reranked")]
    top_n: Annotated[int, bounded("top_n")] | None = Field(
        None, description="Number of documents to return, all by default."
    )
    return_documents: bool | None = None
    instruction: Query | None = Field(
        None, description="Task description for the model, in place of its default."
    )
