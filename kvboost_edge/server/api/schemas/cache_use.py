"""The `kvboost` object of a body: use of the cache, and speculative decoding."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kvboost_edge.server.api.bounds import bounded
from kvboost_edge.server.api.schemas.strict import Strict, bad_field

__all__ = ["CacheUse"]


class CacheUse(Strict):
    """Use of the cache and speculative decoding by one request; answers may become approximate.

    Fields that are left out have the values with which the server was started. The recompute fields
    are for mode "chunk_kv_reuse".
    """

    mode: Literal["baseline", "prefix_cache", "chunk_kv_reuse"] | None = Field(
        None,
        description=(
            "baseline: neither read nor write the cache; prefix_cache: what prompts have in common "
            "from their beginning, exact, and what happens anyway; chunk_kv_reuse: runs of "
            "tokens that were computed at other positions too, approximate"
        ),
    )
    recompute_strategy: Literal["none", "selective", "cacheblend", "query"] | None = None
    recompute_overlap: Annotated[int, bounded("recompute_overlap")] | None = None
    recompute_ratio: Annotated[float, bounded("recompute_ratio")] | None = None
    speculation: Literal["auto", "on", "off"] | None = Field(
        None,
        description="whether tokens are guessed ahead from what was said before; "
        "answers are the same",
    )
    max_draft_tokens: Annotated[int, bounded("max_draft_tokens")] | None = None
    context_overflow: Literal["error", "drop_oldest"] | None = Field(
        None,
        description=(
            "of a chat that does not fit: an error, or its oldest turns are left out, many at "
            "once, and kvboost.dropped_messages says so; by default what the server was started "
            "with"
        ),
    )
    explain: bool | None = Field(
        None,
        description=(
            "true: kvboost.cache of the answer says where and why its prompt left what was asked "
            "before"
        ),
    )

    @property
    def repair(self) -> dict[str, Any]:
        """Given fields about the recompute of reused tokens."""
        return self._given("recompute_strategy", "recompute_overlap", "recompute_ratio")

    @property
    def drafts(self) -> dict[str, Any]:
        """Given fields about speculative decoding."""
        return self._given("speculation", "max_draft_tokens")

    def _given(self, *names: str) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def check_together(self, cache_prompt: bool | None) -> None:
        """Raise ApiError for a mode that contradicts the body's `cache_prompt`."""
        if None not in (cache_prompt, self.mode) and cache_prompt == (self.mode == "baseline"):
            given = f"cache_prompt={str(cache_prompt).lower()}"
            raise bad_field(
                "cache_prompt", f"{given} contradicts kvboost.mode {self.mode!r}; give one of them"
            )
