"""Log of the blocks that entered or left a tier, for cache-aware routers."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable

from kvboost_edge.kvcache.events import CacheEvents
from kvboost_edge.tiers.base import Tier

__all__ = ["Holdings"]

_CHECKED_AGAIN = 512  # reported blocks that each call rechecks, in about 50 us


class Holdings:
    """Log of changes to a tier's contents, for a single reader.

    Logging starts with the first `take`. Tiers do not announce evictions. Each call therefore
    rechecks some of the reported blocks in rotation, and evictions are reported late. A router that
    relies on a stale report only loses time.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._lock = threading.Lock()
        # Reported blocks, in the order in which they are rechecked. None until the first `take`.
        self._reported: dict[bytes, None] | None = None
        self._noted: dict[bytes, None] = {}

    def note(self, prefix_hashes: Iterable[bytes]) -> None:
        """Record that blocks were written, read or not found. Any thread may call this."""
        if self._reported is not None:
            with self._lock:
                self._noted.update(dict.fromkeys(prefix_hashes))

    def take(self, whole: bool = False) -> CacheEvents:
        """Return the changes since the last call.

        Published are blocks that are known to be stored and have not been reported yet. Evicted are
        reported blocks that are no longer known to be stored. The result lists the tier's whole
        known contents on the first call, or if `whole` is true.
        """
        holds = self._tier.holds
        with self._lock:
            noted = self._noted
            self._noted = {}
            reported = self._reported
            if reported is None or whole:
                self._reported = dict.fromkeys(self._tier.known())
                return CacheEvents(True, tuple(self._reported), ())
            came = tuple(one for one in noted if one not in reported and holds(one) is True)
            checked = dict.fromkeys(
                (
                    *itertools.islice(reported, _CHECKED_AGAIN),
                    *(one for one in noted if one in reported),
                )
            )
            left = tuple(one for one in checked if holds(one) is not True)
            for one in checked:
                del reported[one]
            gone = set(left)
            reported.update(dict.fromkeys(one for one in (*checked, *came) if one not in gone))
            return CacheEvents(False, came, left)
