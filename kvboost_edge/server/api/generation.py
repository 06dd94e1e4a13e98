"""Execution of a generation request of any API: admission, run, and whole or streamed answer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Protocol

from starlette.requests import Request
from starlette.types import Send

from kvboost_edge.engine.handle import RequestHandle, TokenEvent
from kvboost_edge.engine.request.progress import Progress
from kvboost_edge.engine.request.results import GenerationResult
from kvboost_edge.server.api.rendered_request import RenderedRequest
from kvboost_edge.server.api_errors import ClientGone, DeadlineExceeded, as_api_error, log_failure
from kvboost_edge.server.cache_report.recent_requests import Diagnosis
from kvboost_edge.server.state import state_of
from kvboost_edge.server.work.admission import Admission
from kvboost_edge.server.work.bridge import (
    EngineRequest,
    Running,
    finished,
    merged,
    off_loop,
    running,
    wait_all,
)
from kvboost_edge.server.work.streams import EventStream, send_json

__all__ = ["AnswerWriter", "record_cache_use", "respond"]

_PROGRESS_SECONDS = 0.5  # interval between progress events
# Clients and proxies drop a stream that is silent for 30 seconds or more.
_PING_SECONDS = 10.0
_NO_RETRY = {"X-Should-Retry": "false"}  # read by OpenAI's and Anthropic's clients
_FEW_TOKENS = 2000  # parsing this many takes about 10 ms


class AnswerWriter(Protocol):
    """Writer of the answer to one request in the format of an API.

    For a stream, `events` is called first, then `begin` when the request runs. Each sequence gets
    `open` before its first token, `push` for each token and `close` with its result. `end` is
    called last. These methods only append to the stream, and the caller flushes it. Nothing is
    flushed before the first token or the end, except progress reports and pings.
    """

    def whole(self, run: Running, results: list[GenerationResult]) -> bytes:
        """Return the answer as JSON. May run in a worker thread."""
        ...

    def events(self, send: Send) -> EventStream:
        """Return the stream to write to."""
        ...

    def begin(self, run: Running) -> None: ...

    def wait(self, index: int, progress: Progress) -> None:
        """Report the progress of a prompt before `open`. Called only if the request asks for it."""
        ...

    def ping(self) -> None:
        """Write something that clients ignore. Called at any time after `begin`."""
        ...

    async def open(self, index: int) -> None: ...

    def push(self, index: int, event: TokenEvent) -> None: ...

    def close(self, index: int, result: GenerationResult) -> None: ...

    def end(self) -> None: ...

    def explain(self, diagnosis: Diagnosis) -> None:
        """Add the cache-miss report of the first prompt. Called before the end is written."""
        ...

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of reasoning tokens; complete once the answer is written."""
        ...


async def respond(
    request: Request, send: Send, rendered: RenderedRequest, writer: AnswerWriter
) -> None:
    """Run the request and send the answer.

    An error is raised only before the first byte is sent. Later errors end the stream.
    """
    if rendered.streams:
        await _respond_stream(request, rendered, writer, writer.events(send))
        return
    handles: list[RequestHandle] = []
    try:
        body = await _whole(request, rendered, writer, handles)
    except DeadlineExceeded as error:
        # A retry finds the prompt in the cache, but decodes the answer from the start.
        if any(handle.progress().seconds_left == 0 for handle in handles):
            error.headers = _NO_RETRY
        raise
    await send_json(send, body)


async def _whole(
    request: Request,
    rendered: RenderedRequest,
    writer: AnswerWriter,
    handles: list[RequestHandle],
) -> bytes:
    """Run the request and return the answer as JSON. Add the handles of its sequences."""
    state = state_of(request)
    async with (
        state.admit(request, rendered.estimate, rendered.num_sequences) as admission,
        running(state.engine, rendered, admission) as started,
        record_cache_use(request, admission, rendered, started) as run,
    ):
        handles += run.handles
        results = await wait_all(admission, run.handles)
        await _diagnosed(rendered, writer, run, results[0])
        if (
            len(results) > 1
            or results[0].logprobs is not None
            or results[0].generated_tokens > _FEW_TOKENS
        ):
            # Parsing tens of thousands of tokens or writing their log probabilities takes long.
            body = await off_loop(lambda: writer.whole(run, results))
        else:
            body = writer.whole(run, results)
        _reasoned(writer, run)
    return body


async def _respond_stream(
    request: Request, rendered: RenderedRequest, writer: AnswerWriter, stream: EventStream
) -> None:
    state = state_of(request)
    try:
        async with (
            state.admit(
                request, rendered.estimate, rendered.num_sequences, streams=True
            ) as admission,
            running(state.engine, rendered, admission) as started,
            record_cache_use(request, admission, rendered, started) as run,
        ):
            admission.follow_prompt(functools.partial(_num_computed, run.handles))
            await _stream(admission, rendered, writer, run, stream)
            await stream.end()
    except Exception as error:
        if not stream.started:
            raise
        api_error = as_api_error(error, engine_alive=state.engine.is_alive())
        if api_error.status_code == 500:
            log_failure(request.scope, error)
        if not isinstance(api_error, ClientGone):
            await stream.fail(api_error)


@asynccontextmanager
async def record_cache_use(
    request: Request, admission: Admission, engine_request: EngineRequest, run: Running
) -> AsyncGenerator[Running]:
    """Record the cache use of the first prompt for cache-miss reports.

    If the request is still running when the `with` block exits, the tracker waits for it.
    """
    prompt = run.prompts[0]
    doctor = state_of(request).doctor
    watch = doctor.watch(
        request.scope["kvboost"]["id"],
        admission.tenant,
        engine_request.terms.cache_salt,
        prompt.token_ids,
        prompt.asked,
        engine_request.slot,
        engine_request.terms.prefill,
    )
    try:
        yield dataclasses.replace(run, watch=watch)
    finally:
        if not watch.finished:
            doctor.left(watch, run.handles[0], is_late=admission.is_late)


def _reasoned(writer: AnswerWriter, run: Running) -> None:
    if run.watch is not None and len(run.handles) == 1:
        run.watch.reasoned(writer.num_reasoning_tokens)


async def _diagnosed(
    rendered: RenderedRequest, writer: AnswerWriter, run: Running, result: GenerationResult
) -> None:
    """Record the result of the first prompt, and add its cache-miss report if requested."""
    assert run.watch is not None
    run.watch.finish(result)
    explained = run.watch.explained() if rendered.explains else None
    if explained is not None:
        writer.explain(await off_loop(explained))


def _num_computed(handles: Sequence[RequestHandle]) -> int:
    """Return the number of prompt tokens that were computed, without those from the cache."""
    found = [handle.progress() for handle in handles]
    return sum(one.computed - one.cached for one in found)


async def _stream(
    admission: Admission,
    rendered: RenderedRequest,
    writer: AnswerWriter,
    run: Running,
    stream: EventStream,
) -> None:
    writer.begin(run)
    opened: set[int] = set()
    num_open = len(run.handles)
    every = _PROGRESS_SECONDS if rendered.reports_progress else None
    prompts = range(0, num_open, run.per_prompt)  # their first sequences
    events = merged(run.handles, every=every, followed=prompts, silence=_PING_SECONDS)
    async with aclosing(events) as batches:
        async for batch in batches:
            # A slow reader gets only the latest progress event.
            latest = {index: item for index, item in batch if isinstance(item, Progress)}
            for index, item in batch:
                if isinstance(item, Progress):
                    if index not in opened and latest[index] is item:
                        writer.wait(index, item)
                    continue
                admission.progress()
                if isinstance(item, GenerationResult):
                    finished(admission, item)
                    if not index:
                        await _diagnosed(rendered, writer, run, item)
                if index not in opened:
                    opened.add(index)
                    admission.first_token()
                    if rendered.reports_progress and index in prompts:
                        writer.wait(index, run.handles[index].progress())
                    await writer.open(index)
                if isinstance(item, GenerationResult):
                    num_open -= 1
                    writer.close(index, item)
                else:
                    writer.push(index, item)
            if num_open:
                if stream.is_silent(_PING_SECONDS):
                    writer.ping()
                await stream.flush()
    writer.end()
    _reasoned(writer, run)
