"""Detection of a model's reasoning and tool-call format from its chat template.

The template is rendered with and without reasoning and calls, and the difference shows the format.
Model names are not used.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from kvboost_edge.errors import RequestError
from kvboost_edge.text.turns.call_detection import PROBES, Calls, TemplateCall, call_format
from kvboost_edge.text.turns.formats import CHANNELS, CallFormat, ReasoningFormat, TurnFormat
from kvboost_edge.text.turns.keyword_calls import calls_by_tool_list

__all__ = ["turn_format"]

Render = Callable[..., str]
Message = dict[str, Any]

_SECONDS = 5.0  # CPU time in seconds of all renderings; the slowest known template takes 0.1 s
_LONGEST = 1 << 17  # characters of a rendering; longer renderings are ignored
_USER: Message = {"role": "user", "content": "kvbquestion"}
_CONTENT = "kvbcontent"
_EARLIER = "kvbearlier"
_SWITCHES = ("enable_thinking", "thinking")
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_MARKER = r"<[^<>\s]+>|\[[A-Z/_]+\]"
# The marker may be followed by a word that names the block.
_ENDS_IN_MARKER = re.compile(rf"((?:{_MARKER})(?:[a-z]+(?=\n))?)\s*\Z")
_BEGINS_WITH_MARKER = re.compile(rf"\s*({_MARKER})\s*")
_CLOSED = re.compile(r"([<\[])/([A-Za-z][\w:-]*[>\]])\s*\Z")
_CLOSED_MIRRORED = re.compile(r"(<\|(\w+)>\w*)\s*(<\2\|>)\s*\Z")
_OPENED = re.compile(r"(<[A-Za-z][\w:-]*>|\[[A-Z]+\])\s*\Z")
# Markers up to which templates cut off past answers, though new answers do not show them.
_CUT_MARKERS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<thinking>", "</thinking>"))


def turn_format(render: Render, is_token: Callable[[str], bool] = lambda _: True) -> TurnFormat:
    """Detect the turn format of a chat template.

    Formats that the template cannot render are missing from the result.

    Args:
        render: `ChatTemplate.render` of the template.
        is_token: returns whether a text is a single token of the model. By default, any text is.
    """
    turns = _Turns(render)
    if _has_channels(turns):
        marks = ReasoningFormat(CHANNELS.header(CHANNELS.thoughts), CHANNELS.end)
        return TurnFormat(
            _channel_calls(turns),
            marks,
            turns.shows_tools(),
            replays=False,
            channels=CHANNELS,
            has_levels=_has_levels(turns),
        )
    reasoning = _reasoning(turns)
    plainly = _writes_plainly(turns, reasoning)
    shown = _calls(turns, reasoning) if plainly else None
    unshown = _unshown_calls(turns, is_token) if plainly and shown is None else None
    needed = shown is not None and _results_need_calls(turns, shown)
    # If results need their call, replacing the call would also replace the results. Only "braced"
    # calls can be replaced alone.
    replays = _replays(turns, reasoning) and not (
        needed and shown is not None and shown.kind != "braced"
    )
    return TurnFormat(
        calls=shown or unshown,
        reasoning=reasoning,
        shows_tools=turns.shows_tools(),
        replays=replays,
        preserves=reasoning is not None and _preserves(turns),
        shows_calls=unshown is None,
        results_need_calls=needed,
        has_levels=_has_levels(turns),
        closing="" if reasoning is None else _closing(turns, reasoning),
    )


class _Turns:
    """Renderings of a template.

    A rendering is None if the template rejects the messages, writes too much, or the time is used
    up.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self._ends = time.thread_time() + _SECONDS
        # Some templates fail without tools, so their renderings always get tools.
        self._tools = None if self.text([_USER]) is not None else PROBES.tools
        self.asked = self.text([_USER], prompt=False) or ""
        self.prompt = self.text([_USER]) or self.asked

    _tools: list[Message] | None = None

    def text(
        self,
        messages: list[Message],
        *,
        prompt: bool = True,
        tools: list[Message] | None = None,
        variables: Message | None = None,
    ) -> str | None:
        if time.thread_time() > self._ends:
            return None
        try:
            text = self._render(
                messages,
                tools=tools or self._tools,
                add_generation_prompt=prompt,
                variables=variables,
            )
        except RequestError:
            return None
        return text if len(text) <= _LONGEST else None

    def answer(self, message: Message, tools: list[Message] | None = None) -> str | None:
        return self.text([_USER, {"role": "assistant", **message}], prompt=False, tools=tools)

    def shows_tools(self) -> bool:
        shown = self.text([_USER], tools=PROBES.tools)
        return shown is not None and PROBES.name in shown


# -- messages in channels --


def _has_channels(turns: _Turns) -> bool:
    """Return whether an answer is rendered as a message in the channel for answers."""
    front, found, _ = (turns.answer({"content": _CONTENT}) or "").partition(_CONTENT)
    return bool(found) and front.endswith(CHANNELS.start + CHANNELS.header(CHANNELS.answer))


def _channel_calls(turns: _Turns) -> CallFormat | None:
    """Detect calls that are messages to a tool. Other header fields are ignored."""
    call = TemplateCall(PROBES.ids[0], PROBES.name, {PROBES.key: PROBES.value})
    for as_text in (False, True):
        given = PROBES.messages([call], as_text=as_text)
        text = turns.answer({"content": "", "tool_calls": given}, PROBES.tools) or ""
        _, found, behind = text.rpartition(f"to={CHANNELS.functions}{PROBES.name}")
        _, begun, arguments = behind.partition(CHANNELS.message)
        if found and begun and arguments.startswith(json.dumps(call.arguments)):
            return CallFormat("channels", CHANNELS.channel, arguments_as_text=as_text)
    return None


# -- reasoning --


def _reasoning(turns: _Turns) -> ReasoningFormat | None:
    return (
        _shown_reasoning(turns)
        or _opened_reasoning(turns)
        or _closed_reasoning(turns)
        or _cut_reasoning(turns)
    )


def _shown_reasoning(turns: _Turns) -> ReasoningFormat | None:
    """Detect reasoning that is rendered between two markers directly before the answer."""
    for key in _REASONING_KEYS:
        text = turns.answer({"content": _CONTENT, key: _EARLIER})
        front, found, back = (text or "").partition(_EARLIER)
        start = _ENDS_IN_MARKER.search(front)
        end = _BEGINS_WITH_MARKER.match(back)
        if found and start and end and back[end.end() :].startswith(_CONTENT):
            return ReasoningFormat(start[1], end[1])
    return None


def _opened_reasoning(turns: _Turns) -> ReasoningFormat | None:
    """Detect an opening tag at the end of the generation prompt that past answers lack."""
    opened = _OPENED.search(turns.prompt.removeprefix(turns.asked))
    if opened is None:
        return None
    start = opened[1]
    end = f"{start[0]}/{start[1:]}"
    front = (turns.answer({"content": _CONTENT}) or "").partition(_CONTENT)[0].rstrip()
    return None if front.endswith(start) else ReasoningFormat(start, end)


def _closed_reasoning(turns: _Turns) -> ReasoningFormat | None:
    """Detect a closed reasoning block before an answer.

    The block may be empty, or only be written when reasoning is disabled.
    """
    switched = [turns.text([_USER], variables={name: False}) or "" for name in _SWITCHES]
    answered = (turns.answer({"content": _CONTENT}) or "").partition(_CONTENT)[0]
    for text in (turns.prompt, answered, *switched):
        found = _CLOSED.search(text.removeprefix(turns.asked))
        if found is not None:
            return ReasoningFormat(found[1] + found[2], f"{found[1]}/{found[2]}")
        mirrored = _CLOSED_MIRRORED.search(text.removeprefix(turns.asked))
        if mirrored is not None:
            return ReasoningFormat(mirrored[1], mirrored[3])
    return None


def _cut_reasoning(turns: _Turns) -> ReasoningFormat | None:
    """Detect a closing tag up to which the template cuts off past answers."""
    for start, end in _CUT_MARKERS:
        past = {"role": "assistant", "content": f"{_EARLIER}{end}{_CONTENT}"}
        text = turns.text([_USER, past, _USER])
        if text is not None and _CONTENT in text and _EARLIER not in text:
            return ReasoningFormat(start, end)
    return None


def _replays(turns: _Turns, reasoning: ReasoningFormat | None) -> bool:
    text = turns.text([_USER, {"role": "assistant", "content": _CONTENT}, _USER])
    front = _before_reasoning(turns.prompt, reasoning)
    if text is None or not text.startswith(front):
        return False
    return _behind_reasoning(text[len(front) :], reasoning).startswith(_CONTENT)


def _preserves(turns: _Turns) -> bool:
    past = {"role": "assistant", "content": _CONTENT, "reasoning_content": _EARLIER}
    shown = [
        turns.text([_USER, past, _USER], variables={"preserve_thinking": on}) or ""
        for on in (True, False)
    ]
    return [_EARLIER in text for text in shown] == [True, False]


def _closing(turns: _Turns, reasoning: ReasoningFormat) -> str:
    """Return the closing marker with the white space around it, as far as the template shows it."""
    start, end = map(re.escape, reasoning)
    shown = re.compile(rf"{_EARLIER}(\s*{end}\s*){_CONTENT}")
    for key in _REASONING_KEYS:
        found = shown.search(turns.answer({"content": _CONTENT, key: _EARLIER}) or "")
        if found is not None:
            return found[1]
    empty = re.compile(rf"{start}\s*?(\n?{end}\s*)\Z")
    switched = (turns.text([_USER], variables={name: False}) or "" for name in _SWITCHES)
    for text in (turns.prompt, *switched):
        found = empty.search(text)
        if found is not None:
            return found[1]
    return reasoning.end


def _has_levels(turns: _Turns) -> bool:
    shown = {
        turns.text([_USER], variables={"enable_thinking": True, "reasoning_effort": level})
        for level in ("low", "high")
    }
    return None not in shown and len(shown) > 1


def _writes_plainly(turns: _Turns, reasoning: ReasoningFormat | None) -> bool:
    """Return whether an answer directly follows the generation prompt.

    A channel or another marker between them is not supported.
    """
    text = turns.answer({"content": _CONTENT}) or ""
    front = _before_reasoning(turns.prompt, reasoning)
    behind = _behind_reasoning(text[len(front) :], reasoning).partition(_CONTENT)[0].strip()
    # Some templates repeat the opening reasoning marker before any answer.
    return text.startswith(front) and behind in (
        "",
        reasoning.start if reasoning is not None else "",
    )


def _before_reasoning(prompt: str, reasoning: ReasoningFormat | None) -> str:
    """Return a generation prompt without the reasoning block, open or closed, at its end."""
    if reasoning is None:
        return prompt
    kept = prompt.rstrip()
    if kept.endswith(reasoning.end):
        kept = kept.removesuffix(reasoning.end).rstrip()
    return kept.removesuffix(reasoning.start) if kept.endswith(reasoning.start) else prompt


def _behind_reasoning(text: str, reasoning: ReasoningFormat | None) -> str:
    """Return a text without the reasoning block at its start."""
    if reasoning is None:
        return text
    rest = text.lstrip()
    _, found, behind = rest.partition(reasoning.end)
    # Some templates write only the closing marker.
    if found and (rest.startswith((reasoning.start, reasoning.end))):
        return behind.lstrip()
    return text


# -- calls --


def _results_need_calls(turns: _Turns, calls: CallFormat) -> bool:
    """Return whether results are rendered only after a message with a call."""
    call = TemplateCall(PROBES.ids[0], PROBES.name, {PROBES.key: PROBES.value})
    given = PROBES.messages([call], as_text=calls.arguments_as_text)
    result = {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": _EARLIER}
    past: Message = {"role": "assistant", "content": _CONTENT}
    shown = [
        turns.text([_USER, one, result], tools=PROBES.tools)
        for one in ({**past, "tool_calls": given}, past)
    ]
    return [text is not None and _EARLIER in text for text in shown] == [True, False]


class _Way(NamedTuple):
    """Form in which a template accepts past calls."""

    as_text: bool  # arguments are JSON text
    content: str | None
    with_result: bool  # a result must follow the call


_WAYS = [_Way(*way) for way in itertools.product((False, True), ("", None), (False, True))]


def _calls(turns: _Turns, reasoning: ReasoningFormat | None) -> CallFormat | None:
    for way in _WAYS:
        show = _Shown(turns, reasoning, way)
        found = call_format(show, arguments_as_text=way.as_text)
        if found is not None:
            return replace(found, result_opening=show.result_opening)
    return None


class _Shown:
    """Renderer that isolates the text of calls in a message, for one `_Way`."""

    def __init__(self, turns: _Turns, reasoning: ReasoningFormat | None, way: _Way) -> None:
        self._turns = turns
        self._reasoning = reasoning
        self._way = way
        self.result_opening = ""

    def __call__(self, calls: Calls) -> str | None:
        """Return the text of the calls, or None if the template rejects or omits them."""
        given = PROBES.messages(calls, as_text=self._way.as_text)
        messages = [_USER, {"role": "assistant", "content": self._way.content, "tool_calls": given}]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "name": calls[0].name, "content": _EARLIER}
            for call in given
        ]
        for tools in (PROBES.tools, None):
            called, answered = (
                self._turns.text(one, prompt=False, tools=tools)
                for one in (messages, messages + results)
            )
            text = answered if self._way.with_result else called
            plain = self._turns.answer({"content": _CONTENT}, tools)
            if text is not None and plain is not None and _CONTENT in plain:
                shown = self._cut(text, plain, tools)
                if shown is None or _EARLIER in shown:
                    return None
                behind = None if answered is None else self._cut(answered, plain, tools)
                return self._without_opened_result(shown, behind or "")
        return None

    def _without_opened_result(self, text: str, answered: str) -> str:
        """Return a message's text without the marker that begins a result.

        Some templates write this marker after each call, even if no result follows.

        Args:
            text: rendered calls without a result.
            answered: rendered calls with a result in the same turn.
        """
        opened = _ENDS_IN_MARKER.search(text)
        behind = answered.removeprefix(text)
        if opened is None or behind == answered or not behind or _BEGINS_WITH_MARKER.match(behind):
            return text
        self.result_opening = opened[1]
        return text[: opened.start()]

    def _cut(self, text: str, plain: str, tools: list[Message] | None) -> str | None:
        front, _, tail = plain.rpartition(_CONTENT)
        for lead in self._leads(front, tools):
            if text.startswith(lead):
                return _without_tail(_behind_reasoning(text[len(lead) :], self._reasoning), tail)
        return None

    def _leads(self, front: str, tools: list[Message] | None) -> Iterator[str]:
        """Yield the texts that may precede a message's text, most likely first."""
        prompt = self._turns.text([_USER], tools=tools) or self._turns.prompt
        for lead in (front, prompt):
            yield lead
            yield _before_reasoning(lead, self._reasoning)
        for lead in (front, prompt):
            yield _before_reasoning(lead, self._reasoning).rstrip()


def _without_tail(text: str, tail: str) -> str:
    """Return a message's text without the end of the turn and any result after it."""
    ending = tail.strip()
    if not ending:
        return text
    at = text.find(ending)
    return text[:at] if at >= 0 else text


# -- calls that the template omits --


def _unshown_calls(turns: _Turns, is_token: Callable[[str], bool]) -> CallFormat | None:
    """Detect calls that the template omits, from the markers around its tool list."""
    prompt = turns.text([_USER], tools=PROBES.tools)
    if prompt is None or not _leaves_calls_out(turns):
        return None
    return calls_by_tool_list(prompt, (PROBES.name, PROBES.other), is_token)


def _leaves_calls_out(turns: _Turns) -> bool:
    """Return whether the template ignores the calls of a message."""
    call = TemplateCall(PROBES.ids[0], PROBES.name, {PROBES.key: PROBES.value})
    for as_text, content in itertools.product((False, True), ("", _CONTENT)):
        plain = turns.answer({"content": content}, PROBES.tools)
        given = PROBES.messages([call], as_text=as_text)
        if (
            plain is None
            or turns.answer({"content": content, "tool_calls": given}, PROBES.tools) != plain
        ):
            return False
    return True
