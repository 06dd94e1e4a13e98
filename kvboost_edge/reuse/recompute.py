"""Settings for recomputing reused tokens."""

from __future__ import annotations

import dataclasses

from kvboost_edge.config import RecomputeStrategy

__all__ = ["Repair"]

_TESTED_OVERLAPS = (0, 8, 16, 64)
_TESTED_RATIOS = (0.0, 0.05, 0.1, 0.25)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """Settings that select which reused tokens are recomputed.

    The strategies recompute these tokens:

        NONE         no tokens
        SELECTIVE    the first tokens after every chunk boundary
        CACHEBLEND   as SELECTIVE, and the blocks whose values deviate most
        QUERY        as SELECTIVE, and the blocks that the end of the prompt attends to most

    Attributes:
        strategy: recompute strategy.
        overlap: number of tokens to recompute after a chunk boundary, at most 4096. Rounding to
            whole blocks can add up to `block_size - 1` tokens.
        ratio: additional fraction of the span tokens that CACHEBLEND and QUERY recompute, in [0,
            1].
    """

    strategy: RecomputeStrategy = RecomputeStrategy.CACHEBLEND
    overlap: int = 16
    ratio: float = 0.10

    @property
    def tested(self) -> Repair:
        """Settings with which the quality gate tests a model before allowing these settings.

        They recompute at most as many tokens as these. Settings are rounded down to a few values,
        so clients that choose their own numbers cause few tests.
        """
        if self.strategy is RecomputeStrategy.NONE:
            return Repair(strategy=self.strategy, overlap=0, ratio=0.0)
        overlap = max(one for one in _TESTED_OVERLAPS if one <= self.overlap)
        ratio = max(one for one in _TESTED_RATIOS if one <= self.block_ratio)
        return Repair(strategy=self.strategy, overlap=overlap, ratio=ratio)

    @property
    def block_ratio(self) -> float:
        """Fraction of the span tokens to recompute because of their scores."""
        looks = self.strategy in (RecomputeStrategy.CACHEBLEND, RecomputeStrategy.QUERY)
        return self.ratio if looks else 0.0

    @property
    def num_boundary_tokens(self) -> int:
        """Number of tokens to recompute after a chunk boundary."""
        return 0 if self.strategy is RecomputeStrategy.NONE else self.overlap
