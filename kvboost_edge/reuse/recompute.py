"""Recompute settings for reused tokens."""

from __future__ import annotations

import dataclasses

from kvboost_edge.config import RecomputeStrategy

__all__ = ["Repair"]

_TESTED_OVERLAPS = (0, 8, 16, 64)
_TESTED_RATIOS = (0.0, 0.05, 0.1, 0.25)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """Settings that select which reused tokens are recomputed.

    Strategies:

        NONE         no tokens
        SELECTIVE    the first tokens after every chunk boundary
        CACHEBLEND   those, and the blocks whose values deviate most
        QUERY        those, and the blocks that the end of the prompt attends to most

    Attributes:
        strategy: one of these strategies.
        overlap: tokens to recompute after a chunk boundary, at most 4096. Rounding to whole blocks
            can add up to `block_size - 1` tokens.
        ratio: additional share of the tokens in spans that CACHEBLEND and QUERY recompute, in [0,
            1].
    """

    strategy: RecomputeStrategy = RecomputeStrategy.CACHEBLEND
    overlap: int = 16
    ratio: float = 0.10

    @property
    def tested(self) -> Repair:
        """Settings that the model is tested with before these are used.

        They recompute at most as much. There are only a few of them, so clients that choose their
        own numbers cause few tests.
        """
        if self.strategy is RecomputeStrategy.NONE:
            return Repair(strategy=self.strategy, overlap=0, ratio=0.0)
        overlap = max(one for one in _TESTED_OVERLAPS if one <= self.overlap)
        ratio = max(one for one in _TESTED_RATIOS if one <= self.block_ratio)
        return Repair(strategy=self.strategy, overlap=overlap, ratio=ratio)

    @property
    def block_ratio(self) -> float:
        """Share of the tokens in spans that is selected by scores."""
        looks = self.strategy in (RecomputeStrategy.CACHEBLEND, RecomputeStrategy.QUERY)
        return self.ratio if looks else 0.0

    @property
    def num_boundary_tokens(self) -> int:
        """Tokens to recompute after a chunk boundary."""
        return 0 if self.strategy is RecomputeStrategy.NONE else self.overlap
