"""Response writer of /api/chat and /api/generate: one JSON object, or one per line."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

from starlette.types import Send

from kvboost_edge.engine.request.results import GenerationResult
from kvboost_edge.server.api.compat.arguments import arguments_of
from kvboost_edge.server.api.turn_writer import TurnWriter
from kvboost_edge.server.api.usage import costs, usage_of
from kvboost_edge.server.api_errors import ApiError
from kvboost_edge.server.state import ModelState
from kvboost_edge.server.work.streams import EventStream, dumps, dumps_long
from kvboost_edge.text.turns.turn_parts import CallStart, ContentDelta, Part, ReasoningDelta

__all__ = ["LINES", "OllamaWriter", "loaded", "now"]

Json = dict[str, Any]

LINES = "application/x-ndjson"


def now() -> str:
    """Return the current time as text in Ollama's format."""
    return datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")


def loaded(name: str, *, stays: bool, chat: bool) -> Json:
    """Return the response to a request that only loads or unloads the model."""
    reason = "load" if stays else "unload"
    return {
        "model": name,
        "created_at": now(),
        **_said("", "", [], chat),
        "done": True,
        "done_reason": reason,
    }


class OllamaWriter(TurnWriter):
    """`AnswerWriter` for /api/chat and /api/generate."""

    def __init__(
        self,
        state: ModelState,
        name: str,
        stop: Sequence[str],
        *,
        chat: bool,
        load_seconds: float,
    ) -> None:
        """Create a writer.

        Args:
            state: the model.
            name: model name as given in the request.
            stop: stop strings.
            chat: whether answers contain a `message` instead of a `response`.
            load_seconds: time that the request waited until the model was loaded.
        """
        super().__init__(state, stop)
        self._name = name
        self._chat = chat
        self._load_ms = load_seconds * 1000
        self._calls_told = 0

    def response_body(self, result: GenerationResult, reason: str) -> bytes:
        thinking = self.message.as_sent().get("reasoning_content", "")
        said = _said(
            self.message.content, thinking, self._whole_calls(len(self.message.calls)), self._chat
        )
        return dumps_long({**self._head(), **said, "done": True, **self._figures(result, reason)})

    def events(self, send: Send) -> EventStream:
        self._stream = EventStream(send, _failure, content_type=LINES)
        return self._stream

    def ping(self) -> None:
        self._add({**self._head(), **_said("", "", [], self._chat), "done": False})

    def write_start(self) -> None:
        """Do nothing: the stream starts with the first text."""

    def write_parts(self, parts: Sequence[Part]) -> None:
        content = "".join(part.text for part in parts if isinstance(part, ContentDelta))
        thinking = "".join(part.text for part in parts if isinstance(part, ReasoningDelta))
        # A tool call is complete when the next one begins or the turn ends, and only then sent.
        begun = max(
            (part.index for part in parts if isinstance(part, CallStart)), default=self._calls_told
        )
        self._tell(content, thinking, begun)

    def write_end(self, result: GenerationResult, reason: str) -> None:
        self._tell("", "", len(self.message.calls))
        said = _said("", "", [], self._chat)
        self._add({**self._head(), **said, "done": True, **self._figures(result, reason)})

    def _tell(self, content: str, thinking: str, calls_until: int) -> None:
        calls = self._whole_calls(calls_until)
        if content or thinking or calls:
            self._add(
                {**self._head(), **_said(content, thinking, calls, self._chat), "done": False}
            )

    def _whole_calls(self, until: int) -> list[Json]:
        """Return the complete tool calls that were not sent yet."""
        # The arguments of a call that was cut short are not valid JSON, so the call is left out.
        calls: list[Json] = []
        for index in range(self._calls_told, until):
            call = self.message.calls[index]
            try:
                arguments = arguments_of(call["function"]["arguments"])
            except (ValueError, RecursionError):
                continue
            function = {"index": index, "name": call["function"]["name"], "arguments": arguments}
            calls.append({"id": call["id"], "function": function})
        self._calls_told = max(self._calls_told, until)
        return calls

    def _add(self, line: Json) -> None:
        self._stream.add(dumps(line) + b"\n")

    def _head(self) -> Json:
        return {"model": self._name, "created_at": now()}

    def _figures(self, result: GenerationResult, reason: str) -> Json:
        """Return Ollama's durations, in nanoseconds, and token counts.

        Prompt tokens include cached ones.
        """
        usage = usage_of([result], 1)
        spent = costs(
            [result], 1, self.run.tokenize_ms, self.run.prompts[0].dropped, self.run.cause
        )
        return {
            "done_reason": "length" if reason == "length" else "stop",
            "total_duration": _nanoseconds(self._load_ms + spent["kvboost"]["total_ms"]),
            "load_duration": _nanoseconds(self._load_ms),
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": _nanoseconds(spent["timings"]["prompt_ms"]),
            "eval_count": usage["completion_tokens"],
            "thinking_count": self.num_reasoning_tokens,
            "eval_duration": _nanoseconds(spent["timings"]["predicted_ms"]),
            "kvboost": spent["kvboost"],
        }


def _said(content: str, thinking: str, calls: list[Json], chat: bool) -> Json:
    more: Json = {"thinking": thinking} if thinking else {}
    if not chat:
        return {"response": content, **more}
    return {
        "message": {
            "role": "assistant",
            "content": content,
            **more,
            **({"tool_calls": calls} if calls else {}),
        }
    }


def _nanoseconds(milliseconds: float) -> int:
    return round(milliseconds * 1e6)


def _failure(error: ApiError) -> bytes:
    return dumps({"error": error.message}) + b"\n"
