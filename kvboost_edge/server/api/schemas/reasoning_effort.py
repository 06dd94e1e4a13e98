"""Effort of reasoning: its levels, as template variables and as fractions of the answer."""

from __future__ import annotations

from typing import Any, Literal

__all__ = ["FRACTIONS", "Effort", "effort_variables"]

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

FRACTIONS = {
    "none": 0.0,
    "minimal": 0.1,
    "low": 0.2,
    "medium": 0.5,
    "high": 0.8,
    "xhigh": 0.95,
    "max": 0.95,
}
"""Fraction of an answer's tokens that its reasoning may have, for templates without levels."""

# Templates have three levels at most.
_LEVELS = {"minimal": "low", "low": "low", "medium": "medium"}


def effort_variables(effort: str | None) -> dict[str, Any]:
    """Return the template variables for an effort. Templates ignore unknown variables."""
    if effort is None:
        return {}
    if effort == "none":
        return {"enable_thinking": False}
    return {"enable_thinking": True, "reasoning_effort": _LEVELS.get(effort, "high")}
