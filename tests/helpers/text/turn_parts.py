"""Parsed turns: the parts that the parser returns, and the calls among them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from helpers.text.chat_templates import TOOLS, Calls, format_of
from kvboost_edge.text.turns.formats import Tool, TurnFormat
from kvboost_edge.text.turns.parser import CallArguments, CallStart, Part, TurnParser, merge_parts


def parts_of(
    form: TurnFormat | str,
    *texts: str,
    tools: Sequence[Tool] = TOOLS,
    reasoning: str = "closed",
    calls: bool = True,
) -> list[Part]:
    """Parse a text given in pieces. A family's name selects its format."""
    parser = TurnParser(
        format_of(form) if isinstance(form, str) else form, tools, reasoning=reasoning, calls=calls
    )
    parts = [part for text in texts for part in parser.push(text)]
    return merge_parts([*parts, *parser.close()])


def arguments_of(parts: Sequence[Part]) -> list[Any]:
    return [json.loads(part.text) for part in parts if isinstance(part, CallArguments)]


def calls_of(parts: Sequence[Part]) -> Calls:
    """Return names and arguments of calls, after checking that there are no other parts and that
    calls are numbered in order.
    """
    starts = [part for part in parts if isinstance(part, CallStart)]
    arguments = [part for part in parts if isinstance(part, CallArguments)]
    assert len(starts) + len(arguments) == len(parts)
    assert (
        [part.index for part in starts]
        == [part.index for part in arguments]
        == list(range(len(starts)))
    )
    return [(start.name, given) for start, given in zip(starts, arguments_of(parts), strict=True)]
