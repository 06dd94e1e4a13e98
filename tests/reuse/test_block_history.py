"""Blocks that are or were in a pool, and texts whose runs should be restored."""

import pytest

from kvboost_edge.kvcache.hashing import LoneRoot, decode_tokens
from kvboost_edge.kvcache.manager import KVCacheManager
from kvboost_edge.reuse.block_history import BlockHistory
from kvboost_edge.reuse.span_search import find_runs

SIZE = 16
ROOT = b"r" * 32
TEXT = list(range(100))  # 6 blocks and 4 tokens
PROMPT = [*range(500, 520), *TEXT[20:90], 7]


def publish(manager, tokens, root=ROOT):
    table = manager.open_table(tokens, root)
    manager.extend(table, len(tokens))
    manager.commit(table, list(tokens), len(tokens))
    manager.free(table)


def remembering(limit=32):
    manager = KVCacheManager(16, SIZE)
    remembered = BlockHistory(limit, SIZE)
    manager.spans.watch(remembered)
    return manager, remembered


def lost(remembered, prompt=PROMPT, root=ROOT):
    runs = find_runs(prompt, SIZE, remembered.index, root, SIZE)
    return [(decode_tokens(chain.tokens), chain.root) for chain in remembered.lost_chains(runs)]


def test_only_evicted_text_is_lost_and_starts_at_its_beginning():
    manager, remembered = remembering()
    publish(manager, TEXT)
    assert lost(remembered) == []
    manager.reset()
    assert lost(remembered) == [(TEXT[:96], ROOT)]
    assert lost(remembered, [*range(500, 520), *TEXT[20:60], 7]) == [(TEXT[:64], ROOT)]
    publish(manager, TEXT[:48])
    assert lost(remembered) == [(TEXT[:96], ROOT)]
    publish(manager, TEXT)
    assert lost(remembered) == []
    remembered.index.check()


@pytest.mark.parametrize("num_hidden", [0, 2])
def test_the_root_of_a_separately_computed_text_is_known(num_hidden):
    manager, remembered = remembering()
    root = LoneRoot.of(ROOT, num_hidden)
    publish(manager, TEXT, root)
    manager.reset()
    found = lost(remembered, [*range(500, 520), *TEXT[40:90], 7])
    assert found == [(TEXT[:96], root)]
    assert isinstance(found[0][1], LoneRoot)
    assert (found[0][1].user, found[0][1].num_hidden) == (ROOT, num_hidden)
    assert lost(remembered, PROMPT, b"o" * 32) == []


def test_the_oldest_entries_are_dropped_with_their_texts():
    manager, remembered = remembering(8)
    publish(manager, TEXT)
    manager.reset()
    publish(manager, range(1000, 1048))  # three more blocks evict one of the first six
    assert lost(remembered) == []
    remembered.index.check()
    publish(manager, TEXT)
    manager.reset()
    assert lost(remembered) == [(TEXT[:96], ROOT)]
