"""Token ids drawn at random."""

from __future__ import annotations

import numpy as np


def random_ids(count: int, seed: int, low: int = 0, high: int = 256) -> list[int]:
    """Draw ids from `low` up to, not including, `high`."""
    return np.random.default_rng(seed).integers(low, high, count).tolist()
