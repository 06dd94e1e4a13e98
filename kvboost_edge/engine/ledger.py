"""Where the memory goes: weights, pool, the rest; and whether it fits before anything is allocated."""

from __future__ import annotations

import dataclasses

from kvboost_edge.backends.base import KVSpec
from kvboost_edge.config import EngineConfig
from kvboost_edge.errors import CapacityError
from kvboost_edge.host.memory import process_peak, process_rss

__all__ = ["MemoryLedger", "check_weights_fit", "num_open_blocks", "plan_num_blocks", "planned_pool_bytes"]

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
            "use a smaller model, weights='int4' (native runner) or dtype='bfloat16'"
        )


def plan_num_blocks(config: EngineConfig, spec: KVSpec, max_context: int, weight_bytes: int, available: int) -> int:
    """Blocks of the pool. `available` is memory free now, after the weights were loaded.

    Given by the config, else min(25% of the available memory, context x max_num_seqs), at least one block. The
    buffers of open blocks that a quantized pool needs come out of the same bytes.
    Raises CapacityError when the budget holds no block or the pool does not fit.
    """
    num_blocks = _wanted_blocks(config, spec, max_context, available)
    block_bytes, open_bytes = spec.bytes_per_block, num_open_blocks(config) * spec.bytes_per_open_block
    if num_blocks < 1:
        beside = f" beside {open_bytes} bytes for blocks that are not full yet" if open_bytes else ""
        raise CapacityError(
            f"max_cache_bytes={config.max_cache_bytes} holds no block: one of {spec.block_size} tokens takes "
            f"{block_bytes} bytes in this model{beside}; give at least that"
        )
    pool_bytes = num_blocks * block_bytes + open_bytes
    if pool_bytes > available:
        raise CapacityError(
            f"weights {_gb(weight_bytes)} + pool {_gb(pool_bytes)} ({num_blocks} blocks of {block_bytes} bytes) exceed "
            f"memory: {_gb(available)} are available beside the weights; lower max_cache_bytes or num_blocks"
        )
    return num_blocks


def planned_pool_bytes(config: EngineConfig, spec: KVSpec, max_context: int, available: int) -> int:
    """Bytes the pool would take of so much memory; nothing is refused."""
    num_blocks = max(1, _wanted_blocks(config, spec, max_context, available))
    return num_blocks * spec.bytes_per_block + num_open_blocks(config) * spec.bytes_per_open_block


def num_open_blocks(config: EngineConfig) -> int:
    """Blocks that may be partly written at a time: one for each sequence and one to spare."""
    return config.max_num_seqs + 1


def _wanted_blocks(config: EngineConfig, spec: KVSpec, max_context: int, available: int) -> int:
    if config.num_blocks is not None or config.max_chunks is not None:
        return config.num_blocks or config.max_chunks or 0
    open_bytes = num_open_blocks(config) * spec.bytes_per_open_block
    if config.max_cache_bytes is not None:
        return (config.max_cache_bytes - open_bytes) // spec.bytes_per_block
    wanted = -(-max_context // spec.block_size) * config.max_num_seqs
    return max(1, min((available // _POOL_SHARE - open_bytes) // spec.bytes_per_block, wanted))


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"
