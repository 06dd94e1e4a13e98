"""Which of the tokens found at other positions are computed all the same."""

from __future__ import annotations

import dataclasses

from kvboost_edge.config import RecomputeStrategy

__all__ = ["Repair"]

_TESTED_OVERLAPS = (0, 8, 16, 64)
_TESTED_RATIOS = (0.0, 0.05, 0.1, 0.25)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """How reuse is repaired.

    Attributes:
        strategy: NONE: not; SELECTIVE: the first tokens behind every seam; CACHEBLEND: those, and
            the blocks whose values deviate most; QUERY: those, and the blocks that the end of the
            prompt attends to most.
        overlap: tokens behind a seam, at most 4096; whole blocks are computed, so up to a block
            less one are added.
        ratio: share of the tokens in spans that CACHEBLEND and QUERY compute besides, in [0, 1].
    """

    strategy: RecomputeStrategy = RecomputeStrategy.CACHEBLEND
    overlap: int = 16
    ratio: float = 0.10

    @property
    def tested(self) -> Repair:
        """The repair that a model is tested with before this one is used: no more than this one,
        and one of a few, so that clients who choose numbers of their own cause few tests.
        """
        if self.strategy is RecomputeStrategy.NONE:
            return Repair(strategy=self.strategy, overlap=0, ratio=0.0)
        overlap = max(one for one in _TESTED_OVERLAPS if one <= self.overlap)
        ratio = max(one for one in _TESTED_RATIOS if one <= self.block_ratio)
        return Repair(strategy=self.strategy, overlap=overlap, ratio=ratio)

    @property
    def block_ratio(self) -> float:
        """Share of the tokens in spans that is chosen by looking at them."""
        looks = self.strategy in (RecomputeStrategy.CACHEBLEND, RecomputeStrategy.QUERY)
        return self.ratio if looks else 0.0

    @property
    def num_seam_tokens(self) -> int:
        """Tokens computed behind a seam."""
        return 0 if self.strategy is RecomputeStrategy.NONE else self.overlap
