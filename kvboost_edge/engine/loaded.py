"""What tiers brought for one request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

__all__ = ["Loaded"]


class Loaded:
    """Tokens by tier, and how long that took.

    seconds   of all loads, one after another
    """

    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()
        self.seconds = 0.0

    def note(self, tokens: Mapping[str, int], seconds: float) -> None:
        """So many tokens came from tiers, by name."""
        self._tokens.update(tokens)
        self.seconds += seconds

    def split(self, num_cached: int) -> dict[str, int]:
        """Cached tokens by the tier that had them. Of a block that was cached to its end the last
        token may have to be computed, and what arrived may have been dropped again before it was
        taken.
        """
        rest = num_cached
        found = {}
        for tier, count in self._tokens.items():
            found[tier] = min(count, rest)
            rest -= found[tier]
        return {"pool": rest, **found}
