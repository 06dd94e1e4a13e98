"""llama.cpp's request fields for speculative decoding."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from kvboost_edge.config import MOST_DRAFT_TOKENS
from kvboost_edge.server.api.bounds import bounded
from kvboost_edge.server.api.schemas.strict import Strict

__all__ = ["SpeculativeFields"]


class SpeculativeFields(Strict):
    """Fields whose names begin with "speculative." in JSON."""

    draft_n_max: Annotated[int, bounded("draft_n_max")] | None = Field(
        None,
        alias="speculative.n_max",
        description=(
            "Maximum number of draft tokens per step, under llama.cpp's name. 0 turns speculative "
            "decoding off. It does not change the output."
        ),
    )

    @property
    def draft_options(self) -> dict[str, Any]:
        """Arguments of the engine's `submit` for the given fields."""
        most = self.draft_n_max
        if most is None:
            return {}
        return (
            {"max_draft_tokens": min(most, MOST_DRAFT_TOKENS)} if most else {"speculation": "off"}
        )
