"""What Ollama's answers look like, for the OpenAPI document: they are written by hand."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from kvboost_edge.server.api.answers import Costs

__all__ = ["OLLAMA_ERRORS", "Chatted", "Generated", "OllamaVersion", "Running", "Shown", "Tags"]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class OllamaError(_Answer):
    error: str


OLLAMA_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": OllamaError},
    "5XX": {"model": OllamaError},
}


class _Figures(_Answer):
    """The figures only where something was generated; all durations in nanoseconds."""

    model: str
    created_at: str
    done: Literal[True]
    done_reason: Literal["stop", "length", "load", "unload"]
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0
    prompt_eval_duration: int = 0
    eval_count: int = 0
    eval_duration: int = 0
    kvboost: Costs | None = None


class OllamaFunction(_Answer):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(_Answer):
    id: str
    function: OllamaFunction


class OllamaSaid(_Answer):
    role: Literal["assistant"]
    content: str
    thinking: str = ""
    tool_calls: list[OllamaCall] = []


class Chatted(_Figures):
    message: OllamaSaid


class Generated(_Figures):
    response: str
    thinking: str = ""


class Details(_Answer):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class _Entry(_Answer):
    name: str
    model: str
    size: int
    digest: str
    details: Details


class Tagged(_Entry):
    modified_at: str


class Tags(_Answer):
    models: list[Tagged]


class RunningEntry(_Entry):
    expires_at: str
    size_vram: int
    context_length: int


class Running(_Answer):
    models: list[RunningEntry]


class Shown(_Answer):
    license: str
    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, str | int]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(_Answer):
    version: str
    server: str
