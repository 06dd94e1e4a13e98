"""Response bodies of our own and of OpenAI's routes: the functions that write them return these
types, and the OpenAPI document shows them.

The routes of other projects' APIs declare none: their vendors document them.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

__all__ = [
    "ERRORS",
    "UNDECLARED_ERRORS",
    "BlockCounts",
    "Blocks",
    "Cause",
    "ChatAnswer",
    "ChatChoiceAnswer",
    "ChatLogprobs",
    "ChatMessageAnswer",
    "ChatToken",
    "ChatTokenAndOthers",
    "ChunkHead",
    "CompletionAnswer",
    "CompletionChoiceAnswer",
    "CompletionLogprobs",
    "Costs",
    "Detokenized",
    "EmbeddingAnswer",
    "EngineStats",
    "ErrorAnswer",
    "Explained",
    "Figures",
    "FinishReason",
    "HeldInCache",
    "InputUsage",
    "Model",
    "ModelFigures",
    "ModelList",
    "ModelsMemory",
    "Phase",
    "Piece",
    "PoolBytes",
    "PromptCache",
    "PromptCaches",
    "Ranked",
    "ReplicaPool",
    "ReplicaStats",
    "RerankAnswer",
    "Reset",
    "Spent",
    "Stats",
    "Throughput",
    "TierView",
    "Timings",
    "Tokenized",
    "Unpinned",
    "Usage",
    "Vector",
    "Warmed",
]

FinishReason = Literal["stop", "length", "tool_calls"]


@with_config(ConfigDict(extra="forbid"))
class _Answer(TypedDict):
    """Base of all response bodies: they have no other keys."""


# Errors.


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
UNDECLARED_ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {}, "5XX": {}}
"""Errors of other projects' APIs, each in the shape that its clients look for."""


# Cache-miss reports.

Cause = Literal[
    "none",
    "bypassed",
    "not_started",
    "not_compared",
    "first_seen",
    "new_text",
    "tail",
    "evicted",
    "state",
    "not_kept",
    "tool_order",
    "tools",
    "template",
    "thinking",
    "retokenized",
    "other_message",
    "changed_text",
    "other_position",
]
"""Why the rest of a prompt was computed, see `doctor.diagnosis.CAUSES`."""


class PromptCache(_Answer):
    """The place where a prompt left what its API key asked before, and the cause. The two texts are
    of that place, `text_before` of the request `compared_with`; `seconds`: what computing
    `computed_tokens` took; `step_share`: mean share of the tokens of the request's steps, 0 to 1;
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
    step_share: float
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
    """Reports on the last prompts of this API key, the latest first and without texts;
    `kept_seconds` 0: requests are not kept (--request-history 0).
    """

    object: Literal["list"]
    data: list[PromptCache]
    kept_seconds: float


# Models.

Phase = Literal["not_loaded", "loading", "loaded", "unloading"]


class ModelMeta(_Answer):
    architecture: str
    dtype: str
    runner: str
    vocab_size: int
    weight_bytes: int


class SamplingValues(_Answer):
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float


class Model(_Answer):
    """One name of a model.

    Attributes:
        root: the name that answers show.
        sampling: values of sampling parameters that a request leaves out.
        mode: use of the cache by requests that choose none.
        approximate: answers in that mode may be approximate.
        failure: why its last loading failed.

    Null for a model that was never loaded: max_model_len, sampling, mode, approximate and meta.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None
    sampling: SamplingValues | None
    mode: str | None
    approximate: bool | None
    meta: ModelMeta | None
    state: Phase
    failure: str | None


class ModelList(_Answer):
    object: Literal["list"]
    data: list[Model]


class ModelFigures(_Answer):
    """bytes: what its weights, pool and states take; in_use: requests that hold it or wait for it;
    unloads_in_seconds: null while no time is set; waits_for: what its loading waits for, else "".
    """

    id: str
    state: Phase
    bytes: int
    in_use: int
    unloads_in_seconds: float | None
    waits_for: str


class ModelsMemory(_Answer):
    """Figures of all models together; waiting: requests for one that is not loaded yet."""

    max_bytes: int
    taken_bytes: int
    waiting: int
    data: list[ModelFigures]


# Figures of a request.


class PromptTokensDetails(_Answer):
    cached_tokens: int


class CompletionTokensDetails(_Answer):
    reasoning_tokens: int


class Usage(_Answer):
    """Tokens of an answer. `approximate`: some were reused from other positions; always given if
    that is the server's default mode, else only if true.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    approximate: NotRequired[bool]


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


class Costs(_Answer):
    """The mode that ran, the times, and the origin of the cached tokens. `approximate`: some tokens
    were shared at other positions, `reused_span_tokens` of them; `recomputed_tokens` were found
    there and computed all the same. Of `matched_tokens` the keys and values were cached: of models
    with states more than those of `hit_tokens`. `miss_reason` is `cause`, "" for "none".
    `step_share`: mean share of the tokens of the steps that were the request's, 0 to 1.
    """

    mode: str
    approximate: bool
    reused_span_tokens: int
    recomputed_tokens: int
    hit_tokens: dict[str, int]
    matched_tokens: int
    cause: Cause
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
    step_share: float
    seeds: list[int]


class Explained(Costs):
    """The same, and with kvboost.explain a report on the first prompt."""

    cache: NotRequired[PromptCache]


class Spent(_Answer):
    """The members of an answer that say what it cost."""

    timings: Timings
    kvboost: Explained


class Figures(Spent):
    """Figures of a completion or a chat completion."""

    usage: Usage


# Completions and chat completions.


class _Head(_Answer):
    id: str
    created: int
    model: str
    system_fingerprint: str


class ChunkHead(_Head):
    """Members that an answer, and every chunk of one, begins with."""

    object: str


class CompletionLogprobs(_Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoiceAnswer(_Answer):
    """`token_ids` only when asked for."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    token_ids: NotRequired[list[int]]


class CompletionAnswer(Figures, _Head):
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
    """`reasoning_content` and `tool_calls` only where there are any; `content` is null where there
    are calls and no text.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoiceAnswer(_Answer):
    """`token_ids` only when asked for."""

    index: int
    message: ChatMessageAnswer
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: NotRequired[list[int]]


class ChatAnswer(Figures, _Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoiceAnswer]


# Texts and vectors.


class Piece(_Answer):
    id: int
    piece: str


class Tokenized(_Answer):
    """`token_strs` only when asked for."""

    tokens: list[int] | list[Piece]
    count: int
    max_model_len: int
    token_strs: NotRequired[list[str]]


class Detokenized(_Answer):
    content: str
    prompt: str


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
    document: NotRequired[RankedText]


class RerankAnswer(_Answer):
    object: Literal["list"]
    model: str
    results: list[Ranked]
    usage: InputUsage


# The cache.


class Warmed(_Answer):
    """The part of a text, or of documents, that is in the cache now; `alignment_warning` says what
    was not kept, if it matters. `timings` and `kvboost` are null where documents are there already
    and nothing had to be computed.
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
    """The number of blocks that are no longer pinned; 0 if this text was not pinned with this key
    and salt.
    """

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


class HeldInCache(_Answer):
    """Contents of the cache of one engine; the names in cache, pool and memory are the engine's."""

    cache: dict[str, float]
    pool: dict[str, Any]
    tiers: dict[str, TierFigures]
    memory: dict[str, int]


class ReplicaStats(HeldInCache):
    """One replica's part of the stats."""

    running: int
    waiting: int
    waiting_tokens: int


class EngineStats(HeldInCache):
    """Stats of one model alone."""

    object: Literal["stats"]
    model: str
    queue: Queue
    throughput: Throughput
    replicas: dict[str, ReplicaStats]


class Stats(EngineStats):
    """Queue, cache, pool, tiers, memory and throughput of one model; those of cache, pool and
    memory are the engine's own names. replicas: of each, by name, where several serve the model and
    the others are their sums. models: which are loaded, and what they take.
    """

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
    """Contents of a tier, null where only its server knows; max_bytes null: its server caps it.
    `state` says what is wrong, "" when all is well; `recent_hit_tokens` are prompt tokens of the
    last minute that came from it.
    """

    blocks: int | None
    bytes: int | None
    max_bytes: int | None
    writable: bool
    state: str
    recent_hit_tokens: int


class PoolBytes(_Answer):
    """Blocks of a pool that can be matched, and their bytes of all."""

    blocks: int
    bytes: int
    max_bytes: int


class ReplicaPool(PoolBytes):
    """One replica's pool: its blocks, those of them that can be matched, and their bytes of all."""

    num_blocks: int
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
