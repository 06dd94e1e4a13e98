"""Streaming parser that splits an assistant's turn into reasoning, content and tool calls.

Text that may begin a marker is held back until this is decided. So is a message that may be a call
without markers. Text that only resembles a call, or names an unknown tool, is content.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvboost_edge.errors import RequestError
from kvboost_edge.text.turns.bare_call import Accepts, BareCall
from kvboost_edge.text.turns.call_reader import CallReader
from kvboost_edge.text.turns.formats import CallFormat, ReasoningFormat, Tool, TurnFormat
from kvboost_edge.text.turns.harmony.turn import ChannelTurn
from kvboost_edge.text.turns.scanner import EndOfText, Scanner, Step, held_back
from kvboost_edge.text.turns.turn_parts import (
    CallArguments,
    CallStart,
    ContentDelta,
    Part,
    ReasoningDelta,
    merge_parts,
)

__all__ = [
    "CallArguments",
    "CallStart",
    "ContentDelta",
    "Part",
    "ReasoningDelta",
    "TurnParser",
    "merge_parts",
]


class TurnParser:
    """Streaming parser of one turn.

    `push` and `close` return the parts that are final. Merged with `merge_parts`, they do not
    depend on how the text was divided. Whitespace that only separates parts (after reasoning,
    around calls) is dropped.
    """

    def __init__(
        self,
        format: TurnFormat,
        tools: Sequence[Tool],
        *,
        reasoning: str,
        calls: bool,
        accepts: Accepts | None = None,
    ) -> None:
        """Start a turn.

        Args:
            format: turn format of the model.
            tools: tools that may be called.
            reasoning: "opened" if the prompt ends inside a reasoning block, "possible" if the turn
                may begin with one, or "closed" if it may not.
            calls: whether to parse calls.
            accepts: checks the arguments of a message that may be a call without markers. If None,
                such a message is content.
        """
        if calls and format.calls is None:
            raise RequestError(
                "the tool-call format of the model's chat template is not supported; send the "
                "request without tools"
            )
        self._scanner = Scanner()
        self._parts: list[Part] = []
        self._turn: _Turn | ChannelTurn
        if format.channels is not None:
            self._turn = ChannelTurn(
                self._scanner, self._parts, tools if calls else (), format.channels
            )
            self._steps = self._turn.read(reasoning)
        else:
            called = format.calls if calls else None
            self._turn = _Turn(self._scanner, self._parts, tools, called, accepts)
            self._steps = self._turn.read(format.reasoning, reasoning)
        next(self._steps, None)

    def push(self, text: str) -> list[Part]:
        """Add text of the turn and return the parts that are now final."""
        if text:
            self._scanner.text += text
            next(self._steps, None)
        return self._taken()

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends inside a reasoning block or its closing marker."""
        return self._turn.in_reasoning

    @property
    def num_thoughts(self) -> int:
        """Number of completed reasoning blocks."""
        return self._turn.num_thoughts

    @property
    def in_answer(self) -> bool:
        """Whether the text so far ends inside an answer in a channel."""
        return self._turn.in_answer

    def close(self) -> list[Part]:
        """End the turn and return the parts held back.

        A truncated call keeps the arguments received so far.
        """
        self._scanner.ended = True
        next(self._steps, None)
        return self._taken()

    def _taken(self) -> list[Part]:
        parts = merge_parts(self._parts)
        self._parts.clear()
        return parts


class _Turn:
    """Incremental parser of a turn that is one text."""

    def __init__(
        self,
        scanner: Scanner,
        parts: list[Part],
        tools: Sequence[Tool],
        format: CallFormat | None,
        accepts: Accepts | None,
    ) -> None:
        self._scanner = scanner
        self._parts = parts
        self._format = format
        self._calls = CallReader(scanner, parts, tools, format) if format is not None else None
        self._bare_call = (
            BareCall(scanner, parts, tools, format, accepts)
            if format is not None and accepts is not None
            else None
        )
        self._bare = False  # whitespace that follows only separates parts
        self.in_reasoning = self.in_answer = False
        self.num_thoughts = 0

    def read(self, markers: ReasoningFormat | None, state: str) -> Step[None]:
        try:
            if markers is not None and state != "closed":
                yield from self._reasoning(markers, opened=state == "opened")
            if self._bare_call is not None and (yield from self._bare_call.read()):
                return
            if self._calls is not None and not self._calls.trigger:
                yield from self._try_calls()
            yield from self._content()
        except EndOfText:
            pass

    def _reasoning(self, markers: ReasoningFormat, *, opened: bool) -> Step[None]:
        scanner = self._scanner
        start = self._scanner.at
        try:
            yield from scanner.space()
            begun = yield from scanner.exactly(markers.start)
        except EndOfText:
            begun = False
        if not begun and not opened:
            scanner.at = start
            return
        self.in_reasoning = True
        yield from scanner.space()
        scanner.forget()
        yield from self._thoughts(markers.end)
        self.in_reasoning = False
        self.num_thoughts = 1
        self._bare = True

    def _thoughts(self, marker: str) -> Step[None]:
        """Emit reasoning up to its closing marker, without the whitespace before the marker."""
        scanner = self._scanner
        while (end := scanner.text.find(marker)) < 0:
            self._show_thought(len(scanner.text) - held_back(scanner.text, 0, marker))
            try:
                yield from scanner.more()
            except EndOfText:
                self._parts += [ReasoningDelta(scanner.text)] if scanner.text else []
                raise
        self._show_thought(end)
        scanner.at = scanner.text.index(marker) + len(marker)
        scanner.forget()

    def _show_thought(self, end: int) -> None:
        text = self._scanner.text[:end].rstrip()
        if text:
            self._parts.append(ReasoningDelta(text))
            self._scanner.at = len(text)
            self._scanner.forget()

    def _content(self) -> Step[None]:
        """Read the rest of the turn: content, and calls after their marker."""
        scanner = self._scanner
        trigger = self._calls.trigger if self._calls is not None else ""
        looked = 0  # position before which no call begins
        while True:
            at = scanner.text.find(trigger, looked) if trigger else -1
            if at < 0:
                held = held_back(scanner.text, looked, trigger) if trigger else 0
                looked = self._show_content(len(scanner.text) - held)
                try:
                    yield from scanner.more()
                except EndOfText:
                    self._show_rest()
                    raise
                continue
            at = self._show_content(at)
            scanner.at = at
            called = yield from self._try_calls()
            looked = 0 if called else at + len(trigger)

    def _show_content(self, end: int) -> int:
        """Emit the text up to `end` without trailing whitespace.

        Returns:
            The position of `end` after the emitted text is dropped.
        """
        scanner = self._scanner
        text = scanner.text[:end].rstrip()
        if text:
            self._parts.append(ContentDelta(text.lstrip() if self._bare else text))
            self._bare = False
            scanner.at = len(text)
            scanner.forget()
        return end - len(text)

    def _show_rest(self) -> None:
        rest = self._scanner.text
        if rest and not (self._bare and rest.isspace()):
            self._parts.append(ContentDelta(rest.lstrip() if self._bare else rest))

    def _try_calls(self) -> Step[bool]:
        """Read the calls that begin here. If there are none, nothing is consumed."""
        assert self._calls is not None
        scanner = self._scanner
        before = self._calls.count
        try:
            found = yield from self._calls.read()
        except EndOfText:
            if self._calls.count > before:
                raise
            found = False
        if not found:
            scanner.at = 0
            return False
        scanner.forget()
        self._bare = True
        return True
