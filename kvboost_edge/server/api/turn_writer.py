"""Base class of response writers for APIs whose answer is one assistant turn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from kvboost_edge.engine.handle import TokenEvent
from kvboost_edge.engine.request.progress import Progress
from kvboost_edge.engine.request.results import GenerationResult
from kvboost_edge.server.cache_report.recent_requests import Diagnosis
from kvboost_edge.server.state import ModelState
from kvboost_edge.server.work.bridge import Running
from kvboost_edge.text.turns.answer_reader import TurnMessage, TurnReader
from kvboost_edge.text.turns.turn_parts import ContentDelta, Part

__all__ = ["TurnWriter"]


class TurnWriter(ABC):
    """An `AnswerWriter` that parses one assistant turn while it is generated.

    Subclasses write a whole turn, or the start, the parts and the end of a streamed turn.

    Attributes:
        message: the message so far.
        run: the running request.
    """

    def __init__(self, state: ModelState, stop: Sequence[str] = ()) -> None:
        self.state = state
        self._stop = stop
        self.message = TurnMessage()
        self._reader: TurnReader | None = None
        self._num_reasoning: int | None = None  # as counted by the engine

    @abstractmethod
    def response_body(self, result: GenerationResult, reason: str) -> bytes:
        """Return the whole answer as JSON. `message` holds the finished turn."""

    @abstractmethod
    def ping(self) -> None:
        """Write something that clients ignore."""

    @abstractmethod
    def write_start(self) -> None:
        """Write the beginning of the stream."""

    @abstractmethod
    def write_parts(self, parts: Sequence[Part]) -> None:
        """Write parts that were just added to the message."""

    @abstractmethod
    def write_end(self, result: GenerationResult, reason: str) -> None:
        """Write the end of the turn."""

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of reasoning tokens; final once the answer is complete."""
        if self._num_reasoning is not None:
            return self._num_reasoning
        return 0 if self._reader is None else self._reader.num_reasoning_tokens

    def whole(self, run: Running, results: list[GenerationResult]) -> bytes:
        self.begin(run)
        (result,) = results
        if self._reader is None:
            self.message.add([ContentDelta(result.output_text)])
        else:
            for token_id in result.output_token_ids:
                self._reader.push(token_id)
        self._finish(result)
        return self.response_body(result, self._reason(result))

    def begin(self, run: Running) -> None:
        self.run = run
        tokenizer = self.state.engine.tokenizer
        turn = run.prompts[0].turn
        if turn is not None:
            self._reader = TurnReader(turn, tokenizer, self._stop, run.answers.keep)
            self.message = self._reader.message

    def wait(self, index: int, progress: Progress) -> None:  # noqa: B027
        """Ignore the progress of a prompt. Subclasses whose API can report it override this."""

    async def open(self, index: int) -> None:
        self.write_start()

    def push(self, index: int, event: TokenEvent) -> None:
        if self._reader is not None:
            parts: list[Part] = self._reader.push(event.token_id)
        else:
            parts = [ContentDelta(event.text)] if event.text else []
            self.message.add(parts)
        if parts:
            self.write_parts(parts)

    def close(self, index: int, result: GenerationResult) -> None:
        if parts := self._finish(result):
            self.write_parts(parts)
        self.write_end(result, self._reason(result))

    def end(self) -> None:  # noqa: B027
        """Do nothing, because `write_end` has written the end."""

    def explain(self, diagnosis: Diagnosis) -> None:  # noqa: B027
        """Ignore the cache-miss report, because these APIs have no field for it."""

    def _finish(self, result: GenerationResult) -> list[Part]:
        self._num_reasoning = result.reasoning_tokens
        return [] if self._reader is None else self._reader.close()

    def _reason(self, result: GenerationResult) -> str:
        """Return the finish reason: "stop", "length" or "tool_calls"."""
        return (
            result.finish_reason
            if self._reader is None
            else self._reader.reason(result.finish_reason)
        )

    def calls(self) -> list[dict[str, Any]]:
        """Return the tool calls of the message. `arguments` of each function is JSON text."""
        return self.message.calls
