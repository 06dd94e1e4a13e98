"""Reasoning while it is generated: where it begins, and the tokens that end it.

A reasoning budget limits the tokens between the markers of a reasoning block. When they are used
up, an optional message and the closing marker follow. In a turn of several messages (gpt-oss), the
end of the message and the start of the next one follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvboost_edge.errors import RequestError
from kvboost_edge.text.codec import StreamKind
from kvboost_edge.text.detokenizer import IncrementalDetokenizer
from kvboost_edge.text.tokenizer import Tokenizer
from kvboost_edge.text.turns.formats import CallFormat, TurnFormat
from kvboost_edge.text.turns.parser import ReasoningDelta, TurnParser

__all__ = ["ReasoningEnd", "ReasoningLimit", "ReasoningTracker", "reasoning_end", "reasoning_state"]

_TAIL_TOKENS = 64  # last prompt tokens: template text before the answer


class ReasoningEnd(NamedTuple):
    """Token ids that end a reasoning block.

    Attributes:
        marker: ids of the closing marker alone.
        behind: ids that follow the marker, such as those of line ends.
        closing: ids of the closing marker with what the template writes around it.
        with_message: ids of the message, if any, and `closing`.
        barred: ids of the markers that would open or close another block, if these are tokens of
            their own.
        barred_after: id of the token after which `barred` applies, or None for anywhere before the
            answer.
        num_lead: number of tokens between the end and the answer's text.
    """

    marker: tuple[int, ...]
    behind: tuple[int, ...]
    closing: tuple[int, ...]
    with_message: tuple[int, ...]
    barred: tuple[int, ...] = ()
    barred_after: int | None = None
    num_lead: int = 0


class ReasoningLimit(NamedTuple):
    """A limit for the reasoning of one answer.

    Attributes:
        budget: maximum number of tokens between the markers.
        format: turn format of the model.
        state: "opened" if the prompt ends inside a reasoning block, or "possible" if the answer may
            begin with one.
        end: ids that end a block.
    """

    budget: int
    format: TurnFormat
    state: str
    end: ReasoningEnd


def reasoning_state(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> str:
    """Return whether a prompt ends inside reasoning, see `TurnFormat.reasoning_after`.

    Raises:
        RequestError: the model has no chat template.
    """
    tail = tokenizer.decode(prompt_ids[-_TAIL_TOKENS:], skip_special_tokens=False)
    return tokenizer.turn_format.reasoning_after(tail)


def reasoning_end(tokenizer: Tokenizer, message: str = "") -> ReasoningEnd:
    """Return the token ids that end the model's reasoning.

    Args:
        tokenizer: tokenizer of the model.
        message: text before the closing marker. Special tokens in it are encoded as plain text.

    Raises:
        RequestError: the markers of reasoning are unknown, or the message contains one.
    """
    if tokenizer.chat_template is None:
        raise RequestError(
            "reasoning_budget needs the markers of the model's reasoning, but the model has no "
            "chat template that shows them; leave it out",
            option="reasoning_budget",
        )
    format = tokenizer.turn_format
    if format.reasoning is None:
        raise RequestError(
            "reasoning_budget needs the markers of the model's reasoning, but its chat template "
            "shows none; leave it out",
            option="reasoning_budget",
        )
    if tokenizer.codec.stream_kind is StreamKind.WHOLE:
        raise RequestError(
            "reasoning_budget needs a tokenizer that decodes token by token, but the model's "
            "cannot; leave it out",
            option="reasoning_budget",
        )
    channels = format.channels
    opener, closer = format.reasoning
    for mark in (opener, closer) if channels is None else (*channels.ends, channels.start):
        if mark in message:
            raise RequestError(
                f"reasoning_budget_message contains {mark!r}, a marker of the model's reasoning; "
                "remove it",
                option="reasoning_budget_message",
            )
    text = format.closing if channels is None else closer + channels.start
    before, _, behind = text.partition(closer)

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.codec.encode(text, False))

    marker = ids(closer)
    closing = ids(text)
    if closer not in tokenizer.decode(marker, skip_special_tokens=False):
        raise RequestError(
            f"reasoning_budget needs tokens for the marker {closer!r}, but the model's tokenizer "
            "has none; leave it out",
            option="reasoning_budget",
        )
    with_message = closing
    if message:
        begin = "" if message[-1].isspace() else before
        with_message = tuple(tokenizer.encode_framed("", message, begin + closer + behind))
    if channels is None:
        barred = tuple(
            ids(one)[0]
            for one in (opener, closer)
            if ids(one)[0] == _marker_at_start(tokenizer, one)
        )
        return ReasoningEnd(marker, ids(behind), closing, with_message, barred)
    channel = tokenizer.marker_id(channels.channel)
    return ReasoningEnd(
        marker,
        ids(behind),
        closing,
        with_message,
        () if channel is None else ids(channels.thoughts)[:1],
        channel,
        len(ids(channels.header(channels.answer))),
    )


def _marker_at_start(tokenizer: Tokenizer, text: str) -> int | None:
    """Return the id of the longest marker token with which a text begins, or None."""
    found = (tokenizer.marker_id(text[:end]) for end in range(len(text), 0, -1))
    return next((token_id for token_id in found if token_id is not None), None)


class ReasoningTracker:
    """Parser that follows an answer token by token and knows whether it is inside reasoning.

    Attributes:
        answered: whether text after the reasoning, or without one, has begun.
    """

    def __init__(self, tokenizer: Tokenizer, format: TurnFormat, state: str) -> None:
        """Start an answer.

        Args:
            tokenizer: tokenizer of the model.
            format: turn format of the model.
            state: "opened" or "possible", see `ReasoningLimit`.
        """
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        self._parser = TurnParser(format, (), reasoning=state, calls=False)
        self._is_opened = state == "opened"
        self._call = _CallMarks(format.calls)
        self.answered = False

    @property
    def inside(self) -> bool:
        """Whether the text so far ends inside a reasoning block."""
        return self._parser.in_reasoning or (self._is_opened and not self._parser.num_thoughts)

    @property
    def in_call(self) -> bool:
        """Whether the text so far ends inside a tool call that began inside reasoning."""
        return self.inside and self._call.inside

    def push(self, token_id: int) -> None:
        """Add the next token."""
        text = self._detokenizer.push(token_id)
        was_inside = self.inside
        parts = self._parser.push(text)
        if was_inside:
            self._call.push(text)
        self.answered |= any(not isinstance(part, ReasoningDelta) for part in parts)


class _CallMarks:
    """Finder of tool calls in a text, by their first and last marker.

    Without a last marker, a call extends to the end.
    """

    def __init__(self, calls: CallFormat | None) -> None:
        last = () if calls is None else (calls.closing or calls.after).split()
        self._marks = ("" if calls is None else calls.trigger, last[-1] if last else "")
        self._tail = ""
        self.inside = False

    def push(self, text: str) -> None:
        if not self._marks[0]:
            return
        self._tail += text
        while (mark := self._marks[self.inside]) and mark in self._tail:
            self._tail = self._tail.partition(mark)[2]
            self.inside = not self.inside
        kept = max(map(len, self._marks)) - 1
        self._tail = self._tail[-kept:] if kept else ""
