"""Parsing of tool-call arguments, for APIs that send them as objects instead of JSON text."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

__all__ = ["arguments_of"]


def arguments_of(text: str) -> Any:
    """Parse the arguments of a tool call.

    A number beyond the range of a double becomes the largest double, because JSON has no infinity.

    Raises:
        ValueError, RecursionError: the arguments are not JSON, because they were cut short.
    """
    return json.loads(text, parse_float=_finite, parse_constant=_refuse)


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else math.copysign(sys.float_info.max, value)


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")
