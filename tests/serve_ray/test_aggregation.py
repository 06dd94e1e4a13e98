"""Aggregation: the figures of several replicas as those of one engine."""

from kvboost_edge.serve_ray.aggregation import summed_paged


def replica(used, **snapshots):
    return {
        "block_size": 16,
        "num_blocks": 10,
        "used_blocks": used,
        "block_utilization": used / 10,
        "occupied_blocks": used + 3,
        "cache_utilization": (used + 3) / 10,
        "state_snapshots": snapshots,
        "step_counts": {"0.1": used, "+Inf": used + 1},
        "tiers": {},
    }


def test_snapshots_and_steps_are_summed_by_name():
    summed = summed_paged(
        [replica(2, prompt=3, hint=0), replica(5, prompt=4, hint=1), replica(5, prompt=0, hint=2)]
    )
    assert summed["state_snapshots"] == {"prompt": 7, "hint": 3}
    assert summed["step_counts"] == {"0.1": 12, "+Inf": 15}
    assert (summed["block_size"], summed["num_blocks"], summed["block_utilization"]) == (
        16,
        30,
        0.4,
    )
    assert (summed["occupied_blocks"], summed["cache_utilization"]) == (21, 0.7)


def test_replicas_without_states_have_no_snapshots():
    assert summed_paged([replica(1), replica(2)])["state_snapshots"] == {}


def test_blocks_of_a_shared_server_are_counted_once():
    def tiers(blocks):
        tier = {"blocks": blocks, "max_bytes": None, "read_blocks": 2, "writable": blocks > 3}
        state = "it is full" if blocks > 3 else ""
        return {"disk": {**tier, "state": ""}, "redis": {**tier, "state": state}}

    summed = summed_paged([{**replica(1), "tiers": tiers(blocks)} for blocks in (3, 5)])["tiers"]
    same = {"max_bytes": None, "read_blocks": 4, "writable": True}
    assert summed["disk"] == {"blocks": 8, "state": "", **same}
    assert summed["redis"] == {"blocks": 5, "state": "it is full", **same}
