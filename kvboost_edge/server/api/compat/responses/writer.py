"""Response writer of /v1/responses: one JSON object, or a stream of events."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.types import Send

from kvboost_edge.config import GenerationMode
from kvboost_edge.engine.request.results import GenerationResult
from kvboost_edge.server.api.compat.responses.items import new_id
from kvboost_edge.server.api.compat.responses.output import Output
from kvboost_edge.server.api.compat.responses.schemas import ResponseRequest
from kvboost_edge.server.api.compat.responses.tools import names_of
from kvboost_edge.server.api.turn_writer import TurnWriter
from kvboost_edge.server.api.usage import costs, usage_of
from kvboost_edge.server.api_errors import ApiError
from kvboost_edge.server.state import ModelState
from kvboost_edge.server.work.streams import PING, EventStream, dumps, dumps_long, event
from kvboost_edge.text.turns.turn_parts import (
    CallArguments,
    CallStart,
    ContentDelta,
    Part,
    ReasoningDelta,
)

__all__ = ["ResponsesWriter"]

Json = dict[str, Any]
Keep = Callable[[str, bytes, Sequence[Json]], bool]


class ResponsesWriter(TurnWriter):
    """`AnswerWriter` for /v1/responses."""

    def __init__(
        self,
        state: ModelState,
        body: ResponseRequest,
        keep: Keep | None,
        stop: Sequence[str] = (),
    ) -> None:
        """Create a writer.

        Args:
            state: the model.
            body: the request body.
            keep: function that stores the JSON of a finished response under its id, given its
                output items, and returns False if the response is too large; None to store
                nothing.
            stop: stop strings of the model.
        """
        super().__init__(state, stop)
        self._keep = keep
        self._response = _head(state, body)
        self._output = Output(names_of(body.tools or ()))
        self._stream: EventStream | None = None
        self._number = 0
        self._is_open = False

    def response_body(self, result: GenerationResult, reason: str) -> bytes:
        for part in self._parts():
            for _ in self._added(part):
                pass  # The events are not needed.
        for _ in self._output.end(_status(reason)):
            pass
        return self._finished(result, reason)

    def events(self, send: Send) -> EventStream:
        self._stream = EventStream(send, self._failure)
        return self._stream

    def ping(self) -> None:
        # Some clients wait for events, and ignore comments. No event fits after the first output.
        if self._output.items:
            assert self._stream is not None
            self._stream.add(PING)
        elif self._is_open:
            self._tell({"type": "response.in_progress", "response": self._response})
        else:
            self.write_start()

    def write_start(self) -> None:
        if self._is_open:
            return
        self._is_open = True
        for kind in ("response.created", "response.in_progress"):
            self._tell({"type": kind, "response": self._response})

    def write_parts(self, parts: Sequence[Part]) -> None:
        for part in parts:
            for data in self._added(part):
                self._tell(data)

    def write_end(self, result: GenerationResult, reason: str) -> None:
        for data in self._output.end(_status(reason)):
            self._tell(data)
        whole = self._finished(result, reason)
        head = dumps({"type": f"response.{_status(reason)}", "sequence_number": self._number})
        assert self._stream is not None
        named = f"event: response.{_status(reason)}\ndata: ".encode()
        self._stream.add(named, head[:-1], b',"response":', whole, b"}\n\n")

    def _parts(self) -> list[Part]:
        """Return the parts of a complete message, in the order of a turn."""
        sent = self.message.as_sent()
        parts: list[Part] = (
            [ReasoningDelta(sent["reasoning_content"])] if "reasoning_content" in sent else []
        )
        parts += [ContentDelta(self.message.content)] if self.message.content else []
        for index, call in enumerate(self.message.calls):
            function = call["function"]
            parts += [
                CallStart(index, function["name"]),
                CallArguments(index, function["arguments"]),
            ]
        return parts

    def _added(self, part: Part) -> Any:
        call_id = self.message.calls[part.index]["id"] if isinstance(part, CallStart) else ""
        return self._output.add(part, call_id)

    def _tell(self, data: Json) -> None:
        assert self._stream is not None
        self._stream.add(event({**data, "sequence_number": self._number}, data["type"]))
        self._number += 1

    def _finished(self, result: GenerationResult, reason: str) -> bytes:
        """Return the finished response as JSON. Store it if the request asks for that."""
        usage = usage_of([result], 1, self.num_reasoning_tokens, self.state.mode)
        label = {"approximate": usage["approximate"]} if "approximate" in usage else {}
        self._response |= {
            "status": _status(reason),
            "completed_at": int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if reason == "length" else None,
            "output": self._output.items,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {
                    **usage["prompt_tokens_details"],
                    "cache_write_tokens": self._num_written(result),
                },
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
                "total_tokens": usage["total_tokens"],
                **label,
            },
            **costs([result], 1, self.run.tokenize_ms, self.run.prompts[0].dropped, self.run.cause),
        }
        whole = dumps_long(self._response)
        if self._keep is not None and not self._keep(
            self._response["id"], whole, self._output.items
        ):
            self._response["store"] = False
            whole = dumps_long(self._response)
        return whole

    def _num_written(self, result: GenerationResult) -> int:
        """Return the number of prompt tokens in full blocks that were added to the cache."""
        if result.mode is GenerationMode.BASELINE:
            return 0
        size = self.state.engine.config.block_size
        return max(0, result.prompt_tokens // size * size - result.cached_tokens)

    def _failure(self, error: ApiError) -> bytes:
        """Return the events that report an error in a stream."""
        # OpenAI's clients know only this code for an invalid request.
        code = "invalid_prompt" if error.status_code < 500 else "server_error"
        told = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        failed = {
            **self._response,
            "status": "failed",
            "error": {"code": code, "message": error.message},
        }
        events: list[Json] = [
            told,
            {"type": "response.failed", "response": {**failed, "output": self._output.items}},
        ]
        numbered = [
            {**data, "sequence_number": self._number + more} for more, data in enumerate(events)
        ]
        return b"".join(event(data, data["type"]) for data in numbered)


def _status(reason: str) -> str:
    return "incomplete" if reason == "length" else "completed"


def _head(state: ModelState, body: ResponseRequest) -> Json:
    """Return a response object before the first output."""
    reasoning = body.reasoning
    sampling = state.sampling_defaults.values_for(body)
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "model": state.model_name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": sampling["temperature"],
        "text": body.text,
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": sampling["top_p"],
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }
