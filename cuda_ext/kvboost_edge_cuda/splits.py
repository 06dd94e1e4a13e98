"""Split-K: the keys of a few long sequences are split into parts to fill the GPU.

The method is that of Flash-Decoding; `merge_splits` combines the parts.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

__all__ = ["choose_num_splits"]

_MOST_SPLITS = 128
_TILE = 64
"""Keys that a CTA reads at a time; parts of fewer than a few tiles are not worth merging."""
_TILES_TO_A_PART = 4


def choose_num_splits(device: torch.device, num_ctas: int, longest_k: int) -> int:
    """Return the smallest number of parts that gives every multiprocessor two CTAs.

    Args:
        device: the GPU.
        num_ctas: number of CTAs without splits.
        longest_k: number of keys of the longest sequence, or an upper bound.
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
