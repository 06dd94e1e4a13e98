"""What a body asks for against what this server has: its model, its context and pool, its tenants."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.types import Send

from kvboost_edge.config import GenerationMode
from kvboost_edge.server.api.bounds import COUNTS
from kvboost_edge.server.errors import ApiError
from kvboost_edge.server.state import ServerState, state_of
from kvboost_edge.server.work.bridge import Answer

__all__ = [
    "answered",
    "check_logprobs",
    "check_mode",
    "check_model",
    "check_priority",
    "most_with_logprobs",
    "room_for",
]


def answered(request: Request, model: str | None, work: Callable[[ServerState, Send], Awaitable[None]]) -> Answer:
    """The answer that `work` sends, once the model that the body names is known to be the one that is served."""

    async def whole(send: Send) -> None:
        state = state_of(request)
        check_model(state, model)
        await work(state, send)

    return Answer(whole)


def check_model(state: ServerState, name: str | None) -> None:
    """404 for a model that is not served here; None is the one that is."""
    if name is not None and name not in state.settings.model_names:
        raise ApiError(
            404,
            f"the model {name[:200]!r} is not served here; this server has {state.model_name!r}",
            code="model_not_found",
            param="model",
        )


def room_for(state: ServerState, num_prompt_tokens: int, param: str, wanted: int | None, wanted_param: str) -> int:
    """New tokens a prompt may have: `wanted`, or (None) all that context and pool leave. ApiError 400 if it has no
    room; 0 wanted tokens need none."""
    context, pool = state.engine.runner_info.max_context, state.admission.pool_tokens
    # The last token's keys and values are never computed.
    room = min(context, pool + 1) - num_prompt_tokens
    limit = f"the model's context is {context} tokens and the cache holds {pool}"
    if room < (0 if wanted == 0 else 1):
        message = f"the prompt has {num_prompt_tokens} tokens and leaves no room for an answer: {limit}; shorten it"
        raise ApiError(400, message, code="context_length_exceeded", param=param)
    if wanted is None:
        return room
    if wanted > room:
        message = f"{num_prompt_tokens} prompt tokens and {wanted_param}={wanted} are too many: {limit}"
        raise ApiError(400, message, code="context_length_exceeded", param=wanted_param)
    return wanted


def check_logprobs(num_tokens: int, logprobs: int | None, param: str) -> None:
    """ApiError 400 where the tokens of an answer, all its sequences and echoed prompts, have too many log
    probabilities to write down."""
    limit = int(COUNTS["logprob_entries"].high)
    total = 0 if logprobs is None else num_tokens * (logprobs + 1)
    if total > limit:
        message = (
            f"{param}={logprobs} for {num_tokens} tokens makes {num_tokens} x {(logprobs or 0) + 1} = {total} log "
            f"probabilities; at most {limit} are answered; lower {param}, n or max_tokens, or send shorter prompts"
        )
        raise ApiError(400, message, code="request_too_large", param=param)


def most_with_logprobs(num_sequences: int, logprobs: int) -> int:
    """New tokens of each sequence that `check_logprobs` lets pass: the most of an answer without a limit of its own."""
    return int(COUNTS["logprob_entries"].high) // (num_sequences * (logprobs + 1))


def check_mode(state: ServerState, mode: GenerationMode) -> GenerationMode:
    """The mode. ApiError 400 for reuse at other positions where the engine cannot do that."""
    refusal = state.engine.reuse_refusal if mode is GenerationMode.CHUNK_KV_REUSE else None
    if refusal is not None:
        message = f"kvboost.mode 'chunk_kv_reuse' is refused: {refusal}"
        raise ApiError(400, message, code="invalid_value", param="kvboost")
    return mode


def check_priority(state: ServerState, priority: int | None) -> int:
    """The priority to run with, 0 for None. ApiError 400 for one below 0 where there are several API keys: it would go
    before the requests of other tenants. Above 0 a request lets others go first, and that anybody may."""
    if priority is None:
        return 0
    if priority < 0 and len(state.settings.all_keys) > 1:
        message = f"priority={priority} would go before other tenants; with several API keys it must be 0 or more"
        raise ApiError(400, message, code="invalid_value", param="priority")
    return priority
