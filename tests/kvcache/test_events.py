"""Cache events: added up, they equal the index, whatever happened between two calls."""

import pytest

from helpers.kvcache.manager_cases import ROOT, B
from helpers.kvcache.pool_model import ROOTS, held
from helpers.kvcache.recurrent_snapshots import cold, manager_of, states_of
from kvboost_edge.kvcache.events import CacheEvents
from kvboost_edge.kvcache.hashing import prefix_hashes, state_hash
from kvboost_edge.kvcache.manager import KVCacheManager


def fill(manager, tokens):
    table = manager.open_table(tokens, ROOTS[0])
    manager.extend(table, len(tokens))
    manager.commit(table, tokens, len(tokens))
    manager.free(table)


def test_events_are_recorded_from_the_first_call_on():
    manager = KVCacheManager(8, 2)
    fill(manager, [1, 2, 3, 4])
    assert manager._index._watchers == []
    first = manager.events.take()
    assert first.is_whole
    assert set(first.published) == held(manager)
    assert len(first.published) == 2


def test_only_changes_are_reported():
    manager = KVCacheManager(8, 2)
    manager.events.take()
    assert manager.events.take() == CacheEvents(False, (), ())
    fill(manager, [1, 2, 3, 4])
    came = manager.events.take()
    assert (came.is_whole, set(came.published), came.evicted) == (False, held(manager), ())
    manager.reset()
    left = manager.events.take()
    assert (left.is_whole, left.published, set(left.evicted)) == (False, (), set(came.published))


@pytest.mark.parametrize("num_texts", [2, 40])
def test_many_changes_are_reported_as_a_snapshot(num_texts):
    manager = KVCacheManager(8, 2)
    manager.events.take()
    for number in range(num_texts):
        fill(manager, [number, 7, 8, 9])
    events = manager.events.take()
    assert events.is_whole == (2 * num_texts > 8)
    assert set(events.published) == held(manager)
    assert len(manager.events._changed) == 0
    fill(manager, [100, 101, 102, 103])
    assert not manager.events.take().is_whole


def test_states_are_reported_with_their_blocks_and_when_dropped():
    manager = manager_of()
    tokens = list(range(3 * B + 1))
    assert manager.events.take() == CacheEvents(True, (), ())
    cold(manager, tokens, hints=(B,))
    blocks = prefix_hashes(tokens, ROOT, B)
    came = manager.events.take()
    assert came.evicted == ()
    assert sorted(came.published) == sorted([*blocks, state_hash(blocks[0]), state_hash(blocks[2])])
    slots = states_of(manager).slots
    last = manager.pins.published(tokens, ROOT)[2]
    slots.drop(last)
    assert manager.events.take() == CacheEvents(False, (), (state_hash(blocks[2]),))
    assert set(manager.events.take(whole=True).published) == {*blocks, state_hash(blocks[0])}
    manager.reset()
    assert set(manager.events.take().evicted) == {*blocks, state_hash(blocks[0])}
    assert not manager.events._states
