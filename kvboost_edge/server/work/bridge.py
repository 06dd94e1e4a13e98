"""From the event loop to the engine and back: nothing here blocks the loop, and nothing runs on
once nobody waits.

Tokenizing, chat templates and submitting happen in worker threads, short prompts excepted; results
and tokens arrive through the handles. A cancelled task (client gone, deadline, shutdown) cancels
its requests in every phase.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvboost_edge.config import GenerationMode
from kvboost_edge.engine.handle import Handles, RequestHandle, TokenEvent
from kvboost_edge.engine.request.answer_ids import KeptAnswers
from kvboost_edge.engine.request.progress import Progress
from kvboost_edge.engine.request.request import Entry, SamplingParams
from kvboost_edge.engine.request.results import GenerationResult
from kvboost_edge.server.doctor.doctor import Watch
from kvboost_edge.server.doctor.records import NOT_SAID, Asked
from kvboost_edge.server.errors import DeadlineExceeded, ShuttingDown
from kvboost_edge.server.work.admission import Ticket
from kvboost_edge.text.turns.reader import Turn

if TYPE_CHECKING:
    from kvboost_edge.server.engines import Engine

__all__ = [
    "Answer",
    "EncodedPrompt",
    "Job",
    "Running",
    "finished",
    "merged",
    "off_loop",
    "running",
    "to_its_end",
    "wait_all",
]

T = TypeVar("T")

Item = TokenEvent | GenerationResult | Progress

# Characters or tokens; reading as many takes a fraction of a millisecond, a hop to a thread as
# long.
_SHORT = 1000
_FEW = 8  # sequences submitted without such a hop
_LONG = 1 << 16  # characters; as many take a tokenizer about 50 ms


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt's tokens, and its text as `echo` shows it ("" where nobody asks). turn: what its
    answers are made of; None: text alone. pins: of its beginnings, see the engine's `Terms`. asked:
    what the prompt was made of. dropped: messages that were left out as they did not fit.
    """

    token_ids: list[int]
    text: str = ""
    from_text: bool = True
    turn: Turn | None = None
    pins: tuple[tuple[int, float], ...] = ()
    asked: Asked = NOT_SAID
    dropped: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a request body asks of the engine.

    encode         tokenizes, given the ids of earlier answers; runs in a worker thread unless the
                   prompts are short
    params         (prompt, number of the sequence) -> sampling; may raise ApiError; runs where
                   `encode` does
    per_prompt     sequences computed for each prompt
    options        other keywords of the engine's `submit`
    cache_key, retention, pin, ttl    how long it is kept, see the engine's `Terms`
    size           characters or tokens of all prompts, and some for each message
    """

    encode: Callable[[KeptAnswers], list[EncodedPrompt]]
    size: int
    params: Callable[[EncodedPrompt, int], SamplingParams]
    per_prompt: int
    mode: GenerationMode
    cache_salt: str | None
    priority: int
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    cache_key: str | None = dataclasses.field(default=None, repr=False)
    retention: float | None = None
    pin: bool = False
    ttl: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Running:
    """Requests in the engine: those of prompt 0 first, `per_prompt` of each. `watch`: what observes
    the first.
    """

    prompts: list[EncodedPrompt]
    handles: list[RequestHandle]
    per_prompt: int
    tokenize_ms: float
    answers: KeptAnswers
    watch: Watch | None = None


class Answer(Response):
    """A response that does its work while it is sent: all of it happens in the request's own task,
    inside the app's error handlers, so an error before the first byte still gets its status.
    """

    def __init__(self, work: Callable[[Send], Awaitable[None]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._work(send)


async def off_loop(work: Callable[[], T], size: int = 0) -> T:
    """Run in a worker thread. A cancelled caller does not wait for it; the work must end by itself.

    `size` is the number of characters or tokens to read: long ones have threads of their own, so
    that a short request never waits until somebody's book is tokenized.
    """
    if size > _LONG:
        return await asyncio.get_running_loop().run_in_executor(_long_workers(), work)
    return await asyncio.to_thread(work)


async def to_its_end(work: Callable[[], T], size: int, handles: Handles) -> T:
    """The same for work that computes, which puts what it queues into `handles`: a cancelled caller
    stops it, and waits for it all the same, unless it is cancelled once more, as at the server's
    end.
    """
    task = asyncio.ensure_future(off_loop(work, size))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        handles.stop()
        task.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # nobody else asks for it
        await asyncio.wait([task])
        raise


@functools.cache
def _long_workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, thread_name_prefix="ThreadPoolExecutor-long")


@asynccontextmanager
async def running(engine: Engine, job: Job, ticket: Ticket) -> AsyncGenerator[Running]:
    """Tokenize, queue, and cancel whatever is not done when the block is left."""
    started = time.perf_counter()
    answers = engine.kept_answers(tenant=ticket.tenant, cache_salt=job.cache_salt)
    encode = functools.partial(job.encode, answers)
    prompts = encode() if job.size <= _SHORT else await off_loop(encode, job.size)
    tokenize_ms = (time.perf_counter() - started) * 1e3
    if job.mode is not GenerationMode.BASELINE and job.cache_salt is None:
        await ticket.group(prompts[0].token_ids)
    handles = await _submit(engine, job, ticket, prompts, Entry(started, prompt_text=""))
    try:
        yield Running(prompts, handles, job.per_prompt, tokenize_ms, answers)
    finally:
        for handle in handles:
            handle.cancel()


async def _submit(
    engine: Engine, job: Job, ticket: Ticket, prompts: Sequence[EncodedPrompt], entry: Entry
) -> list[RequestHandle]:
    """Queue every sequence, or none: an error or a cancel meanwhile takes back those that were
    queued.
    """
    handles: list[RequestHandle] = []
    abandoned = False

    def plan() -> list[tuple[EncodedPrompt, SamplingParams]]:
        return [
            (prompt, job.params(prompt, choice))
            for prompt in prompts
            for choice in range(job.per_prompt)
        ]

    def submit(planned: Sequence[tuple[EncodedPrompt, SamplingParams]] | None = None) -> None:
        try:
            for prompt, params in planned or plan():
                if abandoned:
                    return
                handles.append(
                    engine.submit(
                        prompt.token_ids,
                        sampling=params,
                        entry=entry,
                        mode=job.mode,
                        **job.options,
                        tenant=ticket.tenant,
                        weight=ticket.weight,
                        cache_salt=job.cache_salt,
                        priority=job.priority,
                        deadline=ticket.deadline,
                        cache_key=job.cache_key,
                        retention=job.retention,
                        pin=job.pin,
                        pins=prompt.pins,
                        ttl=job.ttl,
                        pin_share=ticket.pin_share,
                    )
                )
        except BaseException:
            cancel()
            raise

    def cancel() -> None:
        for handle in handles:
            handle.cancel()

    def abandon(done: asyncio.Future[None]) -> None:
        done.exception()  # nobody else asks for it
        cancel()

    planned = plan() if job.size <= _SHORT and len(prompts) * job.per_prompt <= _FEW else None
    if planned is not None and not any(params.fits for _, params in planned):
        submit(planned)
        return handles
    task = asyncio.ensure_future(asyncio.to_thread(submit, planned))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        abandoned = True
        task.add_done_callback(abandon)
        raise
    return handles


async def wait_all(ticket: Ticket, handles: Sequence[RequestHandle]) -> list[GenerationResult]:
    """All results in order. The first error is raised; the caller's `running` block cancels the
    rest.
    """
    results = []
    for handle in handles:
        results.append(finished(ticket, await handle.aresult()))
    return results


def finished(ticket: Ticket, result: GenerationResult) -> GenerationResult:
    """Count a result; ApiError for one that was ended from outside."""
    ticket.first_token()
    ticket.observe(result)
    if result.finish_reason == "timeout":
        raise DeadlineExceeded(ticket.timeout)
    if result.finish_reason == "cancelled":
        raise ShuttingDown
    return result


async def merged(
    handles: Sequence[RequestHandle], *, every: float | None = None, followed: Sequence[int] = (0,)
) -> AsyncGenerator[list[tuple[int, Item]]]:
    """Events of all handles as they come, with the handle's number, in lists of all that is there;
    the last item of each handle is its result. An error of any handle is raised. With `every`, in
    seconds, progress of the `followed` handles that often until their first event.
    """
    if len(handles) == 1:
        while every is not None and not await handles[0].astarted(every):
            yield [(0, handles[0].progress())]
        async with aclosing(handles[0].abatches()) as batches:  # type: ignore[type-var]
            async for batch in batches:
                yield [(0, item) for item in batch]
        return
    queue: asyncio.Queue[list[tuple[int, Item]] | Exception] = asyncio.Queue()

    async def pump(index: int, handle: RequestHandle) -> None:
        try:
            async for batch in handle.abatches():
                queue.put_nowait([(index, item) for item in batch])
        except Exception as error:
            queue.put_nowait(error)

    async def follow(index: int, handle: RequestHandle, every: float) -> None:
        while not await handle.astarted(every):
            queue.put_nowait([(index, handle.progress())])

    pumps = [asyncio.ensure_future(pump(index, handle)) for index, handle in enumerate(handles)]
    if every is not None:
        pumps += [asyncio.ensure_future(follow(index, handles[index], every)) for index in followed]
    try:
        open_handles = len(handles)
        while open_handles:
            found = [await queue.get()]
            while not queue.empty():
                found.append(queue.get_nowait())
            items: list[tuple[int, Item]] = []
            for part in found:
                if isinstance(part, Exception):
                    raise part
                items += part
            open_handles -= sum(isinstance(item, GenerationResult) for _, item in items)
            yield items
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
