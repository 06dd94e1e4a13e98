"""Bridge between the event loop and the engine.

Nothing here blocks the loop. Tokenization, chat templates and submission run in worker threads,
except for short texts. Results and tokens arrive through the handles. When a task is cancelled
(disconnect, deadline or shutdown), its requests are cancelled too, in every phase.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing, asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvboost_edge.config import GenerationMode
from kvboost_edge.engine.handle import Handles, RequestHandle, TokenEvent
from kvboost_edge.engine.request.answer_ids import KeptAnswers
from kvboost_edge.engine.request.progress import Progress
from kvboost_edge.engine.request.request import RequestArrival, SamplingParams
from kvboost_edge.engine.request.results import GenerationResult
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.server.api_errors import DeadlineExceeded, ShuttingDown
from kvboost_edge.server.cache_report.recent_requests import NOT_SAID, PromptInputs
from kvboost_edge.server.cache_report.tracker import Watch
from kvboost_edge.server.logs import log_facts
from kvboost_edge.server.work.admission import Admission
from kvboost_edge.server.work.threads import in_thread
from kvboost_edge.text.turns.answer_reader import Turn

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

# Number of characters or tokens. Tokenizing them takes a fraction of a millisecond, and so does
# handing the work to a thread.
_SHORT = 1000
_FEW = 8  # maximum number of sequences submitted on the event loop
_LONG = 1 << 16  # number of characters; tokenizing them takes about 50 ms
_PREFILL_LOG_SECONDS = 5.0
_AT_ONCE = 32  # number of results counted before other tasks run, in about a millisecond

# Many threads that read at a time would keep the event loop waiting for the GIL.
_short_readers = threading.Semaphore(4)
_long_readers = threading.Semaphore(2)


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A tokenized prompt.

    Attributes:
        text: the prompt's text for `echo`; "" if the request does not ask for it.
        from_text: True if the tokens come from text or messages, False if the request gave token
            ids.
        turn: parser of tool calls and reasoning in the answers; None for plain text.
        pins: pins of the prompt's first tokens, see the engine's `Terms`.
        asked: messages, tools and template variables that the prompt was rendered from.
        dropped: number of messages left out because they did not fit.
    """

    token_ids: list[int]
    text: str = ""
    from_text: bool = True
    turn: Turn | None = None
    pins: tuple[tuple[int, float], ...] = ()
    asked: PromptInputs = NOT_SAID
    dropped: int = 0


class EngineRequest(ABC):
    """An HTTP request in the form that the engine needs.

    Subclasses tokenize the prompts and create the sampling parameters of each sequence.

    Attributes:
        renders: True if `encode` runs a chat template, which may take arbitrarily long.
        size: number of characters or tokens of all prompts, plus an allowance for each message.
        per_prompt: number of sequences computed for each prompt.
        terms: options of the sequences. `submit` adds tenant, weight, deadline and pins.
        is_default_mode: True if the server chose the mode.
        slot: llama.cpp's slot that holds the conversation afterwards; -1 for none.
    """

    renders = False
    slot = 0

    def __init__(
        self,
        *,
        size: int,
        terms: Terms,
        is_default_mode: bool = False,
        per_prompt: int = 1,
    ) -> None:
        self.size = size
        self.terms = terms
        self.is_default_mode = is_default_mode
        self.per_prompt = per_prompt

    @abstractmethod
    def encode(self, answers: KeptAnswers) -> list[EncodedPrompt]:
        """Tokenize the prompts. Runs in a worker thread unless the prompts are short texts.

        Args:
            answers: token ids of earlier answers, used instead of tokenizing their text.
        """

    def mode_of(self, prompt: EncodedPrompt, params: SamplingParams) -> GenerationMode | str:
        """Return the mode of one sequence.

        A sequence that needs exact KV gets an exact mode if the server, and not the request, chose
        an approximate one.
        """
        needs_exact = (
            bool(prompt.pins) or params.prompt_logprobs is not None or params.max_new_tokens == 0
        )
        is_approximate = self.terms.mode is GenerationMode.CHUNK_KV_REUSE
        if self.is_default_mode and is_approximate and needs_exact:
            return GenerationMode.PREFIX_CACHE
        return self.terms.mode

    @abstractmethod
    def params(self, prompt: EncodedPrompt, choice: int) -> SamplingParams:
        """Return the sampling parameters for sequence number `choice` of a prompt.

        Runs in the same thread as `encode`. May raise ApiError.
        """


_Planned = list[tuple[EncodedPrompt, SamplingParams]]


@dataclasses.dataclass(frozen=True, slots=True)
class Running:
    """Sequences of one request in the engine.

    Attributes:
        prompts: the tokenized prompts.
        handles: `per_prompt` handles for each prompt, in the order of the prompts.
        tokenize_ms: time spent on tokenization, in milliseconds.
        answers: token ids of earlier answers.
        watch: cache-miss tracking of the first sequence.
    """

    prompts: list[EncodedPrompt]
    handles: list[RequestHandle]
    per_prompt: int
    tokenize_ms: float
    answers: KeptAnswers
    watch: Watch | None = None

    @property
    def cause(self) -> str:
        """Reason why part of the first prompt was not cached, or "" until the request ends."""
        return "" if self.watch is None else self.watch.cause


class Answer(Response):
    """A response that does its work while it is sent."""

    def __init__(self, work: Callable[[Send], Awaitable[None]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # All work happens in the request's task and inside the app's error handlers. An error
        # before the first byte can therefore still set the status.
        await self._work(send)


async def off_loop(work: Callable[[], T], size: int = 0) -> T:
    """Run `work` in a worker thread.

    If the caller is cancelled, it does not wait for the thread, and `work` must end by itself.

    Args:
        size: number of characters or tokens to read. Long texts use separate threads, so short
            requests never wait for them.
    """
    if size > _LONG:
        return await asyncio.get_running_loop().run_in_executor(_long_workers(), work)
    return await asyncio.to_thread(work)


async def to_its_end(work: Callable[[], T], size: int, handles: Handles) -> T:
    """Run computing `work` in its own thread. A cancelled caller stops the work and waits for it.

    A second cancellation, as at shutdown, ends the wait.

    Args:
        work: function that reads texts, submits requests to the engine, adds their handles to
            `handles` and waits for them.
        size: number of characters or tokens to read. Only a few threads read at a time, and long
            texts do not delay short ones.
        handles: handles to cancel.
    """
    readers = _long_readers if size > _LONG else _short_readers

    def run() -> T:
        with ExitStack() as reading:
            reading.enter_context(readers)
            handles.on_first = reading.close
            return work()

    # The work lasts as long as the engine computes. In a shared worker thread, it would delay the
    # tokenization of other requests.
    task = asyncio.ensure_future(in_thread(run))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        handles.stop()
        # Retrieve the exception, because no other code does.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait([task])
        raise


@functools.cache
def _long_workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, thread_name_prefix="ThreadPoolExecutor-long")


@asynccontextmanager
async def running(
    engine: Engine, request: EngineRequest, admission: Admission
) -> AsyncGenerator[Running]:
    """Tokenize and queue a request. Leaving the block cancels unfinished sequences."""
    started = admission.arrived_at = time.perf_counter()
    answers = engine.kept_answers(
        tenant=admission.tenant,
        cache_salt=request.terms.cache_salt,
        prefill=request.terms.prefill,
    )
    encode = functools.partial(request.encode, answers)
    is_quick = request.size <= _SHORT and not request.renders
    prompts = encode() if is_quick else await off_loop(encode, request.size)
    tokenize_ms = (time.perf_counter() - started) * 1e3
    if request.terms.mode is not GenerationMode.BASELINE and request.terms.cache_salt is None:
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
    """Log of the progress of a long prompt, with a line every few seconds until the first token."""

    def __init__(self, handle: RequestHandle, request_id: str | None) -> None:
        self._handle = handle
        self._request_id = request_id
        self._next = asyncio.get_running_loop().call_later(_PREFILL_LOG_SECONDS, self._look)

    def close(self) -> None:
        """Stop logging."""
        self._next.cancel()

    def _look(self) -> None:
        progress = self._handle.progress()
        if self._handle.done or progress.seconds_left == 0:  # the first token has arrived
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
    """Submission of the sequences of a request. Either all or none are submitted."""

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
        """Queue all sequences. An error or a cancellation cancels those already queued."""
        request = self._request
        few = request.size <= _SHORT and len(prompts) * request.per_prompt <= _FEW
        planned = self._plan(prompts) if few else None
        # `submit` compiles grammars and looks up words, which takes a while.
        if planned is not None and not any(
            params.fits or params.reads_vocabulary for _, params in planned
        ):
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
        terms = dataclasses.replace(
            request.terms,
            mode=request.mode_of(prompt, params),
            tenant=admission.tenant,
            weight=admission.weight,
            background=admission.background,
            # The deadline of a stream moves, so the admission cancels the request instead.
            deadline=None if admission.streams else admission.deadline,
            pins=prompt.pins,
            pin_share=admission.pin_share,
        )
        return self._engine.submit(
            prompt.token_ids, sampling=params, terms=terms, entry=self._entry
        )

    def _take_back(self, done: asyncio.Future[None]) -> None:
        done.exception()  # no caller retrieves the exception
        self._cancel()

    def _cancel(self) -> None:
        for handle in self._handles:
            handle.cancel()


async def wait_all(
    admission: Admission, handles: Sequence[RequestHandle]
) -> list[GenerationResult]:
    """Return all results in order. Raises the first error.

    The caller's `running` block cancels the remaining sequences.
    """
    results: list[GenerationResult] = []
    for handle in handles:
        if len(results) % _AT_ONCE == _AT_ONCE - 1:
            await asyncio.sleep(0)  # `aresult` does not yield for results that are ready
        results.append(finished(admission, await handle.aresult()))
    return results


def finished(admission: Admission, result: GenerationResult) -> GenerationResult:
    """Count a result and return it. Raises ApiError if the deadline or the server ended it."""
    admission.first_token()
    admission.observe(result)
    if result.finish_reason == "timeout":
        raise DeadlineExceeded(admission.timeout)
    if result.finish_reason == "cancelled":
        raise ShuttingDown
    return result


async def merged(
    handles: Sequence[RequestHandle],
    *,
    every: float | None = None,
    followed: Sequence[int] = (0,),
    silence: float | None = None,
) -> AsyncGenerator[list[tuple[int, Item]]]:
    """Yield events of all handles as they arrive, each with the index of its handle.

    Each yielded list contains all events that are ready. The last item of each handle is its
    result. An error of any handle is raised.

    Args:
        every: seconds between progress items of the `followed` handles, until their first event;
            None for no progress items.
        followed: indexes of the handles whose progress to report.
        silence: seconds without an event of a handle after which an empty list is yielded,
            repeatedly; None for no empty lists.
    """
    if len(handles) == 1:
        while every is not None and not await handles[0].astarted(every):
            yield [(0, handles[0].progress())]
        async with aclosing(handles[0].abatches(silence)) as batches:  # type: ignore[type-var]
            async for batch in batches:
                yield [(0, item) for item in batch]
        return
    queue: asyncio.Queue[list[tuple[int, Item]] | Exception] = asyncio.Queue()

    async def pump(index: int, handle: RequestHandle) -> None:
        try:
            async for batch in handle.abatches(silence):
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
