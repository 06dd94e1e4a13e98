"""Routing: the least expected time, against a plain sum; stable homes; only replicas that exist."""

import collections

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.serve_ray.router_beliefs import chain_of_tokens, check_router
from kvboost_edge.kvcache.hashing import shared_root
from kvboost_edge.serve_ray.routing.cache_records import (
    KEY_BYTES,
    NOTHING_KNOWN,
    EventBatch,
    ReplicaReport,
)
from kvboost_edge.serve_ray.routing.prompt_chain import Outside, PromptChain
from kvboost_edge.serve_ray.routing.router import PrefixRouter

SPEED = 1e-3
ROOT = b"r" * 32


def chain(keys, num_tokens=None, cache_key=None):
    """Build the chain of a prompt with blocks of 16 tokens and one token more."""
    return PromptChain(tuple(keys), num_tokens or 16 * len(keys) + 1, 16, cache_key)


def told(keys, serial=0):
    return [
        EventBatch(
            1, serial, True, b"".join(key.to_bytes(KEY_BYTES, "little") for key in keys), b""
        )
    ]


def report(serial=0, **figures):
    return ReplicaReport(serial=serial, **{"seconds_per_token": SPEED, **figures})


def router_of(num_replicas, **options):
    router = PrefixRouter(**options)
    router.set_members(f"r{number}" for number in range(num_replicas))
    for number in range(num_replicas):
        router.take_report(f"r{number}", report(), 0.0)
    return router


def best(router, prompt, now=0.0, among=None):
    return router.choose(prompt, now, among)[0]


def first(router, prompt, now=0.0):
    return best(router, prompt, now).replica_id


replicas = st.lists(
    st.tuples(
        st.integers(0, 30), st.integers(0, 900), st.integers(0, 20), st.booleans(), st.booleans()
    ),
    min_size=1,
    max_size=12,
)


@given(replicas, st.integers(1, 30), st.booleans())
def test_the_choice_minimises_the_expected_time(figures, length, among_only):
    """`figures` has for each replica (blocks held, tokens queued, requests running, draining,
    allowed). The expected times are computed here by plain sums.
    """
    router = router_of(len(figures))
    keys = list(range(1000, 1000 + length))
    sums = {}
    allowed = []
    for number, (held, queued, running, draining, asked) in enumerate(figures):
        name = f"r{number}"
        held = min(held, length)
        router.take_events(name, told(keys[:held]), 0.0)
        router.take_report(
            name,
            report(
                1,
                queued_tokens=queued,
                num_running=running,
                decode_seconds=0.01,
                is_draining=draining,
            ),
            0.0,
        )
        missing = 16 * (length - held) + 1
        own = missing * SPEED / (1 - running / 512)
        if not draining and (asked or not among_only):
            allowed.append(name)
            sums[name] = queued * SPEED + own + 0.01, own, held, missing
    among = [f"r{number}" for number, one in enumerate(figures) if one[4]] if among_only else None
    choices = router.choose(chain(keys), 0.0, among, count=len(figures))
    assert sorted(choice.replica_id for choice in choices) == sorted(allowed)
    for choice in choices:
        seconds, _, held, missing = sums[choice.replica_id]
        assert choice.expected_seconds == pytest.approx(seconds)
        assert (choice.matched_tokens, choice.missing_tokens) == (16 * held, missing)
    if choices:
        ranks = {name: seconds + own / 2 for name, (seconds, own, _, _) in sums.items()}
        least = min(ranks.values())
        assert ranks[choices[0].replica_id] <= least * 1.02 + 1e-3 + 1e-9
        near = [name for name, rank in ranks.items() if rank <= least * 1.02 + 1e-3 - 1e-9]
        assert sums[choices[0].replica_id][2] >= max((sums[name][2] for name in near), default=0)
    check_router(router)


DISK = 0.1 * SPEED
SERVER = 0.3 * SPEED
tiered = st.lists(
    st.tuples(
        st.integers(0, 30), st.integers(0, 30), st.booleans(), st.booleans(), st.integers(0, 300)
    ),
    min_size=1,
    max_size=8,
)


@given(tiered, st.integers(0, 30), st.integers(1, 24))
def test_tier_blocks_cost_their_read_time(figures, on_server, length):
    """The disk is read from the end of the pool's blocks, the server from the end of the disk's,
    while the queue is computed.

    `figures` has for each replica (blocks in the pool, blocks on disk, has a disk, has the server,
    tokens queued). The first replica reports the server's blocks. At most eight blocks of a disk
    are reported, because more are not all distinguished.
    """
    router = router_of(len(figures))
    keys, disk, server = (list(range(start, start + length)) for start in (1000, 2000, 3000))
    # Every third block of the disk is reported, and every other one of the server. The last
    # reported block counts.
    on_disk = Outside(tuple(disk[2::3]), tuple(range(3, length + 1, 3)))
    shared = Outside(tuple(server[1::2]), tuple(range(2, length + 1, 2)))
    prompt = PromptChain(tuple(keys), 16 * length + 1, 16, None, on_disk, shared)
    on_server = min(on_server, length) // 2 * 2
    sums = {}
    for number, (pool, held, has_disk, has_server, queued) in enumerate(figures):
        name = f"r{number}"
        pool = min(pool, length)
        held = min(held, length) // 3 * 3
        told_here = [*keys[:pool], *disk[2:held:3], *(server[1:on_server:2] if number == 0 else [])]
        router.take_events(name, told(told_here), 0.0)
        speeds = {
            "disk_token_seconds": DISK * has_disk,
            "shared_token_seconds": SERVER * has_server,
        }
        router.take_report(name, report(1, queued_tokens=queued, **speeds), 0.0)
        disk_end = max(pool, held) if has_disk else pool
        end = max(disk_end, on_server) if has_server else disk_end
        reading = 16 * ((disk_end - pool) * DISK + (end - disk_end) * SERVER)
        missing = 16 * (length - end) + 1
        sums[name] = (
            16 * pool,
            missing,
            max(queued * SPEED, reading) + missing * SPEED,
            16 * (end - pool),
        )
    for choice in router.choose(prompt, 0.0, count=len(figures)):
        matched, missing, seconds, restored = sums[choice.replica_id]
        assert (choice.matched_tokens, choice.missing_tokens, choice.restored_tokens) == (
            matched,
            missing,
            restored,
        )
        assert choice.expected_seconds == pytest.approx(seconds)
    check_router(router)


def test_a_fast_tier_moves_a_prompt_away_from_a_busy_replica():
    """The home holds the prompt but is busy. Waiting there is faster than recomputing elsewhere,
    but slower than reading from the tier.
    """
    prompt = chain_of_tokens(list(range(1600)), ROOT, 16)
    for speed, goes in ((0.0, "r0"), (SERVER, "r1")):
        router = router_of(2)
        router.take_events("r0", told([*prompt.keys, *prompt.shared.keys]), 0.0)
        for number, queued in enumerate((1200, 0)):
            figures = {"queued_tokens": queued, "shared_token_seconds": speed}
            router.take_report(f"r{number}", report(1, **figures), 0.0)
        assert first(router, prompt) == goes


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "remove", "drain", "route", "tell"]), st.integers(0, 7)),
        max_size=60,
    )
)
def test_absent_and_draining_replicas_are_not_chosen(steps):
    router = PrefixRouter()
    members = set()
    draining = set()
    for now, (what, number) in enumerate(steps):
        name = f"r{number}"
        prompt = chain([number, number + 1])
        if what == "add":
            router.add(name)
            draining -= {name} - members
            members.add(name)
        elif what == "remove":
            router.remove(name)
            members.discard(name)
        elif what == "drain":
            router.take_report(name, report(now, is_draining=True), now)
            draining |= {name} & members
        elif what == "tell":  # by a removed replica: no effect
            assert router.take_events(name, told([number], serial=now), now)
        choices = router.choose(prompt, now, count=8)
        assert {choice.replica_id for choice in choices} == members - draining
        for choice in choices[:1]:
            router.note_routed(choice, prompt, now)
        check_router(router)
    router.set_members(["r1", "x"])
    assert set(router.members()) == {"r1", "x"}
    check_router(router)


def test_an_identical_prompt_follows_the_first_one():
    router = router_of(50)
    prompt = chain(range(40))
    choice = best(router, prompt)
    router.note_routed(choice, prompt, 0.0)
    again = best(router, prompt, 100.0)
    assert (again.replica_id, again.missing_tokens) == (choice.replica_id, 1)
    assert best(router, prompt, 500.0).missing_tokens == prompt.num_tokens, (
        "unconfirmed blocks must expire"
    )


def test_a_fully_cached_prompt_computes_its_last_token():
    router = router_of(2)
    prompt = chain(range(4), num_tokens=64)
    router.take_events("r1", told(range(4)), 0.0)
    choice = best(router, prompt)
    assert (choice.replica_id, choice.matched_tokens, choice.missing_tokens) == ("r1", 63, 1)


def test_all_routers_agree_on_the_replica_of_a_cold_prefix():
    """Two routers do not know of each other. If a replica leaves, only the prefixes that had their
    home there move.
    """
    routers = [router_of(20), PrefixRouter()]
    routers[1].set_members(f"r{number}" for number in reversed(range(20)))
    prompts = [chain([1000 + number, 7, 8]) for number in range(400)]
    homes = [[first(router, prompt) for prompt in prompts] for router in routers]
    assert homes[0] == homes[1]
    counts = collections.Counter(homes[0])
    assert len(counts) == 20
    assert max(counts.values()) < 3 * 400 / 20
    routers[0].remove("r3")
    after = [first(routers[0], prompt) for prompt in prompts]
    assert [now for now, before in zip(after, homes[0], strict=True) if before != "r3"] == [
        home for home in homes[0] if home != "r3"
    ]


def test_the_replica_with_most_blocks_wins_among_nearly_equal_ones():
    """Two of two hundred blocks are 1% of the time. Such times count as equal, and otherwise the
    home would decide.
    """
    router = router_of(20)
    router.take_events("r7", told([1, 2]), 0.0)
    tails = [range(1000 * number, 1000 * number + 198) for number in range(1, 11)]
    assert {first(router, chain([1, 2, *tail])) for tail in tails} == {"r7"}
    assert len({first(router, chain([3, 4, *tail])) for tail in tails}) == 1  # the home of chain 3
    assert len({first(router, chain([*tail])) for tail in tails}) > 3


def test_a_hot_prefix_spreads_only_if_its_replica_is_full():
    """The head takes 0.48 s on a replica without it. A request leaves its home only if the queue
    there takes that much longer than elsewhere.
    """
    router = router_of(10)
    head = list(range(30))
    used = collections.Counter()
    for number in range(6):
        prompt = chain([*head, *range(500 + 10 * number, 510 + 10 * number)])
        choice = best(router, prompt)
        router.note_routed(choice, prompt, 0.0)
        used[choice.replica_id] += 1
    assert 1 < len(used) < 5
    later = best(router, chain([*head, 900]), 60.0)
    assert later.replica_id in used
    assert later.missing_tokens == 17


def test_routed_work_counts_until_reported_and_decays():
    router = router_of(1)
    prompt = chain(range(100))
    cold = best(router, prompt)
    router.note_routed(cold, prompt, 0.0)
    other = chain([5000])
    waits = [best(router, other, now).expected_seconds for now in (0.0, 1.0, 5.0)]
    assert waits == pytest.approx([1.601 + 0.017, 0.601 + 0.017, 0.017])
    router.take_report(
        "r0", report(1), 0.01
    )  # made before the request arrived, so the request still counts
    assert best(router, other, 0.01).expected_seconds == pytest.approx(1.601 + 0.017)
    router.take_report("r0", report(2, queued_tokens=400), 1.0)
    assert best(router, other, 1.0).expected_seconds == pytest.approx(0.4 + 0.017)
    router.take_report("r0", report(1, queued_tokens=9999), 1.0)  # late
    assert best(router, other, 1.0).expected_seconds == pytest.approx(0.4 + 0.017)


def test_work_routed_to_an_idle_replica_counts_from_now():
    router = router_of(1)
    prompt = chain(range(100))
    router.note_routed(best(router, prompt, 1000.0), prompt, 1000.0)
    assert best(router, chain([5000]), 1000.0).expected_seconds == pytest.approx(1.601 + 0.017)


def test_routed_work_that_never_arrived_is_dropped():
    router = router_of(1)
    prompt = chain(range(100))
    choice = best(router, prompt)
    router.note_routed(choice, prompt, 0.0)
    router.note_not_started(choice)
    router.note_not_started(choice)  # counts once
    assert best(router, chain([5000])).expected_seconds == pytest.approx(0.017)


@pytest.mark.parametrize(
    "full",
    [{"num_running": 4, "max_running": 4}, {"num_running": 1, "free_blocks": 2}],
    ids=["places", "blocks"],
)
def test_a_full_replica_costs_the_wait_for_a_free_place(full):
    router = router_of(2)
    keys = list(range(20))
    router.take_events("r0", told(keys[:10]), 0.0)
    assert first(router, chain(keys)) == "r0"
    router.take_report("r0", report(1, answer_seconds=8.0, **full), 0.0)
    assert first(router, chain(keys)) == "r1"


def test_a_cache_key_is_a_preference_not_a_rule():
    router = router_of(20)
    prompts = [chain_of_tokens([number] * 40, ROOT, 16, "mine") for number in range(30)]
    homes = {first(router, prompt) for prompt in prompts}
    assert len(homes) == 1, "prompts with one cache key must go to one replica"
    other = chain_of_tokens([1] * 40, shared_root(ROOT, "b", None), 16, "mine")
    assert other.cache_key != prompts[0].cache_key, (
        "equal cache keys of different tenants must differ"
    )
    router.take_report(homes.pop(), report(1, queued_tokens=10_000), 0.0)
    assert len({first(router, prompt) for prompt in prompts}) == 1, (
        "all prompts of the key must move to one replica"
    )


def test_a_tenants_cache_does_not_affect_another_tenants_routing():
    """The blocks that one tenant has cached change neither the choice nor the figures of another
    tenant.
    """
    tokens = list(range(160))
    mine, theirs = (chain_of_tokens(tokens, shared_root(ROOT, tenant, None), 16) for tenant in "ab")
    alone = router_of(8)
    beside = router_of(8)
    beside.take_events("r5", told(list(theirs.keys)), 0.0)
    assert best(beside, theirs)[:2] == ("r5", 160 - 1)
    assert beside.choose(mine, 0.0, count=8) == alone.choose(mine, 0.0, count=8)


def test_prompts_shorter_than_a_block_are_spread():
    router = router_of(10)
    used = set()
    for _ in range(60):
        choice = best(router, chain([], num_tokens=5))
        router.note_routed(choice, chain([], num_tokens=5), 0.0)
        used.add(choice.replica_id)
    assert len(used) == 10


def test_without_replicas_there_is_no_choice():
    router = PrefixRouter()
    assert router.choose(chain([1]), 0.0) == []
    router.add("a")
    assert router.cursor("a") == NOTHING_KNOWN
    assert router.choose(chain([1]), 0.0, among=["b"]) == []
    assert router._residency.num_entries == 0


def test_a_new_replica_starts_with_the_median_speed():
    router = router_of(3)
    for number, speed in enumerate((1e-3, 4e-3, 9e-3)):
        router.take_report(f"r{number}", report(1, seconds_per_token=speed), 0.0)
    router.add("new")
    choices = router.choose(chain([1]), 0.0, among=["new"])
    assert choices[0].expected_seconds == pytest.approx(17 * 4e-3)


def test_depths_do_not_depend_on_the_number_of_holders():
    """The holders are read in one of two ways, depending on their number. Here a hundred replicas
    hold less and less of a chain.
    """
    router = router_of(100)
    keys = list(range(24))
    for number in range(100):
        router.take_events(f"r{number}", told(keys[: number % 25]), 0.0)
    choices = router.choose(chain(keys), 0.0, count=100)
    assert {c.replica_id: c.matched_tokens for c in choices} == {
        f"r{n}": 16 * (n % 25) for n in range(100)
    }
    assert np.all(np.diff([choice.missing_tokens for choice in choices]) >= 0)
