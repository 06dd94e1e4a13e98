"""The arguments of a call as values, for APIs that show them so: the model wrote JSON."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

__all__ = ["arguments_of"]


def arguments_of(text: str) -> Any:
    """ValueError or RecursionError for those that were cut short, which are no JSON. A number
    beyond any double, which JSON may hold and answers cannot, is the largest there is.
    """
    return json.loads(text, parse_float=_finite, parse_constant=_refuse)


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else math.copysign(sys.float_info.max, value)


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")
