"""Aggregation: the figures of several replicas as those of one engine."""

from kvboost_edge.serve_ray.aggregation import summed_cache, summed_paged
from kvboost_edge.serve_ray.messages import ReplicaFigures


def figures(*paged, cache=(), stores=(), weights=()):
    """Return the figures of replicas with these results of `paged_stats`."""
    cached = cache or [{}] * len(paged)
    shared = stores or [{}] * len(paged)
    mapped = weights or [{}] * len(paged)
    return [
        ReplicaFigures(str(number), one, cached[number], 0, 0, 0, shared[number], mapped[number])
        for number, one in enumerate(paged)
    ]


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
        "drafts": {},
        "draft_failed": False,
        "weight_bytes": 700,
        "draft_weight_bytes": 30,
        "tiers": {},
    }


def test_snapshots_and_steps_are_summed_by_name():
    summed = summed_paged(
        figures(
            replica(2, prompt=3, hint=0),
            replica(5, prompt=4, hint=1),
            replica(5, prompt=0, hint=2),
        )
    )
    assert summed["state_snapshots"] == {"prompt": 7, "hint": 3}
    assert summed["step_counts"] == {"0.1": 12, "+Inf": 15}
    assert (summed["block_size"], summed["num_blocks"], summed["block_utilization"]) == (
        16,
        30,
        0.4,
    )
    assert (summed["occupied_blocks"], summed["cache_utilization"]) == (21, 0.7)


def test_weights_that_replicas_share_count_once():
    first, second = {"weight_bytes": "m1:8:5"}, {"weight_bytes": "m2:8:5"}
    summed = summed_paged(
        figures(*[replica(1)] * 4, weights=[first, second, {}, first | {"draft_weight_bytes": "x"}])
    )
    assert (summed["weight_bytes"], summed["draft_weight_bytes"]) == (3 * 700, 4 * 30)


def test_replicas_without_states_have_no_snapshots():
    assert summed_paged(figures(replica(1), replica(2)))["state_snapshots"] == {}


def tier(blocks, *, writable=True, state=""):
    return {
        "blocks": blocks,
        "max_bytes": 90,
        "read_blocks": 2,
        "writable": writable,
        "state": state,
    }


def test_blocks_of_a_shared_server_are_counted_once():
    first = {**tier(3, writable=False), "max_bytes": None}
    second = {**tier(5, state="it is full"), "max_bytes": None}
    found = figures(
        *({**replica(1), "tiers": {"redis": one}} for one in (first, second)),
        cache=[cached(redis=3), cached(redis=5)],
        stores=[{"redis": ""}] * 2,
    )
    expected = {**second, "read_blocks": 4}
    assert summed_paged(found)["tiers"] == {"redis": expected}
    summed = summed_cache(found)
    assert (summed["redis_chunks"], summed["redis_hits"]) == (5, 2)


def cached(**chunks):
    """Return `cache_stats` of a replica with these chunks by tier."""
    names = ("hot_memory_mb", "budget_mb", "cache_hits", "approximate_hits", "cache_misses")
    tiers = {
        f"{name}_{size}": value
        for name, count in chunks.items()
        for size, value in {
            "chunks": count,
            "memory_mb": count / 2,
            "budget_mb": 90.0,
            "hits": 1,
        }.items()
    }
    return {**dict.fromkeys(names, 1), **tiers}


def test_a_directory_of_several_replicas_is_counted_once():
    """Replicas 0 and 1 are on one machine, where 1 owns the directory, and 2 is on another one."""
    reader = tier(4, writable=False, state="owned by another process")
    found = figures(
        *({**replica(1), "tiers": {"disk": one}} for one in (reader, tier(5), tier(7))),
        cache=[cached(disk=4), cached(disk=5), cached(disk=7)],
        stores=[{"disk": "x"}, {"disk": "x"}, {"disk": "y"}],
    )
    expected = {**tier(12), "max_bytes": 180, "read_blocks": 6}
    assert summed_paged(found)["tiers"] == {"disk": expected}
    summed = summed_cache(found)
    sizes = [summed[f"disk_{name}"] for name in ("chunks", "memory_mb", "budget_mb", "hits")]
    assert sizes == [12, 6.0, 180.0, 3]


def test_the_problem_of_a_directory_without_a_writer_is_reported():
    broken = tier(4, writable=False, state="it cannot be written")
    found = figures(
        *({**replica(1), "tiers": {"disk": one}} for one in (tier(5), broken)),
        stores=[{"disk": "x"}, {"disk": "y"}],
    )
    summed = summed_paged(found)["tiers"]["disk"]
    assert (summed["writable"], summed["state"]) == (True, "it cannot be written")


def drafts(num_drafts, *accepted):
    return {
        "num_drafts": num_drafts,
        "drafted_tokens": 4 * num_drafts,
        "accepted_by_position": list(accepted),
    }


def test_draft_counts_are_summed_and_settings_are_not():
    first = {"drafts": {"lookup": drafts(1, 1), "mtp": drafts(2, 2, 1)}, "draft_failed": False}
    second = {"drafts": {"lookup": drafts(3, 3, 2, 1)}, "draft_failed": True}
    settings = {"max_draft_tokens": 8, "draft_vocabulary": 1000}
    summed = summed_paged(
        figures({**replica(1), **first, **settings}, {**replica(1), **second, **settings})
    )
    assert summed["drafts"] == {"lookup": drafts(4, 4, 2, 1), "mtp": drafts(2, 2, 1)}
    assert summed["draft_failed"] is True
    assert {name: summed[name] for name in settings} == settings


def test_every_count_of_an_engine_is_summed(alone):
    """The values that are equal in the sum are settings, texts and ratios."""
    alone.generate("One two one two one two", max_new_tokens=4)
    one = alone.paged_stats()
    both = summed_paged(figures(one, one))
    numbers = {
        name: value
        for name, value in one.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value
    }
    assert {name for name in numbers if both[name] == numbers[name]} == {
        "block_size",
        "bytes_per_block",
        "cache_utilization",
        "max_draft_tokens",
    }
    assert both["step_counts"]["+Inf"] == 2 * one["step_counts"]["+Inf"]
