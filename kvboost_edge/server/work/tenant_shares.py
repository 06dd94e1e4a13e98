"""Limited resource that tenants share, with a reserved share for each tenant.

Half of the resource is reserved for the tenants in proportion to their weights, whether they use it
or not. The other half is first come, first served. With a total of R and a reserved share of S, a
tenant therefore gets at least S and at most R/2 + S. With one tenant, or without API keys, the only
limit is R.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

__all__ = ["Shares"]


class Shares:
    """Amounts in use by each tenant, and the tenants' reserved shares.

    If there are several tenants, requests without a tenant (None) have no share. Every call takes
    constant time.

    Attributes:
        limit: total amount.
        used: amount used by all tenants.
    """

    def __init__(self, limit: int, weights: Mapping[str, float], least: int = 0) -> None:
        """Create shares of `limit`.

        Args:
            limit: total amount.
            weights: weight of each tenant; with fewer than two tenants, nothing is reserved.
            least: minimum share of each tenant; ignored if the minimum shares add up to more than
                `limit`.
        """
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
        # Sum, over all tenants, of the larger of the used and reserved amounts. Never exceeds the
        # limit.
        self._committed = sum(self._kept.values())
        self.used = 0

    @property
    def are_kept(self) -> bool:
        """True if shares are reserved, because there are several tenants."""
        return bool(self._kept)

    def used_by(self, tenant: str | None) -> int:
        """Return the amount that a tenant uses."""
        return self._used[tenant]

    def kept_for(self, tenant: str | None) -> int:
        """Return the reserved share of a tenant, or 0 for an unknown tenant."""
        return self._kept.get(tenant, 0)

    def most(self, tenant: str | None) -> int:
        """Return the maximum for a tenant, which is all but the other tenants' shares."""
        return self.limit - sum(self._kept.values()) + self.kept_for(tenant)

    def fit(self, tenant: str | None, amount: int) -> bool:
        """Return whether a tenant may take `amount` more. Always true within its share."""
        return self._committed + self._growth(tenant, amount) <= self.limit

    def take(self, tenant: str | None, amount: int) -> None:
        """Add to the amount that a tenant uses. The caller must have checked `fit`."""
        self._change(tenant, amount)

    def give_back(self, tenant: str | None, amount: int) -> None:
        """Subtract from the amount that a tenant uses."""
        self._change(tenant, -amount)

    def _change(self, tenant: str | None, amount: int) -> None:
        self._committed += self._growth(tenant, amount)
        self.used += amount
        self._used[tenant] += amount
        if not self._used[tenant]:
            del self._used[tenant]

    def _growth(self, tenant: str | None, amount: int) -> int:
        """Return how much the committed total grows if the tenant takes `amount` more."""
        kept = self.kept_for(tenant)
        used = self._used[tenant]
        return max(kept, used + amount) - max(kept, used)
