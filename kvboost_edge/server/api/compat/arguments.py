"""Arguments of a tool call as values, for APIs that do not send them as JSON text."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

__all__ = ["arguments_of"]


def arguments_of(text: str) -> Any:
    """Parse the arguments of a call.

    A number beyond the range of a double becomes the largest double, because answers cannot hold
    infinity.

    Raises:
        ValueError, RecursionError: the arguments were cut short, so they are not JSON.
    """
    return json.loads(text, parse_float=_finite, parse_constant=_refuse)


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else math.copysign(sys.float_info.max, value)


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")
