"""Response writer of OpenAI's completions and chat completions: one JSON object, or chunks."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from starlette.types import Send

from kvboost_edge import __version__
from kvboost_edge.engine.handle import TokenEvent
from kvboost_edge.engine.request.progress import Progress
from kvboost_edge.engine.request.results import GenerationResult
from kvboost_edge.server.api.rendered_request import ChoiceWriter, RenderedRequest
from kvboost_edge.server.api.usage import costs, progress_of, usage_of
from kvboost_edge.server.cache_report.recent_requests import Diagnosis
from kvboost_edge.server.response_types import ChunkHead, Figures
from kvboost_edge.server.work.bridge import Running, off_loop
from kvboost_edge.server.work.streams import PING, ChunkStream, EventStream, dumps, dumps_long

__all__ = ["OpenAIWriter"]

Json = dict[str, Any]


class OpenAIWriter:
    """`AnswerWriter` for OpenAI's completions and chat completions."""

    def __init__(self, rendered: RenderedRequest) -> None:
        self._rendered = rendered
        self._include_usage = rendered.include_usage
        self._num_generated: Counter[int] = Counter()  # tokens of each choice so far
        self._diagnosis: Diagnosis | None = None
        self._num_reasoning = 0
        self._run: Running | None = None
        self._choices: list[ChoiceWriter] = []
        self._results: dict[int, GenerationResult] = {}

    def explain(self, diagnosis: Diagnosis) -> None:
        """Add the cache-miss report of the first prompt to the answer."""
        self._diagnosis = diagnosis

    @property
    def num_reasoning_tokens(self) -> int:
        return self._num_reasoning

    def whole(self, run: Running, results: list[GenerationResult]) -> bytes:
        # Choices with log probabilities are large, so each is encoded before the next is built.
        writers = [
            (self._rendered.choice(index, run), result)
            for index, result in enumerate(self._rendered.chosen(results))
        ]
        choices = [dumps_long(writer.whole(result)) for writer, result in writers]
        figures = dumps(self._figures(results, run, [writer for writer, _ in writers]))
        head = dumps(self._head(self._rendered.wire_names.kind))
        return head[:-1] + b',"choices":[' + b",".join(choices) + b"]," + figures[1:]

    def events(self, send: Send) -> EventStream:
        self._stream = ChunkStream(
            send,
            self._head(self._rendered.wire_names.chunk_kind),
            include_usage=self._include_usage,
        )
        return self._stream

    def begin(self, run: Running) -> None:
        self._run = run
        self._choices = [self._rendered.choice(index, run) for index in range(len(run.handles))]

    def wait(self, index: int, progress: Progress) -> None:
        self._stream.chunk([self._choices[index].waiting()], prompt_progress=progress_of(progress))

    def ping(self) -> None:
        self._stream.add(PING)

    async def open(self, index: int) -> None:
        """Write the first chunk of a choice, in a thread if it has prompt log probabilities."""
        assert self._run is not None
        choice = self._choices[index]
        prompt_logprobs = self._run.handles[index].prompt_logprobs

        def write() -> None:
            opening = choice.opening(prompt_logprobs)
            if opening is not None:
                self._write(index, opening, long=bool(prompt_logprobs))

        if prompt_logprobs:
            await off_loop(write)
        else:
            write()

    def push(self, index: int, event: TokenEvent) -> None:
        self._num_generated[index] += 1
        if (piece := self._choices[index].push(event)) is not None:
            self._write(index, piece)

    def close(self, index: int, result: GenerationResult) -> None:
        self._results[index] = result
        closing = self._choices[index].close(result)
        if len(self._results) == len(self._choices) and not self._include_usage:
            figures = self._all_figures()  # no usage was requested
            self._write(index, closing, timings=figures["timings"], kvboost=figures["kvboost"])
        else:
            self._write(index, closing)

    def end(self) -> None:
        if self._include_usage:
            self._stream.chunk([], **self._all_figures())

    def _write(self, index: int, piece: Json, *, long: bool = False, **members: Any) -> None:
        """Write a chunk with a piece of one choice."""
        if self._rendered.continuous_usage:
            assert self._run is not None
            num_prompt = len(self._run.prompts[index // self._run.per_prompt].token_ids)
            generated = self._num_generated[index]
            members["usage"] = {
                "prompt_tokens": num_prompt,
                "completion_tokens": generated,
                "total_tokens": num_prompt + generated,
            }
        self._stream.chunk([piece], long=long, **members)

    def _all_figures(self) -> Figures:
        assert self._run is not None
        results = [self._results[index] for index in range(len(self._results))]
        return self._figures(results, self._run, self._choices)

    def _figures(
        self, results: Sequence[GenerationResult], run: Running, choices: Sequence[ChoiceWriter]
    ) -> Figures:
        """Return the members `usage`, `timings` and `kvboost`."""
        self._num_reasoning = reasoning = sum(choice.num_reasoning_tokens for choice in choices)
        spent = costs(results, run.per_prompt, run.tokenize_ms, run.prompts[0].dropped, run.cause)
        if self._diagnosis is not None:
            spent["kvboost"]["cache"] = self._diagnosis.as_json()
        mode = self._rendered.state.mode
        return {"usage": usage_of(results, run.per_prompt, reasoning, mode), **spent}

    def _head(self, kind: str) -> ChunkHead:
        """Return the members that begin an answer and each chunk."""
        state = self._rendered.state
        info = state.engine.runner_info
        described = f"{__version__} {state.model_name} {info.name} {info.architecture} {info.dtype}"
        return {
            "id": f"{self._rendered.wire_names.id_prefix}-{secrets.token_hex(16)}",
            "object": kind,
            "created": int(time.time()),
            "model": state.model_name,
            "system_fingerprint": "fp_" + hashlib.sha256(described.encode()).hexdigest()[:12],
        }
