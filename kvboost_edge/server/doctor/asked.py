"""A chat request as the model is asked: what clients change without meaning anything by it is as it was before."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvboost_edge.server.doctor.diagnosis import tool_field
from kvboost_edge.server.doctor.normalise import Normaliser
from kvboost_edge.server.doctor.records import Asked, Field

__all__ = ["Normal", "normal"]

Json = dict[str, Any]


class Normal(NamedTuple):
    """Messages and tools as templates know them; and what the doctor keeps of them."""

    messages: list[Json]
    tools: list[Json] | None
    described: Asked


def normal(
    normaliser: Normaliser,
    root: bytes,
    messages: Sequence[Json],
    tools: list[Json] | None,
    variables: Mapping[str, Any] | None,
) -> Normal:
    """What to ask of the model. messages: as templates know them; root: of the tenant and salt, whose earlier requests
    count."""
    same_tools, reordered = normaliser.tools(root, tools)
    plain, changed = normaliser.messages(root, messages)
    names = tuple(tool["function"]["name"] for tool in same_tools or ())
    fields = [tool_field(number, name) for number, name in enumerate(names)]
    fields += [_field(number, message) for number, message in enumerate(plain)]
    settings = json.dumps(dict(variables or {}), sort_keys=True)
    done = (*(["tools"] if reordered else []), *changed)
    return Normal(plain, same_tools, Asked(tuple(fields), names, settings, done))


def _field(number: int, message: Json) -> Field:
    name = f"message {number} ({message['role']})"
    text = message["content"] or "".join(call["function"]["name"] for call in message.get("tool_calls") or ()[:1])
    return Field(name, text)
