"""Parser for turns with several messages (see `ChannelFormat`).

The header of each message determines the kind of its text. Text without a header is an answer. A
message to an unknown tool, or without valid arguments, is emitted unchanged as part of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from kvboost_edge.text.turns.formats import ChannelFormat, Tool
from kvboost_edge.text.turns.scanner import EndOfText, Scanner, Step, held_back
from kvboost_edge.text.turns.turn_parts import (
    CallArguments,
    CallStart,
    ContentDelta,
    Part,
    ReasoningDelta,
)

__all__ = ["ChannelTurn"]

_LONGEST_HEADER = 512  # characters; every valid header is shorter (see the limits in `_begun`)
_RECIPIENT = "to="
_BETWEEN = "\n\n"  # separator between messages of one kind, which clients receive as one text


class _Header(NamedTuple):
    """Channel and recipient of a message.

    Attributes:
        text: the header as written.
    """

    channel: str
    recipient: str
    text: str


class ChannelTurn:
    """Incremental parser of one turn.

    Attributes:
        in_answer: whether the text so far ends inside an answer, after its header.
    """

    def __init__(
        self, scanner: Scanner, parts: list[Part], tools: Sequence[Tool], format: ChannelFormat
    ) -> None:
        self._scanner = scanner
        self._parts = parts
        self._format = format
        self._tools = {format.functions + tool.name: tool.name for tool in tools}
        channel, message, constrain = map(
            re.escape, (format.channel, format.message, format.constrain)
        )
        space = r"\s{0,8}"
        to = rf"{_RECIPIENT}(?P<%s>[^\s<]{{0,160}})"
        self._begun = re.compile(
            rf"{space}(?:{to % 'before'}{space})?(?:{channel}{space}(?P<channel>\w{{0,32}}){space}"
            rf"(?:{to % 'behind'})?{space}(?:{constrain})?{space}[\w/.+-]{{0,32}}{space})?"
        )
        self._header = re.compile(self._begun.pattern + message)
        self._marks = (*format.ends, format.start)
        self._said: set[type[Part]] = set()
        self._calls = 0
        self.in_reasoning = self.in_answer = False
        self.num_thoughts = 0

    def read(self, state: str) -> Step[None]:
        """Parse the turn.

        Args:
            state: state at the end of the prompt, as returned by `TurnFormat.reasoning_after`.
        """
        names = {"opened": self._format.thoughts, "closed": self._format.answer}
        try:
            if state in names:
                yield from self._message(_Header(names[state], "", ""))
            while True:
                yield from self._message((yield from self._next_header()))
        except EndOfText:
            pass

    def _next_header(self) -> Step[_Header]:
        """Consume and return the next header, or return an empty header if there is none."""
        scanner = self._scanner
        message = self._format.message
        while (found := self._header.match(scanner.text)) is None:
            text = scanner.text
            if not self._may_begin(text) or message in text or len(text) > _LONGEST_HEADER:
                return _Header("", "", "")
            try:
                yield from scanner.more()
            except EndOfText:
                # A truncated header is dropped. Any other text is emitted.
                if text and not text.lstrip().startswith(
                    (self._format.channel, _RECIPIENT + self._format.functions)
                ):
                    self._show(ContentDelta, text)
                raise
        scanner.at = found.end()
        scanner.forget()
        return _Header(found["channel"] or "", found["before"] or found["behind"] or "", found[0])

    def _may_begin(self, text: str) -> bool:
        """Return whether a header may begin with this text."""
        begun = self._begun.match(text)
        rest = text if begun is None else text[begun.end() :]
        marks = (self._format.channel, self._format.constrain, self._format.message, _RECIPIENT)
        return any(mark.startswith(rest) for mark in marks)

    def _message(self, header: _Header) -> Step[None]:
        """Read a message's text and end marker, and the start marker of the next message."""
        if header.recipient:
            yield from self._addressed(header)
        elif header.channel == self._format.thoughts:
            self.in_reasoning = True
            yield from self._text(ReasoningDelta)
            self.in_reasoning = False
            self.num_thoughts += 1
        else:
            self.in_answer = bool(header.text)
            yield from self._text(ContentDelta)
        self.in_answer = False
        yield from self._end()

    def _addressed(self, header: _Header) -> Step[None]:
        """Read a message to a tool, whose text is a JSON object of arguments.

        An empty text stands for an empty object.
        """
        name = self._tools.get(header.recipient)
        first = ""
        if name is not None:
            try:
                first = yield from self._first_of_arguments()
            except EndOfText:
                self._start(name)
                raise
        if name is None or first == "":
            self._scanner.at = 0
            self._show(ContentDelta, header.text)
            yield from self._text(ContentDelta, continued=True)
            return
        self._scanner.forget()
        self._start(name)
        if first == "{":
            yield from self._arguments()
            yield from self._text(None)
        else:
            self._parts.append(CallArguments(self._calls - 1, "{}"))

    def _arguments(self) -> Step[None]:
        """Emit an object of arguments up to its end, or to a marker outside its strings."""
        scanner = self._scanner
        try:
            yield from scanner.shown_value(
                lambda text: self._show(CallArguments, text), self._marks
            )
        except EndOfText:
            self._show(CallArguments, scanner.text)
            raise

    def _first_of_arguments(self) -> Step[str]:
        """Skip whitespace and return "{", an end marker, or "" for anything else."""
        scanner = self._scanner
        while True:
            yield from scanner.space()
            rest = scanner.text[scanner.at :]
            found = next((mark for mark in ("{", *self._marks) if rest.startswith(mark)), None)
            if found is not None or not any(mark.startswith(rest) for mark in self._marks):
                return found or ""
            yield from scanner.more()

    def _start(self, name: str) -> None:
        self._parts.append(CallStart(self._calls, name))
        self._calls += 1

    def _text(self, kind: type[Part] | None, *, continued: bool = False) -> Step[None]:
        """Emit the text up to the first end marker, which is not consumed.

        Args:
            kind: kind of part to emit, or None to discard the text.
            continued: whether part of the same message was already emitted.
        """
        scanner = self._scanner
        is_next = not continued
        while True:
            ends = [at for mark in self._marks if (at := scanner.text.find(mark)) >= 0]
            held = max(held_back(scanner.text, 0, mark) for mark in self._marks)
            end = min(ends, default=len(scanner.text) - held)
            if end:
                self._show(kind, scanner.text[:end], is_next=is_next)
                is_next = False
                scanner.at = end
                scanner.forget()
            if ends:
                return
            try:
                yield from scanner.more()
            except EndOfText:
                if scanner.text:
                    self._show(kind, scanner.text, is_next=is_next)
                raise

    def _show(self, kind: type[Part] | None, text: str, *, is_next: bool = True) -> None:
        if kind is None or not text:
            return
        if kind is CallArguments:
            self._parts.append(CallArguments(self._calls - 1, text))
            return
        between = _BETWEEN if is_next and kind in self._said else ""
        self._said.add(kind)
        self._parts.append(
            ReasoningDelta(between + text)
            if kind is ReasoningDelta
            else ContentDelta(between + text)
        )

    def _end(self) -> Step[None]:
        """Consume the end marker of a message and the start marker of the next one."""
        scanner = self._scanner
        format = self._format
        while any(scanner.text.startswith(mark) for mark in format.ends):
            mark = next(mark for mark in format.ends if scanner.text.startswith(mark))
            scanner.at = len(mark)
            scanner.forget()
        yield from scanner.space()
        if (yield from scanner.exactly(format.start)):
            scanner.forget()
        else:
            scanner.at = 0
