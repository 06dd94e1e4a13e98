"""Among replicas of nearly equal cost, the one that all routers would take: rendezvous hashing."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

__all__ = ["choose", "home", "seed_of"]

_TIE_SHARE = 0.02
_TIE_SECONDS = 1e-3

Seeds = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.intp]


def seed_of(replica_id: str) -> int:
    """What stands for a replica in rendezvous hashing, the same in every process."""
    return int.from_bytes(
        hashlib.sha256(replica_id.encode("utf-8", "surrogatepass")).digest()[:8], "little"
    )


def home(key: int, slots: Slots, seeds: Seeds) -> int:
    """The one of some slots that a key belongs to: another one only if that slot is not there."""
    mixed = seeds[slots] ^ np.uint64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return int(slots[np.argmax(mixed ^ (mixed >> np.uint64(31)))])


def choose(
    seconds: npt.NDArray[np.float64], depths: npt.NDArray[np.int64], key: int, seeds: Seeds
) -> int:
    """The slot of the least `seconds`, inf where it may not be used; of those that take hardly
    longer the one that holds most, and of equals the home of `key`.
    """
    least = float(seconds.min())
    near = np.flatnonzero(seconds <= least * (1 + _TIE_SHARE) + _TIE_SECONDS)
    if len(near) == 1:
        return int(near[0])
    held = depths[near]
    return home(key, near[held == held.max()], seeds)
