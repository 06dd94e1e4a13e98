"""From the event loop to the engine and back: nothing here blocks the loop, and nothing runs on
once nobody waits.

Tokenizing, chat templates and submitting happen in worker threads, short texts excepted; results
and tokens arrive through the handles. A cancelled task (client gone, deadline, shutdown) cancels
its requests in every phase.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import time
from abc import ABC, abstractmethod
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
from kvboost_edge.engine.request.request import RequestArrival, SamplingParams
from kvboost_edge.engine.request.results import GenerationResult
from kvboost_edge.server.cache_report.records import NOT_SAID, PromptInputs
from kvboost_edge.server.cache_report.tracker import Watch
from kvboost_edge.server.errors import DeadlineExceeded, ShuttingDown
from kvboost_edge.server.logs import log_facts
from kvboost_edge.server.work.admission import Admission
from kvboost_edge.text.turns.reader import Turn

if TYPE_CHECKING:
    from kvboost_edge.server.engines import Engine

__all__ = [
    "Answer",
    "EncodedPrompt",
    "EngineBridge",
    "EngineRequest",
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
_PREFILL_LOG_SECONDS = 5.0
_AT_ONCE = 32  # results that are counted before others go on: a millisecond


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as tokens.

    Attributes:
        text: its text as `echo` shows it; "" when the request does not ask for it.
        turn: reader of its answers' calls and reasoning; None: the answers are text alone.
        pins: pins of its first tokens, see the engine's `Terms`.
        asked: messages, tools and template values that the prompt was rendered from.
        dropped: messages that were left out because they did not fit.
    """

    token_ids: list[int]
    text: str = ""
    from_text: bool = True
    turn: Turn | None = None
    pins: tuple[tuple[int, float], ...] = ()
    asked: PromptInputs = NOT_SAID
    dropped: int = 0


class EngineRequest(ABC):
    """What one HTTP request asks of the engine. Subclasses tokenize its prompts and say how each
    sequence is sampled.

    Attributes:
        renders: whether `encode` runs a chat template, which takes as long as that likes.
        size: characters or tokens of all prompts, and some for each message.
        per_prompt: sequences computed for each prompt.
        mode: use of the cache.
        is_default_mode: the server chose the mode.
        options: other keywords of the engine's `submit`.
        cache_key, retention, pin, ttl: how long it is kept, see the engine's `Terms`.
    """

    renders = False

    def __init__(
        self,
        *,
        size: int,
        mode: GenerationMode,
        cache_salt: str | None,
        priority: int,
        is_default_mode: bool = False,
        per_prompt: int = 1,
        options: Mapping[str, Any] | None = None,
        cache_key: str | None = None,
        retention: float | None = None,
        pin: bool = False,
        ttl: float | None = None,
    ) -> None:
        self.size = size
        self.mode = mode
        self.is_default_mode = is_default_mode
        self.cache_salt = cache_salt
        self.priority = priority
        self.per_prompt = per_prompt
        self.options = options or {}
        self.cache_key = cache_key
        self.retention = retention
        self.pin = pin
        self.ttl = ttl

    @abstractmethod
    def encode(self, answers: KeptAnswers) -> list[EncodedPrompt]:
        """Tokenize the prompts, given the ids of earlier answers. Runs in a worker thread unless
        the prompts are short texts.
        """

    def mode_of(self, prompt: EncodedPrompt, params: SamplingParams) -> GenerationMode:
        """Return the mode of one sequence.

        A request that needs exact KV gets it if the server, not the request, chose an approximate
        mode.
        """
        needs_exact = (
            bool(prompt.pins) or params.prompt_logprobs is not None or params.max_new_tokens == 0
        )
        is_approximate = self.mode is GenerationMode.CHUNK_KV_REUSE
        if self.is_default_mode and is_approximate and needs_exact:
            return GenerationMode.PREFIX_CACHE
        return self.mode

    @abstractmethod
    def params(self, prompt: EncodedPrompt, choice: int) -> SamplingParams:
        """Return how sequence number `choice` of a prompt is sampled; may raise ApiError. Runs
        where `encode` does.
        """


_Planned = list[tuple[EncodedPrompt, SamplingParams]]


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

    @property
    def cause(self) -> str:
        """Why the rest of the first prompt was computed; "" before its end."""
        return "" if self.watch is None else self.watch.cause


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
async def running(
    engine: Engine, request: EngineRequest, admission: Admission
) -> AsyncGenerator[Running]:
    """Tokenize, queue, and cancel whatever is not done when the block is left."""
    started = time.perf_counter()
    answers = engine.kept_answers(tenant=admission.tenant, cache_salt=request.cache_salt)
    encode = functools.partial(request.encode, answers)
    is_quick = request.size <= _SHORT and not request.renders
    prompts = encode() if is_quick else await off_loop(encode, request.size)
    tokenize_ms = (time.perf_counter() - started) * 1e3
    if request.mode is not GenerationMode.BASELINE and request.cache_salt is None:
        await admission.group(prompts[0].token_ids)
    bridge = EngineBridge(engine, request, admission, RequestArrival(started, prompt_text=""))
    handles = await bridge.submit(prompts)
    log = _PrefillLog(handles[0], admission.facts.get("id"))
    try:
        yield Running(prompts, handles, request.per_prompt, tokenize_ms, answers)
    finally:
        for handle in handles:
            handle.cancel()
        log.close()


class _PrefillLog:
    """Lines of the log that tell how far a long prompt is, every few seconds until its first
    token.
    """

    def __init__(self, handle: RequestHandle, request_id: str | None) -> None:
        self._handle = handle
        self._request_id = request_id
        self._next = asyncio.get_running_loop().call_later(_PREFILL_LOG_SECONDS, self._look)

    def close(self) -> None:
        """Log no more."""
        self._next.cancel()

    def _look(self) -> None:
        progress = self._handle.progress()
        if self._handle.done or progress.seconds_left == 0:  # the first token is there
            return
        self._next = asyncio.get_running_loop().call_later(_PREFILL_LOG_SECONDS, self._look)
        left = progress.seconds_left
        if progress.elapsed:
            log_facts(
                logging.INFO,
                "reading a prompt",
                request_id=self._request_id,
                tokens=progress.computed,
                of=progress.total,
                tokens_per_second=round(progress.tokens_per_second, 1),
                seconds_left=None if left is None else round(left, 1),
            )


class EngineBridge:
    """Queues the sequences of one request: all of them, or none."""

    def __init__(
        self, engine: Engine, request: EngineRequest, admission: Admission, entry: RequestArrival
    ) -> None:
        self._engine = engine
        self._request = request
        self._admission = admission
        self._entry = entry
        self._handles: list[RequestHandle] = []
        self._abandoned = False

    async def submit(self, prompts: Sequence[EncodedPrompt]) -> list[RequestHandle]:
        """Queue every sequence. An error or a cancel meanwhile takes back those that were
        queued.
        """
        request = self._request
        few = request.size <= _SHORT and len(prompts) * request.per_prompt <= _FEW
        planned = self._plan(prompts) if few else None
        # A grammar is compiled by `submit`, which takes a while.
        if planned is not None and not any(params.fits for _, params in planned):
            self._queue(planned)
            return self._handles
        task = asyncio.ensure_future(asyncio.to_thread(self._plan_and_queue, prompts, planned))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            self._abandoned = True
            task.add_done_callback(self._take_back)
            raise
        return self._handles

    def _plan(self, prompts: Sequence[EncodedPrompt]) -> _Planned:
        return [
            (prompt, self._request.params(prompt, choice))
            for prompt in prompts
            for choice in range(self._request.per_prompt)
        ]

    def _plan_and_queue(self, prompts: Sequence[EncodedPrompt], planned: _Planned | None) -> None:
        self._queue(self._plan(prompts) if planned is None else planned)

    def _queue(self, planned: _Planned) -> None:
        try:
            for prompt, params in planned:
                if self._abandoned:
                    return
                self._handles.append(self._submitted(prompt, params))
        except BaseException:
            self._cancel()
            raise

    def _submitted(self, prompt: EncodedPrompt, params: SamplingParams) -> RequestHandle:
        request = self._request
        admission = self._admission
        return self._engine.submit(
            prompt.token_ids,
            sampling=params,
            entry=self._entry,
            mode=request.mode_of(prompt, params),
            **request.options,
            tenant=admission.tenant,
            weight=admission.weight,
            cache_salt=request.cache_salt,
            priority=request.priority,
            deadline=admission.deadline,
            cache_key=request.cache_key,
            retention=request.retention,
            pin=request.pin,
            pins=prompt.pins,
            ttl=request.ttl,
            pin_share=admission.pin_share,
        )

    def _take_back(self, done: asyncio.Future[None]) -> None:
        done.exception()  # no caller asks for it any more
        self._cancel()

    def _cancel(self) -> None:
        for handle in self._handles:
            handle.cancel()


async def wait_all(
    admission: Admission, handles: Sequence[RequestHandle]
) -> list[GenerationResult]:
    """All results in order. The first error is raised; the caller's `running` block cancels the
    rest.
    """
    results: list[GenerationResult] = []
    for handle in handles:
        if len(results) % _AT_ONCE == _AT_ONCE - 1:
            await asyncio.sleep(0)  # the results may all be there, and then nothing waits
        results.append(finished(admission, await handle.aresult()))
    return results


def finished(admission: Admission, result: GenerationResult) -> GenerationResult:
    """Count a result; ApiError for one that was ended from outside."""
    admission.first_token()
    admission.observe(result)
    if result.finish_reason == "timeout":
        raise DeadlineExceeded(admission.timeout)
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
