"""Statistics of a running engine, read under its lock. Counters start at zero with the engine."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from kvboost_edge.engine.memory.state_budget import most_draft_tokens
from kvboost_edge.host.processor import default_num_threads, describe_cpu
from kvboost_edge.tiers.base import TierStats

if TYPE_CHECKING:
    from kvboost_edge.config import EngineConfig
    from kvboost_edge.engine.build import EngineParts
    from kvboost_edge.engine.offload.tiering import NoTiers
    from kvboost_edge.engine.schedule.scheduler import Scheduler
    from kvboost_edge.kvcache.manager import KVCacheManager

__all__ = [
    "BLOCK_SPAN",
    "BlockDetail",
    "StepTimes",
    "block_details",
    "block_map",
    "cache_stats",
    "paged_stats",
]

BLOCK_SPAN = 4
"""State of a block that a request uses at another position. The manager's states are 0 to 3."""

_BOUNDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
)  # seconds


class StepTimes:
    """A histogram of step durations since the start. Failed forward passes are excluded."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._counts = [0] * (len(_BOUNDS) + 1)

    def observe(self, seconds: float) -> None:
        """Record the duration of a step."""
        self.seconds += seconds
        self._counts[bisect.bisect_left(_BOUNDS, seconds)] += 1

    def cumulative(self) -> dict[str, int]:
        """Return the cumulative number of steps by upper bound in seconds, as in Prometheus."""
        names = (*map(str, _BOUNDS), "+Inf")
        return dict(zip(names, itertools.accumulate(self._counts), strict=True))


def cache_stats(parts: EngineParts, tiering: NoTiers) -> dict[str, float]:
    """Return cache statistics under KVBoost's names, which call a block a chunk.

    Pool:
        hot_chunks: full blocks in the prefix index, used or cached.
        hot_memory_mb: size of these blocks, in MB.
        budget_mb: size of the pool, in MB.
        budget_utilization: share of the pool that these blocks use, 0 to 1.

    Prompts, in whole blocks since the start:
        cache_hits: blocks found as a prefix.
        approximate_hits: blocks reused from other positions.
        cache_misses: blocks computed.
        evictions: cached blocks whose space was given to other tokens.
        hit_rate: share of exact and approximate hits, 0 to 1.
        exact_hit_rate: share of exact hits, 0 to 1.

    Disk tier, all 0 without one; a Redis tier has the same figures, named redis_*:
        disk_chunks: blocks on disk.
        disk_memory_mb: size of the blocks on disk, in MB.
        disk_budget_mb: largest size of the blocks on disk, in MB.
        disk_hits: blocks read and verified.
        disk_misses: blocks that were looked up and not found.
        disk_writes: blocks written.
        disk_evictions: blocks evicted from disk.
        disk_refused: blocks that were damaged or did not match, and were dropped.
        disk_lost: blocks that could not be stored.
        disk_errors: failed operations of the device.
    """
    manager = parts.manager
    block_bytes = parts.backend.spec.bytes_per_block
    hot = manager.published_block_count
    hits = manager.hit_tokens
    moved = manager.spans.num_tokens
    misses = _miss_tokens(manager)
    looked_up = hits + moved + misses
    return {
        "hot_chunks": hot,
        "hot_memory_mb": hot * block_bytes / 1e6,
        "budget_mb": manager.num_blocks * block_bytes / 1e6,
        "budget_utilization": hot / manager.num_blocks,
        "cache_hits": hits // manager.block_size,
        "approximate_hits": moved // manager.block_size,
        "cache_misses": misses // manager.block_size,
        "evictions": manager.evictions,
        "hit_rate": (hits + moved) / looked_up if looked_up else 0.0,
        "exact_hit_rate": hits / looked_up if looked_up else 0.0,
        **_tier_stats("disk", TierStats()),
        **{
            key: value
            for name, stat in tiering.stats().items()
            for key, value in _tier_stats(name, stat).items()
        },
    }


def _miss_tokens(manager: KVCacheManager) -> int:
    """Return the number of prompt tokens that were neither cached nor reused in spans."""
    return manager.miss_tokens + manager.spans.num_cut_tokens


def _tier_stats(name: str, stat: TierStats) -> dict[str, float]:
    return {
        f"{name}_chunks": stat.blocks or 0,
        f"{name}_memory_mb": (stat.bytes or 0) / 1e6,
        f"{name}_budget_mb": (stat.max_bytes or 0) / 1e6,
        f"{name}_hits": stat.read_blocks,
        f"{name}_misses": stat.missing,
        f"{name}_writes": stat.written_blocks,
        f"{name}_evictions": stat.evicted,
        f"{name}_refused": stat.refused,
        f"{name}_lost": stat.not_written,
        f"{name}_errors": stat.errors,
    }


def paged_stats(
    parts: EngineParts,
    scheduler: Scheduler,
    config: EngineConfig,
    tiering: NoTiers,
    step_times: StepTimes,
    num_waiting: int,
) -> dict[str, Any]:
    """Return statistics of the pool and the engine, by name. Counters count since the start.

    Blocks:
        num_blocks: blocks of the pool.
        block_size: tokens in a block.
        bytes_per_block: size of a block across all layers, in bytes.
        occupied_blocks: blocks that hold KV: used_blocks and cached_blocks.
        cache_utilization: share of the pool that is occupied, 0 to 1. It stays near 1 once the
            cache is full.
        used_blocks: blocks that sequences or pins reference; 0 in an idle engine without pins.
        block_utilization: share of the pool in use, 0 to 1. Cached blocks do not count.
        shared_blocks: used blocks with more than one reference.
        cached_blocks: unreferenced blocks that still match prompts.
        free_blocks: blocks that are not in use, including cached ones.
        pinned_blocks: used blocks of pinned prompts, at most max_pinned_blocks.
        max_pinned_blocks: maximum number of pinned blocks.
        pinned_bytes: size of the pinned blocks, a part of pool_bytes.
        retained_blocks: blocks that are evicted after all other blocks of their tenant.
        loaded_chunks: full blocks in the prefix index, used or cached. KVBoost's name.
        blocks_used_by_chunks: the same number, under KVBoost's other name.
        evictions: cached blocks whose space was given to other tokens.
        cow_copies: shared blocks that were copied before a write (copy-on-write).
        tokens_held: tokens whose KV is in the pool; shared tokens count once.

    Tokens:
        hit_tokens: prompt tokens found as a prefix.
        span_tokens: prompt tokens reused from other positions.
        miss_tokens: prompt tokens computed.
        generated_tokens: generated tokens.
        drafted_tokens: draft tokens verified.
        accepted_tokens: draft tokens accepted, a part of generated_tokens.
        drafts: num_drafts, drafted_tokens and accepted_by_position of the verified drafts, by
            source: lookup, grammar, draft_model and mtp. accepted_by_position counts the drafts
            whose first, second and following tokens were accepted.
        max_draft_tokens: default limit of draft tokens per sequence and step. For a hybrid model,
            the limit for all sequences together.
        draft_vocabulary: number of token ids that the draft model or MTP head chooses draft tokens
            from where higher ids are rare. 0 without either.
        draft_failed: whether an error has turned the draft model or MTP head off until the engine
            is created again. The log has the error.

    Requests and steps:
        num_running: sequences that hold blocks.
        num_waiting: sequences that wait to be scheduled, including preempted ones.
        max_num_seqs: maximum number of sequences computed together.
        preemptions: number of times that a sequence lost its blocks and was recomputed.
        step_seconds: time of all steps, from schedule to sampled tokens, in seconds.
        step_counts: cumulative number of steps by upper bound on duration in seconds; "+Inf" counts
            all.

    Memory:
        weight_bytes: weights, in bytes.
        pool_bytes: block pool, in bytes.
        draft_weight_bytes: weights of the draft model or MTP head, in bytes.
        draft_pool_bytes: draft KV pool, in bytes. It has as many blocks as the block pool.
        state_bytes: slots of recurrent state, in bytes, including room for draft tokens.
        copied_bytes: copies of KV that the runner makes, in bytes.
        buffer_bytes: buffers of the largest pass and of the draft history, in bytes.
        draft_bytes: draft history, in bytes, at most 118 MB. It is part of other_bytes.
        other_bytes: remaining resident memory, in bytes: interpreter, packages, kernels,
            activations and the draft history.
        process_rss_bytes: resident memory of the process, in bytes.
        process_peak_bytes: maximum resident memory of the process so far, in bytes.

    Recurrent state of hybrid models, 0 for other models:
        state_slots: slots for recurrent states.
        state_slots_used: slots that hold a state.
        state_snapshots: slots that hold a snapshot, by the reason for keeping it.
        replayed_tokens: tokens recomputed only for their recurrent state.

    Hardware and runner:
        backend: name of the backend.
        device: device of the backend.
        runner: name of the runner: native, torch or onnx.
        isa: instruction set of the processor.
        kernel_path: active variant of the linear kernels, or "none" if torch's kernels run.
        attention_path: active variant of the attention kernels.
        threading_layer: name of the thread pool that runs the kernels.
        num_threads: number of compute threads.

    Offload tiers:
        tiers: fields of `TierStats`, by tier.
        staging_bytes: size of the blocks in transit between pool and tiers, in bytes.
        lost_blocks: blocks evicted before a tier could store them, for example because another
            process owns the disk cache.
        draft_restored_blocks: blocks whose KV of the draft model or MTP head came from a tier.
    """
    return {
        **_block_stats(parts, scheduler),
        **_token_stats(parts, scheduler, config),
        **_step_stats(parts, scheduler, step_times),
        "num_waiting": num_waiting,
        **_hardware_stats(parts, config),
        "tiers": {name: dataclasses.asdict(stat) for name, stat in tiering.stats().items()},
        "staging_bytes": tiering.staging_bytes,
        "lost_blocks": tiering.num_lost,
        "draft_restored_blocks": tiering.num_draft_restored,
    }


def _block_stats(parts: EngineParts, scheduler: Scheduler) -> dict[str, Any]:
    manager = parts.manager
    used = manager.used_block_count
    cached = manager.cached_block_count
    hot = manager.published_block_count
    private = _unpublished_tokens(manager, scheduler)
    return {
        "occupied_blocks": used + cached,
        "cache_utilization": (used + cached) / manager.num_blocks,
        "num_blocks": manager.num_blocks,
        "block_size": manager.block_size,
        "free_blocks": manager.free_block_count,
        "used_blocks": used,
        "cached_blocks": cached,
        "shared_blocks": manager.shared_block_count,
        "block_utilization": used / manager.num_blocks,
        "loaded_chunks": hot,
        "blocks_used_by_chunks": hot,
        "cow_copies": manager.cow_copies,
        "evictions": manager.evictions,
        "bytes_per_block": parts.backend.spec.bytes_per_block,
        "pinned_blocks": manager.pins.num_blocks,
        "max_pinned_blocks": manager.pins.max_blocks,
        "retained_blocks": manager.pins.num_retained,
        **parts.memory_report.snapshot(),
        "pinned_bytes": manager.pins.num_blocks * parts.backend.spec.bytes_per_block,
        "tokens_held": hot * manager.block_size + sum(private.values()),
    }


def _unpublished_tokens(manager: KVCacheManager, scheduler: Scheduler) -> dict[int, int]:
    """Return the number of computed tokens in each block that is not published, by id."""
    found: dict[int, int] = {}
    size = manager.block_size
    for sequence in scheduler.running:
        table = sequence.blocks
        is_private = [not manager.has_entry(block_id) for block_id in table.block_ids]
        if True not in is_private:
            continue
        for entry in table.entries(size, is_private.index(True)):
            if not manager.has_entry(entry.block_id):
                stop = min(entry.valid_to, table.num_computed_tokens)
                computed = max(0, stop - entry.first_position)
                found[entry.block_id] = max(computed, found.get(entry.block_id, 0))
    return found


def _token_stats(parts: EngineParts, scheduler: Scheduler, config: EngineConfig) -> dict[str, Any]:
    manager = parts.manager
    return {
        "hit_tokens": manager.hit_tokens,
        "span_tokens": manager.spans.num_tokens,
        "miss_tokens": _miss_tokens(manager),
        **_state_stats(manager),
        "generated_tokens": scheduler.num_generated_tokens,
        "drafted_tokens": scheduler.speculation.num_drafted,
        "accepted_tokens": scheduler.speculation.num_accepted,
        "drafts": {
            # A list, as JSON has no tuples.
            name: {**one._asdict(), "accepted_by_position": list(one.accepted_by_position)}
            for name, one in scheduler.speculation.counts.items()
        },
        "max_draft_tokens": most_draft_tokens(config, manager.states),
        "draft_vocabulary": scheduler.speculation.draft_vocabulary,
        "draft_failed": scheduler.speculation.draft_failed,
        "draft_bytes": scheduler.speculation.memory_bytes,
    }


def _step_stats(parts: EngineParts, scheduler: Scheduler, step_times: StepTimes) -> dict[str, Any]:
    return {
        "preemptions": scheduler.num_preemptions,
        "step_seconds": step_times.seconds,
        "step_counts": step_times.cumulative(),
        "max_num_seqs": parts.max_num_seqs,
        "num_running": len(scheduler.running),
    }


def _hardware_stats(parts: EngineParts, config: EngineConfig) -> dict[str, Any]:
    backend = parts.backend.describe()
    return {
        "backend": backend.name,
        "device": backend.device,
        "runner": parts.runner.info.name,
        "isa": _isa(),
        "kernel_path": parts.runner.info.kernel_path,
        "attention_path": backend.attention_path,
        "threading_layer": backend.threading_layer,
        "num_threads": backend.num_threads or config.num_threads or default_num_threads(),
    }


def _state_stats(manager: KVCacheManager) -> dict[str, Any]:
    states = manager.states
    return {
        "state_slots": 0 if states is None else states.slots.num_slots,
        "state_slots_used": 0 if states is None else states.slots.num_used,
        "state_snapshots": {} if states is None else states.slots.counts(),
        "replayed_tokens": 0 if states is None else states.num_replayed,
    }


class BlockDetail(NamedTuple):
    """The status of one block.

    Attributes:
        state: state number, as in `block_map`.
        tokens: number of tokens whose KV the block holds.
        refs: number of references to the block.
    """

    state: int
    tokens: int
    refs: int


def block_map(parts: EngineParts, scheduler: Scheduler) -> list[int]:
    """Return the state of every block by id, including BLOCK_SPAN for reused spans."""
    states = parts.manager.block_states()
    for sequence in scheduler.running:
        for span in sequence.blocks.spans:
            for block_id in span.block_ids:
                states[block_id] = BLOCK_SPAN
    return states


def block_details(parts: EngineParts, scheduler: Scheduler, limit: int) -> list[BlockDetail]:
    """Return the status of the first `limit` blocks, by id.

    Only computed tokens are counted in a partly filled block.
    """
    manager = parts.manager
    private = _unpublished_tokens(manager, scheduler)
    return [
        BlockDetail(
            state,
            manager.block_size if manager.has_entry(block_id) else private.get(block_id, 0),
            manager.ref_count(block_id),
        )
        for block_id, state in enumerate(block_map(parts, scheduler)[: max(0, limit)])
    ]


@functools.cache
def _isa() -> str:
    return describe_cpu().isa
