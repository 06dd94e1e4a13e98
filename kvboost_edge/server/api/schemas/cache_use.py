"""The `kvboost` object of a request: cache mode, prefill and speculative decoding."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kvboost_edge.server.api.bounds import bounded
from kvboost_edge.server.api.schemas.strict import Strict, bad_field

__all__ = ["CacheUse", "PrefillChoice"]

PrefillChoice = Literal["exact", "sparse"] | None
"""Prefill of a request; None for the server's default."""


class CacheUse(Strict):
    """Cache mode, prefill and speculative decoding of one request.

    Fields that are left out have the server's defaults. The recompute fields apply to mode
    "chunk_kv_reuse", whose answers are approximate.
    """

    mode: Literal["baseline", "prefix_cache", "chunk_kv_reuse"] | None = Field(
        None,
        description=(
            "baseline: do not read or write the cache. prefix_cache: reuse cached prefixes; "
            "answers are exact. chunk_kv_reuse: also reuse tokens cached at other positions; "
            "answers are approximate."
        ),
    )
    prefill: PrefillChoice = Field(
        None,
        description=(
            "exact: compute the prompt exactly. sparse: compute a long prompt faster, with an "
            "approximate answer, if the server runs with --prefill on-request or sparse. Requests "
            "share cached prefixes only with requests of the same prefill."
        ),
    )
    recompute_strategy: Literal["none", "selective", "cacheblend", "query"] | None = Field(
        None,
        description="Strategy that selects reused tokens to recompute, for chunk_kv_reuse mode.",
    )
    recompute_overlap: Annotated[int, bounded("recompute_overlap")] | None = Field(
        None,
        description="Tokens to recompute after each chunk boundary, for chunk_kv_reuse mode.",
    )
    recompute_ratio: Annotated[float, bounded("recompute_ratio")] | None = Field(
        None,
        description=(
            "Share of the remaining reused tokens to recompute, for the strategies cacheblend and "
            "query."
        ),
    )
    speculation: Literal["auto", "on", "off"] | None = Field(
        None,
        description=(
            "Speculative decoding, by prompt lookup and with the server's draft model, multi-token "
            "prediction head or assistant. It does not change the output."
        ),
    )
    max_draft_tokens: Annotated[int, bounded("max_draft_tokens")] | None = Field(
        None, description="Maximum number of draft tokens per step."
    )
    context_overflow: Literal["error", "drop_oldest"] | None = Field(
        None,
        description=(
            "Handling of a chat that exceeds the context. error: return an error. "
            "drop_oldest: leave out the oldest turns, and return the number of dropped messages "
            "as kvboost.dropped_messages."
        ),
    )
    explain: bool | None = Field(
        None,
        description="Add a cache-miss report on the prompt to the answer, as kvboost.cache.",
    )

    @property
    def repair(self) -> dict[str, Any]:
        """The fields about recomputing reused tokens that the request gives."""
        return self._given("recompute_strategy", "recompute_overlap", "recompute_ratio")

    @property
    def drafts(self) -> dict[str, Any]:
        """The fields about speculative decoding that the request gives."""
        return self._given("speculation", "max_draft_tokens")

    def _given(self, *names: str) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def check_together(self, cache_prompt: bool | None) -> None:
        """Raise ApiError if `cache_prompt` contradicts the mode."""
        if None not in (cache_prompt, self.mode) and cache_prompt == (self.mode == "baseline"):
            given = f"cache_prompt={str(cache_prompt).lower()}"
            raise bad_field(
                "cache_prompt", f"{given} contradicts kvboost.mode {self.mode!r}; give one of them"
            )
