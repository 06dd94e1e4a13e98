"""Ollama's `keep_alive` field: a number of seconds, or a duration in Go's notation."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from kvboost_edge.server.api.bounds import BOUNDS
from kvboost_edge.server.api.schemas.shared import number_schema
from kvboost_edge.server.api.schemas.strict import field_error

__all__ = ["KeepAlive"]

_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PART = re.compile(r"([0-9]{1,12}(?:\.[0-9]{0,12})?)(h|ms|m|s|us|µs|ns)")
_NUMBER = re.compile(r"-?[0-9]{1,12}(?:\.[0-9]{0,12})?")
_WRONG = (
    'must be seconds, or a duration such as "5m" or "1h30m"; '
    "0 unloads the model after the answer, -1 keeps it loaded"
)


def _seconds(value: Any) -> float | None:
    """Convert a value to seconds; negative values become infinity."""
    if value is None:
        return None
    if isinstance(value, str):
        seconds = _of_text(value)
    else:
        seconds = value if type(value) in (int, float) and value == value else None  # rejects NaN
    if seconds is None:
        raise field_error("keep_alive", _WRONG)
    # Compare before the conversion: an integer with hundreds of digits overflows a float.
    if not BOUNDS["keep_alive"].low <= seconds <= BOUNDS["keep_alive"].high:
        raise field_error(
            "keep_alive",
            f"must be at most {BOUNDS['keep_alive'].high:g} seconds, or -1 for no limit",
        )
    return math.inf if seconds < 0 else float(seconds)


def _of_text(text: str) -> float | None:
    if _NUMBER.fullmatch(text):
        return float(text)
    sign, rest = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
    parts = _PART.findall(rest[:100])
    if not parts or "".join(number + unit for number, unit in parts) != rest:
        return None
    return sign * sum(float(number) * _UNITS[unit] for number, unit in parts)


KeepAlive = Annotated[
    float | None,
    PlainValidator(_seconds),
    WithJsonSchema(
        {"anyOf": [number_schema("keep_alive"), {"enum": ["5m", "1h30m", "-1"]}, {"type": "null"}]}
    ),
]
"""Seconds that an idle model stays loaded; infinity means no limit."""
