"""Checks of a request against the model, its context, the block pool and the API keys."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

from fastapi import Query
from starlette.requests import Request
from starlette.types import Send

from kvboost_edge.config import GenerationMode
from kvboost_edge.errors import KVBoostError, RequestError
from kvboost_edge.server.api.bounds import COUNTS
from kvboost_edge.server.api.schemas.shared import SamplingFields
from kvboost_edge.server.api.schemas.strict import bad_field
from kvboost_edge.server.api_errors import ApiError, stopped
from kvboost_edge.server.models.served import ServedModel
from kvboost_edge.server.models.server import server_of
from kvboost_edge.server.state import ModelState
from kvboost_edge.server.work.bridge import Answer, off_loop

__all__ = [
    "ModelParam",
    "check_logprobs",
    "check_mode",
    "check_priority",
    "loaded_model",
    "looked_up",
    "max_length",
    "most_with_logprobs",
    "respond_when_loaded",
    "room_for",
    "served_model",
]

T = TypeVar("T")

ModelParam = Annotated[str | None, Query(max_length=256)]
"""Query parameter with the name of the model."""


def respond_when_loaded(
    request: Request,
    model: str | None,
    work: Callable[[ModelState, Send], Awaitable[None]],
    keep_alive: float | None = None,
) -> Answer:
    """Return a response that loads the model if needed and keeps it loaded while `work` runs.

    Args:
        request: the HTTP request.
        model: name of the model; None for the first one.
        work: sends the response.
        keep_alive: seconds to keep the model loaded afterwards, see `Models.lease`.
    """

    async def whole(send: Send) -> None:
        served = served_model(request, model)
        async with server_of(request).models.lease(request, served, keep_alive) as state:
            await work(state, send)

    return Answer(whole)


def served_model(request: Request, name: str | None) -> ServedModel:
    """Find the served model with this name; None selects the first one.

    Raises:
        ApiError: no model with this name is served (404).
    """
    models = server_of(request).models
    served = models.find(name)
    if served is None:
        here = ", ".join(repr(one.name) for one in models.all)
        message = f"the model {(name or '')[:200]!r} is not served here; this server has {here}"
        raise ApiError(404, message, code="model_not_found", param="model")
    return served


def loaded_model(request: Request, name: str | None) -> ModelState:
    """Return the state of a model that is already loaded.

    Raises:
        ApiError: the model is not served (404) or not loaded (503).
    """
    served = served_model(request, name)
    if served.state is None:
        message = (
            f"the model {served.name!r} is not loaded ({served.phase}); a request for it loads it"
        )
        raise ApiError(
            503,
            message,
            code="model_not_loaded",
            headers={"Retry-After": "1", "Cache-Control": "no-store"},
        )
    return served.state


async def looked_up(state: ModelState, work: Callable[[], T]) -> T:
    """Run `work` in a worker thread while the model's engine is kept open.

    Raises:
        EngineStopped, NoReplica: the engine has stopped (503).
    """
    try:
        with state.looks.begin():
            return await off_loop(work)
    except KVBoostError as error:
        if state.engine.is_alive():
            raise
        raise stopped(state.engine) from error


def max_length(state: ModelState) -> int:
    """Return the maximum number of tokens of a prompt and its answer."""
    # The last token needs no room in the pool, because its KV is never computed.
    return min(state.engine.runner_info.max_context, state.admission.pool_tokens + 1)


def room_for(
    state: ModelState,
    num_prompt_tokens: int,
    param: str,
    wanted: int | None,
    wanted_param: str,
    *,
    fills: bool = False,
    described: str = "the prompt",
) -> int:
    """Return the number of new tokens that a prompt may generate.

    Args:
        state: the model.
        num_prompt_tokens: number of tokens of the prompt.
        param: field of the prompt, for errors.
        wanted: requested number of new tokens; None for all that fit.
        wanted_param: field of `wanted`, for errors.
        fills: whether a `wanted` above the room means all that fit.
        described: name of the prompt in errors.

    Raises:
        ApiError: the context or the block pool is too small (400).
    """
    context = state.engine.runner_info.max_context
    pool = state.admission.pool_tokens
    room = max_length(state) - num_prompt_tokens
    limit = f"the model's context is {context} tokens and the cache holds {pool}"
    if room < (0 if wanted == 0 else 1):
        message = (
            f"{described} has {num_prompt_tokens} tokens, which leaves no room for an answer: "
            f"{limit}; shorten it"
        )
        raise ApiError(400, message, code="context_length_exceeded", param=param)
    if wanted is None or (fills and wanted > room):
        return room
    if wanted > room:
        message = (
            f"{num_prompt_tokens} prompt tokens and {wanted_param}={wanted} are too many: {limit}; "
            f"lower {wanted_param} or shorten the prompt"
        )
        raise ApiError(400, message, code="context_length_exceeded", param=wanted_param)
    return wanted


def check_logprobs(num_tokens: int, logprobs: int | None, param: str) -> None:
    """Check that an answer would not hold too many log probabilities.

    Args:
        num_tokens: number of tokens of all sequences, including echoed prompts.
        logprobs: number of alternatives per token; None without log probabilities.
        param: field that the error names.

    Raises:
        ApiError: the limit is exceeded (400).
    """
    limit = int(COUNTS["logprob_entries"].high)
    total = 0 if logprobs is None else num_tokens * (logprobs + 1)
    if total > limit:
        message = (
            f"{param}={logprobs} for {num_tokens} tokens makes {num_tokens} x "
            f"{(logprobs or 0) + 1} = {total} log probabilities; at most {limit} are returned; "
            f"lower {param}, n or max_tokens, or send shorter prompts"
        )
        raise ApiError(400, message, code="request_too_large", param=param)


def most_with_logprobs(num_sequences: int, logprobs: int) -> int:
    """Return the largest number of new tokens per sequence that `check_logprobs` accepts."""
    return int(COUNTS["logprob_entries"].high) // (num_sequences * (logprobs + 1))


def check_mode(state: ModelState, body: SamplingFields) -> GenerationMode:
    """Return the cache mode of a request: its own or the server's default.

    If the default is baseline, cache_prompt=true selects prefix_cache.

    Raises:
        ApiError: the engine does not support non-prefix KV reuse, or its options are given in
            another mode (400).
    """
    mode = body.mode or state.mode
    check_prefill(state, body.prefill, "kvboost")
    if body.mode is None and body.cache_prompt and mode is GenerationMode.BASELINE:
        mode = GenerationMode.PREFIX_CACHE
    if mode is GenerationMode.CHUNK_KV_REUSE:
        refusal = state.engine.reuse_refusal
        if refusal is not None:
            message = f"kvboost.mode 'chunk_kv_reuse' is refused: {refusal}"
            raise ApiError(400, message, code="invalid_value", param="kvboost")
    elif body.kvboost is not None and body.kvboost.repair:
        name = next(iter(body.kvboost.repair))
        raise bad_field(
            "kvboost",
            f"kvboost.{name} needs kvboost.mode 'chunk_kv_reuse'",
        )
    return mode


def check_prefill(state: ModelState, prefill: str | None, param: str = "prefill") -> str | None:
    """Return a request's choice of prefill.

    Raises:
        ApiError: the engine does not support it (400).
    """
    try:
        state.engine.config.prefill_of(prefill)
    except RequestError as error:
        raise bad_field(param, str(error)) from error
    return prefill


def check_priority(state: ModelState, priority: int | None) -> int:
    """Return the priority of a request; 0 by default.

    Raises:
        ApiError: the priority is negative and several API keys are configured (400).
    """
    if priority is None:
        return 0
    # A negative priority would put this key's requests before those of other keys.
    if priority < 0 and len(state.settings.all_keys) > 1:
        message = (
            f"priority={priority} would run before other tenants; with several API keys it must be "
            "0 or more"
        )
        raise ApiError(400, message, code="invalid_value", param="priority")
    return priority
