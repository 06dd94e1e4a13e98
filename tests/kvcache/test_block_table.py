"""Block tables whose segments begin inside a block, so that `index == position // block_size` does
not hold.
"""

import pytest

from kvboost_edge.errors import CacheCorruption
from kvboost_edge.kvcache.block_table import WHOLE, TableEntry, TableSegment
from kvboost_edge.kvcache.hashing import root_hash
from kvboost_edge.kvcache.manager import KVCacheManager

B = 4
ROOT = root_hash(model_fingerprint="m", kv_format="f32", tenant="")


def seamed(manager):
    """Build a table whose segments begin inside blocks.

    - tokens 0..5: two blocks
    - tokens 6..8: a block of their own that begins at position 6
    - tokens 9..10: inside another block
    """
    table = manager.open_table(range(11), ROOT)
    manager.extend(table, 6)
    manager.commit(table, range(11), 6)
    table.segments.append(TableSegment(2, 6, 6, 0))
    manager.extend(table, 9)
    manager.commit(table, range(11), 9)
    table.segments.append(TableSegment(3, 7, 9, 0))
    manager.extend(table, 11)
    return table


def test_a_plain_table_is_one_segment():
    manager = KVCacheManager(8, B)
    table = manager.open_table(range(6), ROOT)
    manager.extend(table, 6)
    assert table.segments == [WHOLE]
    assert table.entries(B) == [TableEntry(0, 0, 0, 4, 0), TableEntry(1, 4, 4, 8, 0)]
    assert (table.num_slots(B), table.index_of(5, B), table.index_of(8, B)) == (8, 1, 2)


def test_entries_and_slots_of_a_segmented_table():
    manager = KVCacheManager(8, B)
    table = seamed(manager)
    assert table.block_ids == [0, 1, 2, 3]
    assert table.entries(B) == [
        TableEntry(0, 0, 0, 4, 0),
        TableEntry(1, 4, 4, 6, 0),
        TableEntry(2, 6, 6, 9, 0),
        TableEntry(3, 7, 9, 11, 0),
    ]
    assert [table.index_of(position, B) for position in range(11)] == [
        0,
        0,
        0,
        0,
        1,
        1,
        2,
        2,
        2,
        3,
        3,
    ]
    assert manager.slots(table, 4, 11) == [
        1 * B,
        1 * B + 1,
        2 * B,
        2 * B + 1,
        2 * B + 2,
        3 * B + 2,
        3 * B + 3,
    ]
    assert table.num_slots(B) == 11
    manager.check_invariants([table])
    with pytest.raises(CacheCorruption, match="11 slots"):
        manager.slots(table, 0, 12)


def test_needed_blocks_are_counted_per_segment():
    manager = KVCacheManager(8, B)
    table = seamed(manager)
    assert manager.blocks_needed(table, 11) == 0
    assert manager.blocks_needed(table, 12) == 1
    assert manager.extend(table, 15) == []
    assert (len(table), table.num_slots(B)) == (5, 15)
    with pytest.raises(CacheCorruption, match="15 fit"):
        manager.commit(table, range(40), 16)


def test_a_chain_ends_at_a_segment_border_within_a_block():
    """A block is published only if its tokens alone determine its content."""
    manager = KVCacheManager(8, B)
    table = seamed(manager)
    manager.extend(table, 15)
    manager.commit(table, range(15), 15)
    assert manager.published_block_count == 1
    child = manager.fork(table)
    assert child.segments == table.segments
    assert child.segments is not table.segments
    manager.check_invariants([table, child])
    manager.free(table)
    manager.free(child)
    assert (child.segments, manager.free_block_count, manager.cached_block_count) == ([WHOLE], 8, 1)
    assert manager.peek(range(15), ROOT) == B


@pytest.mark.parametrize(
    "segments",
    [
        [],
        [TableSegment(0, 1, 1, 0)],
        [WHOLE, TableSegment(2, 9, 9, 0)],  # a gap: blocks 0 and 1 end at 8
        [WHOLE, TableSegment(2, 6, 0, 0)],  # serves no position
        [
            WHOLE,
            TableSegment(2, 7, 6, 0),
        ],  # its first block begins after the first position that it serves
        [WHOLE, TableSegment(9, 8, 8, 0)],
    ],
)
def test_invalid_segments_are_detected(segments):
    manager = KVCacheManager(8, B)
    table = manager.open_table(range(11), ROOT)
    manager.extend(table, 11)
    manager.check_invariants([table])
    table.segments = segments
    with pytest.raises((CacheCorruption, IndexError)):
        manager.check_invariants([table])
