"""What llama.cpp's answers look like, for the OpenAPI document: they are written by hand."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from kvboost_edge.server.api.answers import Costs, Timings

__all__ = ["LLAMA_ERRORS", "Completed", "Props", "Slot", "Templated"]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class LlamaErrorDetail(_Answer):
    code: int
    message: str
    type: str


class LlamaError(_Answer):
    error: LlamaErrorDetail


LLAMA_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": LlamaError},
    "5XX": {"model": LlamaError},
}


class Completed(_Answer):
    """`tokens` is empty unless return_tokens asks for them; `tokens_cached` of the prompt came from
    the cache.
    """

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: Literal[True]
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    generation_settings: dict[str, Any]
    prompt: str
    has_new_line: bool
    truncated: Literal[False]
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    tokens_cached: int
    timings: Timings
    kvboost: Costs


class Templated(_Answer):
    prompt: str


class Modalities(_Answer):
    vision: Literal[False]
    audio: Literal[False]


class Props(_Answer):
    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: Modalities
    build_info: str
    is_sleeping: Literal[False]


class Slot(_Answer):
    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool
