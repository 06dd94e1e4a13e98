"""Reasoning budgets of chats: the request's tokens, its effort, or the server's default.

The first of these that a request has applies:

1. `reasoning_budget`, in tokens. A model whose reasoning cannot be limited refuses it.
2. The effort. A template with levels gets it as a variable. Otherwise the budget is a fraction of
   the tokens that the answer may have.
3. `--reasoning-budget` for the model, then for all models.

The last two have no effect on models whose reasoning cannot be limited.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvboost_edge.engine.request.requested_grammar import MadeGrammar
from kvboost_edge.errors import RequestError
from kvboost_edge.server.api.schemas.reasoning_effort import FRACTIONS
from kvboost_edge.server.api.schemas.shared import SamplingFields
from kvboost_edge.server.api.schemas.strict import bad_field
from kvboost_edge.server.state import ModelState
from kvboost_edge.text.tokenizer import Tokenizer
from kvboost_edge.text.turns.thinking import reasoning_end

__all__ = ["reasoning_options"]


def reasoning_options(
    state: ModelState,
    body: SamplingFields,
    room: int,
    fits: Mapping[str, Any],
    *,
    effort: str | None = None,
    wanted: int | None = None,
) -> dict[str, Any]:
    """Return the sampling parameters that limit the reasoning of an answer.

    Args:
        state: the model.
        body: the request body.
        room: maximum number of tokens of the answer.
        fits: sampling parameters for structured output.
        effort: effort of the request, if any.
        wanted: budget of an API whose models need not reason, in tokens.

    Raises:
        ApiError: a message is given, but no budget applies (400).
    """
    budget = body.reasoning_budget
    given = body.reasoning_budget_message
    message = state.settings.reasoning_budget_message if given is None else given
    if budget is None and room and _can_limit(state.engine.tokenizer, message, fits):
        budget = _default(state, room, effort, wanted)
    if budget is not None:
        return {"reasoning_budget": budget, "reasoning_budget_message": message}
    if given:
        raise bad_field(
            "reasoning_budget_message",
            "reasoning_budget_message has no effect, because nothing limits the reasoning; give "
            "reasoning_budget too",
        )
    return {}


def _default(state: ModelState, room: int, effort: str | None, wanted: int | None) -> int | None:
    if wanted is not None:
        return wanted
    if effort is None:
        return state.settings.reasoning_budget_of(state.model_name)
    if effort != "none" and state.engine.tokenizer.turn_format.has_levels:
        return None
    return int(FRACTIONS[effort] * room)


def _can_limit(tokenizer: Tokenizer, message: str | None, fits: Mapping[str, Any]) -> bool:
    """Return whether the model's reasoning can be limited.

    A format that applies from the first token leaves no reasoning.
    """
    if not all(isinstance(value, MadeGrammar) for value in fits.values()):
        return False
    try:
        reasoning_end(tokenizer, message or "")
    except RequestError:
        return False
    return True
