"""Recurrent states outside the pool: a prompt resumes at the deepest available state that follows
available blocks.

A tier that does not know its contents is asked. Records that it lost or damaged cost only time.
"""

import pytest

from engine.schedule.test_state_schedules import bench_of, computed_by
from helpers.engine.fake_runner import ROOT
from helpers.engine.hand_io_thread import DictTier
from helpers.tiers.disk_cases import InlineSealer
from kvboost_edge.tiers import io_thread as io_thread_module
from kvboost_edge.tiers.disk.tier import DiskTier

PROMPT = list(range(100))  # six full blocks and four tokens
HINTS = {
    "snapshot_hints": (35, 70)
}  # the states after blocks two and four, and after block six, the end of the prompt


KEYS = list(bench_of().manager.content.addresses_after(PROMPT, ROOT).addresses)


def block(number):
    """Return the hash of the prompt's n-th block."""
    return KEYS[number - 1].prefix_hash


def state(number):
    """Return the hash of the state after the n-th block."""
    return KEYS[number - 1].state_address.prefix_hash


def damage(tier, *names):
    """Damage records of a tier, so that they no longer match their addresses."""
    for name in names:
        address, data = tier.blocks[name]
        tier.blocks[name] = (address._replace(tokens=b""), data)


def filled(*, knows):
    """Return a tier that has the prompt's blocks and its three states."""
    tier = DictTier(knows=knows)
    computed_by(bench_of(tiers=[tier]), PROMPT, terms=HINTS)
    assert set(tier.blocks) == {*map(block, range(1, 7)), *map(state, (2, 4, 6))}
    tier.num_read = tier.num_asked = 0
    return tier


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize(
    ("length", "blocks"), [(100, 6), (96, 6), (95, 4), (64, 4), (63, 2), (32, 2), (31, 0)]
)
def test_blocks_are_restored_up_to_the_deepest_state(knows, length, blocks):
    tier = filled(knows=knows)
    prompt = [*PROMPT[:length], 7, 7, 7]
    computed, result = computed_by(bench_of(tiers=[tier]), prompt)
    assert result.hit_tokens == ({"pool": 0, "shelf": 16 * blocks} if blocks else {"pool": 0})
    assert computed == len(prompt) - 16 * blocks
    assert tier.num_read == (blocks + 1 if blocks else 0), "the blocks and one state must be read"
    assert tier.num_asked == (not knows), "a tier without an index must be asked once"


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("how", ["lost", "damaged"])
@pytest.mark.parametrize(
    ("gone", "cached"),
    [
        ([state(6)], 64),
        ([state(6), state(4)], 32),
        ([state(2), state(4), state(6)], 0),
        ([block(6)], 64),
        ([block(4), state(6)], 32),
        ([block(3)], 32),
        ([block(1)], 0),
    ],
)
@pytest.mark.some(3)
def test_lost_or_damaged_records_only_cost_time(knows, how, gone, cached):
    tier = filled(knows=knows)
    if how == "lost":
        tier.drop(gone)
    else:
        damage(tier, *gone)
    bench = bench_of(tiers=[tier])
    computed, result = computed_by(bench, PROMPT, terms=HINTS)
    assert (computed, result.cached_tokens) == (100 - cached, cached)
    if how == "damaged" and gone[0] == state(6):  # damage shows only after all blocks have arrived
        assert (result.matched_tokens, result.miss_reason) == (96, "state")
    assert computed_by(bench, PROMPT)[0] == 4
    computed_by(bench_of(tiers=[tier]), PROMPT)  # finds damaged records after the lost ones
    assert computed_by(bench_of(tiers=[tier]), PROMPT)[0] == 4, (
        "the missing records must be stored again"
    )


def without_states(tier, *numbers):
    """Return a bench whose pool has all the prompt's blocks but only these states."""
    bench = bench_of(tiers=[tier])
    computed_by(bench, PROMPT, terms=HINTS)
    states = bench.manager.states
    kept = {state(number) for number in numbers}
    for block_id in states.slots.snapshots():
        key = bench.manager.content.address(block_id)
        if key.state_address.prefix_hash not in kept:
            states.slots.drop(block_id)
    tier.num_read = tier.num_asked = 0
    return bench


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("here", [(), (2,), (2, 4)])
def test_a_missing_state_alone_is_read_without_blocks(knows, here):
    tier = filled(knows=knows)
    bench = without_states(tier, *here)
    computed, result = computed_by(bench, PROMPT)
    assert (computed, result.cached_tokens, result.hit_tokens) == (4, 96, {"pool": 96})
    assert (tier.num_read, tier.num_asked) == (1, not knows)
    assert (bench.manager.used_block_count, bench.io_thread.staging_bytes) == (0, 0)


@pytest.mark.parametrize("knows", [True, False])
def test_only_missing_blocks_are_read(knows):
    tier = filled(knows=knows)
    bench = without_states(tier, 2)
    bench.manager.reset(
        [
            block_id
            for block_id in range(bench.manager.num_blocks)
            if is_one_of(bench, block_id, 5, 6)
        ]
    )
    computed, result = computed_by(bench, PROMPT)
    assert (computed, result.hit_tokens) == (4, {"pool": 64, "shelf": 32})
    assert (tier.num_read, tier.num_asked) == (3, not knows)


def is_one_of(bench, block_id, *numbers):
    """Return whether a block of the pool is one of these blocks of the prompt."""
    key = bench.manager.content.address(block_id)
    return key is not None and key.prefix_hash in map(block, numbers)


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize(
    ("gone", "cached"),
    [
        ([*map(block, range(1, 7))], 96),
        ([*map(block, range(1, 7)), state(6)], 64),
        ([state(6), state(4)], 32),
        ([state(2), state(4), state(6)], 0),
    ],
)
def test_a_stored_state_is_used_with_blocks_in_the_pool(knows, gone, cached):
    tier = filled(knows=knows)
    bench = without_states(tier)
    tier.drop(gone)
    computed, result = computed_by(bench, PROMPT)
    assert (computed, result.cached_tokens, tier.num_read) == (100 - cached, cached, cached > 0)
    assert result.matched_tokens == 96


@pytest.mark.parametrize("knows", [True, False])
def test_after_a_damaged_state_the_one_before_is_used(knows):
    tier = filled(knows=knows)
    bench = without_states(tier)
    damage(tier, state(6))
    computed, result = computed_by(bench, PROMPT)
    assert (computed, result.cached_tokens, tier.num_read) == (36, 64, 1)


@pytest.mark.parametrize("knows", [True, False])
def test_without_a_free_slot_the_prompt_is_computed(knows, monkeypatch):
    tier = filled(knows=knows)
    bench = without_states(tier)
    states = bench.manager.states
    handle = bench.submit(PROMPT, 1)
    bench.step()
    bench.io_thread.pump()
    (load,) = bench.scheduler.loads
    has_room = states.has_room
    monkeypatch.setattr(
        states, "has_room", lambda table: table is not load.table and has_room(table)
    )
    bench.run()
    assert (bench.answer(handle).cached_tokens, tier.num_read) == (0, 1)
    assert (bench.manager.used_block_count, bench.io_thread.staging_bytes) == (0, 0)


def test_an_unknown_prompt_is_looked_up_once():
    tier = filled(knows=False)
    computed, _ = computed_by(bench_of(tiers=[tier]), list(range(200, 250)))
    assert (computed, tier.num_asked, tier.num_read) == (50, 1, 0)


def test_the_deepest_states_are_looked_up_first(
    monkeypatch,
):
    monkeypatch.setattr(io_thread_module, "_ASKED_AT_ONCE", 2)
    tier = filled(knows=False)
    prompt = [
        *PROMPT[:70],
        *range(100, 250),
    ]  # 13 blocks that could be served: 13 and 12, 11 and 10, ..., 5 and 4
    computed, _ = computed_by(bench_of(tiers=[tier]), prompt)
    assert (computed, tier.num_asked) == (220 - 64, 5)


@pytest.mark.parametrize("gone", [(), (6,)])
def test_a_lost_first_block_ends_the_lookup(gone, monkeypatch):
    monkeypatch.setattr(io_thread_module, "_ASKED_AT_ONCE", 2)
    tier = filled(knows=False)
    tier.drop([block(1), *map(state, gone)])
    bench = bench_of(tiers=[tier])
    monkeypatch.setattr(
        tier, "read", lambda blocks, into: pytest.fail("a block was read without those before it")
    )
    computed, result = computed_by(bench, PROMPT)
    assert (computed, result.cached_tokens, tier.num_asked) == (100, 0, 1)


def test_a_complete_hit_in_a_near_tier_skips_far_tiers():
    near = filled(knows=True)
    far = filled(knows=False)
    far.name = "far"
    _, result = computed_by(bench_of(tiers=[near, far]), PROMPT)
    assert (result.hit_tokens, far.num_asked) == ({"pool": 0, "shelf": 96}, 0)


def test_blocks_and_states_from_different_tiers_combine():
    near = filled(knows=True)
    far = filled(knows=False)
    far.name = "far"
    near.drop(map(state, (2, 4, 6)))
    far.drop(map(block, range(1, 4)))
    computed, result = computed_by(bench_of(tiers=[near, far]), PROMPT)
    assert (computed, result.hit_tokens) == (4, {"pool": 0, "shelf": 96})
    assert far.num_read == 1


def test_a_waiting_request_loads_its_own_state_if_needed():
    """The first prompt loads a deeper state, which the second one cannot use."""
    tier = filled(knows=False)
    bench = bench_of(tiers=[tier])
    prompts = [PROMPT, [*PROMPT[:40], *range(200, 230)]]
    handles = [bench.submit(prompt, 1) for prompt in prompts]
    bench.run()
    assert [bench.answer(handle).cached_tokens for handle in handles] == [96, 32]


@pytest.mark.parametrize("knows", [True, False])
def test_a_request_waits_for_a_load_only_if_it_may_bring_its_state(knows, monkeypatch):
    tier = filled(knows=knows)
    bench = bench_of(tiers=[tier])
    handles = [
        bench.submit(prompt, 1)
        for prompt in (PROMPT, [*PROMPT[:40], *range(200, 230)], [*PROMPT, 7])
    ]
    bench.step()
    pieces = []
    deliver = bench.io_thread._deliver
    monkeypatch.setattr(bench.io_thread, "_deliver", pieces.append)
    bench.io_thread.pump()
    *blocks, last = pieces
    for piece in blocks:
        deliver(piece)
    bench.step()
    assert len(bench.scheduler.loads) == 1 + knows, (
        "the third request must wait for the load only if it may restore its state"
    )
    monkeypatch.undo()
    deliver(last)
    bench.run()
    assert [bench.answer(handle).cached_tokens for handle in handles] == [96, 32, 96]


def test_requests_that_wait_for_a_state_do_not_keep_preempting_another_tenant():
    bench = without_states(filled(knows=True))
    bench.scheduler.max_num_seqs = 4
    answers = [bench.submit([200 + i] * 20, 60, tenant="a") for i in range(4)]
    for _ in range(6):
        bench.step()
    asked = [bench.submit([*PROMPT, i], 1) for i in range(2)]
    for _ in range(20):
        bench.step()
    assert not any(one.done for one in asked), "the state must not have arrived yet"
    assert bench.scheduler.num_preemptions <= 2, "each request takes one place"
    bench.run()
    assert [bench.answer(one).cached_tokens for one in asked] == [96, 96]
    for one in answers:
        bench.answer(one)


def test_blocks_after_the_restored_state_are_not_hits():
    tier = filled(knows=False)
    damage(tier, state(4), state(6))
    bench = bench_of(tiers=[tier])
    computed_by(bench, PROMPT[:40])
    _, result = computed_by(bench, PROMPT)
    assert (result.cached_tokens, result.hit_tokens) == (32, {"pool": 32})


def test_blocks_of_a_load_without_its_state_are_not_hits(monkeypatch):
    bench = bench_of(tiers=[filled(knows=True)])
    computed_by(bench, PROMPT[:40])
    handle = bench.submit(PROMPT, 1)
    bench.step()
    deliver = bench.io_thread._deliver
    monkeypatch.setattr(
        bench.io_thread,
        "_deliver",
        lambda piece: deliver(piece) if piece.num_blocks_before is None else None,
    )
    bench.io_thread.pump()
    bench.step()
    (load,) = bench.scheduler.loads
    assert load.arrived == {"shelf": 64}
    monkeypatch.setattr("kvboost_edge.engine.offload.prefetch.PATIENCE", 0.0)
    bench.run()
    result = bench.answer(handle)
    assert (result.cached_tokens, result.hit_tokens) == (32, {"pool": 32})


@pytest.mark.parametrize(("damaged", "cached"), [((4, 6), 48), ((3, 4, 6), 0)])
def test_at_most_three_states_of_a_load_are_tried(damaged, cached):
    tier = DictTier(knows=False)
    computed_by(bench_of(tiers=[tier]), PROMPT, terms={"snapshot_hints": (20, 35, 52, 70)})
    damage(tier, *map(state, damaged))
    assert computed_by(bench_of(tiers=[tier]), PROMPT)[0] == 100 - cached
    assert tier.lost == set(map(state, damaged))
    assert {state(1), state(2)} < tier.blocks.keys()


def test_after_a_failed_allocation_no_other_state_is_tried(monkeypatch):
    tier = filled(knows=False)
    bench = bench_of(tiers=[tier])
    refused = []
    allocated = bench.io_thread._allocated

    def refuse_states(count, row_bytes):
        if row_bytes == bench.parts.backend.spec.bytes_per_state and count:
            refused.append(row_bytes)
            return allocated(0, row_bytes)
        return allocated(count, row_bytes)

    monkeypatch.setattr(bench.io_thread, "_allocated", refuse_states)
    assert computed_by(bench, PROMPT)[0] == 100
    assert len(refused) == 1


def test_after_a_damaged_state_on_disk_the_one_before_is_used(tmp_path):
    def opened():
        return DiskTier.open(tmp_path, bytes(32), max_bytes=1 << 20, sealer=InlineSealer())

    tier = opened()
    computed_by(bench_of(tiers=[tier]), PROMPT, terms=HINTS)
    entry = tier._store.index.get(state(6))
    tier.close()
    (segment,) = tmp_path.glob("*/*.kvs")
    data = bytearray(segment.read_bytes())
    data[entry.offset + entry.header_bytes] ^= 1
    segment.write_bytes(data)
    tier = opened()
    computed, result = computed_by(bench_of(tiers=[tier]), PROMPT)
    assert result.hit_tokens == {"pool": 0, "disk": 64}
    assert (computed, tier.stat().refused) == (36, 1)
    computed, result = computed_by(bench_of(tiers=[tier]), PROMPT)
    assert (computed, result.hit_tokens) == (4, {"pool": 0, "disk": 96})
    tier.close()
