"""Detection of a template's tool-call format from renderings of example calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from kvboost_edge.text.turns.formats import ID_SLOT, CallFormat

__all__ = ["PROBES", "Calls", "TemplateCall", "call_format"]


class TemplateCall(NamedTuple):
    """A call in a message that is passed to a template."""

    id: str
    name: str
    arguments: Mapping[str, object]


Calls = list[TemplateCall]
Show = Callable[[Calls], str | None]
"""Function that renders calls, or returns None if the template rejects them."""


class _Probes:
    """Names and values for example calls. They do not occur in any template."""

    name = "kvb_first_tool"
    other = "kvb_second_tool"
    key = "kvbkey"
    second_key = "kvbnext"
    value = "kvbvalue"
    second_value = "kvbworth"
    # Some templates require ids of nine characters.
    ids = ("kvbid0001", "kvbid0002")

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Definitions of both tools in the format of OpenAI's API."""
        properties = {
            key: {"type": "string", "description": "text"} for key in (self.key, self.second_key)
        }
        schema = {"type": "object", "properties": properties, "required": [self.key]}
        return [
            {
                "type": "function",
                "function": {"name": name, "description": "does it", "parameters": schema},
            }
            for name in (self.name, self.other)
        ]

    def messages(self, calls: Calls, *, as_text: bool) -> list[dict[str, Any]]:
        """Return the calls in the format of a message's `tool_calls`."""
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
_NUMBER = 73
_FIRST = TemplateCall(PROBES.ids[0], PROBES.name, _ONE)
_SECOND = TemplateCall(PROBES.ids[1], PROBES.other, _ONE)
# ID_SLOT is a control character, which strict JSON forbids
_DECODER = json.JSONDecoder(strict=False)
_LONGEST_PIECE = 160
_PROBE = "kvb"  # common prefix of all names and values in _Probes
_OPEN_TAG = re.compile(r"<[^<>]*\Z|\[[A-Z/_]+\Z")
_KEYWORD = re.compile(rf"\({PROBES.key}=(['\"]){PROBES.value}\1\)")
_BRACED = re.compile(rf"\{{{PROBES.key}:(<[^<>\s]+>){PROBES.value}\1\}}")
_NOT_THE_SAME = re.compile(r"[A-Za-z0-9_-]+")


def call_format(show: Show, *, arguments_as_text: bool) -> CallFormat | None:
    """Return the format of the calls that `show` renders, or None if it is unknown."""
    first = _with_slots(show([_FIRST]))
    if PROBES.name not in first:
        return None
    for read in (
        _json_call,
        _named_json_call,
        _tagged_call(show),
        _keyword_call,
        _braced_call(show),
    ):
        core = read(first, PROBES.name)
        if core is not None:
            return _whole(core, first, _read_both(read, show), arguments_as_text)
    return None


class _Core(NamedTuple):
    """Position and format of a call in a text, without the text around it."""

    start: int
    end: int
    shape: CallFormat


ReadCore = Callable[[str, str], _Core | None]
"""Function that finds the call of a tool in a text, given the text and the tool's name."""


def _with_slots(text: str | None) -> str:
    for call_id in PROBES.ids:
        text = (text or "").replace(call_id, ID_SLOT)
    return text or ""


# -- text around calls --


class _Both(NamedTuple):
    """A rendering of two calls and their positions."""

    text: str
    one: _Core
    two: _Core


def _read_both(read: ReadCore, show: Show) -> _Both | None:
    """Render two calls; return None if the template rejects them or omits one."""
    text = _with_slots(show([_FIRST, _SECOND]))
    one = read(text, PROBES.name) if PROBES.name in text else None
    two = read(text, PROBES.other) if PROBES.other in text else None
    return (
        _Both(text, one, two)
        if one is not None and two is not None and one.end <= two.start
        else None
    )


def _whole(
    core: _Core, first: str, both: _Both | None, arguments_as_text: bool
) -> CallFormat | None:
    front = first[: core.start]
    back = first[core.end :]
    shape = replace(core.shape, arguments_as_text=arguments_as_text)
    joined = None if both is None else _joined(front, back, both)
    same = None if both is None else _alike(core.shape, both.two.shape)
    if joined is not None and same is not None:
        shape = replace(
            shape, **joined, between=same.between, id_key=same.id_key, constants=same.constants
        )
    else:
        shape = replace(shape, before=front, after=shape.after + back)
    shape = replace(shape, trigger=_trigger(shape))
    pieces = (
        shape.opening,
        shape.before,
        shape.after,
        shape.separator,
        shape.closing,
        shape.between,
    )
    arguments = (shape.argument_before, shape.value_before, shape.argument_after)
    known = all(
        len(piece) <= _LONGEST_PIECE and _PROBE not in piece for piece in (*pieces, *arguments)
    )
    known = known and (shape.kind == "json" or bool(shape.trigger))
    return shape if known else None


def _joined(front: str, back: str, both: _Both) -> dict[str, Any] | None:
    """Split the text around two calls into opening, separator and closing.

    Text after both calls becomes `after`, and text before both becomes `before`. Tags are not
    split.
    """
    text, one, two = both
    if text[: one.start] != front or text[two.end :] != back:
        return None
    middle = text[one.end : two.start]
    after = back[: _common_prefix(back, middle)]
    after = _OPEN_TAG.sub("", after)
    middle = middle[len(after) :]
    size = _common_prefix(front[::-1], middle[::-1])
    opening = front[: len(front) - size]
    before = front[len(front) - size :]
    if _OPEN_TAG.search(opening):
        tag, _, before = before.partition(">")
        opening += tag + ">"
    return {
        "opening": opening,
        "before": before,
        "after": both.one.shape.after + after,
        "separator": middle[: len(middle) - len(before)],
        "closing": back[len(after) :],
        "parallel": True,
    }


def _common_prefix(left: str, right: str) -> int:
    for at, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return at
    return min(len(left), len(right))


def _alike(first: CallFormat, second: CallFormat) -> CallFormat | None:
    """Return the common format of two calls, or None if they differ too much.

    They may differ by one value, such as a number or an id.
    """
    if first.kind == "json":
        different = [
            key for key in first.constants if first.constants[key] != second.constants.get(key)
        ]
        if first.members != second.members or len(different) > (not first.id_key):
            return None
        constants = {key: value for key, value in first.constants.items() if key not in different}
        return replace(
            first, id_key=different[0] if different else first.id_key, constants=constants
        )
    left = first.between
    right = second.between
    size = _common_prefix(left, right)
    rest = min(_common_prefix(left[::-1], right[::-1]), len(left) - size, len(right) - size)
    middles = (left[size : len(left) - rest], right[size : len(right) - rest])
    if middles == ("", ""):
        return first
    if not all(map(_NOT_THE_SAME.fullmatch, middles)):
        return None
    return replace(first, between=left[:size] + ID_SLOT + left[len(left) - rest :])


# -- one call --


def _json_call(text: str, name: str) -> _Core | None:
    """Find the innermost JSON object that contains both the name and the arguments."""
    at = text.index(name)
    start = text.rfind("{", 0, at)
    while start >= 0:
        members, end = _object_at(text, start)
        if end > at:
            keys = {value: key for key, value in members.items() if isinstance(value, str)}
            arguments_key = next((key for key, value in members.items() if value == _ONE), None)
            if name not in keys or arguments_key is None:
                return None
            known = {keys[name], arguments_key, keys.get(ID_SLOT)}
            shape = CallFormat(
                "json",
                "",
                members=tuple(members),
                name_key=keys[name],
                arguments_key=arguments_key,
                id_key=keys.get(ID_SLOT, ""),
                constants={key: value for key, value in members.items() if key not in known},
            )
            return _Core(start, end, shape)
        start = text.rfind("{", 0, start)
    return None


def _named_json_call(text: str, name: str) -> _Core | None:
    """Find a tool's name followed by a JSON object of arguments."""
    at = text.index(name)
    start = text.find("{", at)
    members, end = _object_at(text, start)
    if members != _ONE:
        return None
    return _Core(at, end, CallFormat("named_json", "", between=text[at + len(name) : start]))


def _object_at(text: str, start: int) -> tuple[dict[str, Any], int]:
    """Return the JSON object at `start` and its end, or ({}, -1) if there is none."""
    try:
        value, end = _DECODER.raw_decode(text, start) if start >= 0 else ({}, -1)
    except (ValueError, RecursionError):
        return {}, -1
    return (value, end) if isinstance(value, dict) else ({}, -1)


def _keyword_call(text: str, name: str) -> _Core | None:
    """Find a call with keyword arguments in Python's syntax."""
    at = text.index(name)
    found = _KEYWORD.match(text, at + len(name))
    return None if found is None else _Core(at, found.end(), CallFormat("keyword", ""))


def _braced_call(show: Show) -> ReadCore:
    """Return a function that finds calls with keys and values in braces.

    Strings must be between two equal markers. Further renderings must show that commas separate
    arguments and that numbers, lists and objects are bare.
    """

    def read(text: str, name: str) -> _Core | None:
        at = text.index(name)
        found = _BRACED.match(text, at + len(name))
        if found is None or not _writes_braces(show, found[1]):
            return None
        return _Core(at, found.end(), CallFormat("braced", "", quote=found[1]))

    return read


def _writes_braces(show: Show, quote: str) -> bool:
    value = f"{quote}{PROBES.value}{quote}"
    key = PROBES.key
    second = PROBES.second_key
    nested = {key: {second: [PROBES.value, _NUMBER, True]}}
    wanted: list[tuple[Mapping[str, object], list[str]]] = [
        (_TWO, [f"{{{key}:{value},{second}:{quote}{PROBES.second_value}{quote}}}"]),
        ({key: _NUMBER}, [f"{{{key}:{_NUMBER}}}"]),
        (
            nested,
            [f"{{{key}:{{{second}:[{value},{_NUMBER},{true}]}}}}" for true in ("true", "True")],
        ),
        ({}, ["{}"]),
    ]
    for arguments, texts in wanted:
        shown = show([_FIRST._replace(arguments=arguments)]) or ""
        if not any(PROBES.name + text in shown for text in texts):
            return False
    return True


def _tagged_call(show: Show) -> ReadCore:
    """Return a function that finds calls whose name, keys and values are between tags.

    A rendering with a second argument shows the separator. A rendering with a number shows whether
    values other than strings are formatted differently.
    """

    def read(text: str, name: str) -> _Core | None:
        at = text.index(name)
        one = _between(text[at:], name, PROBES.key, PROBES.value)
        if one is None or shape is None:
            return None
        end = at + len("".join([name, one[1], PROBES.key, one[2], PROBES.value]))
        return (
            _Core(at, end + len(shape.argument_after), shape)
            if text.startswith(shape.argument_after, end)
            else None
        )

    shape = _tagged_shape(show)
    return read


def _tagged_shape(show: Show) -> CallFormat | None:
    first = show([_FIRST])
    number = show([_FIRST._replace(arguments={PROBES.key: _NUMBER})])
    longer = show([_FIRST._replace(arguments=_TWO)])
    one = _between(first or "", PROBES.name, PROBES.key, PROBES.value)
    two = _between(
        longer or "", PROBES.name, PROBES.key, PROBES.value, PROBES.second_key, PROBES.second_value
    )
    if one is None or two is None or number != (first or "").replace(PROBES.value, str(_NUMBER)):
        return None
    _, head, middle, tail = one
    joint = two[3]
    # Split the text between two arguments into the end of one and the start of the next. Tags are
    # not split.
    for size in range(len(joint), 0, -1):
        ends = joint[: len(joint) - size]
        begins = joint[len(joint) - size :]
        if (
            head.endswith(begins)
            and tail.startswith(ends)
            and ends.rstrip()
            and begins.lstrip()[:1] in ("<", "[")
        ):
            return CallFormat(
                "tagged",
                "",
                between=head.removesuffix(begins),
                argument_before=begins,
                value_before=middle,
                argument_after=ends,
            )
    return None


def _between(text: str, *words: str) -> list[str] | None:
    """Split a text at these words in order; return None if a word is missing."""
    parts = []
    for word in words:
        part, found, text = text.partition(word)
        if not found:
            return None
        parts.append(part)
    return [*parts, text]


def _trigger(found: CallFormat) -> str:
    """Return the marker that calls begin with, or "" for brackets, which occur in any text."""
    text = (found.opening + found.before).strip()
    tag = re.match(r"<[^<>\s]+>|\[[A-Z/_]+\]", text)
    trigger = tag[0] if tag else (text.split(maxsplit=1) or [""])[0]
    trigger = trigger.partition(ID_SLOT)[0]
    return trigger if any(letter.isalnum() for letter in trigger) else ""
