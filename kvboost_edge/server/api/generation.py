"""The course of a generating request, the same for both endpoints: admit, run, answer whole or as a stream."""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from starlette.requests import Request
from starlette.types import Send

import kvboost_edge
from kvboost_edge.engine.handle import TokenEvent
from kvboost_edge.engine.results import GenerationResult, TokenLogprobs
from kvboost_edge.server.api.schemas.shared import SamplingFields
from kvboost_edge.server.api.usage import costs, usage_of
from kvboost_edge.server.errors import ClientGone, as_api_error, log_failure
from kvboost_edge.server.state import ServerState, state_of
from kvboost_edge.server.work.admission import Ticket
from kvboost_edge.server.work.bridge import Job, Running, finished, merged, off_loop, running, wait_all
from kvboost_edge.server.work.streams import EventStream, dumps, dumps_long, send_json

__all__ = ["Choice", "Order", "respond"]

_FEW_TOKENS = 2000  # as many are taken apart in some 10 ms

Json = dict[str, Any]
PromptLogprobs = Sequence[TokenLogprobs | None] | None


class Choice(Protocol):
    """Writes one choice of an answer, either whole, or piece by piece."""

    def whole(self, result: GenerationResult) -> Json: ...

    def opening(self, prompt_logprobs: PromptLogprobs) -> Json | None:
        """What a stream shows before the first token, if anything."""
        ...

    def push(self, event: TokenEvent) -> Json | None:
        """The next piece; None while there is no text to show. What belongs to the token waits for it."""
        ...

    def close(self, result: GenerationResult) -> Json:
        """The last piece, with the reason of the end."""
        ...

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the answer that are reasoning; known once it is whole or closed."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One request, ready to run.

    estimate    tokens it may hold, guessed before tokenization
    num_prompts, job, body    what is computed
    choice      (number of the choice, the running requests) -> its writer
    chosen      the results to show, in order
    id_prefix, kind, chunk_kind    how the answer calls itself
    """

    estimate: int
    num_prompts: int
    job: Job
    body: SamplingFields
    choice: Callable[[int, Running], Choice]
    chosen: Callable[[Sequence[GenerationResult]], list[GenerationResult]] = list
    id_prefix: str
    kind: str
    chunk_kind: str


async def respond(request: Request, send: Send, order: Order) -> None:
    """Do the work and send the answer. Raises only while nothing was sent."""
    state = state_of(request)
    if order.body.stream:
        head = _head(state, order.id_prefix, order.chunk_kind)
        stream = EventStream(send, head, include_usage=order.body.include_usage)
        await _respond_stream(request, order, stream)
        return
    async with (
        state.admit(request, order.estimate, order.num_prompts * order.job.per_prompt) as ticket,
        running(state.engine, order.job, ticket) as run,
    ):
        results = await wait_all(ticket, run.handles)
        if len(results) > 1 or results[0].logprobs is not None or results[0].generated_tokens > _FEW_TOKENS:
            # Ten thousands of tokens take a while to write down with their alternatives, or to take apart.
            body = await off_loop(lambda: _whole(state, order, run, results))
        else:
            body = _whole(state, order, run, results)
    await send_json(send, body)


def _whole(state: ServerState, order: Order, run: Running, results: list[GenerationResult]) -> bytes:
    # One choice after the other, each as bytes at once: with their log probabilities they are large.
    writers = [(order.choice(index, run), result) for index, result in enumerate(order.chosen(results))]
    choices = [dumps_long(writer.whole(result)) for writer, result in writers]
    figures = dumps(_figures(results, run, [writer for writer, _ in writers]))
    head = dumps(_head(state, order.id_prefix, order.kind))
    return head[:-1] + b',"choices":[' + b",".join(choices) + b"]," + figures[1:]


async def _respond_stream(request: Request, order: Order, stream: EventStream) -> None:
    state = state_of(request)
    try:
        async with (
            state.admit(request, order.estimate, order.num_prompts * order.job.per_prompt) as ticket,
            running(state.engine, order.job, ticket) as run,
        ):
            await _stream(ticket, order, run, stream)
            await stream.end()
    except Exception as error:
        if not stream.started:
            raise
        api_error = as_api_error(error, engine_alive=state.engine.is_alive())
        if api_error.status_code == 500:
            log_failure(request.scope, error)
        if not isinstance(api_error, ClientGone):
            await stream.fail(api_error)


async def _stream(ticket: Ticket, order: Order, run: Running, stream: EventStream) -> None:
    choices = [order.choice(index, run) for index in range(len(run.handles))]
    opened: set[int] = set()
    results: dict[int, GenerationResult] = {}
    async with aclosing(merged(run.handles)) as batches:
        async for batch in batches:
            for index, item in batch:
                choice = choices[index]
                if isinstance(item, GenerationResult):
                    results[index] = finished(ticket, item)
                if index not in opened:
                    opened.add(index)
                    ticket.first_token()
                    await _open(choice, run.handles[index].prompt_logprobs, stream)
                if isinstance(item, GenerationResult):
                    closing = choice.close(item)
                    last = len(results) == len(choices) and not order.body.include_usage
                    members = _figures(_in_order(results), run, choices) if last else {}
                    members.pop("usage", None)  # only who asks for it gets it in a stream
                    stream.chunk([closing], **members)
                elif (piece := choice.push(item)) is not None:
                    stream.chunk([piece])
            if len(results) < len(choices):
                await stream.flush()
    if order.body.include_usage:
        stream.chunk([], **_figures(_in_order(results), run, choices))


async def _open(choice: Choice, prompt_logprobs: PromptLogprobs, stream: EventStream) -> None:
    """The first piece of a choice; the log probabilities of a prompt are written beside the loop."""

    def write() -> None:
        opening = choice.opening(prompt_logprobs)
        if opening is not None:
            stream.chunk([opening], long=bool(prompt_logprobs))

    if prompt_logprobs:
        await off_loop(write)
    else:
        write()


def _head(state: ServerState, prefix: str, kind: str) -> Json:
    """The members that an answer, and every chunk of one, begins with."""
    info = state.engine.runner_info
    described = f"{kvboost_edge.__version__} {state.model_name} {info.name} {info.architecture} {info.dtype}"
    return {
        "id": f"{prefix}-{secrets.token_hex(16)}",
        "object": kind,
        "created": int(time.time()),
        "model": state.model_name,
        "system_fingerprint": "fp_" + hashlib.sha256(described.encode()).hexdigest()[:12],
    }


def _in_order(results: Mapping[int, GenerationResult]) -> list[GenerationResult]:
    return [results[index] for index in range(len(results))]


def _figures(results: Sequence[GenerationResult], run: Running, choices: Sequence[Choice]) -> Json:
    """usage, timings and kvboost."""
    reasoning = sum(choice.num_reasoning_tokens for choice in choices)
    return {"usage": usage_of(results, run.per_prompt, reasoning), **costs(results, run.per_prompt, run.tokenize_ms)}
