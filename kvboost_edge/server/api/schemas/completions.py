"""Request body of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from kvboost_edge.config import GenerationMode
from kvboost_edge.server.api.bounds import COUNTS, bounded
from kvboost_edge.server.api.schemas.shared import (
    SamplingFields,
    check_token_ids,
    is_text,
    number_schema,
)
from kvboost_edge.server.api.schemas.strict import bad_field, field_error

__all__ = ["CompletionRequest"]


def _prompts(value: Any) -> list[str] | list[list[int]]:
    """Convert one or more prompts to a list, either all texts or all token ids."""
    count = COUNTS["prompts"]
    tokens = COUNTS["prompt_tokens"]
    if isinstance(value, list) and value and type(value[0]) is int:
        value = [value]
    prompts = [value] if isinstance(value, str) else value
    if not isinstance(prompts, list):
        raise field_error(
            "prompt",
            "must be a string, a list of strings, a list of token ids, or a list of such lists",
        )
    if not count.low <= len(prompts) <= count.high:
        raise field_error("prompt", f"must hold {count.describe()} prompts, not {len(prompts)}")
    if isinstance(prompts[0], str):
        if not all(prompt and is_text(prompt) for prompt in prompts):
            raise field_error("prompt", "each prompt must be a string with at least one character")
        if (longest := max(map(len, prompts))) > COUNTS["text"].high:
            raise field_error(
                "prompt",
                f"a prompt has {longest} characters; at most {COUNTS['text'].high} are allowed",
            )
        return prompts
    for prompt in prompts:
        if not tokens.low <= len(check_token_ids(prompt)) <= tokens.high:
            raise field_error(
                "prompt", f"each prompt must have {tokens.describe()} token ids, not {len(prompt)}"
            )
    return prompts


_TEXT_SCHEMA = {"type": "string", "minLength": 1, "maxLength": COUNTS["text"].high}
_IDS_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "items": number_schema("token_id"),
}
Prompts = Annotated[
    list[str] | list[list[int]],
    PlainValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT_SCHEMA,
                {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": COUNTS["prompts"].high,
                    "items": _TEXT_SCHEMA,
                },
                _IDS_SCHEMA,
                {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": COUNTS["prompts"].high,
                    "items": _IDS_SCHEMA,
                },
            ]
        }
    ),
]


def _refuse_suffix(value: Any) -> None:
    if value is not None:
        raise field_error(
            "not_built",
            "not supported; use /infill, or put the model's infill tokens into the prompt",
        )


class CompletionRequest(SamplingFields):
    """Body of /v1/completions: one or more prompts to continue.

    As in OpenAI's API, `max_tokens` is 16 by default. A value of 0 needs `echo`.
    """

    prompt: Prompts = Field(description="A text, token ids, or a list of either.")
    max_tokens: Annotated[int, bounded("max_tokens")] | None = Field(
        None, description="Maximum number of new tokens, 16 by default; 0 needs echo."
    )
    best_of: Annotated[int, bounded("best_of")] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, bounded("logprobs")] | None = None
    add_special_tokens: bool = Field(
        True, description="Put the tokenizer's BOS token before text prompts."
    )
    suffix: Annotated[None, BeforeValidator(_refuse_suffix)] = None

    def check_together(self) -> None:
        super().check_together()
        if self.best_of is not None and self.best_of < self.num_choices:
            raise bad_field(
                "best_of", f"best_of={self.best_of} must be at least n={self.num_choices}"
            )
        if self.stream and self.num_sequences > self.num_choices:
            raise bad_field(
                "best_of",
                f"best_of={self.best_of} above n cannot be streamed: the best sequences are known "
                "only at the end",
            )
        exact = (
            "logprobs"
            if self.logprobs is not None
            else "max_tokens=0"
            if self.max_tokens == 0
            else None
        )
        if self.echo and exact and self.mode is GenerationMode.CHUNK_KV_REUSE:
            why = f"is approximate, but echo with {exact} needs exact KV"
            raise bad_field("kvboost", f"kvboost.mode 'chunk_kv_reuse' {why}")
        total = self.num_sequences * len(self.prompt)
        limit = COUNTS["sequences"]
        if total > limit.high:
            raise bad_field(
                "n",
                f"prompts times n (or best_of) make {total} sequences; at most {limit.high} are "
                "allowed",
            )

    @property
    def num_sequences(self) -> int:
        """Number of sequences computed for each prompt."""
        return self.num_choices if self.best_of is None else self.best_of
