"""Random numbers and sorting for sampling."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["XTC_STREAM", "largest_places", "uniform"]

XTC_STREAM = 1
"""Stream of random numbers that decide whether XTC applies. The draws use stream 0."""


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """Return the random number in [0, 1) for the token at `position`, given a seed.

    Args:
        stream: numbers of different streams are independent.
    """
    key = np.array([seed, position], dtype=np.uint64)
    counter = np.array([0, 0, 0, stream], dtype=np.uint64) if stream else None
    return float(np.random.Generator(np.random.Philox(counter=counter, key=key)).random())


def largest_places(values: npt.NDArray[np.floating[Any]], count: int) -> npt.NDArray[np.int64]:
    """Return the places of the `count` largest values in descending order.

    Equal values keep their order.
    """
    if count < len(values):
        threshold = np.partition(values, len(values) - count)[len(values) - count]
        candidates = np.flatnonzero(values >= threshold)
    else:
        candidates = np.arange(len(values))
    order = np.argsort(-values[candidates], kind="stable")
    return candidates[order[:count]].astype(np.int64, copy=False)
