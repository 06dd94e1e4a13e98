"""Aggregation of the statistics of several replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["summed_cache", "summed_paged"]

_SAME = ("block_size", "bytes_per_block")  # equal in all replicas
_COUNTS = ("state_snapshots", "step_counts")  # dictionaries of counts
_SHARED_TIERS = ("redis",)  # All replicas share one server, so its sizes count once.
_SIZES = ("blocks", "bytes", "max_bytes")


def summed_paged(stats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Aggregate the `paged_stats` of several replicas.

    Counts are summed, ratios are recomputed, and other values are those of the first replica.
    """
    summed: dict[str, Any] = dict(stats[0])
    for name, value in summed.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and name not in _SAME:
            summed[name] = sum(one[name] for one in stats)
    for name in _COUNTS:
        summed[name] = {key: sum(one[name].get(key, 0) for one in stats) for key in summed[name]}
    summed["cache_utilization"] = summed["occupied_blocks"] / summed["num_blocks"]
    summed["block_utilization"] = summed["used_blocks"] / summed["num_blocks"]
    summed["tiers"] = {
        name: _summed_tier(name, [one["tiers"][name] for one in stats if name in one["tiers"]])
        for name in summed["tiers"]
    }
    return summed


def summed_cache(stats: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Aggregate the `cache_stats` of several replicas."""
    summed = {name: sum(one.get(name, 0) for one in stats) for name in stats[0]}
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


def _summed_tier(name: str, stats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    summed = dict(stats[0])
    for field in summed:
        values = [one[field] for one in stats if one[field] is not None]
        if not values:
            continue
        if isinstance(values[0], str):  # the first problem of any replica
            summed[field] = next(filter(None, values), "")
        elif isinstance(values[0], bool):  # Only one replica owns a shared directory.
            summed[field] = any(values)
        elif name in _SHARED_TIERS and field in _SIZES:
            summed[field] = max(values)
        else:
            summed[field] = sum(values)
    return summed
