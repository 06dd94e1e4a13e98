"""The course of a generating request, the same for every API: admit, run, answer whole or as a stream."""

from __future__ import annotations

import dataclasses
from contextlib import aclosing
from typing import Protocol

from starlette.requests import Request
from starlette.types import Send

from kvboost_edge.engine.handle import TokenEvent
from kvboost_edge.engine.results import GenerationResult
from kvboost_edge.server.errors import ClientGone, as_api_error, log_failure
from kvboost_edge.server.state import state_of
from kvboost_edge.server.work.admission import Ticket
from kvboost_edge.server.work.bridge import Job, Running, finished, merged, off_loop, running, wait_all
from kvboost_edge.server.work.streams import EventStream, send_json

__all__ = ["AnswerWriter", "Order", "respond"]

_FEW_TOKENS = 2000  # as many are taken apart in some 10 ms


class AnswerWriter(Protocol):
    """Writes the answer of one request in the shape of an API, whole or as a stream.

    Of a stream: `events`, then `begin` once the request runs, then for each sequence `open` before its first token,
    `push` for each token and `close` with its result, and `end` behind the last. All of them add to the stream only; it
    is flushed in between, and nothing before a first token or an end.
    """

    def whole(self, run: Running, results: list[GenerationResult]) -> bytes:
        """The JSON of the answer; may run in a worker thread."""
        ...

    def events(self, send: Send) -> EventStream:
        """What a stream is written to."""
        ...

    def begin(self, run: Running) -> None: ...

    async def open(self, index: int) -> None: ...

    def push(self, index: int, event: TokenEvent) -> None: ...

    def close(self, index: int, result: GenerationResult) -> None: ...

    def end(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One request, ready to run.

    estimate          tokens it may hold, guessed before tokenization
    num_prompts, job  what is computed
    streams           the answer is a stream
    writer            writes it
    """

    estimate: int
    num_prompts: int
    job: Job
    streams: bool
    writer: AnswerWriter


async def respond(request: Request, send: Send, order: Order) -> None:
    """Do the work and send the answer. Raises only while nothing was sent."""
    if order.streams:
        await _respond_stream(request, order, order.writer.events(send))
        return
    state = state_of(request)
    async with (
        state.admit(request, order.estimate, order.num_prompts * order.job.per_prompt) as ticket,
        running(state.engine, order.job, ticket) as run,
    ):
        results = await wait_all(ticket, run.handles)
        if len(results) > 1 or results[0].logprobs is not None or results[0].generated_tokens > _FEW_TOKENS:
            # Ten thousands of tokens take a while to write down with their alternatives, or to take apart.
            body = await off_loop(lambda: order.writer.whole(run, results))
        else:
            body = order.writer.whole(run, results)
    await send_json(send, body)


async def _respond_stream(request: Request, order: Order, stream: EventStream) -> None:
    state = state_of(request)
    try:
        async with (
            state.admit(request, order.estimate, order.num_prompts * order.job.per_prompt) as ticket,
            running(state.engine, order.job, ticket) as run,
        ):
            await _stream(ticket, order.writer, run, stream)
            await stream.end()
    except Exception as error:
        if not stream.started:
            raise
        api_error = as_api_error(error, engine_alive=state.engine.is_alive())
        if api_error.status_code == 500:
            log_failure(request.scope, error)
        if not isinstance(api_error, ClientGone):
            await stream.fail(api_error)


async def _stream(ticket: Ticket, writer: AnswerWriter, run: Running, stream: EventStream) -> None:
    writer.begin(run)
    opened: set[int] = set()
    num_open = len(run.handles)
    async with aclosing(merged(run.handles)) as batches:
        async for batch in batches:
            for index, item in batch:
                if isinstance(item, GenerationResult):
                    finished(ticket, item)
                if index not in opened:
                    opened.add(index)
                    ticket.first_token()
                    await writer.open(index)
                if isinstance(item, GenerationResult):
                    num_open -= 1
                    writer.close(index, item)
                else:
                    writer.push(index, item)
            if num_open:
                await stream.flush()
    writer.end()
