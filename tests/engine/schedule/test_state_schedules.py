"""Recurrent states of sequences: their places, the requests that resume from them, and isolation
between tenants.
"""

import pytest

from helpers.engine.model_kinds import HYBRID
from kvboost_edge.errors import CacheCorruption, KVBoostError

bench_of = HYBRID.bench


def computed_by(bench, prompt, *args, **options):
    """Run one request alone, by default for one token. Return the number of tokens computed and its
    result.
    """
    before = bench.runner.computed
    result = bench.ask(prompt, *(args or (1,)), **options)
    return bench.runner.computed - before, result


def test_an_answer_leaves_one_snapshot():
    bench = bench_of()
    bench.ask(list(range(30)), 40)
    assert bench.manager.states.slots.counts()["answer"] <= 2


def test_a_branching_prompt_snapshots_the_branch_point():
    bench = bench_of()
    stem = list(range(100, 150))
    computed_by(bench, [*stem, 1, 2, 3])
    computed, result = computed_by(bench, [*stem[:40], 4, 5, 6])
    assert (result.cached_tokens, result.matched_tokens, result.miss_reason) == (0, 32, "state")
    assert computed == 43
    computed, third = computed_by(bench, [*stem[:40], 9, 9, 9, 9])
    assert (third.cached_tokens, third.miss_reason) == (32, "tail")
    assert computed == 12


def test_a_snapshot_hint_serves_the_first_branching_prompt():
    bench = bench_of()
    stem = list(range(100, 150))
    computed_by(bench, [*stem, 1, 2, 3], terms={"snapshot_hints": (40, 10_000)})
    computed, second = computed_by(bench, [*stem[:40], 4, 5, 6])
    assert second.cached_tokens == 32
    assert computed == 11


def test_a_request_that_waits_for_a_prefix_finds_its_state():
    bench = bench_of(max_batch_tokens=32)
    prefix = list(range(160))
    bench.ask(prefix, 1)
    shorter = [bench.submit([*prefix[:100], 240 + i, *prefix], 1) for i in range(2)]
    other = [bench.submit([*range(50, 150), 240 + i, *prefix], 1) for i in range(3)]
    bench.run()
    assert [bench.answer(handle).cached_tokens for handle in (*shorter, *other)] == [
        0,
        96,
        0,
        96,
        96,
    ]


def test_states_are_never_shared_between_tenants():
    """Tenants share no state in succession, at once, or when slots are so few that one tenant's are
    taken for another.
    """
    prompt = list(range(50))
    for num_slots in (40, 4):
        bench = bench_of(num_slots=num_slots, max_num_seqs=2)
        for tenant in ("one", "two", "one", "two"):
            computed, _ = computed_by(bench, prompt, 3, tenant=tenant)
            assert computed == (52 if bench.num_requests <= 2 else 4), (
                bench.num_requests,
                num_slots,
            )
        handles = [
            bench.submit([*prompt[:40], 7], 3, tenant=tenant)
            for tenant in ("one", "three", "two", "")
        ]
        bench.run()
        results = [bench.answer(handle) for handle in handles]
        assert [(result.matched_tokens, result.cached_tokens) for result in results] == [
            (32, 0),
            (0, 0),
        ] * 2


def test_checkpoints_serve_an_unforeseen_branch():
    bench = bench_of(interval=64)
    text = [i % 256 for i in range(300)]
    computed_by(bench, text)
    _, other = computed_by(bench, [*text[:150], 3, 3, 3])
    assert (other.cached_tokens, other.matched_tokens) == (128, 144)


def test_small_states_are_kept_after_every_block():
    bench = bench_of(every_block=True)
    text = [i % 256 for i in range(300)]
    computed_by(bench, text)
    _, other = computed_by(bench, [*text[:150], 3, 3, 3])
    assert (other.cached_tokens, other.miss_reason) == (144, "tail")


def test_a_request_waits_for_a_free_state_slot():
    bench = bench_of(64, 2, max_num_seqs=8)
    handles = [bench.submit([number] * 20, 30) for number in range(4)]
    bench.step()
    assert len(bench.scheduler.running) == 2
    bench.run()
    for handle in handles:
        bench.answer(handle)


def test_the_state_of_a_failed_request_is_never_used():
    bench = bench_of()
    bench.runner.nan_for = {9}
    prompt = [*range(40), 9]
    with pytest.raises(KVBoostError, match="NaN"):
        computed_by(bench, prompt)
    assert bench.manager.states.slots.num_used == 0
    bench.runner.nan_for = set()
    assert computed_by(bench, prompt)[0] == 41


def test_a_write_into_a_snapshot_is_detected():
    """The checks of a bench raise after the pass that wrote into the snapshot."""
    bench = bench_of()
    prompt = list(range(50))
    computed_by(bench, prompt)
    backend = bench.parts.backend
    states = bench.manager.states
    ((block_id, slot),) = states.slots.snapshots().items()
    bench.runner.on_forward = lambda batch: backend.write_state(slot, (1, 1))
    bench.submit([7, 8, 9], 1)
    with pytest.raises(
        CacheCorruption, match=f"after block {block_id}, in slot {slot}, was overwritten"
    ):
        bench.run()
