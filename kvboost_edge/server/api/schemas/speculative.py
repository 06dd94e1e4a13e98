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

    draft_n_min: Annotated[int, bounded("draft_n_min")] | None = Field(
        None,
        alias="speculative.n_min",
        description=(
            "Minimum number of draft tokens per step, up to the maximum, under llama.cpp's name. "
            "Shorter drafts are not verified. It does not change the output."
        ),
    )

    draft_p_min: Annotated[float, bounded("draft_p_min")] | None = Field(
        None,
        alias="speculative.p_min",
        description=(
            "Minimum probability of a token by the draft model or multi-token prediction head, "
            "under llama.cpp's name. A draft ends before a less likely token. Needs a server with "
            "a draft model or head."
        ),
    )

    @property
    def draft_options(self) -> dict[str, Any]:
        """Arguments of the engine's `submit` for the given fields."""
        found: dict[str, Any] = {}
        if self.draft_n_max == 0:
            found["speculation"] = "off"
        elif self.draft_n_max is not None:
            found["max_draft_tokens"] = min(self.draft_n_max, MOST_DRAFT_TOKENS)
        if self.draft_n_min is not None:
            found["min_draft_tokens"] = min(self.draft_n_min, MOST_DRAFT_TOKENS)
        if self.draft_p_min is not None:
            found["draft_p_min"] = self.draft_p_min
        return found
