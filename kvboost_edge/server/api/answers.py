"""What the answers look like, for the OpenAPI document: they are written by hand, not through these
models. A test asks every route and compares the keys.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from kvboost_edge.server.doctor.shown import PromptCache
from kvboost_edge.server.models.shown import ModelsMemory

__all__ = [
    "ERRORS",
    "BlockCounts",
    "Blocks",
    "ChatAnswer",
    "CompletionAnswer",
    "Detokenized",
    "ErrorAnswer",
    "Memory",
    "Reset",
    "Stats",
    "Tokenized",
    "Warmed",
]

FinishReason = Literal["stop", "length", "tool_calls"]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(_Answer):
    """`code` is for programs, `message` for people, `param` names the field at fault."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(_Answer):
    """Every error, in OpenAI's shape."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer},
    "5XX": {"model": ErrorAnswer},
}


class PromptTokensDetails(_Answer):
    cached_tokens: int


class CompletionTokensDetails(_Answer):
    reasoning_tokens: int


class Usage(_Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Timings(_Answer):
    """llama.cpp's figures. `draft_n` tokens were guessed ahead, `draft_n_accepted` of them were
    right.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int
    draft_n_accepted: int


def _only_when_asked(name: str) -> ConfigDict:
    """The field is always there where it is asked for, and never null."""
    return ConfigDict(json_schema_extra=lambda schema: schema["required"].remove(name))


class Costs(_Answer):
    """What ran, where the time went, and where the cached tokens came from. `approximate`: some
    tokens were shared at other positions, `reused_span_tokens` of them; `recomputed_tokens` were
    found there and computed all the same. Of `matched_tokens` the keys and values were cached: of
    models with states more than those of `hit_tokens`.
    """

    mode: str
    approximate: bool
    reused_span_tokens: int
    recomputed_tokens: int
    hit_tokens: dict[str, int]
    matched_tokens: int
    miss_reason: str
    tokenize_ms: float
    queue_ms: float
    lookup_ms: float
    load_ms: float
    probe_ms: float
    repair_ms: float
    prefill_ms: float
    decode_ms: float
    ttft_ms: float
    total_ms: float
    dropped_messages: int
    preemptions: int
    seeds: list[int]


class Explained(Costs):
    """The same, and with kvboost.explain what became of the first prompt."""

    model_config = _only_when_asked("cache")

    cache: PromptCache


class _Figures(_Answer):
    usage: Usage
    timings: Timings
    kvboost: Explained


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


class _TokenIds(_Answer):
    model_config = _only_when_asked("token_ids")

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


class CalledFunction(_Answer):
    name: str
    arguments: str


class ToolCall(_Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessageAnswer(_Answer):
    """`reasoning_content` and `tool_calls` only where there are any; `content` is null beside calls
    without a text.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = []


class ChatChoiceAnswer(_TokenIds):
    """`token_ids` only when asked for."""

    index: int
    message: ChatMessageAnswer
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatAnswer(_Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoiceAnswer]


class Piece(_Answer):
    id: int
    piece: str


class Tokenized(_Answer):
    """`token_strs` only when asked for."""

    model_config = _only_when_asked("token_strs")

    tokens: list[int] | list[Piece]
    count: int
    max_model_len: int
    token_strs: list[str]


class Detokenized(_Answer):
    content: str
    prompt: str


class Warmed(_Answer):
    """What a warmed text, or documents, left in the cache; `alignment_warning` says what of it was
    not kept, if it matters. `timings` and `kvboost` are null where documents are there already and
    nothing had to be computed.
    """

    object: Literal["warm"]
    usage: Usage
    timings: Timings | None
    kvboost: Costs | None
    chunks_stored: int
    token_count: int
    chunk_size: int
    chunk_boundary_aligned: bool
    partial_tail_tokens: int
    alignment_warning: str | None


class Unpinned(_Answer):
    """How many blocks are pinned no more; 0 if this text was not pinned with this key and salt."""

    object: Literal["unpin"]
    blocks_unpinned: int


class Reset(_Answer):
    object: Literal["cache.reset"]
    blocks_dropped: int


class Queue(_Answer):
    running: int
    waiting: int
    waiting_tokens: int
    in_flight: int
    max_in_flight: int
    refused: int


class TierFigures(_Answer):
    """A tier below the pool: blocks and bytes it holds (null: only its server knows), its cap,
    counters since the start, whether it stores, and what is wrong.
    """

    blocks: int | None
    bytes: int | None
    max_bytes: int | None
    read_blocks: int
    read_bytes: int
    written_blocks: int
    written_bytes: int
    missing: int
    refused: int
    evicted: int
    not_written: int
    errors: int
    writable: bool
    state: str


class Throughput(_Answer):
    prompt_tokens_total: int
    generated_tokens_total: int
    prompt_tokens_per_second: float
    generated_tokens_per_second: float


class ReplicaStats(_Answer):
    """One replica's part of them."""

    running: int
    waiting: int
    waiting_tokens: int
    cache: dict[str, float]
    pool: dict[str, Any]
    tiers: dict[str, TierFigures]
    memory: dict[str, int]


class Stats(_Answer):
    """Queue, cache, pool, tiers, memory and throughput of one model; those of cache, pool and
    memory are the engine's own names. replicas: of each, by name, where several serve the model and
    the others are their sums. models: which are loaded, and what they take.
    """

    object: Literal["stats"]
    model: str
    queue: Queue
    cache: dict[str, float]
    pool: dict[str, Any]
    tiers: dict[str, TierFigures]
    memory: dict[str, int]
    throughput: Throughput
    replicas: dict[str, ReplicaStats]
    models: ModelsMemory


class BlockCounts(_Answer):
    """By state, in the order of the numbers in `Blocks.states`; span: in use at another
    position.
    """

    free: int
    cached: int
    used: int
    shared: int
    span: int


class Memory(_Answer):
    weight_bytes: int
    pool_bytes: int
    state_bytes: int
    process_rss_bytes: int
    process_peak_bytes: int


class TierView(_Answer):
    """What a tier holds, null where only its server knows; max_bytes null: somebody else's cap.
    `state` says what is wrong, "" when all is well; `recent_hit_tokens` are prompt tokens of the
    last minute that came from it.
    """

    blocks: int | None
    bytes: int | None
    max_bytes: int | None
    writable: bool
    state: str
    recent_hit_tokens: int


class ReplicaPool(_Answer):
    """One replica's pool: its blocks, those of them that can be matched, and their bytes of all."""

    num_blocks: int
    blocks: int
    bytes: int
    max_bytes: int
    running: int
    waiting: int
    hit_rate: float | None


class Blocks(_Answer):
    """The pool, and the tiers from the pool outwards; `states`, `refs` and `tokens` are base64 of
    one byte a block. The slots are those of a model that keeps states beside keys and values.
    replicas: by name, where several serve the model; the pool is then theirs in a row, in this
    order.
    """

    num_blocks: int
    block_size: int
    states: str
    refs: str | None
    tokens: str | None
    counts: BlockCounts
    running: int
    waiting: int
    hit_tokens: int
    span_tokens: int
    miss_tokens: int
    hit_rate: float | None
    memory: Memory
    tiers: dict[str, TierView]
    recent_span_tokens: int
    recent_computed_tokens: int
    generated_tokens_total: int
    evictions: int
    preemptions: int
    state_slots: int
    state_slots_used: int
    replayed_tokens: int
    replicas: dict[str, ReplicaPool]
