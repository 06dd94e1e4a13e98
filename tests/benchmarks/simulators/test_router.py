"""Tests of the routing simulator on a small scale: properties that do not depend on the machine's
speed.
"""

import numpy as np
import pytest

from benchmarks.simulators.router import Faults, floor, main, simulate, workload
from benchmarks.simulators.router_policies import POLICIES
from benchmarks.simulators.router_replicas import Shared, States

REPLICAS = 4


@pytest.fixture(scope="module")
def trace():
    return workload("chats", REPLICAS, 0.7, 240.0, 250)


@pytest.fixture(scope="module")
def best(trace):
    return floor(trace)


@pytest.fixture(scope="module")
def ours(trace):
    return simulate(trace, REPLICAS, "ours")[0]


def test_a_workload_is_reproducible_and_scales_with_the_replicas(trace):
    assert trace == workload("chats", REPLICAS, 0.7, 240.0, 250)
    assert [one.at for one in trace] == sorted(one.at for one in trace)
    more = workload("chats", 3 * REPLICAS, 0.7, 240.0)
    assert len({one.tenant for one in more}) > len({one.tenant for one in trace})
    unique = workload("unique", REPLICAS, 0.7, 240.0, 250)
    ids = [i for one in unique for i in (*one.prompt_ids, *one.output_ids)]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("policy", POLICIES)
def test_all_requests_are_done_and_none_finds_more_than_there_ever_was(policy, trace, best, ours):
    outcome = ours if policy == "ours" else simulate(trace, REPLICAS, policy)[0]
    assert outcome.num_done == len(trace)
    assert outcome.prompt_tokens == best.prompt_tokens
    assert 0 <= outcome.hit_tokens <= best.hit_tokens
    assert (outcome.stray, outcome.unknown) == (0, 0)
    assert len(outcome.ttft) == len(best.ttft)
    # No policy can be below the floor at any percentile.
    assert np.all(np.sort(outcome.ttft) >= np.sort(best.ttft) - 1e-9)


def test_routing_by_prefix_finds_more_tokens_than_round_robin(trace, ours):
    """The limits are for a short run on the virtual clock, which is equal on every machine."""
    blind, _ = simulate(trace, REPLICAS, "round robin")
    assert ours.hit_tokens > 1.5 * blind.hit_tokens
    assert sorted(ours.ttft)[len(ours.ttft) // 2] < sorted(blind.ttft)[len(blind.ttft) // 2]


@pytest.mark.parametrize(
    "faults",
    [Faults(lost=0.3), Faults(late=0.3), Faults(lost=0.2, late=0.2, dies_at=60.0, drains_at=90.0)],
    ids=["lost", "late", "all"],
)
def test_lost_and_late_messages_and_a_death_cost_time_only(faults, trace):
    outcome, made = simulate(trace, REPLICAS, "ours", faults)
    assert outcome.num_done == len(trace)
    assert outcome.stray == 0, "a request was sent to a removed replica"
    assert outcome.unknown == 0, "the router's beliefs are wrong after all messages arrived"
    assert len(made.alive) == REPLICAS - 2 * (faults.dies_at is not None)


def test_a_shared_tier_serves_what_any_replica_computed(trace, best):
    """Tokens computed on one replica are found by all, and the router's view matches the tier, also
    with lost and late events.
    """
    for faults in (Faults(), Faults(lost=0.2, late=0.2)):
        outcome, _ = simulate(trace, REPLICAS, "ours", faults, shared=Shared(5e-5))
        assert outcome.num_done == len(trace)
        assert outcome.read_tokens > 0
        assert best.hit_tokens * 0.95 <= outcome.hit_tokens <= best.hit_tokens
        assert (outcome.stray, outcome.unknown) == (0, 0)
        assert sum(outcome.ttft) >= sum(best.ttft)


def test_knowledge_of_the_tier_shortens_the_wait():
    """The prompts are long and similar, and the work is twice what the replicas could do without
    the tier. The limits are for a short run on the virtual clock, which is equal on every machine.
    """
    busy = workload("agents", REPLICAS, 2.0, 300.0, 500)
    told, untold = (
        simulate(busy, REPLICAS, "ours", shared=Shared(5e-5, is_told))[0]
        for is_told in (True, False)
    )
    assert np.percentile(told.ttft, 99) < 0.8 * np.percentile(untold.ttft, 99)
    assert np.mean(told.ttft) < 0.9 * np.mean(untold.ttft)


def test_runs_are_reproducible(trace, ours):
    assert simulate(trace, REPLICAS, "ours")[0].ttft == ours.ttft


def test_a_router_with_states_expects_the_actual_hits():
    """With few slots many blocks have no snapshot. A router that counts blocks only expects cache
    hits for a seventh of all tokens, which are computed instead. The limits are for a short run on
    the virtual clock, which is equal on every machine.
    """
    busy = workload("chats", REPLICAS, 1.2, 240.0, 600)
    seen, unseen = (
        simulate(busy, REPLICAS, "ours", states=States(64, are_seen))[0]
        for are_seen in (True, False)
    )
    assert (seen.unknown, unseen.unknown) == (0, 0)
    assert seen.missed_tokens < 0.02 * seen.prompt_tokens
    assert unseen.missed_tokens > 0.13 * unseen.prompt_tokens
    assert np.percentile(seen.ttft, 99) < 0.8 * np.percentile(unseen.ttft, 99)


def test_states_in_a_shared_tier_are_refused_by_name(monkeypatch):
    monkeypatch.setattr("sys.argv", ["router.py", "--quick", "--shared", "0.0", "--states", "64"])
    with pytest.raises(SystemExit, match=r"--states and --shared"):
        main()
