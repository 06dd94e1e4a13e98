"""What the answers look like, for the OpenAPI document alone: they are written by hand, not through these models."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

__all__ = [
    "Blocks",
    "ChatAnswer",
    "CompletionAnswer",
    "Detokenized",
    "Model",
    "ModelList",
    "Reset",
    "Stats",
    "Tokenized",
    "Warmed",
]

FinishReason = Literal["stop", "length"]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PromptTokensDetails(_Answer):
    cached_tokens: int


class Usage(_Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Timings(_Answer):
    """llama.cpp's figures."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class Costs(_Answer):
    """Where the time went, and where the cached tokens came from."""

    mode: str
    hit_tokens: dict[str, int]
    miss_reason: str
    tokenize_ms: float
    queue_ms: float
    lookup_ms: float
    prefill_ms: float
    decode_ms: float
    ttft_ms: float
    total_ms: float
    preemptions: int
    seeds: list[int]


class _Figures(_Answer):
    usage: Usage
    timings: Timings
    kvboost: Costs


class _Head(_Figures):
    id: str
    created: int
    model: str
    system_fingerprint: str


class CompletionLogprobs(_Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class _TokenIds(BaseModel):
    model_config = ConfigDict(extra="forbid", json_schema_extra=lambda schema: schema["required"].remove("token_ids"))

    token_ids: list[int]


class CompletionChoiceAnswer(_TokenIds):
    """`token_ids` only when asked for."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class CompletionAnswer(_Head):
    object: Literal["text_completion"]
    choices: list[CompletionChoiceAnswer]


class ChatToken(_Answer):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenAndOthers(ChatToken):
    top_logprobs: list[ChatToken]


class ChatLogprobs(_Answer):
    content: list[ChatTokenAndOthers]
    refusal: None


class ChatMessageAnswer(_Answer):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoiceAnswer(_TokenIds):
    """`token_ids` only when asked for."""

    index: int
    message: ChatMessageAnswer
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatAnswer(_Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoiceAnswer]


class Model(_Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    meta: dict[str, Any]


class ModelList(_Answer):
    object: Literal["list"]
    data: list[Model]


class Piece(_Answer):
    id: int
    piece: str


class Tokenized(BaseModel):
    """`token_strs` only when asked for."""

    tokens: list[int] | list[Piece]
    count: int
    max_model_len: int


class Detokenized(_Answer):
    content: str
    prompt: str


class Warmed(_Figures):
    """What a warmed text left in the cache; `alignment_warning` says what of it was not kept, if it matters."""

    object: Literal["warm"]
    chunks_stored: int
    token_count: int
    chunk_size: int
    chunk_boundary_aligned: bool
    partial_tail_tokens: int
    alignment_warning: str | None


class Reset(_Answer):
    object: Literal["cache.reset"]
    blocks_dropped: int


class Stats(BaseModel):
    """Queue, cache, pool, memory and throughput."""

    object: Literal["stats"]
    model: str
    queue: dict[str, int]
    cache: dict[str, float]
    pool: dict[str, Any]
    memory: dict[str, int]
    throughput: dict[str, float]


class Blocks(BaseModel):
    """The pool; `states`, `refs` and `tokens` are base64 of one byte a block."""

    num_blocks: int
    block_size: int
    states: str
    refs: str | None
    tokens: str | None
    counts: dict[str, int]
    running: int
    waiting: int
    hit_tokens: int
    miss_tokens: int
    hit_rate: float | None
    memory: dict[str, int]
