"""How many parts the keys of a call are cut into, so that a few long sequences still fill the
device.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

__all__ = ["choose_num_splits"]

_MOST_SPLITS = 128
_TILE = 64
"""Keys that a CTA reads at a time; a part shorter than a few tiles is not worth merging."""
_TILES_TO_A_PART = 4


def choose_num_splits(device: torch.device, num_ctas: int, longest_k: int) -> int:
    """The least number of parts that gives every multiprocessor two CTAs; 1 where there are enough
    without.

    num_ctas: CTAs without a split; longest_k: keys of the longest sequence, or a bound on it.
    """
    wanted = 2 * _num_multiprocessors(device)
    if num_ctas < 1 or num_ctas >= wanted:
        return 1
    parts = math.ceil(longest_k / (_TILE * _TILES_TO_A_PART))
    return max(1, min(math.ceil(wanted / num_ctas), parts, _MOST_SPLITS))


@lru_cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
