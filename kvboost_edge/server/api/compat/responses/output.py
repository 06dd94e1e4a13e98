"""Output items of a response while it is generated, and their stream events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvboost_edge.server.api.compat.responses.items import new_id
from kvboost_edge.text.turns.turn_parts import (
    CallArguments,
    CallStart,
    ContentDelta,
    Part,
    ReasoningDelta,
)

__all__ = ["Output"]

Json = dict[str, Any]

# Type of the text part and prefix of its event names, by type of item.
_TEXTS = {
    "message": ("output_text", "response.output_text"),
    "reasoning": ("reasoning_text", "response.reasoning_text"),
}


class Output:
    """Output items of a response: reasoning, a message, then tool calls, as far as present.

    Attributes:
        items: output items so far.
    """

    def __init__(self, names: Mapping[str, Json]) -> None:
        """Create an empty output.

        Args:
            names: for each function name known to the model, the members of a call that identify
                the function.
        """
        self.items: list[Json] = []
        self._names = names
        self._pieces: list[str] = []  # text pieces of the open item
        self._open = False

    def add(self, part: Part, call_id: str = "") -> Iterator[Json]:
        """Add a part of a turn and yield the resulting events.

        Args:
            part: part of the turn.
            call_id: id of the tool call that the part begins; "" for other parts.
        """
        match part:
            case ReasoningDelta(text):
                yield from self._text("reasoning", text)
            case ContentDelta(text):
                yield from self._text("message", text)
            case CallStart(_, name):
                yield from self.close()
                named = self._names.get(name, {"name": name})
                item = {
                    "id": new_id("fc"),
                    "type": "function_call",
                    "call_id": call_id,
                    **named,
                    "arguments": "",
                }
                yield from self._begin(item)
            case CallArguments(_, text):
                self._pieces.append(text)
                yield {**self._place("response.function_call_arguments.delta"), "delta": text}

    def close(self, status: str = "completed") -> Iterator[Json]:
        """Close the open item, if any, and yield the resulting events."""
        if not self._open:
            return
        self._open = False
        item = self.items[-1]
        text = "".join(self._pieces)
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            place = self._place("response.function_call_arguments.done")
            yield {**place, "name": item["name"], "arguments": text}
        else:
            kind, stem = _TEXTS[item["type"]]
            part = _part(kind, text)
            item["content"] = [part]
            logprobs: Json = {"logprobs": []} if kind == "output_text" else {}
            yield {**self._place(f"{stem}.done"), "content_index": 0, "text": text, **logprobs}
            yield {**self._place("response.content_part.done"), "content_index": 0, "part": part}
        yield {
            "type": "response.output_item.done",
            "output_index": len(self.items) - 1,
            "item": item,
        }

    def end(self, status: str) -> Iterator[Json]:
        """End the output and yield the resulting events.

        An output without items gets an empty message.
        """
        if not self.items:
            yield from self._begin_text("message")
        yield from self.close(status)

    def _text(self, kind: str, text: str) -> Iterator[Json]:
        if not self._open or self.items[-1]["type"] != kind:
            yield from self.close()
            yield from self._begin_text(kind)
        self._pieces.append(text)
        part, stem = _TEXTS[kind]
        logprobs: Json = {"logprobs": []} if part == "output_text" else {}
        yield {**self._place(f"{stem}.delta"), "content_index": 0, "delta": text, **logprobs}

    def _begin_text(self, kind: str) -> Iterator[Json]:
        if kind == "message":
            yield from self._begin(
                {"id": new_id("msg"), "type": "message", "role": "assistant", "content": []}
            )
        else:
            yield from self._begin(
                {"id": new_id("rs"), "type": "reasoning", "summary": [], "content": []}
            )
        part = _part(_TEXTS[kind][0], "")
        yield {**self._place("response.content_part.added"), "content_index": 0, "part": part}

    def _begin(self, item: Json) -> Iterator[Json]:
        item["status"] = "in_progress"
        self.items.append(item)
        self._pieces = []
        self._open = True
        yield {
            "type": "response.output_item.added",
            "output_index": len(self.items) - 1,
            "item": dict(item),
        }

    def _place(self, kind: str) -> Json:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


def _part(kind: str, text: str) -> Json:
    beside: Json = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return {"type": kind, "text": text, **beside}
