"""Reads the way calls are written from how a template shows made-up ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from kvboost_edge.text.turns.formats import ID_SLOT, CallFormat

__all__ = ["PROBES", "Call", "Calls", "call_format"]


class Call(NamedTuple):
    """A call that a template is given."""

    id: str
    name: str
    arguments: dict[str, str]


Calls = list[Call]
Show = Callable[[Calls], str | None]
"""The text of calls, None where the template refuses them."""


class _Probes:
    """Names and values that no template has of its own."""

    name, other = "kvb_first_tool", "kvb_second_tool"
    key, second_key = "kvbkey", "kvbnext"
    value, second_value = "kvbvalue", "kvbworth"
    # Some templates want ids of nine characters.
    ids = ("kvbid0001", "kvbid0002")

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Both tools, as OpenAI's API describes them."""
        properties = {key: {"type": "string", "description": "text"} for key in (self.key, self.second_key)}
        schema = {"type": "object", "properties": properties, "required": [self.key]}
        return [
            {"type": "function", "function": {"name": name, "description": "does it", "parameters": schema}}
            for name in (self.name, self.other)
        ]

    def messages(self, calls: Calls, *, as_text: bool) -> list[dict[str, Any]]:
        """The calls as a message has them."""
        return [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments) if as_text else dict(call.arguments),
                },
            }
            for call in calls
        ]


PROBES = _Probes()
_ONE = {PROBES.key: PROBES.value}
_TWO = {**_ONE, PROBES.second_key: PROBES.second_value}
_FIRST = Call(PROBES.ids[0], PROBES.name, _ONE)
_SECOND = Call(PROBES.ids[1], PROBES.other, _ONE)
_DECODER = json.JSONDecoder()


def call_format(show: Show, *, arguments_as_text: bool) -> CallFormat | None:
    """How the calls that `show` writes are written; None where it is a way that is not known."""
    text = show([_FIRST])
    if text is None or PROBES.name not in text:
        return None
    joined = _joined(text, show)
    found = _json_call(joined.item) or _named_json_call(joined.item) or _tagged_call(joined.item, show)
    if found is None:
        return None
    found = replace(
        found,
        opening=joined.opening,
        separator=joined.separator,
        closing=joined.closing,
        parallel=joined.parallel,
        arguments_as_text=arguments_as_text,
    )
    found = _with_id_slots(found)
    return replace(found, trigger=_trigger(found))


# -- several calls --


class _Joined(NamedTuple):
    """A text of calls: opening item separator item ... closing."""

    item: str
    opening: str = ""
    separator: str = ""
    closing: str = ""
    parallel: bool = False


def _joined(first: str, show: Show) -> _Joined:
    """Compares the text of one call, of another one, and of both."""
    second, both = show([_SECOND]), show([_FIRST, _SECOND])
    if second is None or both is None or PROBES.other not in both or PROBES.name not in both:
        return _Joined(first)
    front = _common_prefix(first, both)
    back = min(_common_prefix(second[::-1], both[::-1]), len(both) - front)
    opening, closing = second[: len(second) - back], first[front:]
    joined = _Joined(first[len(opening) : front], opening, both[front : len(both) - back], closing, True)
    whole = opening + joined.item + joined.separator + second[len(opening) : len(second) - len(closing)] + closing
    if PROBES.name not in joined.item or whole != both:
        return _Joined(first)
    return joined


def _common_prefix(left: str, right: str) -> int:
    for at, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return at
    return min(len(left), len(right))


# -- one call --


def _json_call(text: str) -> CallFormat | None:
    """The smallest object around the name that holds it and the arguments."""
    at = text.index(PROBES.name)
    start = text.rfind("{", 0, at)
    while start >= 0:
        members, end = _object_at(text, start)
        if end > at:
            keys = {name: key for key, name in members.items() if isinstance(name, str)}
            name_key, id_key = keys.get(PROBES.name), keys.get(PROBES.ids[0], "")
            arguments_key = next((key for key, value in members.items() if value == _ONE), None)
            if name_key is None or arguments_key is None:
                return None
            known = {name_key, arguments_key, id_key}
            return CallFormat(
                "json", "", before=text[:start], after=text[end:], members=tuple(members), name_key=name_key,
                arguments_key=arguments_key, id_key=id_key,
                constants={key: value for key, value in members.items() if key not in known},
            )  # fmt: skip
        start = text.rfind("{", 0, start)
    return None


def _named_json_call(text: str) -> CallFormat | None:
    """The name, and behind it an object of arguments."""
    at = text.index(PROBES.name)
    name_end = at + len(PROBES.name)
    start = text.find("{", name_end)
    members, end = _object_at(text, start)
    if members != _ONE:
        return None
    return CallFormat("named_json", "", before=text[:at], between=text[name_end:start], after=text[end:])


def _object_at(text: str, start: int) -> tuple[dict[str, Any], int]:
    """The JSON object that begins there, and its end; nothing and -1 where none does."""
    try:
        value, end = _DECODER.raw_decode(text, start) if start >= 0 else ({}, -1)
    except ValueError:
        return {}, -1
    return (value, end) if isinstance(value, dict) else ({}, -1)


def _tagged_call(text: str, show: Show) -> CallFormat | None:
    """Name, keys and values between tags; a second argument shows what stands between two."""
    longer = show([_FIRST._replace(arguments=_TWO)])
    one = _between(text, PROBES.name, PROBES.key, PROBES.value)
    two = _between(longer or "", PROBES.name, PROBES.key, PROBES.value, PROBES.second_key, PROBES.second_value)
    if one is None or two is None or two[3] is None:
        return None
    before, head, middle, tail = one
    joint = two[3]
    # The joint is what ends an argument and what begins the next; tags are not cut.
    for size in range(len(joint), 0, -1):
        ends, begins = joint[: len(joint) - size], joint[len(joint) - size :]
        if head.endswith(begins) and tail.startswith(ends) and ends.rstrip() and begins.lstrip()[:1] in ("<", "["):
            return CallFormat(
                "tagged", "", before=before, between=head.removesuffix(begins), argument_before=begins,
                value_before=middle, argument_after=ends, after=tail.removeprefix(ends),
            )  # fmt: skip
    return None


def _between(text: str, *words: str) -> list[str] | None:
    """A text cut at these words, each of which it holds once, in this order."""
    parts = []
    for word in words:
        part, found, text = text.partition(word)
        if not found or word in text:
            return None
        parts.append(part)
    return [*parts, text]


# -- what is left --


def _with_id_slots(found: CallFormat) -> CallFormat:
    pieces = ("opening", "before", "between", "after")
    return replace(found, **{name: getattr(found, name).replace(PROBES.ids[0], ID_SLOT) for name in pieces})


def _trigger(found: CallFormat) -> str:
    """The first marker of a call; "" for mere brackets, which any text may hold."""
    text = (found.opening + found.before).strip()
    tag = re.match(r"<[^<>\s]+>|\[[A-Z/_]+\]", text)
    trigger = tag[0] if tag else (text.split(maxsplit=1) or [""])[0]
    return trigger if any(letter.isalnum() for letter in trigger) else ""
