"""Random token ids."""

from __future__ import annotations

import numpy as np


def random_ids(count: int, seed: int, low: int = 0, high: int = 256) -> list[int]:
    """Draw ids from `low` (inclusive) up to `high` (exclusive)."""
    return np.random.default_rng(seed).integers(low, high, count).tolist()
