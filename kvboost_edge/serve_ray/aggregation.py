"""Aggregation of the statistics of several replicas."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvboost_edge.serve_ray.messages import ReplicaFigures

__all__ = ["summed_cache", "summed_paged"]

_SAME = ("block_size", "bytes_per_block", "draft_vocabulary", "max_draft_tokens")  # settings
_COUNTS = ("state_snapshots", "step_counts", "drafts")  # dictionaries of counts
_SIZES = ("blocks", "bytes", "max_bytes")  # of the content of a store
_CACHE_SIZES = ("chunks", "memory_mb", "budget_mb")  # the same in `cache_stats`
_WEIGHTS = ("weight_bytes", "draft_weight_bytes")  # may be files that replicas share
_ONE_WRITER = ("disk",)  # Of the replicas that share a store, only its owner writes.


def summed_paged(figures: Sequence[ReplicaFigures]) -> dict[str, Any]:
    """Aggregate the `paged_stats` of several replicas.

    Counts are summed, ratios are recomputed, and `draft_failed` is true if it is true in any
    replica. Other values are those of the first replica. The sizes of a tier, and of a file of
    weights in memory, that several replicas share count once.
    """
    stats = [one.paged for one in figures]
    summed: dict[str, Any] = dict(stats[0])
    for name, value in summed.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and name not in _SAME:
            summed[name] = sum(one[name] for one in stats)
    for name in _COUNTS:
        summed[name] = _summed([one[name] for one in stats])
    for name in _WEIGHTS:
        summed[name] = _once_per_store(
            (one.weights.get(name, one.replica), one.paged[name]) for one in figures
        )
    summed["draft_failed"] = any(one["draft_failed"] for one in stats)
    summed["cache_utilization"] = summed["occupied_blocks"] / summed["num_blocks"]
    summed["block_utilization"] = summed["used_blocks"] / summed["num_blocks"]
    summed["tiers"] = {
        name: _summed_tier(
            name,
            [
                (_store_of(one, name), one.paged["tiers"][name])
                for one in figures
                if name in one.paged["tiers"]
            ],
        )
        for name in summed["tiers"]
    }
    return summed


def summed_cache(figures: Sequence[ReplicaFigures]) -> dict[str, float]:
    """Aggregate the `cache_stats` of several replicas, see `summed_paged`."""
    stats = [one.cache for one in figures]
    summed = {name: sum(one.get(name, 0) for one in stats) for name in stats[0]}
    for tier in {tier: None for one in figures for tier in one.stores}:
        for name in (f"{tier}_{size}" for size in _CACHE_SIZES):
            if name in summed:
                summed[name] = _once_per_store(
                    (_store_of(one, tier), one.cache.get(name, 0)) for one in figures
                )
    summed["budget_utilization"] = (
        summed["hot_memory_mb"] / summed["budget_mb"] if summed["budget_mb"] else 0.0
    )
    for name, kinds in (
        ("hit_rate", ("cache_hits", "approximate_hits")),
        ("exact_hit_rate", ("cache_hits",)),
    ):
        looked_up = summed["cache_hits"] + summed["approximate_hits"] + summed["cache_misses"]
        summed[name] = sum(summed[kind] for kind in kinds) / looked_up if looked_up else 0.0
    return summed


def _summed(counts: Sequence[Any]) -> Any:
    """Add numbers, lists of them, or dictionaries of either. Missing elements count as 0."""
    first = counts[0]
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for one in counts for key in one)
        return {key: _summed([one[key] for one in counts if key in one]) for key in keys}
    if isinstance(first, Sequence):
        return [sum(values) for values in itertools.zip_longest(*counts, fillvalue=0)]
    return sum(counts)


def _summed_tier(name: str, stats: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Aggregate a tier's figures, each given with the identity of the store."""
    summed = dict(stats[0][1])
    written = {store for store, one in stats if one["writable"]} if name in _ONE_WRITER else ()
    for field in summed:
        values = [(store, one[field]) for store, one in stats if one[field] is not None]
        if not values:
            continue
        if field == "writable":
            summed[field] = any(value for _, value in values)
        elif field == "state":  # the first problem, which is none if another replica writes
            problems = (
                one[field] for store, one in stats if one["writable"] or store not in written
            )
            summed[field] = next(filter(None, problems), "")
        elif field in _SIZES:
            summed[field] = _once_per_store(values)
        else:
            summed[field] = sum(value for _, value in values)
    return summed


def _store_of(figures: ReplicaFigures, tier: str) -> str:
    return figures.stores.get(tier, figures.replica)


def _once_per_store(values: Iterable[tuple[str, Any]]) -> Any:
    """Return the sum over the stores of the largest value that a replica reports."""
    largest: dict[str, Any] = {}
    for store, value in values:
        largest[store] = max(value, largest.get(store, value))
    return sum(largest.values())
