"""The memory report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from kvboost_edge.host.memory import Region, process_peak, process_rss, resident_bytes

__all__ = ["MemoryReport"]

# Counting pages takes 9 ms per GB. A count is reused for this many times that duration.
_COUNTED_TIMES = 100


class MemoryReport:
    """The memory of the process in bytes, by owner.

    `other_bytes` is the remaining resident memory. It holds the interpreter and its packages
    (mainly Numba and its compiler), compiled kernels, tokenizer, activations and the draft history,
    which `TenantHistory` limits. It also holds the vocabulary of grammar parsers (75 MB for 151,000
    tokens).

    On Linux, resident pages of mapped weights and of the pool are counted. Counting takes at most
    1% of the time. On other systems and for torch, weights and pool count as fully resident. Until
    they are, `other_bytes` is too small.

    Args:
        weight_bytes: Size of the weights.
        pool_bytes: Size of the KV pool.
        regions: Function that returns the memory regions of weights, pools and recurrent state, or
            an empty sequence if unknown.
        copied: Function that returns the size of the runner's KV copies.
        state_bytes: Size of the recurrent state slots.
        buffer_bytes: Size of the draft history and of the buffers of the largest pass, if known.
        draft_weight_bytes: Size of the weights of the draft model or MTP head.
        draft_pool_bytes: Size of the KV pool of the draft model or head.
    """

    def __init__(
        self,
        weight_bytes: int,
        pool_bytes: int,
        regions: Callable[[], Sequence[Region]] = tuple,
        copied: Callable[[], int] = int,
        state_bytes: int = 0,
        buffer_bytes: int = 0,
        draft_weight_bytes: int = 0,
        draft_pool_bytes: int = 0,
    ) -> None:
        self._buffer_bytes = buffer_bytes
        self.draft_weight_bytes = draft_weight_bytes
        self.draft_pool_bytes = draft_pool_bytes
        self.weight_bytes = weight_bytes
        self.pool_bytes = pool_bytes
        self.state_bytes = state_bytes
        self._regions = regions
        self._copied = copied
        self._counted = 0
        self._counted_until = -math.inf

    def snapshot(self) -> dict[str, int]:
        """Return the current memory use by owner, in bytes.

        The keys are weight_bytes, pool_bytes, draft_weight_bytes, draft_pool_bytes, state_bytes,
        copied_bytes, buffer_bytes, other_bytes, process_rss_bytes and process_peak_bytes.
        """
        rss = process_rss()
        copied = self._copied()
        return {
            "weight_bytes": self.weight_bytes,
            "pool_bytes": self.pool_bytes,
            "draft_weight_bytes": self.draft_weight_bytes,
            "draft_pool_bytes": self.draft_pool_bytes,
            "state_bytes": self.state_bytes,
            "copied_bytes": copied,
            "buffer_bytes": self._buffer_bytes,
            "other_bytes": max(0, rss - self._resident() - copied),
            "process_rss_bytes": rss,
            "process_peak_bytes": process_peak(),
        }

    @property
    def _reserved(self) -> int:
        """Size of weights, pools and recurrent state, resident or not."""
        drafting = self.draft_weight_bytes + self.draft_pool_bytes
        return self.weight_bytes + self.pool_bytes + self.state_bytes + drafting

    def _resident(self) -> int:
        start = time.perf_counter()
        if start >= self._counted_until:
            regions = self._regions()
            found = resident_bytes(regions) if regions else None
            self._counted = self._reserved if found is None else found
            end = time.perf_counter()
            self._counted_until = end + _COUNTED_TIMES * (end - start)
        return self._counted
