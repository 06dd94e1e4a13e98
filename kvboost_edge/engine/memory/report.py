"""The memory report: weights, pool and the rest, checked before anything is allocated."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from kvboost_edge.backends.base import KVSpec
from kvboost_edge.config import EngineConfig
from kvboost_edge.errors import CapacityError
from kvboost_edge.host.memory import Region, process_peak, process_rss, resident_bytes, shared_out
from kvboost_edge.runners.base import RunnerInfo

__all__ = [
    "BLOCK_BOOKKEEPING",
    "LEAST_STATES",
    "STATES_PER_SEQUENCE",
    "MemoryLedger",
    "check_weights_fit",
    "gb",
    "least_state_bytes",
    "memory_beside",
    "most_sequences",
    "num_open_blocks",
    "plan_num_blocks",
    "planned_blocks",
    "planned_pool_bytes",
]

_POOL_SHARE = 4  # without a given size the pool takes at most a quarter of the available memory
_CONTEXTS = (
    16  # and at most so many whole contexts, where the number of sequences is not given either
)
LEAST_STATES = 4  # slots, and so many more for each sequence: it writes one, may read another
STATES_PER_SEQUENCE = 2
# Allowed for the bookkeeping of a block in Python objects; an empty block has 138 bytes of it.
BLOCK_BOOKKEEPING = 1024
_TOKENS_PER_SEQUENCE = 512
_MOST_SEQUENCES = 64
_COUNTED_TIMES = (
    100  # a count of pages stands for so many times as long as it took: 9 ms for a gigabyte
)


class MemoryLedger:
    """Bytes by owner. weight_bytes, pool_bytes and state_bytes are reserved, copied_bytes are of
    keys and values that the runner holds beside the pool; `other_bytes` is what is resident beside
    all these: the interpreter and its packages (numba and its compiler foremost), compiled kernels,
    the tokenizer, activations, what drafts are guessed from (`TenantHistory` bounds it), the
    vocabulary of a grammar's parsers (75 MB for 151,000 tokens).

    Weights that were mapped and not yet read, and pages of the pool never written, are not
    resident: they are counted page by page where the system tells (Linux), in at most 1% of the
    time. Elsewhere, and for weights and pools of torch, both are taken as resident, so that
    `other_bytes` is too small until they are.
    """

    def __init__(
        self,
        weight_bytes: int,
        pool_bytes: int,
        regions: Callable[[], Sequence[Region]] = tuple,
        copied: Callable[[], int] = int,
        state_bytes: int = 0,
        buffer_bytes: int = 0,
    ) -> None:
        """regions: where weights, pool and states lie in this process's memory as of now; empty:
        not known. copied: bytes of the runner's copies as of now. buffer_bytes: of the largest
        pass and of the draft history, as far as known.
        """
        self._buffer_bytes = buffer_bytes
        self.weight_bytes = weight_bytes
        self.pool_bytes = pool_bytes
        self.state_bytes = state_bytes
        self._regions = regions
        self._copied = copied
        self._counted = 0
        self._counted_until = -math.inf

    def snapshot(self) -> dict[str, int]:
        """weight_bytes, pool_bytes, state_bytes, copied_bytes, buffer_bytes, other_bytes,
        process_rss_bytes, process_peak_bytes as of now.
        """
        rss = process_rss()
        copied = self._copied()
        return {
            "weight_bytes": self.weight_bytes,
            "pool_bytes": self.pool_bytes,
            "state_bytes": self.state_bytes,
            "copied_bytes": copied,
            "buffer_bytes": self._buffer_bytes,
            "other_bytes": max(0, rss - self._resident() - copied),
            "process_rss_bytes": rss,
            "process_peak_bytes": process_peak(),
        }

    def _resident(self) -> int:
        start = time.perf_counter()
        if start >= self._counted_until:
            regions = self._regions()
            found = resident_bytes(regions) if regions else None
            self._counted = (
                self.weight_bytes + self.pool_bytes + self.state_bytes if found is None else found
            )
            end = time.perf_counter()
            self._counted_until = end + _COUNTED_TIMES * (end - start)
        return self._counted


def check_weights_fit(weight_bytes: int, available: int) -> None:
    """CapacityError if weights about to be loaded exceed the available memory."""
    if weight_bytes > available:
        raise CapacityError(
            f"the weights take {gb(weight_bytes)}, {gb(available)} of memory are available; use "
            "a smaller model, weights='int4' (native runner) or dtype='bfloat16'; `kvboost-edge "
            "doctor MODEL` shows what each format takes"
        )


def memory_beside(available: int, weight_bytes: int) -> int:
    """What is left for a pool of the memory that was available before the weights were loaded.
    Weights of a mapped file go on counting as available once they are: a pool made of that would
    drive them out again and again.
    """
    return max(0, available - weight_bytes)


def plan_num_blocks(config: EngineConfig, info: RunnerInfo, available: int) -> int:
    """Blocks of the pool. `available` is memory beside the weights, see `memory_beside`.

    The smallest size that the config gives, else min(25% of the available memory, context x
    max_num_seqs, 16 where that is None), at least one block. The buffers of open blocks that a
    quantized pool needs come out of the same bytes. Raises CapacityError when the budget holds no
    block or the pool does not fit, with the copies of a runner that has such.
    """
    spec = info.kv_spec
    num_blocks = _wanted_blocks(config, spec, info.max_context, available)
    num_open = num_open_blocks(config, num_blocks, spec.block_size)
    block_bytes = spec.bytes_per_block
    open_bytes = num_open * spec.bytes_per_open_block
    if num_blocks < 1:
        beside = (
            f" beside {open_bytes} bytes for blocks that are not full yet" if open_bytes else ""
        )
        raise CapacityError(
            f"max_cache_bytes={config.max_cache_bytes} holds no block: one of {spec.block_size} "
            f"tokens takes {block_bytes} bytes in this model{beside}; give at least that"
        )
    pool_bytes = num_blocks * block_bytes + open_bytes
    needed = 2 * pool_bytes if info.copies_kv else pool_bytes
    if needed > available:
        copies = (
            f" + as much for the {info.name} runner's copies of what runs" if info.copies_kv else ""
        )
        raise CapacityError(
            f"weights {gb(info.weight_bytes)} + pool {gb(pool_bytes)} ({num_blocks} blocks of "
            f"{block_bytes} bytes){copies} exceed memory: {gb(available)} are available beside "
            "the weights; lower max_cache_bytes or num_blocks"
        )
    return num_blocks


def planned_pool_bytes(config: EngineConfig, spec: KVSpec, max_context: int, available: int) -> int:
    """Bytes the pool would take of so much memory; nothing is refused."""
    num_blocks = planned_blocks(config, spec, max_context, available)
    num_open = num_open_blocks(config, num_blocks, spec.block_size)
    return num_blocks * spec.bytes_per_block + num_open * spec.bytes_per_open_block


def planned_blocks(config: EngineConfig, spec: KVSpec, max_context: int, available: int) -> int:
    """Blocks the pool would have of so much memory; nothing is refused."""
    return max(1, _wanted_blocks(config, spec, max_context, available))


def most_sequences(config: EngineConfig, num_blocks: int, block_size: int) -> int:
    """Sequences that run together on a pool of that size."""
    if config.max_num_seqs is not None:
        return config.max_num_seqs
    return max(1, min(_MOST_SEQUENCES, num_blocks * block_size // _TOKENS_PER_SEQUENCE))


def num_open_blocks(config: EngineConfig, num_blocks: int, block_size: int) -> int:
    """Blocks that may be partly written at a time: one for each sequence and one to spare."""
    return most_sequences(config, num_blocks, block_size) + 1


def _wanted_blocks(config: EngineConfig, spec: KVSpec, max_context: int, available: int) -> int:
    counted = config.counted_blocks
    whole = -(-max_context // spec.block_size) * (config.max_num_seqs or _CONTEXTS)
    if not spec.bytes_per_block:  # blocks are bookkeeping alone
        return whole if counted is None else counted
    if counted is None:
        return _affordable_blocks(config, spec, whole, available)
    if config.max_cache_bytes is None:
        return counted
    return min(counted, _affordable_blocks(config, spec, whole, available))


def _affordable_blocks(config: EngineConfig, spec: KVSpec, whole: int, available: int) -> int:
    """Return the blocks that max_cache_bytes holds; without it those of a share of the available
    memory, at most `whole`.
    """
    if config.max_cache_bytes is not None:
        budget = config.max_cache_bytes
    elif config.max_memory is not None:
        budget = _left_for_pool(config, spec, available)
    else:
        budget = shared_out(available) // _POOL_SHARE
    # Of a budget all of which were blocks: at least as many sequences as will run beside the
    # buffers of open ones.
    gross = budget // spec.bytes_per_block
    num_open = num_open_blocks(
        config, gross if config.max_cache_bytes else min(gross, whole), spec.block_size
    )
    net = (budget - num_open * spec.bytes_per_open_block) // spec.bytes_per_block
    return net if config.max_cache_bytes is not None else max(1, min(net, whole))


def least_state_bytes(config: EngineConfig, spec: KVSpec) -> int:
    """Return the bytes of the fewest slots of states; 0 where there are none."""
    num_slots = LEAST_STATES + STATES_PER_SEQUENCE * (config.max_num_seqs or 1)
    return num_slots * spec.bytes_per_state


def _left_for_pool(config: EngineConfig, spec: KVSpec, available: int) -> int:
    """Return the bytes that the pool may take of the memory for pool and states under
    `max_memory`, without the bookkeeping of its blocks.
    """
    if config.max_state_bytes is not None:
        available -= config.max_state_bytes
    elif spec.states:
        available -= max(least_state_bytes(config, spec), available // (_POOL_SHARE + 1))
    block_bytes = spec.bytes_per_block
    return max(0, available) * block_bytes // (block_bytes + BLOCK_BOOKKEEPING)


def gb(num_bytes: int) -> str:
    """Write a size for an error, in GB or MB."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"
