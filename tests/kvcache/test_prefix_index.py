"""The index never takes a hash's word: tokens and parent decide."""

from __future__ import annotations

import pytest

from kvboost_edge.errors import CacheCorruption
from kvboost_edge.kvcache.block_table import PrefixEntry
from kvboost_edge.kvcache.hashing import chain_hash, encode_tokens
from kvboost_edge.kvcache.prefix_index import ROOT_SERIAL, PrefixIndex, PrefixMatch


def test_a_hit_needs_hash_tokens_and_parent() -> None:
    index = PrefixIndex(4)
    serial = index.publish(2, b"h", b"tokens", 0)
    assert index.find(b"h", b"tokens", 0) == 2
    assert index.find(b"g", b"tokens", 0) is None
    assert index.find(b"h", b"others", 0) is None
    assert index.find(b"h", b"tokens", serial) is None


def test_a_bucket_holds_several_blocks() -> None:
    index = PrefixIndex(4)
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


def test_serials_are_never_reused() -> None:
    index = PrefixIndex(1)
    serials = []
    for _ in range(5):
        serials.append(index.publish(0, b"h", b"t", 0))
        index.withdraw(0)
    assert len(set(serials)) == 5
    assert ROOT_SERIAL not in serials


def test_an_entry_comes_back_under_its_old_identity() -> None:
    index = PrefixIndex(2)
    serial = index.publish(0, b"h", b"t", 0)
    entry = index.withdraw(0)
    assert entry == PrefixEntry(b"h", b"t", 0, serial)
    index.restore(1, entry)
    assert (index.find(b"h", b"t", 0), index.entry(1)) == (1, entry)


def test_publishing_twice_and_withdrawing_what_is_not_there_raise() -> None:
    index = PrefixIndex(2)
    index.publish(0, b"h", b"t", 0)
    with pytest.raises(CacheCorruption, match="published already"):
        index.publish(0, b"g", b"u", 0)
    with pytest.raises(CacheCorruption, match="not published"):
        index.withdraw(1)
    index.check()


def test_match_follows_the_chain_and_names_the_next_hash() -> None:
    index, root = PrefixIndex(4), b"r" * 32
    data = encode_tokens(range(7))
    blocks = [data[0:8], data[8:16], data[16:24]]
    hashes = [chain_hash(root, blocks[0])]
    hashes += [chain_hash(hashes[0], blocks[1])]
    hashes += [chain_hash(hashes[1], blocks[2])]
    assert index.match(data, root, 8, chain_hash) == PrefixMatch([], root, ROOT_SERIAL, hashes[0])
    first = index.publish(3, hashes[0], root + blocks[0], ROOT_SERIAL)
    second = index.publish(1, hashes[1], blocks[1], first)
    assert index.match(data, root, 8, chain_hash) == PrefixMatch([3, 1], hashes[1], second, hashes[2])
    third = index.publish(0, hashes[2], blocks[2], second)
    assert index.match(data, root, 8, chain_hash) == PrefixMatch([3, 1, 0], hashes[2], third, None)
    index.withdraw(1)  # a hole ends the match, whatever is published behind it
    assert index.match(data, root, 8, chain_hash).block_ids == [3]


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
def test_check_finds_each_kind_of_contradiction(damage: object) -> None:
    index = PrefixIndex(2)
    assert index.publish(0, b"h", b"t", 0) == 1
    index.publish(1, b"g", b"u", 1)
    index.check()
    damage(index)  # type: ignore[operator]
    with pytest.raises(CacheCorruption):
        index.check()
