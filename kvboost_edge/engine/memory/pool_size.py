"""Pool sizing, which is checked before allocation."""

from __future__ import annotations

from kvboost_edge.backends.base import KVSpec
from kvboost_edge.config import EngineConfig
from kvboost_edge.errors import CapacityError
from kvboost_edge.host.memory import shared_out
from kvboost_edge.runners.base import RunnerInfo

__all__ = [
    "BLOCK_BOOKKEEPING",
    "LEAST_STATES",
    "STATES_PER_SEQUENCE",
    "check_weights_fit",
    "gb",
    "least_state_bytes",
    "left_after_weights",
    "mb_up",
    "most_sequences",
    "num_open_blocks",
    "plan_num_blocks",
    "planned_blocks",
    "planned_pool_bytes",
    "pool_bytes",
]

_POOL_SHARE = 4  # by default the pool uses at most 1/4 of the available memory
_CONTEXTS = 16  # default maximum pool size in full contexts, without max_num_seqs
LEAST_STATES = 4  # recurrent state slots in addition to those of running sequences
STATES_PER_SEQUENCE = 2  # a sequence writes one slot and may read another
# Size of the Python objects for a block, in bytes. An empty block uses 138; the rest is a margin.
BLOCK_BOOKKEEPING = 1024
_TOKENS_PER_SEQUENCE = 512
_MOST_SEQUENCES = 64


def check_weights_fit(weight_bytes: int, available: int) -> None:
    """Check that the weights fit in memory.

    Raises:
        CapacityError: The weights exceed the available memory.
    """
    if weight_bytes > available:
        raise CapacityError(
            f"the weights take {gb(weight_bytes)}, but only {gb(available)} is available; use a "
            "smaller model, weights='int4' (native runner) or dtype='bfloat16'. `kvboost-edge "
            "doctor MODEL` shows the size of each format"
        )


def left_after_weights(available: int, weight_bytes: int) -> int:
    """Return the memory that is left after loading the weights, in bytes."""
    # The OS counts mapped weights as available. A pool of that size would keep evicting them from
    # the page cache, so subtract them.
    return max(0, available - weight_bytes)


def plan_num_blocks(config: EngineConfig, info: RunnerInfo, available: int) -> int:
    """Return the number of blocks in the pool.

    If the config sets sizes, the smallest applies. The default is the smaller of 25% of the
    available memory and max_num_seqs full contexts (16 if not set). For a quantized pool, the size
    includes the buffers of partly filled blocks.

    Args:
        config: Options of the engine.
        info: The runner's description.
        available: Memory in bytes after the weights, see `left_after_weights`.

    Raises:
        CapacityError: The configured size holds no block, or the pool and the runner's copies do
            not fit.
    """
    spec = info.kv_spec
    num_blocks = _wanted_blocks(config, spec, info.max_context, available)
    num_open = num_open_blocks(config, num_blocks, spec.block_size)
    block_bytes = spec.bytes_per_block
    open_bytes = num_open * spec.bytes_per_open_block
    if num_blocks < 1:
        addition = (
            f" in addition to {open_bytes} bytes for partly written blocks" if open_bytes else ""
        )
        raise CapacityError(
            f"max_cache_bytes={config.max_cache_bytes} is too small: a block of "
            f"{spec.block_size} tokens takes {block_bytes} bytes in this model{addition}; raise "
            "max_cache_bytes to at least that"
        )
    pool = pool_bytes(config, spec, num_blocks)
    needed = 2 * pool if info.copies_kv else pool
    if needed > available:
        copies = f" + the same for the {info.name} runner's copies" if info.copies_kv else ""
        raise CapacityError(
            f"weights {gb(info.weight_bytes)} + pool {gb(pool)} ({num_blocks} blocks of "
            f"{block_bytes} bytes){copies} exceed memory: only {gb(available)} is available "
            "after the weights; lower max_cache_bytes or num_blocks"
        )
    return num_blocks


def planned_pool_bytes(config: EngineConfig, spec: KVSpec, max_context: int, available: int) -> int:
    """Return the planned size of the pool in bytes, without checking that it fits."""
    return pool_bytes(config, spec, planned_blocks(config, spec, max_context, available))


def pool_bytes(config: EngineConfig, spec: KVSpec, num_blocks: int) -> int:
    """Return the size in bytes of a pool with this many blocks, including open ones."""
    num_open = num_open_blocks(config, num_blocks, spec.block_size)
    return num_blocks * spec.bytes_per_block + num_open * spec.bytes_per_open_block


def planned_blocks(config: EngineConfig, spec: KVSpec, max_context: int, available: int) -> int:
    """Return the planned number of blocks, without checking that they fit."""
    return max(1, _wanted_blocks(config, spec, max_context, available))


def most_sequences(config: EngineConfig, num_blocks: int, block_size: int) -> int:
    """Return the maximum number of sequences that run at once on a pool of this size."""
    if config.max_num_seqs is not None:
        return config.max_num_seqs
    return max(1, min(_MOST_SEQUENCES, num_blocks * block_size // _TOKENS_PER_SEQUENCE))


def num_open_blocks(config: EngineConfig, num_blocks: int, block_size: int) -> int:
    """Return the maximum number of partly filled blocks, one per sequence and one spare."""
    return most_sequences(config, num_blocks, block_size) + 1


def _wanted_blocks(config: EngineConfig, spec: KVSpec, max_context: int, available: int) -> int:
    counted = config.counted_blocks
    whole = -(-max_context // spec.block_size) * (config.max_num_seqs or _CONTEXTS)
    if not spec.bytes_per_block:  # without KV, blocks are only bookkeeping
        return whole if counted is None else counted
    if counted is None:
        return _affordable_blocks(config, spec, whole, available)
    if config.max_cache_bytes is None:
        return counted
    return min(counted, _affordable_blocks(config, spec, whole, available))


def _affordable_blocks(config: EngineConfig, spec: KVSpec, whole: int, available: int) -> int:
    """Return the number of blocks that fit the memory budget, at most `whole` by default."""
    if config.max_cache_bytes is not None:
        budget = config.max_cache_bytes
    elif config.max_memory is not None:
        budget = _left_for_pool(config, spec, available)
    else:
        budget = shared_out(available) // _POOL_SHARE
    # The number of open blocks depends on the number of blocks, which is not known yet. The whole
    # budget gives an upper bound.
    gross = budget // spec.bytes_per_block
    num_open = num_open_blocks(
        config, gross if config.max_cache_bytes else min(gross, whole), spec.block_size
    )
    net = (budget - num_open * spec.bytes_per_open_block) // spec.bytes_per_block
    return net if config.max_cache_bytes is not None else max(1, min(net, whole))


def least_state_bytes(config: EngineConfig, spec: KVSpec) -> int:
    """Return the size in bytes of the minimum number of recurrent state slots.

    The result is 0 for a model without recurrent state.
    """
    num_slots = LEAST_STATES + STATES_PER_SEQUENCE * (config.max_num_seqs or 1)
    return num_slots * spec.bytes_per_state


def _left_for_pool(config: EngineConfig, spec: KVSpec, available: int) -> int:
    """Return the pool size in bytes that `max_memory` allows after state and bookkeeping."""
    if config.max_state_bytes is not None:
        available -= config.max_state_bytes
    elif spec.states:
        available -= max(least_state_bytes(config, spec), available // (_POOL_SHARE + 1))
    block_bytes = spec.bytes_per_block
    return max(0, available) * block_bytes // (block_bytes + BLOCK_BOOKKEEPING)


def mb_up(num_bytes: int) -> str:
    """Format a size, rounded up, in the syntax of an option value."""
    return f"{-(-num_bytes // 10**6)}MB"


def gb(num_bytes: int) -> str:
    """Format a size in GB or MB for a message."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"
