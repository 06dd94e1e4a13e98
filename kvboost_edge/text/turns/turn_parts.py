"""Parts of an assistant's turn, as emitted while it is generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["CallArguments", "CallStart", "ContentDelta", "Part", "ReasoningDelta", "merge_parts"]


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Start of a tool call.

    Attributes:
        index: index of the call in its message, from 0.
        name: name of the tool.
    """

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More JSON text of a call's arguments.

    Attributes:
        index: index of the call in its message, from 0.
        text: JSON text, usually incomplete.
    """

    index: int
    text: str


Part = ReasoningDelta | ContentDelta | CallStart | CallArguments


def merge_parts(parts: Sequence[Part]) -> list[Part]:
    """Merge consecutive parts of the same kind."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if (
            isinstance(part, CallArguments)
            and isinstance(last, CallArguments)
            and part.index == last.index
        ):
            found[-1] = CallArguments(part.index, last.text + part.text)
        elif isinstance(part, ReasoningDelta) and isinstance(last, ReasoningDelta):
            found[-1] = ReasoningDelta(last.text + part.text)
        elif isinstance(part, ContentDelta) and isinstance(last, ContentDelta):
            found[-1] = ContentDelta(last.text + part.text)
        else:
            found.append(part)
    return found
