"""Response writer of /v1/messages: one message, or the events of a stream."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from starlette.types import Send

from kvboost_edge.engine.handle import TokenEvent
from kvboost_edge.engine.request.progress import Progress
from kvboost_edge.engine.request.results import GenerationResult
from kvboost_edge.server.api.compat.anthropic.schemas import MessagesRequest
from kvboost_edge.server.api.compat.arguments import arguments_of
from kvboost_edge.server.api.turn_writer import TurnWriter
from kvboost_edge.server.api.usage import approximate_label, costs, progress_of
from kvboost_edge.server.api_errors import error_body
from kvboost_edge.server.state import ModelState
from kvboost_edge.server.work.bridge import Running
from kvboost_edge.server.work.streams import EventStream, dumps_long, event
from kvboost_edge.text.stop_strings import StopChecker
from kvboost_edge.text.turns.turn_parts import (
    CallArguments,
    CallStart,
    ContentDelta,
    Part,
    ReasoningDelta,
    merge_parts,
)

__all__ = ["AnthropicWriter"]

Json = dict[str, Any]

_HOUR = 3600.0
# Clients send thinking back only with a signature. This server does not sign, so the value is a
# placeholder.
_SIGNATURE = "unsigned"
_PATH = "/v1/messages"


class AnthropicWriter(TurnWriter):
    """`AnswerWriter` for /v1/messages."""

    def __init__(
        self,
        state: ModelState,
        body: MessagesRequest,
        kept: Sequence[tuple[int, float]],
        stop: Sequence[str] = (),
    ) -> None:
        """Create a writer.

        Args:
            state: the model.
            body: the request body.
            kept: (number of tokens, seconds) of each breakpoint; filled before the request runs.
            stop: stop strings of the request, or of the model.
        """
        super().__init__(state, stop)
        self._body = body
        self._blocks = _Blocks(
            self, shows_thoughts=body.thinking is None or body.thinking.display != "omitted"
        )
        self._stream: EventStream | None = None
        self._id = f"msg_{secrets.token_hex(12)}"
        self._kept = kept

    def whole(self, run: Running, results: list[GenerationResult]) -> bytes:
        """Return the message as JSON."""
        self.begin(run)
        (result,) = results
        # Push the tokens as in a stream. The blocks then follow the order of the text.
        events = [TokenEvent(token_id, "", 0.0) for token_id in result.output_token_ids]
        for one in (
            [TokenEvent(0, result.output_text, 0.0)] if run.prompts[0].turn is None else events
        ):
            self.push(0, one)
        self.write_parts(self._finish(result))
        return self.response_body(result, self._reason(result))

    def response_body(self, result: GenerationResult, reason: str) -> bytes:
        self._emit(self._blocks.end())
        usage = self._usage_at_end(result)
        return dumps_long(
            {
                **self._head(self._blocks.content),
                **self._ending(result, reason),
                "usage": usage,
                **self._costs(result),
            }
        )

    def events(self, send: Send) -> EventStream:
        self._stream = EventStream(send, lambda error: event(error_body(error, _PATH), "error"))
        return self._stream

    def wait(self, index: int, progress: Progress) -> None:
        self._emit([{"type": "ping", "prompt_progress": progress_of(progress)}])

    def ping(self) -> None:
        self._emit([{"type": "ping"}])

    def write_start(self) -> None:
        prompt = len(self.run.prompts[0].token_ids)
        cached = self.run.handles[0].cached_tokens
        message = {
            **self._head([]),
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(0, prompt, cached),
        }
        self._emit([{"type": "message_start", "message": message}])

    def write_parts(self, parts: Sequence[Part]) -> None:
        self._emit(self._blocks.add(parts))

    def write_end(self, result: GenerationResult, reason: str) -> None:
        self._emit(self._blocks.end())
        usage = self._usage_at_end(result)
        delta = {
            "type": "message_delta",
            "delta": self._ending(result, reason),
            "usage": usage,
            **self._costs(result),
        }
        self._emit([delta, {"type": "message_stop"}])

    def _emit(self, events: Iterator[Json] | Sequence[Json]) -> None:
        for one in events:
            if self._stream is not None:
                self._stream.add(event(one, one["type"]))

    def _head(self, content: list[Json]) -> Json:
        name = self.state.model_name
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": name,
            "content": content,
        }

    def _ending(self, result: GenerationResult, reason: str) -> Json:
        """Return the stop reason and the stop string that was found, if any."""
        if reason == "tool_calls":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if reason == "length":
            full = result.generated_tokens < self._body.max_tokens
            return {
                "stop_reason": "model_context_window_exceeded" if full else "max_tokens",
                "stop_sequence": None,
            }
        stop = self._stop_of(result)
        return {
            "stop_reason": "end_turn" if stop is None else "stop_sequence",
            "stop_sequence": stop,
        }

    def _stop_of(self, result: GenerationResult) -> str | None:
        """Return the stop string that ended the answer, or None."""
        # Special tokens are decoded too, because a stop string may be the text of one.
        checker = StopChecker(self._stop)
        if self._stop:
            checker.push(
                self.state.engine.tokenizer.decode(
                    result.output_token_ids, skip_special_tokens=False
                )
            )
        return checker.stop

    def _usage(self, generated: int, prompt: int, cached: int) -> Json:
        """Return Anthropic's usage. The three input counts add up to the prompt length.

        `cache_creation_input_tokens` counts the full blocks after the cached tokens, up to the last
        breakpoint.
        """
        size = self.state.engine.config.block_size
        written = [
            (max(0, length // size * size - cached), seconds) for length, seconds in self._kept
        ]
        created = max((length for length, _ in written), default=0)
        hour = max((length for length, seconds in written if seconds == _HOUR), default=0)
        return {
            "input_tokens": prompt - cached - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": cached,
            "cache_creation": {
                "ephemeral_5m_input_tokens": created - hour,
                "ephemeral_1h_input_tokens": hour,
            },
            "output_tokens": generated,
            "output_tokens_details": {"thinking_tokens": self.num_reasoning_tokens},
            "service_tier": "standard",
        }

    def _usage_at_end(self, result: GenerationResult) -> Json:
        usage = self._usage(
            result.generated_tokens, result.prompt_tokens, result.exact_cached_tokens
        )
        approximate = approximate_label([result], self.state.mode)
        return usage if approximate is None else {**usage, "approximate": approximate}

    def _costs(self, result: GenerationResult) -> Json:
        figures = costs(
            [result], 1, self.run.tokenize_ms, self.run.prompts[0].dropped, self.run.cause
        )
        size = self.state.engine.config.block_size
        pinned = self.run.handles[0].pinned_tokens // size * size
        return {
            "timings": figures["timings"],
            "kvboost": {**figures["kvboost"], "pinned_tokens": pinned},
        }


class _Blocks:
    """Content blocks of a message, built from the parts of a turn in order."""

    def __init__(self, writer: TurnWriter, *, shows_thoughts: bool) -> None:
        self._writer = writer
        self._shows_thoughts = shows_thoughts
        self.content: list[Json] = []
        self._open = False
        self._arguments: list[str] = []

    def add(self, parts: Sequence[Part]) -> list[Json]:
        """Add parts of a turn and return the resulting events."""
        events: list[Json] = []
        for part in merge_parts(parts):
            match part:
                case ReasoningDelta(text):
                    events += self._begun({"type": "thinking", "thinking": "", "signature": ""})
                    if self._shows_thoughts:
                        self.content[-1]["thinking"] += text
                        events.append(self._delta({"type": "thinking_delta", "thinking": text}))
                case ContentDelta(text):
                    events += self._begun({"type": "text", "text": ""})
                    self.content[-1]["text"] += text
                    events.append(self._delta({"type": "text_delta", "text": text}))
                case CallStart(index, name):
                    call_id = self._writer.calls()[index]["id"]
                    events += [
                        *self.end(),
                        *self._begun(
                            {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                        ),
                    ]
                case CallArguments(_, text):
                    self._arguments.append(text)
                    events.append(self._delta({"type": "input_json_delta", "partial_json": text}))
        return events

    def end(self) -> list[Json]:
        """End the open block, if any, and return the resulting events."""
        if not self._open:
            return []
        self._open = False
        block = self.content[-1]
        events = list[Json]()
        if block["type"] == "thinking":
            block["signature"] = _SIGNATURE
            events.append(self._delta({"type": "signature_delta", "signature": _SIGNATURE}))
        elif block["type"] == "tool_use":
            block["input"] = _object("".join(self._arguments))
            self._arguments = []
        return [*events, {"type": "content_block_stop", "index": len(self.content) - 1}]

    def _begun(self, block: Json) -> list[Json]:
        """Begin a block unless one of its type is open, and return the resulting events."""
        if self._open and self.content[-1]["type"] == block["type"]:
            return []
        events = self.end()
        self.content.append(dict(block))
        self._open = True
        return [
            *events,
            {"type": "content_block_start", "index": len(self.content) - 1, "content_block": block},
        ]

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}


def _object(arguments: str) -> Json:
    """Parse the arguments of a tool call; return {} if they were cut short."""
    try:
        given = arguments_of(arguments or "{}")
    except (ValueError, RecursionError):
        return {}
    return given if isinstance(given, dict) else {}
