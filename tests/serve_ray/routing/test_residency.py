"""The map of beliefs after lost, late, repeated and mixed batches equals the replicas' contents
once all were delivered.
"""

import math
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from helpers.serve_ray.router_beliefs import check_residency, keys_of
from kvboost_edge.errors import ConfigError
from kvboost_edge.kvcache.events import CacheEvents
from kvboost_edge.kvcache.hashing import STATE_MASK, STATE_WORD
from kvboost_edge.serve_ray.routing.cache_records import KEY_BYTES, NOTHING_KNOWN, EventBatch, Place
from kvboost_edge.serve_ray.routing.event_journal import Journal
from kvboost_edge.serve_ray.routing.residency import Level, Residency

LONG, QUICK = (os.environ.get(f"KVBOOST_EDGE_TEST_{name}") == "1" for name in ("LONG", "QUICK"))
NUM_EXAMPLES = 400 if LONG else 30 if QUICK else 60
SECONDS = 10.0
slots = st.integers(0, 2)
key_sets = st.sets(st.integers(0, 15), max_size=6)


def hash_of(key):
    """Build a hash whose keys are the number in the pool, 100 + 4 x the number on disk, and 200 + 4
    x the number on the server.
    """
    return b"".join(
        one.to_bytes(KEY_BYTES, "little") for one in (key, 100 + 4 * key, 200 + 4 * key, 0)
    )


def key_at(key, place):
    return key if place is Place.POOL else 100 * place + 4 * key


def batch_of(serial, published, evicted=(), *, epoch=1, is_whole=False):
    packed = [
        b"".join(key.to_bytes(KEY_BYTES, "little") for key in keys) for keys in (published, evicted)
    ]
    return EventBatch(epoch, serial, is_whole, *packed)


class Replicas(RuleBasedStateMachine):
    """Three replicas whose caches and tiers change. Their batches are delayed, lost, repeated and
    reordered.
    """

    @initialize(max_entries=st.sampled_from([6, 1000]))
    def start(self, max_entries):
        self.map = Residency(max_entries, SECONDS)
        self.bounded = max_entries == 6
        self.now = 0.0
        self.held = []
        self.journals = []
        self.underway = []
        for slot in range(3):
            self.map.open(slot)
            self.held.append(set())
            self.journals.append(Journal(8, epoch=1 + slot))
            self.underway.append([])

    @rule(slot=slots, came=key_sets, left=key_sets, place=st.sampled_from(Place))
    def change(self, slot, came, left, place):
        left -= came
        self.held[slot] |= {key_at(key, place) for key in came}
        self.held[slot] -= {key_at(key, place) for key in left}
        events = CacheEvents(False, tuple(map(hash_of, came)), tuple(map(hash_of, left)))
        batch = self.journals[slot].add(events, place)
        if batch is not None:
            self.underway[slot].append(batch)

    @rule(slot=slots, number=st.integers(0, 20), keep=st.booleans())
    def deliver(self, slot, number, keep):
        """Deliver any batch in transit. If `keep`, it arrives again later."""
        if self.underway[slot]:
            number %= len(self.underway[slot])
            batch = self.underway[slot][number] if keep else self.underway[slot].pop(number)
            self.map.apply(slot, batch, self.now)

    @rule(slot=slots)
    def lose(self, slot):
        self.underway[slot].clear()

    @rule(slot=slots)
    def resync(self, slot):
        """Request the batches after the map's cursor. Afterwards the map equals the replica's
        contents.
        """
        for batch in self.journals[slot].since(self.map.cursor(slot)):
            assert self.map.apply(slot, batch, self.now)
        told = {key for key, is_told in keys_of(self.map, slot).items() if is_told}
        assert told == {key for key in self.held[slot] if not key & self.map._coarse}

    @rule(slot=slots)
    def restart(self, slot):
        """Replace the replica's process. Batches of the old one may still arrive."""
        self.journals[slot] = Journal(8, epoch=self.journals[slot]._epoch + 10)
        self.journals[slot].add(CacheEvents(True, (), ()))
        self.held[slot] = set()

    @rule(slot=slots)
    def replace(self, slot):
        """Remove the replica and give its slot to another one."""
        self.map.close(slot)
        self.map.open(slot)
        self.underway[slot].clear()
        assert keys_of(self.map, slot) == {}
        assert self.map.cursor(slot) == NOTHING_KNOWN

    @rule(slot=slots, keys=st.lists(st.integers(0, 15), max_size=6, unique=True))
    def send(self, slot, keys):
        self.map.believe(slot, keys, 0, self.now)
        assert set(keys_of(self.map, slot)) >= {key for key in keys if not key & self.map._coarse}

    @rule(seconds=st.sampled_from([1.0, 4.0, SECONDS + 1]))
    def time_goes_by(self, seconds):
        self.now += seconds
        self.map.expire(self.now)
        if seconds > SECONDS:
            for slot in range(3):
                assert all(keys_of(self.map, slot).values()), (
                    "only reported blocks must be kept after the time limit"
                )

    @invariant()
    def map_agrees(self):
        if not hasattr(self, "map"):
            return
        check_residency(self.map)
        for slot in range(3):
            if not self.map._known[slot].is_synced:
                assert not any(keys_of(self.map, slot).values()), (
                    "after a gap, no block may count as reported"
                )

    @invariant()
    def map_is_bounded(self):
        """Each change sweeps one slot. While the map is too large, half of the slot's entries are
        dropped.
        """
        if getattr(self, "bounded", False):
            for _ in range(20):
                self.map.believe(0, (), 0, self.now)
            assert self.map.num_entries <= 6


def test_random_events_agree_with_the_model():
    run_state_machine_as_test(
        Replicas,
        settings=settings(max_examples=NUM_EXAMPLES, stateful_step_count=30, deadline=None),
    )


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 40))
def test_levels_name_the_holders_of_each_depth(depths, length):
    """Replica i holds the first depths[i] blocks. If the levels suffice, they give exactly these
    depths.
    """
    known = Residency(10**6, SECONDS)
    keys = list(range(100, 100 + length))
    depths = [min(depth, length) for depth in depths]
    for slot, depth in enumerate(depths):
        known.open(slot)
        assert known.apply(slot, batch_of(0, keys[:depth]), 0.0)
    for most in (3, 8):
        few = known.levels(keys, most)
        assert len(few) <= most
        coarse = [
            max((n for n, holders in few if holders >> slot & 1), default=0)
            for slot in range(len(depths))
        ]
        least = [depth - -(-length // most) for depth in depths]
        assert all(
            low < found <= depth for low, found, depth in zip(least, coarse, depths, strict=True)
        )
    levels = known.levels(keys)
    assert [level.num_blocks for level in levels] == sorted({level.num_blocks for level in levels})
    found = [
        max((n for n, holders in levels if holders >> slot & 1), default=0)
        for slot in range(len(depths))
    ]
    step = -(-length // 32)
    assert all(
        depth - step < known_depth <= depth
        for known_depth, depth in zip(found, depths, strict=True)
    )
    if step == 1:
        expected = [
            Level(d, sum(1 << i for i, own in enumerate(depths) if own >= d))
            for d in sorted({*depths} - {0})
        ]
        assert levels == expected


@given(st.lists(st.integers(0, 40), max_size=4), st.integers(1, 40))
def test_reach_is_the_longest_prefix_of_any_holder(depths, length):
    known = Residency(10**6, SECONDS)
    keys = list(range(100, 100 + length))
    for slot, depth in enumerate(depths):
        known.open(slot)
        assert known.apply(slot, batch_of(0, keys[:depth]), 0.0)
    assert known.reach(keys) == min(max(depths, default=0), length)
    assert known.reach([]) == known.reach([3]) == 0


def test_a_gap_in_events_is_detected_and_repaired():
    known = Residency(1000, SECONDS)
    known.open(0)
    assert known.apply(0, batch_of(0, [1, 2]), 0.0)
    assert known.apply(0, batch_of(0, [9]), 0.0), "a repeated batch must be accepted without effect"
    assert keys_of(known, 0) == {1: True, 2: True}
    assert not known.apply(0, batch_of(2, [3], (2,)), 1.0)
    assert known.cursor(0) == NOTHING_KNOWN
    assert keys_of(known, 0) == {1: False, 3: False}, (
        "block 2 must be removed and the others must be uncertain"
    )
    assert not known.apply(0, batch_of(1, [7]), 2.0), "a late batch must not repair the gap"
    assert known.apply(0, batch_of(2, [1, 3, 4], is_whole=True), 3.0)
    for late in (batch_of(1, [7]), batch_of(0, [8], is_whole=True), batch_of(2, [9])):
        assert known.apply(0, late, 4.0), "a late batch must not be taken as a gap"
        assert known.cursor(0) == (1, 2)
    assert keys_of(known, 0) == {1: True, 3: True, 4: True}
    known.expire(100.0)
    assert keys_of(known, 0) == {1: True, 3: True, 4: True}


def test_unconfirmed_blocks_expire():
    known = Residency(1000, SECONDS)
    known.open(0)
    known.apply(0, batch_of(0, [1, 2]), 0.0)
    known.apply(0, batch_of(5, [3]), 1.0)
    known.expire(1.0 + SECONDS)
    assert keys_of(known, 0) == {}
    check_residency(known)
    assert known.num_entries == 0


def test_expected_blocks_are_renewed_and_expire():
    known = Residency(1000, SECONDS)
    known.open(0)
    known.believe(0, [1, 2], 0, 0.0)
    known.believe(0, [1, 2, 3], 2, 1.0)  # soon after: 1 and 2 stay until 10
    known.believe(0, [1, 2, 3], 3, 8.0)  # late: all stay until 18
    known.expire(12.0)
    assert set(keys_of(known, 0)) == {1, 2, 3}
    known.expire(18.0)
    assert keys_of(known, 0) == {}


def test_a_prefix_is_found_in_a_sampled_map():
    """The keys are random like hashes. The entries left of a chain give nearly its length."""
    keys = [(key * 0x9E3779B97F4A7C15) % 2**64 for key in range(1, 2001)]
    known = Residency(600, SECONDS)
    for slot in range(2):
        known.open(slot)
        known.apply(slot, batch_of(0, keys[: 1000 * (slot + 1)]), 0.0)
    for _ in range(20):
        known.believe(0, (), 0, 0.0)
    assert known.num_entries <= 600
    check_residency(known)
    found = known.levels(keys)
    assert 900 <= found[0].num_blocks <= 1000
    assert found[0].holders == 0b11
    assert 1800 <= found[-1].num_blocks <= 2000
    assert found[-1].holders == 0b10


def test_a_map_with_room_again_is_precise_again():
    """Until all replicas have reported their content again, the lookup finds what it found."""
    keys = [(key * 0x9E3779B97F4A7C15) % 2**64 for key in range(1, 1001)]
    known = Residency(1000, SECONDS)
    contents = [keys, keys[:63]]
    for slot, content in enumerate(contents):
        known.open(slot)
        known.apply(slot, batch_of(0, content), 0.0)
    for _ in range(20):
        known.believe(0, (), 0, 0.0)
    assert known.cursor(0) == (1, 0)
    assert len(keys_of(known, 1)) < 63
    # The first replica keeps only the beginning, so the map has room.
    contents[0] = keys[:127]
    assert known.apply(0, batch_of(1, [], keys[127:]), 1.0)
    coarse = known.levels(keys[:200])
    assert coarse[0].num_blocks < 63
    assert [one.holders for one in coarse] == [0b11, 0b01]
    serial = 1
    while known.cursor(0) == NOTHING_KNOWN:
        serial += 1
        for slot, content in enumerate(contents):
            assert known.cursor(slot) == NOTHING_KNOWN
            assert [one.holders for one in known.levels(keys[:200])] == [0b11, 0b01]
            assert known.apply(slot, batch_of(serial, content, is_whole=True), 1.0)
        for slot in range(2):
            known.believe(slot, (), 0, 1.0)
    assert known.levels(keys[:200]) == [Level(63, 0b11), Level(127, 0b01)]
    assert keys_of(known, 1) == dict.fromkeys(keys[:63], True)
    check_residency(known)
    # An evicted block counts as before.
    assert known.apply(0, batch_of(serial + 1, [], keys[100:127]), 1.0)
    assert known.levels(keys[:200]) == [Level(63, 0b11), Level(100, 0b01)]


def test_a_map_without_room_after_all_drops_the_blocks_again():
    keys = [(key * 0x9E3779B97F4A7C15) % 2**64 for key in range(1, 1001)]
    known = Residency(600, SECONDS)
    known.open(0)
    known.apply(0, batch_of(0, keys), 0.0)
    known.believe(0, (), 0, 0.0)
    known.believe(0, (), 0, 0.0)
    before = keys_of(known, 0)
    assert len(before) <= 600
    known.apply(0, batch_of(1, [], keys[10:]), 0.0)
    assert known.cursor(0) == NOTHING_KNOWN
    known.apply(0, batch_of(2, keys, is_whole=True), 0.0)
    for _ in range(4):
        known.believe(0, (), 0, 0.0)
    assert keys_of(known, 0) == before
    assert known.num_entries == len(before)
    assert known.cursor(0) == (1, 2)
    check_residency(known)


@pytest.mark.parametrize(
    ("max_entries", "seconds"),
    [(0, 1.0), (1, 0.0), (1, math.inf), (1, math.nan)],
    ids=["none", "zero", "inf", "nan"],
)
def test_invalid_bounds_are_refused(max_entries, seconds):
    with pytest.raises(ConfigError, match=r"max_entries|believed_seconds"):
        Residency(max_entries, seconds)


def test_a_truncated_batch_is_refused():
    known = Residency(10, SECONDS)
    known.open(0)
    with pytest.raises(ConfigError, match="7 bytes"):
        known.apply(0, EventBatch(1, 0, False, b"1234567", b""), 0.0)


def state(key):
    """Return the key of the state after a block, by a formula of its own."""
    return (key ^ STATE_WORD) & STATE_MASK


@given(st.lists(st.sets(st.integers(1, 60)), min_size=1, max_size=6), st.integers(1, 60))
def test_the_last_state_of_each_replica_is_found(ends, length):
    """Replica i has states after the blocks in ends[i]. If the levels suffice, they give exactly
    the last ones.
    """
    known = Residency(10**6, SECONDS)
    keys = [state(256 * number) for number in range(1, length + 1)]
    lasts = []
    for slot, own in enumerate(ends):
        known.open(slot)
        own = {end for end in own if end <= length}
        assert known.apply(slot, batch_of(0, [keys[end - 1] for end in own]), 0.0)
        lasts.append(max(own, default=0))
    for most in (4, 32):
        levels = known.deepest(keys, most)
        assert len(levels) <= most + 1
        assert [level.num_blocks for level in levels] == sorted(
            {level.num_blocks for level in levels}
        )
        found = [
            max((n for n, holders in levels if holders >> slot & 1), default=0)
            for slot in range(len(ends))
        ]
        step = -(-length // most)
        assert all(last - step < one <= last for one, last in zip(found, lasts, strict=True))
        assert all((one > 0) == (last > 0) for one, last in zip(found, lasts, strict=True))
        assert max(found) == max(lasts)
        assert step > 1 or found == lasts


def test_a_sampled_map_keeps_states_within_its_bound():
    keys = [(key * 0x9E3779B97F4A7C15) % 2**64 for key in range(1, 1001)]
    known = Residency(200, SECONDS)
    known.open(0)
    assert known.apply(0, batch_of(0, [*keys, *map(state, keys[9::10])]), 0.0)
    for _ in range(20):
        known.believe(0, (), 0, 0.0)
    assert known.num_entries <= 200
    assert known.deepest([*map(state, keys)])[-1].num_blocks == 1000
    assert known.apply(0, batch_of(1, [*map(state, keys)]), 0.0)
    for _ in range(60):
        known.believe(0, (), 0, 0.0)
    assert known.num_entries <= 200
    assert 950 < known.deepest([*map(state, keys)])[-1].num_blocks <= 1000
    check_residency(known)
