"""The memory limit of the whole process, set by `max_memory`."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.memory.draft_plan import DraftPlan
from kvboost_edge.engine.memory.pool_size import (
    BLOCK_BOOKKEEPING,
    gb,
    least_state_bytes,
    mb_up,
    planned_blocks,
    pool_bytes,
)
from kvboost_edge.engine.memory.selection import Selection, bounded_context, usable_context
from kvboost_edge.errors import CapacityError, ConfigError
from kvboost_edge.host.memory import Region, give_back, process_rss, resident_bytes, shared_out
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.runners.base import RunnerInfo

__all__ = [
    "Overhead",
    "check_process",
    "history_bytes",
    "measured_overhead",
    "most_history_bytes",
    "pass_bytes",
    "room_in_process",
]

_LEAST_ADVISED_CONTEXT = 256  # tokens; error messages do not suggest a shorter context
_RESIDENT_SPREAD = 4 << 20  # measured overhead varies by less than this between starts
_HISTORY_SHARE = 16  # the draft history gets 1/16 of what weights and overhead leave
_MOST_HISTORY_BYTES = 128 << 20


class Overhead(NamedTuple):
    """Memory of the process other than weights, pool and recurrent state, in bytes.

    Attributes:
        resident: Measured memory of the interpreter, packages, machine code and tokenizer.
        buffers: Computed size of the buffers for the largest passes. They become resident when such
            passes run.
    """

    resident: int
    buffers: int

    @property
    def nbytes(self) -> int:
        return self.resident + self.buffers

    def measured_again(self, weights: Iterable[Region]) -> Overhead:
        """Measure the overhead again, without resident weights.

        The result is never less than the first measurement.
        """
        # The OS may have dropped pages of machine code that will be loaded again.
        resident = process_rss() - (resident_bytes(weights) or 0)
        return self._replace(resident=max(self.resident, resident))


def measured_overhead(
    checkpoint: Checkpoint,
    config: EngineConfig,
    selected: Selection,
    draft: DraftPlan | None = None,
) -> Overhead | None:
    """Measure the process before the weights are loaded.

    Returns:
        The overhead, or None without `max_memory`.

    Raises:
        ConfigError: The runner's buffer sizes are unknown.
    """
    if config.max_memory is None:
        return None
    if selected.runner.name != "native":
        raise ConfigError(
            f"max_memory={config.max_memory} needs the native runner, but the model runs on the "
            f"{selected.runner.name} runner, whose buffers are unknown; remove max_memory and "
            "limit the pool with max_cache_bytes"
        )
    from kvboost_edge.runners.native.runner import load_kernels

    give_back()  # return freed memory to the OS, mainly from loading the tokenizer
    # Load the kernels so that their machine code is measured too.
    is_wide = config.arithmetic == "wide"
    sparse = config.prefill != "exact"
    load_kernels(
        checkpoint, selected.runner.weights, config.kv_bits, is_wide=is_wide, sparse=sparse
    )
    if draft is not None:
        draft.load_kernels()
    return Overhead(process_rss(), pass_bytes(checkpoint, config, selected, draft))


def pass_bytes(
    checkpoint: Checkpoint,
    config: EngineConfig,
    selected: Selection,
    draft: DraftPlan | None = None,
) -> int:
    """Return the size of the buffers for the largest passes in bytes, or 0 if unknown.

    The draft model has buffers of its own.
    """
    if selected.runner.name != "native":
        return 0
    from kvboost_edge.runners.native.buffers import largest_bytes

    context = bounded_context(usable_context(checkpoint.config), config)
    num_tokens = min(config.max_batch_tokens, context)
    own = largest_bytes(checkpoint.spec, num_tokens, context)
    if draft is None:
        return own
    context = draft.info.max_context
    return own + largest_bytes(draft.spec, min(num_tokens, context), context)


def room_in_process(
    config: EngineConfig, weight_bytes: int, left: int, overhead: Overhead | None
) -> int:
    """Return the memory for the pool and recurrent state, in bytes.

    Args:
        config: Options of the engine.
        weight_bytes: Size of the weights.
        left: Available memory of the machine after the weights. It is an upper limit.
        overhead: Measured overhead, or None without `max_memory`.
    """
    if overhead is None:
        return left
    rest = max(0, _rest(config, weight_bytes, overhead))
    return min(left, rest - _history(rest))


def most_history_bytes(config: EngineConfig, bound: int | None) -> int:
    """Return the maximum size of the draft history in bytes.

    Args:
        config: Options of the engine.
        bound: Result of `history_bytes`.
    """
    if config.speculation == "off":
        return 0
    return _MOST_HISTORY_BYTES if bound is None else bound


def history_bytes(config: EngineConfig, weight_bytes: int, overhead: Overhead | None) -> int | None:
    """Return the byte limit of the draft history, or None for the default."""
    if overhead is None:
        return None
    return _history(max(0, _rest(config, weight_bytes, overhead)))


def check_process(
    config: EngineConfig,
    info: RunnerInfo,
    overhead: Overhead | None,
    packing: int = 0,
    formats: Callable[[], Mapping[str, int]] = dict,
) -> None:
    """Check that `max_memory` is large enough.

    It must hold the weights, the overhead, and either the requested pool or one full context.

    Args:
        config: Options of the engine.
        info: The planned runner's description.
        overhead: Measured overhead, or None without `max_memory`.
        packing: Memory in bytes for packing the weights, which happens before buffers and pool
            exist.
        formats: Function that returns the size of the weights in each supported format, in bytes.

    Raises:
        CapacityError: `max_memory` is too small. The message lists each part.
    """
    if overhead is None:
        return
    allowed = shared_out(config.max_memory or 0)
    is_sized = config.max_cache_bytes is not None or config.counted_blocks is not None
    pool, states, room = _least_room(config, info, is_sized=is_sized)
    needed = info.weight_bytes + overhead.nbytes + room
    least = max(needed, overhead.resident + packing)
    if needed <= allowed < least:
        raise CapacityError(
            f"max_memory={gb(allowed)} is less than the measured overhead of "
            f"{gb(overhead.resident)} and the {gb(packing)} needed to pack the weights; give at "
            f"least {mb_up(least)}"
        )
    if needed <= allowed:
        return
    asked = "the requested pool" if is_sized else f"one context of {info.max_context} tokens"
    parts = [
        f"weights {gb(info.weight_bytes)}",
        f"measured overhead {gb(overhead.resident)}",
        f"buffers {gb(overhead.buffers)}",
        *([f"states {gb(states)}"] if states else []),
        *([f"{asked} {gb(pool)}"] if pool else []),
        *([f"bookkeeping and drafts {gb(room - pool - states)}"] if room > pool + states else []),
    ]
    levers = []
    if pool and is_sized:
        levers.append("max_cache_bytes or num_blocks")
    elif pool:
        context = 0 if overhead.resident + packing > allowed else _context(config, info, overhead)
        fits = f"{context} fits; " if context else ""
        levers.append(f"max_model_len ({fits}--ctx-size)")
    levers.append("max_batch_tokens")
    if pool and max(config.kv_bits) > 4:
        levers.append("kv_cache_bits (--kv-cache-bits)")
    packed = f", and {gb(least)} while it packs the weights for the first time"
    peak = packed if least > needed else ""
    weights = _smaller_weights(info.weight_bytes, needed - allowed, formats())
    raise CapacityError(
        f"max_memory={gb(allowed)} is less than the process needs: {' + '.join(parts)} = "
        f"{gb(needed)}{peak}; give at least {mb_up(least)}, {weights}or lower {', '.join(levers)}"
    )


def _smaller_weights(current: int, missing: int, formats: Mapping[str, int]) -> str:
    """Return advice to use a weight format smaller than `current` bytes.

    The advice names the largest format that saves the missing bytes, or else the smallest format.
    It is "" if no format is smaller.
    """
    sizes = {count: name for name, count in formats.items() if count < current}
    if not sizes:
        return ""
    chosen = max((count for count in sizes if current - count >= missing), default=min(sizes))
    name = sizes[chosen]
    return f"choose weights={name} ({gb(chosen)}; -o weights={name}, in serve --weights {name}), "


def _context(config: EngineConfig, info: RunnerInfo, overhead: Overhead) -> int:
    """Return the longest context whose smallest pool fits, or 0 if it is too short to suggest."""
    rest = _rest(config, info.weight_bytes, overhead) - _RESIDENT_SPREAD
    block_size = info.kv_spec.block_size

    def room(num_blocks: int) -> int:
        bounded = dataclasses.replace(info, max_context=num_blocks * block_size)
        return _least_room(config, bounded, is_sized=False)[2]

    candidates = range(1, info.max_context // block_size + 1)
    context = bisect.bisect_right(candidates, rest, key=room) * block_size
    return context if context >= _LEAST_ADVISED_CONTEXT else 0


def _least_room(config: EngineConfig, info: RunnerInfo, *, is_sized: bool) -> tuple[int, int, int]:
    """Return the bytes needed by the smallest pool.

    Returns:
        The pool, its recurrent state, and the total of both with bookkeeping and draft history.
    """
    spec = info.kv_spec
    if not info.stores_kv:
        return 0, 0, 0
    num_blocks = (
        planned_blocks(config, spec, info.max_context, 0)
        if is_sized
        else -(-info.max_context // spec.block_size)
    )
    pool = pool_bytes(config, spec, num_blocks)
    room = pool + num_blocks * BLOCK_BOOKKEEPING
    if not is_sized:  # `_left_for_pool` rounds down, so add a margin
        room += 2 * (spec.bytes_per_block + BLOCK_BOOKKEEPING) + spec.bytes_per_open_block
    states = config.max_state_bytes or least_state_bytes(config, spec)
    if states and not is_sized and config.max_state_bytes is None:
        states = max(states, -(-room // 4))
    room += states
    history = min(_MOST_HISTORY_BYTES, -(-room // (_HISTORY_SHARE - 1)))
    return pool, states, room + history


def _rest(config: EngineConfig, weight_bytes: int, overhead: Overhead) -> int:
    """Return the bytes left after weights and overhead. Negative if these do not fit."""
    return shared_out(config.max_memory or 0) - weight_bytes - overhead.nbytes


def _history(rest: int) -> int:
    return min(_MOST_HISTORY_BYTES, rest // _HISTORY_SHARE)
