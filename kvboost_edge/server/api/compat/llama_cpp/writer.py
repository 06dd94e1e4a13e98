"""Response writer of /completion and /infill: one JSON object, or a stream that ends with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.types import Send

from kvboost_edge.engine.handle import TokenEvent
from kvboost_edge.engine.request.progress import Progress
from kvboost_edge.engine.request.results import GenerationResult
from kvboost_edge.engine.request.sampling_defaults import SamplingDefaults
from kvboost_edge.server.api.schemas.completions import CompletionRequest
from kvboost_edge.server.api.turn_writer import TurnWriter
from kvboost_edge.server.api.usage import costs, progress_of
from kvboost_edge.server.api_errors import ApiError
from kvboost_edge.server.error_shapes import shape_of
from kvboost_edge.server.state import ModelState
from kvboost_edge.server.work.bridge import Running
from kvboost_edge.server.work.streams import PING, EventStream, dumps_long, event
from kvboost_edge.text.turns.turn_parts import ContentDelta, Part

__all__ = ["LlamaWriter", "default_settings"]

Json = dict[str, Any]
_MISSING = object()


def default_settings(defaults: SamplingDefaults, body: object = None) -> Json:
    """Return sampling settings under llama.cpp's names, from a request or the defaults."""
    values = defaults.values_for(body)
    return {
        "repeat_penalty" if name == "repetition_penalty" else name: value
        for name, value in values.items()
    }


class LlamaWriter(TurnWriter):
    """`AnswerWriter` for /completion and /infill."""

    def __init__(
        self,
        state: ModelState,
        body: CompletionRequest,
        *,
        with_ids: bool,
        fields: Sequence[str] = (),
    ) -> None:
        """Create a writer.

        Args:
            state: the model.
            body: the request body.
            with_ids: whether the answer includes token ids.
            fields: paths of the answer's fields, such as "timings/prompt_n"; empty for all.
        """
        super().__init__(state, body.stop or ())
        self._body = body
        self._with_ids = with_ids
        self._fields = fields
        self._stops = body.stop or ()
        self._ids: list[int] = []
        self._told_ids = 0

    def whole(self, run: Running, results: list[GenerationResult]) -> bytes:
        if len(results) == 1:
            return super().whole(run, results)
        self.begin(run)
        return dumps_long(
            [
                self._final(result, result.finish_reason, result.output_text, index)
                for index, result in enumerate(results)
            ]
        )

    def response_body(self, result: GenerationResult, reason: str) -> bytes:
        return dumps_long(self._final(result, reason, self.message.content))

    def events(self, send: Send) -> EventStream:
        self._stream = EventStream(send, _failure)
        return self._stream

    def write_start(self) -> None:
        """Do nothing: the stream starts with the first text."""

    def push(self, index: int, event: TokenEvent) -> None:
        self._ids.append(event.token_id)
        super().push(index, event)

    def wait(self, index: int, progress: Progress) -> None:
        self._piece("", prompt_progress=progress_of(progress))

    def ping(self) -> None:
        self._stream.add(PING)

    def write_parts(self, parts: Sequence[Part]) -> None:
        self._piece("".join(part.text for part in parts if isinstance(part, ContentDelta)))

    def _piece(self, text: str, **more: Any) -> None:
        head = {
            "index": 0,
            "content": text,
            "tokens": self._new_ids(),
            "stop": False,
            "id_slot": -1,
        }
        counts = {
            "tokens_predicted": len(self._ids),
            "tokens_evaluated": len(self.run.prompts[0].token_ids),
        }
        self._stream.add(event({**head, **counts, **more}))

    def write_end(self, result: GenerationResult, reason: str) -> None:
        self._stream.add(event(self._final(result, reason, "", ids=self._new_ids())))

    def _new_ids(self) -> list[int]:
        begin = self._told_ids
        self._told_ids = len(self._ids)
        return self._ids[begin:] if self._with_ids else []

    def _final(
        self,
        result: GenerationResult,
        reason: str,
        content: str,
        index: int = 0,
        ids: list[int] | None = None,
    ) -> Json:
        if ids is None:
            ids = list(result.output_token_ids) if self._with_ids else []
        word = self._stopping_word(result) if reason == "stop" else ""
        number = index // self.run.per_prompt
        prompt = self.run.prompts[number]
        cause = "" if number else self.run.cause  # It is known of the first prompt only.
        spent = costs([result], 1, self.run.tokenize_ms, prompt.dropped, cause)
        answer = {
            "index": index,
            "content": content,
            "tokens": ids,
            "id_slot": -1,
            "stop": True,
            "model": self.state.model_name,
            "tokens_predicted": result.generated_tokens,
            "tokens_evaluated": result.prompt_tokens,
            "tokens_reasoning": result.reasoning_tokens or 0,
            "generation_settings": self._settings(result),
            "prompt": prompt.text,
            "has_new_line": "\n" in result.output_text,
            "truncated": False,
            "stop_type": "limit" if reason == "length" else "word" if word else "eos",
            "stopping_word": word,
            "tokens_cached": result.exact_cached_tokens,
            **spent,
        }
        return _selected(answer, self._fields) if self._fields else answer

    def _stopping_word(self, result: GenerationResult) -> str:
        """Return the stop string that ended the text, or ""."""
        if not self._stops:
            return ""
        written = self.state.engine.tokenizer.decode(
            result.output_token_ids, skip_special_tokens=True
        )
        rest = written[len(result.output_text) :]
        return next((stop for stop in self._stops if rest.startswith(stop)), "")

    def _settings(self, result: GenerationResult) -> Json:
        body = self._body
        return {
            "n_predict": -1 if body.max_tokens is None else body.max_tokens,
            "seed": result.seed,
            **default_settings(self.state.sampling_defaults, body),
            **body.sampler_options,
            "presence_penalty": body.presence_penalty or 0.0,
            "frequency_penalty": body.frequency_penalty or 0.0,
            "stop": list(self._stops),
            "stream": bool(body.stream),
            "ignore_eos": bool(body.ignore_eos),
            "grammar": body.grammar or "",
            **({} if body.draft_n_max is None else {"speculative.n_max": body.draft_n_max}),
        }


def _selected(answer: Json, paths: Sequence[str]) -> Json:
    """Return the fields at paths, each under its whole path. Missing ones are left out."""
    found: Json = {}
    for path in paths:
        value: Any = answer
        for name in path.split("/"):
            value = value.get(name, _MISSING) if isinstance(value, dict) else _MISSING
        if value is not _MISSING:
            found[path] = value
    return found


def _failure(error: ApiError) -> bytes:
    return event(shape_of("/completion")(error))
