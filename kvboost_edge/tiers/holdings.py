"""Which blocks came to a tier and left it since somebody last asked, for who sends requests where
their blocks are.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from typing import NamedTuple

from kvboost_edge.tiers.base import Tier

__all__ = ["Held", "Holdings"]

_ASKED_AGAIN = 512  # of the blocks told before, at each call: 50 us


class Held(NamedTuple):
    """Prefix hashes of blocks, 32 bytes each; one is in at most one of the two.

    Attributes:
        is_whole: `came` is all the tier is known to hold; what was told before is void.
        came: it is known to hold, and was not told of.
        left: were told of, and are not known to be there any more.
    """

    is_whole: bool
    came: tuple[bytes, ...]
    left: tuple[bytes, ...]


class Holdings:
    """What somebody was told that a tier holds. Watches nothing until it is asked for the first
    time.

    Blocks leave a tier without a word: at each call some of those told before are looked for again,
    in turn, so that what left is told late. That costs whoever believes it time and nothing else.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._lock = threading.Lock()
        self._told: dict[bytes, None] | None = (
            None  # None: nobody has asked; in the order they are looked for again
        )
        self._noted: dict[bytes, None] = {}

    def note(self, prefix_hashes: Iterable[bytes]) -> None:
        """These blocks were written, read, or not found: from any thread."""
        if self._told is not None:
            with self._lock:
                self._noted.update(dict.fromkeys(prefix_hashes))

    def take(self, whole: bool = False) -> Held:
        """What changed since the last call; all there is at the first one, or if `whole` is asked
        for.
        """
        holds = self._tier.holds
        with self._lock:
            noted = self._noted
            self._noted = {}
            told = self._told
            if told is None or whole:
                self._told = dict.fromkeys(self._tier.known())
                return Held(True, tuple(self._told), ())
            came = tuple(one for one in noted if one not in told and holds(one) is True)
            asked = dict.fromkeys(
                (*itertools.islice(told, _ASKED_AGAIN), *(one for one in noted if one in told))
            )
            left = tuple(one for one in asked if holds(one) is not True)
            for one in asked:
                del told[one]
            gone = set(left)
            told.update(dict.fromkeys(one for one in (*asked, *came) if one not in gone))
            return Held(False, came, left)
