"""Where the memory goes: weights, pool, the rest; and whether it fits before anything is allocated."""

from __future__ import annotations

import dataclasses

from kvboost_edge.backends.base import KVSpec
from kvboost_edge.config import EngineConfig
from kvboost_edge.errors import CapacityError
from kvboost_edge.host.memory import process_peak, process_rss

__all__ = ["MemoryLedger", "check_weights_fit", "plan_num_blocks"]

_POOL_SHARE = 4  # without a given size the pool takes at most a quarter of the available memory


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryLedger:
    """Bytes by owner. `other_bytes` is what the process holds beside weights and pool; weights that are mapped and not
    yet read, or a pool page never written, are not resident, so it is at least 0 and may be less than it seems."""

    weight_bytes: int
    pool_bytes: int

    def snapshot(self) -> dict[str, int]:
        """weight_bytes, pool_bytes, other_bytes, process_rss_bytes, process_peak_bytes as of now."""
        rss = process_rss()
        return {
            "weight_bytes": self.weight_bytes,
            "pool_bytes": self.pool_bytes,
            "other_bytes": max(0, rss - self.weight_bytes - self.pool_bytes),
            "process_rss_bytes": rss,
            "process_peak_bytes": process_peak(),
        }


def check_weights_fit(weight_bytes: int, available: int) -> None:
    """CapacityError if weights about to be loaded exceed the available memory."""
    if weight_bytes > available:
        raise CapacityError(
            f"the weights take {_gb(weight_bytes)}, {_gb(available)} of memory are available; "
            "use a smaller model or dtype='bfloat16'"
        )


def plan_num_blocks(config: EngineConfig, spec: KVSpec, max_context: int, weight_bytes: int, available: int) -> int:
    """Blocks of the pool. `available` is memory free now, after the weights were loaded.

    Given by the config, else min(25% of the available memory, context x max_num_seqs), at least one block.
    Raises CapacityError when the budget holds no block or the pool does not fit.
    """
    block_bytes = spec.bytes_per_block
    if config.max_cache_bytes is not None:
        num_blocks = config.max_cache_bytes // block_bytes
        if num_blocks < 1:
            raise CapacityError(
                f"max_cache_bytes={config.max_cache_bytes} holds no block: one of {spec.block_size} tokens takes "
                f"{block_bytes} bytes in this model; give at least that"
            )
    elif config.num_blocks is not None or config.max_chunks is not None:
        num_blocks = config.num_blocks or config.max_chunks or 0
    else:
        wanted = -(-max_context // spec.block_size) * config.max_num_seqs
        num_blocks = max(1, min(available // _POOL_SHARE // block_bytes, wanted))
    pool_bytes = num_blocks * block_bytes
    if pool_bytes > available:
        raise CapacityError(
            f"weights {_gb(weight_bytes)} + pool {_gb(pool_bytes)} ({num_blocks} blocks of {block_bytes} bytes) exceed "
            f"memory: {_gb(available)} are available beside the weights; lower max_cache_bytes or num_blocks"
        )
    return num_blocks


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"
