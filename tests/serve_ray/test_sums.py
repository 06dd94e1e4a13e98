"""The figures of several replicas as those of one."""

from __future__ import annotations

from typing import Any

from kvboost_edge.serve_ray.sums import summed_paged


def replica(used: int, **snapshots: int) -> dict[str, Any]:
    return {
        "block_size": 16, "num_blocks": 10, "used_blocks": used, "block_utilization": used / 10,
        "state_snapshots": snapshots, "tiers": {},
    }  # fmt: skip


def test_snapshots_of_all_replicas_are_counted_by_reason() -> None:
    summed = summed_paged([replica(2, prompt=3, hint=0), replica(5, prompt=4, hint=1), replica(5, prompt=0, hint=2)])
    assert summed["state_snapshots"] == {"prompt": 7, "hint": 3}
    assert (summed["block_size"], summed["num_blocks"], summed["block_utilization"]) == (16, 30, 0.4)


def test_replicas_without_states_have_no_snapshots() -> None:
    assert summed_paged([replica(1), replica(2)])["state_snapshots"] == {}
