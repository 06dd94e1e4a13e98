"""What came and left: whoever adds up the events knows the index, whatever happened between two questions."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from kvboost_edge.kvcache.events import CacheEvents
from kvboost_edge.kvcache.manager import KVCacheManager
from kvcache.pool_model import ROOTS
from kvcache.test_state_machine import NUM_EXAMPLES, PoolMachine


def held(manager: KVCacheManager) -> set[bytes]:
    """The hashes of all published blocks, block by block."""
    keys = map(manager.content.key, range(manager.num_blocks))
    return {key.prefix_hash for key in keys if key is not None}


class AskingMachine(PoolMachine):
    """The machine of random operations, and somebody who asks now and then what changed."""

    @initialize()
    def know_nothing(self) -> None:
        self.told: set[bytes] = set()
        self.asked = False

    @rule(whole=st.booleans())
    def ask(self, whole: bool) -> None:
        events = self.manager.events.take(whole)
        assert len(set(events.published)) == len(events.published)
        assert not set(events.published) & set(events.evicted)
        assert events.is_whole or self.asked
        assert events.is_whole or not whole
        self.told = set(events.published) | (set() if events.is_whole else self.told - set(events.evicted))
        self.asked = True
        assert self.told == held(self.manager)


def test_events_add_up_to_the_index() -> None:
    run_state_machine_as_test(
        AskingMachine, settings=settings(max_examples=NUM_EXAMPLES // 4, stateful_step_count=40, deadline=None)
    )


def fill(manager: KVCacheManager, tokens: list[int]) -> None:
    table = manager.open_table(tokens, ROOTS[0])
    manager.extend(table, len(tokens))
    manager.commit(table, tokens, len(tokens))
    manager.free(table)


def test_nobody_is_told_and_nothing_is_watched_before_the_first_question() -> None:
    manager = KVCacheManager(8, 2)
    fill(manager, [1, 2, 3, 4])
    assert manager._index._watchers == []
    first = manager.events.take()
    assert first.is_whole
    assert set(first.published) == held(manager)
    assert len(first.published) == 2


def test_only_what_changed_is_told() -> None:
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
def test_more_changes_than_blocks_are_told_as_a_whole(num_texts: int) -> None:
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
