"""A bounded amount that tenants share: none takes it all, and each finds its own share whenever it
comes.

Half of the amount is divided among the tenants by their weights and kept for them, used or not; the
other half belongs to whoever comes first. So of R a tenant with the share S gets at least S and at
most R/2 + S. With one tenant, or without keys, the bound is R and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

__all__ = ["Shares"]


class Shares:
    """limit    the whole amount
    weights  of each tenant; fewer than two: nothing is kept for anybody
    least    what each tenant has in any case, as long as that is no more than the whole; else
             nobody has a share

    Requests of no tenant (None) have no share of their own where there are several. Every call
    takes constant time.
    """

    def __init__(self, limit: int, weights: Mapping[str, float], least: int = 0) -> None:
        self.limit = limit
        self._used: Counter[str | None] = Counter()
        self._kept: dict[str | None, int] = {}
        if len(weights) > 1:
            least = least if least * len(weights) <= limit else 0
            rest = max(0, limit // 2 - least * len(weights))
            whole = sum(weights.values())
            self._kept = {
                tenant: least + int(rest * weight / whole) for tenant, weight in weights.items()
            }
        # What is used or kept: of each tenant the greater of the two. Never above the limit.
        self._committed = sum(self._kept.values())
        self.used = 0
        """By all tenants."""

    @property
    def are_kept(self) -> bool:
        """Whether there are shares at all: several tenants."""
        return bool(self._kept)

    def used_by(self, tenant: str | None) -> int:
        """What one tenant uses."""
        return self._used[tenant]

    def kept_for(self, tenant: str | None) -> int:
        """What a tenant finds whenever it comes; 0 where nothing is kept."""
        return self._kept.get(tenant, 0)

    def most(self, tenant: str | None) -> int:
        """What a tenant could use if it were alone: all but the shares of the others."""
        return self.limit - sum(self._kept.values()) + self.kept_for(tenant)

    def fit(self, tenant: str | None, amount: int) -> bool:
        """Whether a tenant may take so much more now. Within its share it always may."""
        return self._committed + self._growth(tenant, amount) <= self.limit

    def take(self, tenant: str | None, amount: int) -> None:
        """Use so much more, which fits."""
        self._change(tenant, amount)

    def give_back(self, tenant: str | None, amount: int) -> None:
        """Use so much less."""
        self._change(tenant, -amount)

    def _change(self, tenant: str | None, amount: int) -> None:
        self._committed += self._growth(tenant, amount)
        self.used += amount
        self._used[tenant] += amount
        if not self._used[tenant]:
            del self._used[tenant]

    def _growth(self, tenant: str | None, amount: int) -> int:
        """By how much what is used or kept grows with this."""
        kept = self.kept_for(tenant)
        used = self._used[tenant]
        return max(kept, used + amount) - max(kept, used)
