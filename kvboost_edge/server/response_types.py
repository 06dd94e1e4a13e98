"""Types of response bodies of this project's own routes and OpenAI's routes.

The functions that build the bodies return these types, and the OpenAPI document describes them.
Routes of other projects' APIs declare no types, because their vendors document them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

__all__ = [
    "ERRORS",
    "UNDECLARED_ERRORS",
    "AnswerCosts",
    "BatchCounts",
    "BatchError",
    "BatchErrors",
    "BatchList",
    "BatchObject",
    "BatchStatus",
    "BlockCounts",
    "Blocks",
    "CacheResetResponse",
    "CacheStats",
    "Cause",
    "ChatLogprobs",
    "ChatResponse",
    "ChatResponseChoice",
    "ChatResponseMessage",
    "ChatToken",
    "ChatTokenAndOthers",
    "ChunkHead",
    "CompletionLogprobs",
    "CompletionResponse",
    "CompletionResponseChoice",
    "CostReport",
    "Costs",
    "DeleteFileResponse",
    "DeleteSessionResponse",
    "DetokenizeResponse",
    "EmbeddingResponse",
    "EngineStats",
    "ErrorResponse",
    "Figures",
    "FileList",
    "FileObject",
    "FinishReason",
    "InputUsage",
    "Labels",
    "Model",
    "ModelFigures",
    "ModelList",
    "ModelsMemory",
    "Phase",
    "Piece",
    "PoolBytes",
    "PromptCache",
    "PromptCaches",
    "ReplicaPool",
    "ReplicaStats",
    "RerankResponse",
    "RerankResult",
    "SavedSession",
    "SessionContents",
    "SessionList",
    "SessionView",
    "Stats",
    "Throughput",
    "TierView",
    "Timings",
    "TokenizeResponse",
    "UnpinResponse",
    "Usage",
    "Vector",
    "WarmResponse",
]

FinishReason = Literal["stop", "length", "tool_calls"]


@with_config(ConfigDict(extra="forbid"))
class _Response(TypedDict):
    """Base class of all response bodies. It allows no undeclared keys."""


# Errors.


class ErrorDetail(_Response):
    """Content of an error."""

    message: Annotated[str, Field(description="Human-readable description of the error.")]
    type: Annotated[str, Field(description="OpenAI's error type.")]
    param: Annotated[str | None, Field(description="Name of the invalid field.")]
    code: Annotated[str, Field(description="Error code that programs can check.")]


class ErrorResponse(_Response):
    """An error in OpenAI's format."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorResponse},
    "5XX": {"model": ErrorResponse},
}
UNDECLARED_ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {}, "5XX": {}}
"""Errors of other projects' APIs, each in its own format."""


# Cache-miss reports.

Cause = Literal[
    "none",
    "bypassed",
    "not_started",
    "not_compared",
    "first_seen",
    "new_text",
    "tail",
    "private_tail",
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
"""Cause of a cache miss, see `cache_report.diagnosis.CAUSES`."""


class PromptCache(_Response):
    """Cache-miss report, with the first token that differs from an earlier request."""

    request_id: Annotated[
        str, Field(description="Request id from the x-request-id response header.")
    ]
    at: Annotated[float, Field(description="Time of the request, in seconds since the epoch.")]
    cause: Annotated[Cause, Field(description="Reason why prompt tokens were computed.")]
    prompt_tokens: Annotated[int, Field(description="Number of prompt tokens.")]
    hit_tokens: Annotated[
        dict[str, int],
        Field(description="Number of prompt tokens found in the pool and in each tier."),
    ]
    reused_span_tokens: Annotated[
        int, Field(description="Number of prompt tokens reused at other positions.")
    ]
    computed_tokens: Annotated[
        int, Field(description="Number of prompt tokens that were computed.")
    ]
    seconds: Annotated[float, Field(description="Time spent on computing these tokens.")]
    step_share: Annotated[
        float,
        Field(description="Mean share of the request in the tokens of its engine steps, 0 to 1."),
    ]
    position: Annotated[
        int, Field(description="Index of the first token that differs from the earlier request.")
    ]
    field: Annotated[
        str, Field(description='Field of the request at this position, such as "message 7".')
    ]
    field_before: Annotated[
        str, Field(description="Field of the earlier request at this position.")
    ]
    text: Annotated[str, Field(description="Text of the request around the position.")]
    text_before: Annotated[
        str, Field(description="Text of the earlier request around the position.")
    ]
    compared_with: Annotated[
        str,
        Field(description='Request id of the earlier request, or "" without an earlier request.'),
    ]
    evicted_from: Annotated[
        list[str], Field(description="Names of the tiers (or pool) that evicted the blocks.")
    ]
    normalised: Annotated[
        list[str], Field(description="Kinds of normalization that changed the request.")
    ]
    model: Annotated[str, Field(description="Name of the model.")]


class PromptCaches(_Response):
    """Cache-miss reports on the latest prompts of an API key, latest first, without texts."""

    object: Literal["list"]
    data: list[PromptCache]
    kept_seconds: Annotated[
        float,
        Field(
            description=(
                "Time that requests are kept (--request-history), or 0 if they are not kept."
            )
        ),
    ]


# Models.

Phase = Literal["not_loaded", "loading", "loaded", "unloading"]


class ModelMeta(_Response):
    """Properties of a model."""

    architecture: str
    dtype: str
    runner: str
    vocab_size: int
    weight_bytes: int


class SamplingValues(_Response):
    """Default values of sampling parameters."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float


_APPROXIMATIONS_DESCRIPTION = (
    "Options that make answers approximate: wide_arithmetic for --arithmetic wide, sparse_prefill "
    "for sparse prefill"
)


class Model(_Response):
    """A model under one of its names.

    max_model_len, sampling, mode, approximate, approximations and meta are null if the model was
    never loaded.
    """

    id: Annotated[str, Field(description="Name of the model.")]
    object: Literal["model"]
    created: int
    owned_by: str
    root: Annotated[str, Field(description="Name of the model in responses.")]
    parent: None
    max_model_len: Annotated[
        int | None,
        Field(description="Context length in tokens, as far as it fits into the block pool."),
    ]
    sampling: Annotated[
        SamplingValues | None,
        Field(description="Default sampling parameters of requests."),
    ]
    mode: Annotated[str | None, Field(description="Default mode of requests.")]
    approximate: Annotated[
        bool | None, Field(description="True if answers in the default mode may be approximate.")
    ]
    approximations: Annotated[
        list[str] | None,
        Field(
            description=f"{_APPROXIMATIONS_DESCRIPTION}, which applies to long prompts only. What "
            "requests choose is left out."
        ),
    ]
    meta: ModelMeta | None
    state: Phase
    failure: Annotated[str | None, Field(description="Reason why the last load failed.")]
    managed: Annotated[
        bool, Field(description="True for a pulled or created model, which can be deleted.")
    ]
    file_bytes: Annotated[
        int | None,
        Field(description="Size of the files of a pulled model, or null for other models."),
    ]
    unloadable: Annotated[
        bool, Field(description="True if this API key may unload the model, with `keep_alive` 0.")
    ]


class ModelFigures(_Response):
    """Memory and requests of one model."""

    id: str
    state: Phase
    bytes: Annotated[int, Field(description="Bytes of weights, pool and recurrent state.")]
    in_use: Annotated[
        int, Field(description="Number of requests that use the model or wait for it.")
    ]
    unloads_in_seconds: Annotated[
        float | None,
        Field(description="Time until the model is unloaded, or null without a time limit."),
    ]
    waits_for: Annotated[str, Field(description='Reason why loading has not finished, or "".')]


class ModelsMemory(_Response):
    """Memory of all models."""

    max_bytes: Annotated[int, Field(description="Memory limit of all models.")]
    taken_bytes: Annotated[int, Field(description="Memory in use by all models.")]
    waiting: Annotated[
        int, Field(description="Number of requests that wait for a model to be loaded.")
    ]
    data: list[ModelFigures]


class AllowedChanges(_Response):
    """Permission to change the models with this API key."""

    allowed: Annotated[bool, Field(description="True if models may be pulled and deleted.")]
    reason: Annotated[str | None, Field(description="Reason why they may not be changed.")]


class ModelList(_Response):
    """The served models."""

    object: Literal["list"]
    data: list[Model]
    changes: AllowedChanges
    memory: Annotated[
        ModelsMemory | None,
        Field(description="Memory of all models, for admins; null for other API keys."),
    ]


# Figures of a request.


class PromptTokensDetails(_Response):
    """Details of the prompt tokens."""

    cached_tokens: int


class CompletionTokensDetails(_Response):
    """Details of the generated tokens."""

    reasoning_tokens: int


class Usage(_Response):
    """Token counts of an answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    approximate: NotRequired[
        Annotated[
            bool,
            Field(
                description=(
                    "True if tokens were reused at other positions, or if an option of the "
                    "server makes the answer approximate. Absent if false, unless the server's "
                    "default mode is approximate."
                )
            ),
        ]
    ]


class Timings(_Response):
    """llama.cpp's timings of an answer."""

    cache_n: Annotated[int, Field(description="Number of prompt tokens found in the cache.")]
    prompt_n: Annotated[int, Field(description="Number of prompt tokens that were computed.")]
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: Annotated[int, Field(description="Number of generated tokens.")]
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: Annotated[int, Field(description="Number of draft tokens in speculative decoding.")]
    draft_n_accepted: Annotated[int, Field(description="Number of accepted draft tokens.")]


class Costs(_Response):
    """Mode, times and cached tokens of a request."""

    mode: Annotated[str, Field(description="Cache mode that the request used.")]
    approximate: Annotated[
        bool,
        Field(
            description="True if tokens were reused at other positions, or if approximations is "
            "not empty."
        ),
    ]
    approximations: Annotated[
        list[str], Field(description=f"{_APPROXIMATIONS_DESCRIPTION} if the prompt is long enough.")
    ]
    reused_span_tokens: Annotated[
        int, Field(description="Number of prompt tokens reused at other positions.")
    ]
    recomputed_tokens: Annotated[
        int, Field(description="Number of prompt tokens found at other positions and recomputed.")
    ]
    hit_tokens: Annotated[
        dict[str, int],
        Field(description="Number of prompt tokens found in the pool and in each tier."),
    ]
    matched_tokens: Annotated[
        int,
        Field(
            description=(
                "Number of prompt tokens whose KV was cached. It exceeds hit_tokens if a "
                "hybrid model lacked the recurrent state."
            )
        ),
    ]
    cause: Annotated[Cause, Field(description="Reason why prompt tokens were computed.")]
    miss_reason: Annotated[str, Field(description='Same as cause, except that "none" becomes "".')]
    tokenize_ms: float
    queue_ms: Annotated[float, Field(description="Time that the request waited in the queue.")]
    lookup_ms: Annotated[float, Field(description="Time spent on the prefix lookup.")]
    load_ms: Annotated[float, Field(description="Time spent on loading blocks from tiers.")]
    probe_ms: Annotated[
        float, Field(description="Time spent on deviation scoring in non-prefix KV reuse.")
    ]
    repair_ms: Annotated[
        float,
        Field(
            description=(
                "Time spent on computing the prompt up to the last reused token in non-prefix "
                "KV reuse."
            )
        ),
    ]
    prefill_ms: Annotated[
        float, Field(description="Time spent on computing the rest of the prompt.")
    ]
    decode_ms: Annotated[float, Field(description="Time spent on generating the output.")]
    ttft_ms: Annotated[float, Field(description="Time to the first token.")]
    total_ms: float
    dropped_messages: Annotated[
        int, Field(description="Number of messages left out to fit the context.")
    ]
    preemptions: Annotated[
        int,
        Field(description="Number of times that the request lost its blocks and was recomputed."),
    ]
    step_share: Annotated[
        float,
        Field(description="Mean share of the request in the tokens of its engine steps, 0 to 1."),
    ]
    seeds: Annotated[list[int], Field(description="Seed of each sequence.")]


class CostReport(Costs):
    """Mode, times and cached tokens of a request, with an optional cache-miss report."""

    cache: NotRequired[
        Annotated[
            PromptCache,
            Field(description="Cache-miss report on the first prompt, if kvboost.explain is true."),
        ]
    ]


class AnswerCosts(_Response):
    """Times and costs of an answer."""

    timings: Timings
    kvboost: CostReport


class Figures(AnswerCosts):
    """Usage and costs of a completion or chat completion."""

    usage: Usage


# Completions and chat completions.


class _Head(_Response):
    """First members of a response."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class ChunkHead(_Head):
    """First members of a response and of each stream chunk."""

    object: str


class CompletionLogprobs(_Response):
    """Log probabilities of a completion, as parallel lists."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionResponseChoice(_Response):
    """One choice of a completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    token_ids: NotRequired[
        Annotated[
            list[int],
            Field(description="Token ids of the output. Present if return_token_ids is true."),
        ]
    ]


class CompletionResponse(Figures, _Head):
    """A completion."""

    object: Literal["text_completion"]
    choices: list[CompletionResponseChoice]


class ChatToken(_Response):
    """A token and its log probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenAndOthers(ChatToken):
    """A token with the most likely alternatives."""

    top_logprobs: list[ChatToken]


class ChatLogprobs(_Response):
    """Log probabilities of a message."""

    content: list[ChatTokenAndOthers]
    refusal: None


class FunctionCall(_Response):
    """Name and arguments of a tool call."""

    name: str
    arguments: str


class ToolCall(_Response):
    """A tool call of the model."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatResponseMessage(_Response):
    """The generated message."""

    role: Literal["assistant"]
    content: Annotated[
        str | None,
        Field(description="Text of the message, or null if it has tool calls and no text."),
    ]
    refusal: None
    reasoning_content: NotRequired[
        Annotated[str, Field(description="Reasoning of the model, if any.")]
    ]
    tool_calls: NotRequired[Annotated[list[ToolCall], Field(description="Tool calls, if any.")]]


class ChatResponseChoice(_Response):
    """One choice of a chat completion."""

    index: int
    message: ChatResponseMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: NotRequired[
        Annotated[
            list[int],
            Field(description="Token ids of the output. Present if return_token_ids is true."),
        ]
    ]


class ChatResponse(Figures, _Head):
    """A chat completion."""

    object: Literal["chat.completion"]
    choices: list[ChatResponseChoice]


# Texts and vectors.


class Piece(_Response):
    """A token with its text."""

    id: int
    piece: Annotated[
        str | list[int],
        Field(description="Text, or a list of bytes if the token has only part of a character."),
    ]


class TokenizeResponse(_Response):
    """Token ids of a text."""

    tokens: list[int] | list[Piece]
    count: int
    max_model_len: int
    token_strs: NotRequired[
        Annotated[
            list[str],
            Field(description="Text of each token. Present if return_token_strs is true."),
        ]
    ]


class DetokenizeResponse(_Response):
    """Text of token ids."""

    content: str
    prompt: str


class CachedTokens(_Response):
    """Details of the prompt tokens."""

    cached_tokens: int


class InputUsage(_Response):
    """Token counts of a request without output."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    approximate: NotRequired[
        Annotated[
            bool,
            Field(
                description="True if an option of the server makes the results approximate. "
                "Absent if false."
            ),
        ]
    ]


class Labels(_Response):
    """Labels of approximate results."""

    approximate: Annotated[bool, Field(description="True if approximations is not empty.")]
    approximations: Annotated[
        list[str], Field(description=f"{_APPROXIMATIONS_DESCRIPTION} if the input is long enough.")
    ]


class Vector(_Response):
    """One embedding."""

    object: Literal["embedding"]
    index: int
    embedding: Annotated[
        list[float] | str,
        Field(
            description="The vector as a list of numbers, or as base64 of little-endian "
            "float32 values."
        ),
    ]


class EmbeddingResponse(_Response):
    """Embeddings, in the order of the inputs."""

    object: Literal["list"]
    data: list[Vector]
    model: str
    usage: InputUsage
    kvboost: Labels


# The batch API.


class FileObject(_Response):
    """A stored file."""

    id: str
    object: Literal["file"]
    bytes: Annotated[int, Field(description="Size of the file.")]
    created_at: Annotated[int, Field(description="Time of the upload, in seconds since the epoch.")]
    expires_at: Annotated[int, Field(description="Time at which the file is removed.")]
    filename: Annotated[str, Field(description="Name that the client gave.")]
    purpose: Annotated[str, Field(description="Use of the file.")]
    status: Annotated[Literal["processed"], Field(description="Always processed.")]


class FileList(_Response):
    """A page of the stored files."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: Annotated[str | None, Field(description="Id of the first file of the page.")]
    last_id: Annotated[str | None, Field(description="Id of the last file of the page.")]
    has_more: Annotated[bool, Field(description="Whether more files follow.")]


class DeleteFileResponse(_Response):
    """A deleted file."""

    id: str
    object: Literal["file"]
    deleted: Annotated[bool, Field(description="Always true.")]


class BatchError(_Response):
    """A reason why a batch failed."""

    code: Annotated[str, Field(description="Error code that programs can check.")]
    line: Annotated[int | None, Field(description="Number of the line in the input file, from 1.")]
    message: Annotated[str, Field(description="Description of the error for people.")]
    param: Annotated[str | None, Field(description="Name of the invalid field.")]


class BatchErrors(_Response):
    """Reasons why a batch failed."""

    object: Literal["list"]
    data: list[BatchError]


class BatchCounts(_Response):
    """Progress of a batch."""

    total: Annotated[int, Field(description="Number of lines.")]
    completed: Annotated[int, Field(description="Number of lines with an answer.")]
    failed: Annotated[int, Field(description="Number of lines that failed.")]


BatchStatus = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
"""Stage of a batch, by OpenAI's names."""


class BatchObject(_Response):
    """A batch. Times are in seconds since the epoch, and null before they occur."""

    id: str
    object: Literal["batch"]
    endpoint: Annotated[str, Field(description="Route that answers the lines.")]
    errors: Annotated[BatchErrors | None, Field(description="Reasons of a failed batch.")]
    input_file_id: Annotated[str, Field(description="File with the lines.")]
    completion_window: Annotated[str, Field(description="Time limit.")]
    status: Annotated[BatchStatus, Field(description="Stage of the batch.")]
    output_file_id: Annotated[
        str | None, Field(description="File with the answers, once the batch has ended.")
    ]
    error_file_id: Annotated[
        str | None, Field(description="File with the lines that failed, once the batch has ended.")
    ]
    created_at: Annotated[int, Field(description="Time of creation.")]
    in_progress_at: Annotated[int | None, Field(description="Start of the first line.")]
    expires_at: Annotated[int, Field(description="Time at which an unfinished batch ends.")]
    finalizing_at: Annotated[int | None, Field(description="End of the last line.")]
    completed_at: Annotated[int | None, Field(description="End of a complete batch.")]
    failed_at: Annotated[int | None, Field(description="End of a batch that failed.")]
    expired_at: Annotated[int | None, Field(description="End of a batch whose time was over.")]
    cancelling_at: Annotated[int | None, Field(description="Time of the request to cancel.")]
    cancelled_at: Annotated[int | None, Field(description="End of a cancelled batch.")]
    request_counts: Annotated[BatchCounts, Field(description="Progress of the batch.")]
    metadata: Annotated[dict[str, str] | None, Field(description="Labels from the request.")]


class BatchList(_Response):
    """A page of the batches, newest first."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: Annotated[str | None, Field(description="Id of the first batch of the page.")]
    last_id: Annotated[str | None, Field(description="Id of the last batch of the page.")]
    has_more: Annotated[bool, Field(description="Whether more batches follow.")]


class RerankDocument(_Response):
    """Text of a document."""

    text: str


class RerankResult(_Response):
    """A document and its relevance."""

    index: Annotated[int, Field(description="Index of the document in the request.")]
    relevance_score: float
    document: NotRequired[
        Annotated[
            RerankDocument, Field(description="The document. Present if return_documents is true.")
        ]
    ]


class RerankResponse(_Response):
    """Documents in the order of their relevance, best first."""

    object: Literal["list"]
    model: str
    results: list[RerankResult]
    usage: InputUsage
    kvboost: Labels


# The cache.


class WarmResponse(_Response):
    """Result of warming, which tells how much of a text or of documents is now cached."""

    object: Literal["warm"]
    usage: Usage
    timings: Annotated[Timings | None, Field(description="Null if everything was already cached.")]
    kvboost: Annotated[Costs | None, Field(description="Null if everything was already cached.")]
    chunks_stored: Annotated[int, Field(description="Number of cached chunks.")]
    token_count: Annotated[int, Field(description="Number of tokens in the text.")]
    chunk_size: Annotated[int, Field(description="Number of tokens in a chunk.")]
    chunk_boundary_aligned: Annotated[
        bool, Field(description="True if fewer than 32 tokens at the end are not cached.")
    ]
    partial_tail_tokens: Annotated[
        int, Field(description="Number of tokens after the last full chunk.")
    ]
    alignment_warning: Annotated[
        str | None, Field(description="Note about the tokens that are not cached, if they matter.")
    ]
    pinned_tokens: Annotated[
        int, Field(description="Number of tokens in pinned blocks, or 0 without pin.")
    ]


class UnpinResponse(_Response):
    """Result of an unpin request."""

    object: Literal["unpin"]
    blocks_unpinned: Annotated[
        int,
        Field(
            description=(
                "Number of blocks that were unpinned, or 0 if the text was not pinned with "
                "this key and salt."
            )
        ),
    ]


class SessionView(_Response):
    """A named session."""

    object: Literal["session"]
    name: Annotated[str, Field(description="Name of the session.")]
    model: str
    tokens: Annotated[int, Field(description="Number of tokens of the conversation.")]
    bytes: Annotated[
        int,
        Field(description="Size of its KV, its recurrent state and its record, in bytes."),
    ]
    created: Annotated[
        int, Field(description="Time when the session was first saved, in seconds since 1970.")
    ]
    expires: Annotated[int, Field(description="Time when the session ends, in seconds since 1970.")]
    stored: Annotated[
        Literal["disk", "pool"],
        Field(
            description=(
                "disk: the session survives a restart. pool: there is no disk cache, and a restart "
                "ends the session."
            )
        ),
    ]


class SavedSession(SessionView):
    """A session that was saved or restored, and the cost of it."""

    pinned: Annotated[
        bool,
        Field(
            description=(
                "True if the full blocks stay in the pool until the session ends. False if other "
                "pins leave no room, or pin is false."
            )
        ),
    ]
    usage: Usage
    timings: Timings
    kvboost: CostReport


class SessionContents(SessionView):
    """A named session and its messages."""

    messages: Annotated[
        list[dict[str, Any]] | None,
        Field(description="Messages of the session; null if it was saved as text or token ids."),
    ]
    tools: list[dict[str, Any]] | None
    chat_template_kwargs: dict[str, Any] | None


class SessionList(_Response):
    """Named sessions of an API key."""

    object: Literal["list"]
    data: list[SessionView]
    sessions: Annotated[
        int, Field(description="Number of the key's sessions, whatever their salts.")
    ]
    max_sessions: Annotated[int, Field(description="Maximum number of the key's sessions.")]
    bytes: Annotated[int, Field(description="Size of the key's sessions, whatever their salts.")]
    max_bytes: Annotated[int, Field(description="Maximum size of the key's sessions.")]


class DeleteSessionResponse(_Response):
    """Result of deleting a session."""

    object: Literal["session.deleted"]
    name: Annotated[str, Field(description="Name of the session.")]
    deleted: Annotated[Literal[True], Field(description="Always true.")]
    blocks_unpinned: Annotated[int, Field(description="Number of blocks that were unpinned.")]


class CacheResetResponse(_Response):
    """Result of a cache reset."""

    object: Literal["cache.reset"]
    blocks_dropped: Annotated[int, Field(description="Number of dropped blocks.")]


class Queue(_Response):
    """Requests in flight."""

    running: Annotated[int, Field(description="Number of running requests.")]
    waiting: Annotated[int, Field(description="Number of waiting requests.")]
    waiting_tokens: Annotated[
        int, Field(description="Number of prompt tokens in the waiting requests.")
    ]
    in_flight: Annotated[int, Field(description="Number of admitted sequences.")]
    max_in_flight: Annotated[int, Field(description="Maximum number of admitted sequences.")]
    refused: Annotated[
        int, Field(description="Number of requests rejected because the queue was full.")
    ]


class _TierStorage(_Response):
    """Storage of an offload tier."""

    blocks: Annotated[
        int | None,
        Field(description="Number of stored blocks, or null if only the tier's server knows it."),
    ]
    bytes: Annotated[
        int | None,
        Field(description="Number of stored bytes, or null if only the tier's server knows it."),
    ]
    max_bytes: Annotated[
        int | None,
        Field(description="Maximum number of bytes, or null if the tier's server sets it."),
    ]
    writable: Annotated[bool, Field(description="True if the tier accepts blocks.")]
    state: Annotated[str, Field(description='Description of the failure, or "".')]


class TierFigures(_TierStorage):
    """State and counters of an offload tier."""

    read_blocks: int
    read_bytes: int
    written_blocks: int
    written_bytes: int
    missing: Annotated[
        int, Field(description="Number of blocks that were requested and not found.")
    ]
    refused: Annotated[
        int,
        Field(description="Number of blocks dropped because they were damaged or did not match."),
    ]
    evicted: int
    not_written: Annotated[int, Field(description="Number of blocks that could not be stored.")]
    errors: Annotated[int, Field(description="Number of failed operations.")]


class Throughput(_Response):
    """Token totals and speeds."""

    prompt_tokens_total: int
    generated_tokens_total: int
    prompt_tokens_per_second: Annotated[
        float, Field(description="Mean speed of one request over the last minute.")
    ]
    generated_tokens_per_second: Annotated[
        float, Field(description="Mean speed of one request over the last minute.")
    ]


class CacheStats(_Response):
    """Cache, pool, tiers and memory of one engine, under the keys that the engine uses."""

    cache: dict[str, float]
    pool: dict[str, Any]
    tiers: dict[str, TierFigures]
    memory: dict[str, int]


class ReplicaStats(CacheStats):
    """Statistics of one replica."""

    running: int
    waiting: int
    waiting_tokens: int


class EngineStats(CacheStats):
    """Statistics of one model."""

    object: Literal["stats"]
    model: str
    queue: Queue
    throughput: Throughput
    replicas: Annotated[
        dict[str, ReplicaStats],
        Field(
            description=(
                "Statistics of each replica by name, empty without replicas. The other members "
                "are totals over the replicas."
            )
        ),
    ]


class Stats(EngineStats):
    """Statistics of one model, and memory of all models."""

    models: ModelsMemory


class BlockCounts(_Response):
    """Numbers of blocks by state, in the order of the numbers in `Blocks.states`."""

    free: int
    cached: int
    used: int
    shared: int
    span: Annotated[int, Field(description="Number of blocks in use at another position.")]


class Memory(_Response):
    """Memory in bytes."""

    weight_bytes: int
    pool_bytes: int
    draft_weight_bytes: Annotated[int, Field(description="Weights of the draft model or MTP head.")]
    draft_pool_bytes: Annotated[int, Field(description="Draft KV pool.")]
    state_bytes: int
    process_rss_bytes: int
    process_peak_bytes: int


class TierView(_TierStorage):
    """Contents of the pool or of an offload tier."""

    recent_hit_tokens: Annotated[
        int, Field(description="Number of prompt tokens found in this tier in the last minute.")
    ]


class PoolBytes(_Response):
    """Bytes of the blocks that prompts can match."""

    blocks: Annotated[int, Field(description="Number of blocks that prompts can match.")]
    bytes: Annotated[int, Field(description="Size of these blocks.")]
    max_bytes: Annotated[int, Field(description="Size of the pool.")]


class ReplicaPool(PoolBytes):
    """Pool and load of one replica."""

    num_blocks: int
    running: int
    waiting: int
    hit_rate: float | None


class Blocks(_Response):
    """State of each block of a model's pool, and contents of the tiers.

    With several replicas, the blocks of all their pools are listed in the order of `replicas`.
    """

    num_blocks: int
    block_size: int
    states: Annotated[
        str, Field(description="State of each block, as base64 of one byte per block.")
    ]
    refs: Annotated[
        str | None,
        Field(
            description=(
                "Number of references to each block, as base64 of one byte per block. Null for "
                "a large pool."
            )
        ),
    ]
    tokens: Annotated[
        str | None,
        Field(
            description=(
                "Number of tokens in each block, as base64 of one byte per block. Null for a "
                "large pool."
            )
        ),
    ]
    counts: BlockCounts
    running: int
    waiting: int
    hit_tokens: int
    span_tokens: int
    miss_tokens: int
    hit_rate: float | None
    memory: Memory
    tiers: Annotated[
        dict[str, TierView], Field(description="The pool and the tiers below it, fastest first.")
    ]
    recent_span_tokens: Annotated[
        int,
        Field(description="Number of prompt tokens reused at other positions in the last minute."),
    ]
    recent_computed_tokens: Annotated[
        int, Field(description="Number of prompt tokens computed in the last minute.")
    ]
    generated_tokens_total: int
    evictions: int
    preemptions: int
    state_slots: Annotated[
        int, Field(description="Slots for the recurrent state of hybrid models.")
    ]
    state_slots_used: int
    replayed_tokens: Annotated[
        int,
        Field(
            description="Number of prompt tokens recomputed because their recurrent state "
            "was not cached."
        ),
    ]
    replicas: Annotated[
        dict[str, ReplicaPool],
        Field(description="Pool of each replica by name, empty without replicas."),
    ]
