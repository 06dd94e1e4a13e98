"""How OpenAI's completions and chat completions are answered: choices in one object, or in
chunks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from starlette.types import Send

import kvboost_edge
from kvboost_edge.engine.handle import TokenEvent
from kvboost_edge.engine.request.answer_ids import KeptAnswers
from kvboost_edge.engine.request.progress import Progress
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.engine.request.results import GenerationResult, TokenLogprobs
from kvboost_edge.server.api.checks import check_mode, check_priority
from kvboost_edge.server.api.generation import AnswerWriter, Order
from kvboost_edge.server.api.schemas.shared import SamplingFields
from kvboost_edge.server.api.usage import costs, progress_of, usage_of
from kvboost_edge.server.doctor.records import Diagnosis
from kvboost_edge.server.response_types import ChunkHead, Figures
from kvboost_edge.server.state import ModelState
from kvboost_edge.server.work.bridge import EncodedPrompt, Job, Running, off_loop
from kvboost_edge.server.work.streams import ChunkStream, EventStream, dumps, dumps_long

__all__ = ["Choice", "OpenAIWriter", "PromptLogprobs", "Spelling", "order_of"]

Json = dict[str, Any]
PromptLogprobs = Sequence[TokenLogprobs | None] | None


class Choice(Protocol):
    """Writes one choice of an answer, either whole, or piece by piece."""

    def whole(self, result: GenerationResult) -> Mapping[str, Any]: ...

    def waiting(self) -> Json:
        """A piece without content."""
        ...

    def opening(self, prompt_logprobs: PromptLogprobs) -> Json | None:
        """What a stream shows before the first token, if anything."""
        ...

    def push(self, event: TokenEvent) -> Json | None:
        """The next piece; None while there is no text to show. What belongs to the token waits for
        it.
        """
        ...

    def close(self, result: GenerationResult) -> Json:
        """The last piece, with the reason of the end."""
        ...

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the answer that are reasoning; known once it is whole or closed."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Spelling:
    """How the answer calls itself, whole and in chunks."""

    id_prefix: str
    kind: str
    chunk_kind: str


class OpenAIWriter:
    """Implements `AnswerWriter`.

    choice   (number of the choice, the running requests) -> its writer
    chosen   the results to show, in order
    """

    def __init__(
        self,
        state: ModelState,
        spelling: Spelling,
        choice: Callable[[int, Running], Choice],
        *,
        include_usage: bool,
        chosen: Callable[[Sequence[GenerationResult]], list[GenerationResult]] = list,
    ) -> None:
        self._state = state
        self._spelling = spelling
        self._choice = choice
        self._chosen = chosen
        self._include_usage = include_usage
        self._diagnosis: Diagnosis | None = None
        self._num_reasoning = 0
        self._run: Running | None = None
        self._choices: list[Choice] = []
        self._results: dict[int, GenerationResult] = {}

    def explain(self, diagnosis: Diagnosis) -> None:
        """Say in the answer what became of its first prompt."""
        self._diagnosis = diagnosis

    @property
    def num_reasoning_tokens(self) -> int:
        return self._num_reasoning

    def whole(self, run: Running, results: list[GenerationResult]) -> bytes:
        # One choice after the other, each as bytes at once: with their log probabilities they are
        # large.
        writers = [
            (self._choice(index, run), result) for index, result in enumerate(self._chosen(results))
        ]
        choices = [dumps_long(writer.whole(result)) for writer, result in writers]
        figures = dumps(self._figures(results, run, [writer for writer, _ in writers]))
        head = dumps(self._head(self._spelling.kind))
        return head[:-1] + b',"choices":[' + b",".join(choices) + b"]," + figures[1:]

    def events(self, send: Send) -> EventStream:
        self._stream = ChunkStream(
            send, self._head(self._spelling.chunk_kind), include_usage=self._include_usage
        )
        return self._stream

    def begin(self, run: Running) -> None:
        self._run = run
        self._choices = [self._choice(index, run) for index in range(len(run.handles))]

    def wait(self, index: int, progress: Progress) -> None:
        self._stream.chunk([self._choices[index].waiting()], prompt_progress=progress_of(progress))

    async def open(self, index: int) -> None:
        """The log probabilities of a prompt are written beside the loop."""
        assert self._run is not None
        choice = self._choices[index]
        prompt_logprobs = self._run.handles[index].prompt_logprobs

        def write() -> None:
            opening = choice.opening(prompt_logprobs)
            if opening is not None:
                self._stream.chunk([opening], long=bool(prompt_logprobs))

        if prompt_logprobs:
            await off_loop(write)
        else:
            write()

    def push(self, index: int, event: TokenEvent) -> None:
        if (piece := self._choices[index].push(event)) is not None:
            self._stream.chunk([piece])

    def close(self, index: int, result: GenerationResult) -> None:
        self._results[index] = result
        closing = self._choices[index].close(result)
        if len(self._results) == len(self._choices) and not self._include_usage:
            figures = self._all_figures()  # usage is for those who ask for it
            self._stream.chunk([closing], timings=figures["timings"], kvboost=figures["kvboost"])
        else:
            self._stream.chunk([closing])

    def end(self) -> None:
        if self._include_usage:
            self._stream.chunk([], **self._all_figures())

    def _all_figures(self) -> Figures:
        assert self._run is not None
        results = [self._results[index] for index in range(len(self._results))]
        return self._figures(results, self._run, self._choices)

    def _figures(
        self, results: Sequence[GenerationResult], run: Running, choices: Sequence[Choice]
    ) -> Figures:
        """Return usage, timings and kvboost."""
        self._num_reasoning = reasoning = sum(choice.num_reasoning_tokens for choice in choices)
        spent = costs(results, run.per_prompt, run.tokenize_ms, run.prompts[0].dropped)
        if self._diagnosis is not None:
            spent["kvboost"]["cache"] = self._diagnosis.as_json()
        return {"usage": usage_of(results, run.per_prompt, reasoning), **spent}

    def _head(self, kind: str) -> ChunkHead:
        """Return the members that an answer, and every chunk of one, begins with."""
        info = self._state.engine.runner_info
        described = (
            f"{kvboost_edge.__version__} {self._state.model_name} {info.name} {info.architecture} "
            f"{info.dtype}"
        )
        return {
            "id": f"{self._spelling.id_prefix}-{secrets.token_hex(16)}",
            "object": kind,
            "created": int(time.time()),
            "model": self._state.model_name,
            "system_fingerprint": "fp_" + hashlib.sha256(described.encode()).hexdigest()[:12],
        }


def order_of(
    state: ModelState,
    body: SamplingFields,
    own: OpenAIWriter,
    writer: AnswerWriter | None,
    *,
    size: int,
    estimate: int,
    num_prompts: int,
    per_prompt: int,
    encode: Callable[[KeptAnswers], list[EncodedPrompt]],
    params: Callable[[EncodedPrompt, int], SamplingParams],
) -> Order:
    """The order of a body, answered by `writer`, or by `own`; the rest as in `Order` and `Job`."""
    job = Job(
        encode=encode,
        size=size,
        params=params,
        per_prompt=per_prompt,
        mode=check_mode(state, body.mode),
        options=body.engine_options,
        cache_salt=body.cache_salt,
        priority=check_priority(state, body.priority),
        cache_key=body.cache_key,
        retention=body.retention,
    )
    return Order(
        estimate=estimate,
        num_prompts=num_prompts,
        job=job,
        streams=bool(body.stream),
        writer=writer or own,
        explain=own.explain if body.explain else None,
        tells_progress=bool(body.return_progress),
    )
