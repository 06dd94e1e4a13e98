"""What the doctor says, for the OpenAPI document: it is written by `Diagnosis.as_json`, not through
these models.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvboost_edge.server.doctor.diagnosis import CAUSES

__all__ = ["PromptCache", "PromptCaches"]

Cause = Annotated[str, Field(json_schema_extra={"enum": list(CAUSES)})]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PromptCache(_Answer):
    """Where a prompt left what its API key asked before, and why. The two texts are of that place,
    `text_before` of the request `compared_with`; `seconds`: what computing `computed_tokens` took;
    `evicted_from`: the pool and tiers that had it and dropped it.
    """

    request_id: str
    at: float
    cause: Cause
    prompt_tokens: int
    hit_tokens: dict[str, int]
    reused_span_tokens: int
    computed_tokens: int
    seconds: float
    position: int
    field: str
    field_before: str
    text: str
    text_before: str
    compared_with: str
    evicted_from: list[str]
    normalised: list[str]
    model: str


class PromptCaches(_Answer):
    """What became of the last prompts of this API key, the latest first and without texts;
    `kept_seconds` 0: requests are not kept (--request-history 0).
    """

    object: Literal["list"]
    data: list[PromptCache]
    kept_seconds: float
