"""Routing of models with recurrent state: the end of the deepest state counts, in the pool and in
tiers.
"""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from helpers.serve_ray.router_beliefs import chain_of_tokens, check_router
from kvboost_edge.serve_ray.routing.cache_records import Place
from serve_ray.routing.test_router import (
    DISK,
    ROOT,
    SERVER,
    SPEED,
    best,
    first,
    report,
    router_of,
    told,
)


def test_the_replica_with_the_state_wins_among_equal_ones():
    """If no replica has a state, one with the blocks is chosen, where the next state will be kept.
    A queue of twice the saved tokens sends the prompt away.
    """
    prompt = chain_of_tokens(list(range(16 * 30 + 1)), ROOT, 16, has_states=True)
    plain = prompt._replace(states=())
    states = prompt.states[Place.POOL]
    assert {first(router_of(20), prompt), first(router_of(20), plain)} <= {
        f"r{number}" for number in range(20)
    }
    for holder in range(4):
        router = router_of(20)
        for number in range(4):
            router.take_events(f"r{number}", told(list(prompt.keys)), 0.0)
        assert best(router, plain).matched_tokens == 480
        assert best(router, prompt).matched_tokens == 0
        assert first(router, prompt) in {"r0", "r1", "r2", "r3"}
        router.take_events(f"r{holder}", told([*prompt.keys, states[19]], serial=1), 0.0)
        choice = best(router, prompt)
        assert choice[:3] == (f"r{holder}", 320, 161)
        router.take_report(f"r{holder}", report(1, queued_tokens=640), 0.0)
        assert first(router, prompt) != f"r{holder}"
        router.take_report(f"r{holder}", report(2), 0.0)
        router.take_events(f"r{holder}", told(list(prompt.keys), serial=2), 0.0)
        assert best(router, prompt).matched_tokens == 0, (
            "blocks without a state must not count as matched"
        )
        check_router(router)


stateful = st.lists(
    st.tuples(
        *(st.sets(st.integers(1, 30), max_size=4) for _ in range(2)),
        st.booleans(),
        st.booleans(),
        st.integers(0, 300),
        st.integers(0, 30),
    ),
    min_size=1,
    max_size=8,
)


@example(
    [({1}, set(), True, False, 0, 0)], set(), 17
)  # a state in the pool whose block is not reported
@given(stateful, st.sets(st.integers(1, 30), max_size=4), st.integers(1, 480))
def test_a_usable_prefix_ends_at_a_state(figures, on_server, num_tokens):
    """Tiers hold all of the prompt's blocks. Blocks in the pool are not read again. Of the states
    only the deepest is read, in the time of a block. The last token is always computed.

    `figures` has for each replica (states in the pool, states on disk, has a disk, has the server,
    tokens queued, blocks in the pool). The first replica reports the server's states.
    """
    prompt = chain_of_tokens(list(range(num_tokens)), ROOT, 16, has_states=True)
    router = router_of(len(figures))
    last = (num_tokens - 1) // 16
    in_tiers = [*prompt.disk.keys, *prompt.shared.keys]

    def deepest(ends):
        return max((end for end in ends if end <= last), default=0)

    def keys_of(ends, place):
        return [prompt.states[place][end - 1] for end in ends if end <= len(prompt.keys)]

    sums = {}
    for number, (pool, disk, has_disk, has_server, queued, held) in enumerate(figures):
        told_here = [
            *prompt.keys[:held],
            *in_tiers,
            *keys_of(pool, Place.POOL),
            *keys_of(disk, Place.DISK),
        ]
        told_here += keys_of(on_server, Place.SHARED) if number == 0 else []
        router.take_events(f"r{number}", told(told_here), 0.0)
        speeds = {
            "disk_token_seconds": DISK * has_disk,
            "shared_token_seconds": SERVER * has_server,
        }
        router.take_report(f"r{number}", report(1, queued_tokens=queued, **speeds), 0.0)
        in_pool = deepest(pool)
        disk_end = max(in_pool, deepest(disk)) if has_disk else in_pool
        end = max(disk_end, deepest(on_server)) if has_server else disk_end
        there = min(
            max(in_pool, held), end
        )  # blocks held after the state that is read are recomputed
        from_disk = max(0, disk_end - there)
        from_server = end - max(there, disk_end)
        if end > disk_end:
            from_server += 1
        elif end > in_pool:
            from_disk += 1
        reading = 16 * (from_disk * DISK + from_server * SERVER)
        missing = num_tokens - 16 * end
        seconds = max(queued * SPEED, reading) + missing * SPEED
        sums[f"r{number}"] = (
            (16 * in_pool, missing, 16 * (end - in_pool), 16 * (there - in_pool)),
            seconds,
        )
    for choice in router.choose(prompt, 0.0, count=len(figures)):
        tokens, seconds = sums[choice.replica_id]
        assert (
            choice.matched_tokens,
            choice.missing_tokens,
            choice.restored_tokens,
            choice.present_tokens,
        ) == tokens
        assert choice.expected_seconds == pytest.approx(seconds)
    check_router(router)


@pytest.mark.parametrize("has_blocks", [False, True])
def test_blocks_already_in_the_pool_need_no_space_for_a_state_read(has_blocks):
    """The prompt has 30 blocks and their state is on disk. If the blocks are in the pool, it needs
    one more block, and 40 free ones leave enough for the next prompt. Otherwise it needs 31: 5 are
    too few, and 40 leave too few.
    """
    prompt = chain_of_tokens(list(range(16 * 30 + 1)), ROOT, 16, has_states=True)
    router = router_of(1)
    keys = [*prompt.disk.keys, prompt.states[Place.DISK][29], *(prompt.keys if has_blocks else ())]
    router.take_events("r0", told(keys), 0.0)
    figures = {
        "disk_token_seconds": DISK,
        "num_running": 1,
        "answer_seconds": 50.0,
        "free_blocks": 5,
    }
    router.take_report("r0", report(1, **figures), 0.0)
    assert (best(router, prompt).expected_seconds < 50.0) == has_blocks
    router.take_report("r0", report(2, **{**figures, "free_blocks": 40}), 0.0)
    choice = best(router, prompt)
    assert (choice.restored_tokens, choice.present_tokens) == (480, 480 * has_blocks)
    router.note_routed(choice, prompt, 0.0)
    other = chain_of_tokens(list(range(900, 1400)), ROOT, 16, has_states=True)
    assert (best(router, other).expected_seconds < 50.0) == has_blocks


def test_a_state_on_redis_counts_without_its_first_blocks():
    """In a long conversation, blocks that were stored on the server minutes ago are no longer
    reported but still exist.
    """
    prompt = chain_of_tokens(list(range(16 * 60 + 1)), ROOT, 16, has_states=True)
    router = router_of(2)
    router.take_report("r1", report(1, shared_token_seconds=SERVER), 0.0)
    router.take_events("r0", told([*prompt.shared.keys[-3:], prompt.states[Place.SHARED][57]]), 0.0)
    assert best(router, prompt, among=["r1"]).restored_tokens == 16 * 58
    assert best(router, prompt, among=["r0"]).restored_tokens == 0, (
        "a replica without the server must not restore anything"
    )


@pytest.mark.parametrize("length", [16 * 20, 16 * 20 + 5])
def test_continued_and_repeated_prompts_follow_the_state_and_branches_do_not(length):
    """The state at the end of a prompt is expected once the prompt was sent. A state inside it is
    expected only once it was reported.
    """
    tokens = list(range(length))
    sent, longer, branch = (
        chain_of_tokens(ids, ROOT, 16, has_states=True)
        for ids in (tokens, [*tokens, *range(99)], [*tokens[:160], 7])
    )
    router = router_of(10)
    choice = best(router, sent)
    router.take_events(choice.replica_id, told([]), 0.0)
    router.note_routed(choice, sent, 0.0)
    again, following, aside = (
        best(router, one, 10.0, among=[choice.replica_id]).matched_tokens
        for one in (sent, longer, branch)
    )
    assert (again, following, aside) == ((length - 1) // 16 * 16, 320, 0)
    assert first(router, sent, 10.0) == first(router, longer, 10.0) == choice.replica_id
    batch = told([sent.states[Place.POOL][8]], serial=1)[0]._replace(is_whole=False)
    router.take_events(choice.replica_id, [batch], 10.0)
    assert best(router, branch, 10.0, among=[choice.replica_id]).matched_tokens == 9 * 16
    assert best(router, sent, 500.0, among=[choice.replica_id]).matched_tokens == 9 * 16, (
        "unconfirmed blocks must expire"
    )
    check_router(router)


def test_states_do_not_affect_models_without_them():
    """Chains of a model without states are placed by their blocks. The choices are equal to the bit
    with and without reported states.
    """
    prompts = [chain_of_tokens([number // 3, *range(400)], ROOT, 16) for number in range(12)]
    found = []
    for tells_states in (False, True):
        router = router_of(8)
        for number in range(8):
            prompt = chain_of_tokens([number // 2, *range(400)], ROOT, 16, has_states=True)
            states = [key for keys in prompt.states for key in keys]
            outside = [*prompt.disk.keys, *prompt.shared.keys]
            keys = [
                *prompt.keys[: 3 * number],
                *outside[: 2 * number],
                *(states if tells_states else []),
            ]
            router.take_events(f"r{number}", told(keys), 0.0)
            speeds = {
                "disk_token_seconds": DISK * (number % 2),
                "shared_token_seconds": SERVER * (number % 3),
            }
            router.take_report(f"r{number}", report(1, queued_tokens=90 * number, **speeds), 0.0)
        choices = [router.choose(prompt, 0.0, count=8) for prompt in prompts]
        for now, prompt in enumerate(prompts):
            choice = best(router, prompt, now)
            router.note_routed(choice, prompt, now)
            choices.append([choice])
        found.append(choices)
    assert found[0] == found[1]
