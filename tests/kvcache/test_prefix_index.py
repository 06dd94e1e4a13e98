"""The prefix index: it compares parent and tokens and never trusts a hash alone."""

import pytest

from kvboost_edge.errors import CacheCorruption
from kvboost_edge.kvcache.block_table import PrefixEntry
from kvboost_edge.kvcache.hashing import chain_hash
from kvboost_edge.kvcache.prefix_index import PrefixIndex


def test_a_bucket_holds_several_blocks():
    index = PrefixIndex(4, 16, chain_hash)
    for block_id in range(4):
        index.publish(block_id, b"h", bytes([block_id]), 0)
    assert [index.find(b"h", bytes([block_id]), 0) for block_id in range(4)] == [0, 1, 2, 3]
    index.withdraw(1)
    assert [index.find(b"h", bytes([block_id]), 0) for block_id in range(4)] == [0, None, 2, 3]
    index.check()
    for block_id in (0, 2, 3):
        index.withdraw(block_id)
    assert len(index) == 0
    assert index._buckets == {}  # an empty bucket would be a leak


def test_publishing_twice_or_withdrawing_unknown_blocks_raises():
    index = PrefixIndex(2, 16, chain_hash)
    index.publish(0, b"h", b"t", 0)
    with pytest.raises(CacheCorruption, match="already published"):
        index.publish(0, b"g", b"u", 0)
    with pytest.raises(CacheCorruption, match="not published"):
        index.withdraw(1)
    index.check()


@pytest.mark.parametrize(
    "damage",
    [
        lambda index: index._buckets.__setitem__(b"h", ()),
        lambda index: index._buckets.__setitem__(b"h", (0, 0)),
        lambda index: index._buckets.__setitem__(b"x", index._buckets.pop(b"h")),
        lambda index: index._entries.__setitem__(1, None),
        lambda index: index._entries.__setitem__(1, PrefixEntry(b"g", b"u", 1, 1)),
        lambda index: index._entries.__setitem__(1, PrefixEntry(b"g", b"u", 1, 99)),
        lambda index: index._entries.__setitem__(1, PrefixEntry(b"g", b"u", 5, 2)),
        lambda index: index._entries.__setitem__(1, PrefixEntry(b"g", b"t", 0, 2)),
    ],
)
def test_check_detects_each_inconsistency(damage):
    index = PrefixIndex(2, 16, chain_hash)
    assert index.publish(0, b"h", b"t", 0) == 1
    index.publish(1, b"g", b"u", 1)
    index.check()
    damage(index)
    with pytest.raises(CacheCorruption):
        index.check()
