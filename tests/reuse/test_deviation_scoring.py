"""The rows of the deviation probe, and the blocks that it chooses."""

import numpy as np
import pytest

from kvboost_edge.kvcache.block_table import Span, TableSegment
from kvboost_edge.kvcache.manager import KVCacheManager
from kvboost_edge.reuse.deviation_scoring import (
    NUM_QUERY_TOKENS,
    Probe,
    QueryProbe,
    num_probed_blocks,
)
from kvboost_edge.reuse.span_plan import cut_spans

SIZE = 4
ROOT = b"r" * 32


def shared_table(num_reserved=3):
    """Build a table for a prompt of 30 tokens: 4 computed, a span of 10 that begins inside a block,
    4 computed, a span of 9, the rest.
    """
    manager = KVCacheManager(32, SIZE)
    stored = manager.open_table(range(100, 140), ROOT)
    manager.extend(stored, 40)
    manager.commit(stored, list(range(100, 140)), 40)
    ids = stored.block_ids.copy()
    manager.free(stored)
    spans = (Span(tuple(ids[1:5]), 2, 4, 14, -4), Span(tuple(ids[6:9]), 18, 18, 27, -6))
    table = manager.open_table(list(range(30)), ROOT)
    assert manager.spans.place(table, spans, 30, 32, num_reserved=num_reserved)
    return manager, table


def looked_at(rows):
    return [(row.start, row.stop, bool(row.stored)) for row in rows]


@pytest.mark.parametrize(
    ("limit", "reserved"), [(100, 5), (100, 1), (4, 5), (1, 1), (8, 2), (12, 3)]
)
def test_every_token_before_the_last_spans_end_is_probed_once_in_order(limit, reserved):
    manager, table = shared_table(reserved)
    probe = Probe(table, SIZE)
    seen = []
    compared = []
    while not probe.is_done:
        rows = probe.next_rows(limit)
        assert 0 < sum(row.stop - row.start for row in rows) <= max(SIZE, limit)
        scratch = [row.block_ids[row.segments[-1].first_index :] for row in rows if row.stored]
        written = [block for blocks in scratch for block in blocks]
        assert len(written) == len(set(written))
        assert set(written) <= set(table.reserve)
        for row in rows:
            seen += range(row.start, row.stop)
            if row.stored:
                compared += range(row.start, row.stop)
                assert row.stored == table.slots(row.start, row.stop, SIZE)
        probe.take(rows, np.zeros(sum(len(row.stored) for row in rows), np.float32))
    assert seen == [*range(12), *range(14, 26)]  # whole blocks of the spans
    assert compared == [*range(4, 12), *range(18, 26)]
    manager.check_invariants([table])


def test_a_span_row_attends_to_everything_before_it():
    _, table = shared_table()
    probe = Probe(table, SIZE)
    rows = probe.next_rows(12)
    assert looked_at(rows) == [(0, 4, False), (4, 12, True)]
    assert rows[1].segments == [*table.segments[:1], TableSegment(1, 4, 4, 0)]
    assert rows[1].block_ids == [*table.block_ids[:1], *table.reserve[:2]]
    rows = probe.next_rows(16)
    assert looked_at(rows) == [(14, 18, False), (18, 26, True)]
    assert rows[0].segments == table.segments[:3]


def test_the_blocks_that_deviate_most_are_recomputed():
    manager, table = shared_table(2)
    old = {position: table.slots(position, position + 1, SIZE)[0] for position in range(30)}
    reserve = table.reserve.copy()
    probe = Probe(table, SIZE)
    deviations = {4: 1.0, 8: 9.0, 18: 2.0, 22: 5.0}
    while not probe.is_done:
        rows = probe.next_rows(100)
        values = [
            deviations[start]
            for row in rows
            if row.stored
            for start in range(row.start, row.stop, SIZE)
        ]
        probe.take(rows, np.repeat(np.array(values, np.float32), SIZE))
    manager.spans.cut(table, probe.spans())
    assert [(span.start, span.stop) for span in table.spans] == [
        (4, 8),
        (12, 14),
        (18, 22),
        (26, 27),
    ]
    chosen = {*range(8, 12), *range(22, 26)}
    for position in range(30):
        slot = table.slots(position, position + 1, SIZE)[0]
        assert (slot // SIZE in reserve) == (position in chosen), position
        assert position in chosen or slot == old[position]
    manager.check_invariants([table])
    manager.free(table)
    manager.check_invariants([])
    assert manager.used_block_count == 0


def test_blocks_after_a_span_are_not_promised():
    """No block after a span will be published. Only the block before the first span is exact."""
    manager, table = shared_table()
    promised = manager.awaited_hash(range(5), ROOT)
    assert promised is not None
    assert manager.awaited_hash(range(30), ROOT) == promised
    manager.free(table)
    assert manager.awaited_hash(range(30), ROOT) is None


def test_whole_spans_may_be_chosen():
    """Only the ends that do not fill a block remain."""
    manager, table = shared_table(4)
    probe = Probe(table, SIZE)
    while not probe.is_done:
        rows = probe.next_rows(100)
        probe.take(rows, np.ones(sum(len(row.stored) for row in rows), np.float32))
    manager.spans.cut(table, probe.spans())
    assert [(span.start, span.stop) for span in table.spans] == [(12, 14), (26, 27)]
    manager.check_invariants([table])


@pytest.mark.parametrize(("ratio", "count"), [(0.0, 0), (0.01, 1), (0.25, 1), (0.5, 2), (1.0, 4)])
def test_number_of_chosen_blocks_follows_the_ratio(ratio, count):
    spans = [Span((1, 2, 3), 0, 1, 11, 0), Span((4, 5, 6), 20, 20, 29, 0)]
    assert num_probed_blocks(spans, ratio, SIZE) == count


def test_spans_are_cut_at_block_boundaries():
    span = Span((7, 8, 9, 10), 2, 5, 17, 3)
    assert cut_spans([span], [9], SIZE) == [Span((7, 8), 2, 5, 9, 3), Span((9, 10), 10, 13, 17, 3)]
    assert cut_spans([span], [5, 9, 13], SIZE) == []
    assert cut_spans([span], [], SIZE) == [span]


def asked_table():
    """Build a `shared_table` with more room after the spans than there are query tokens."""
    manager, table = shared_table(2)
    manager.extend(table, 30 + NUM_QUERY_TOKENS)
    return manager, table


@pytest.mark.parametrize("limit", [100, 16, 8, 4, 1])
@pytest.mark.parametrize("stop", [28, 30, 27 + NUM_QUERY_TOKENS, 30 + NUM_QUERY_TOKENS])
def test_the_last_tokens_are_queried_once_after_uncovered_tokens(limit, stop):
    _, table = asked_table()
    probe = QueryProbe(table, SIZE, stop)
    computed = []
    asked = []
    while not probe.is_done:
        rows = probe.next_rows(limit)
        positions = [position for row in rows for position in range(row.start, row.stop)]
        assert 0 < len(positions) <= max(SIZE, limit)
        assert all(row.block_ids == table.block_ids and not row.stored for row in rows)
        asked += [positions[index] for index in probe.query_indices(rows)]
        computed += positions
        probe.take(rows, np.zeros(len(probe.stored.slots), np.float32))
    assert computed == [*range(4), *range(14, 18), *range(27, stop)]
    assert asked == [*range(max(27, stop - NUM_QUERY_TOKENS), stop)]


def test_queries_attend_to_the_whole_blocks_of_the_spans():
    _, table = shared_table()
    slots, positions, deltas = QueryProbe(table, SIZE, 30).stored
    assert positions.tolist() == [*range(4, 12), *range(18, 26)]
    assert deltas.tolist() == [-4] * 8 + [-6] * 8
    assert slots.tolist() == [*table.slots(4, 12, SIZE), *table.slots(18, 26, SIZE)]


def test_the_blocks_attended_to_most_are_recomputed():
    manager, table = shared_table(2)
    probe = QueryProbe(table, SIZE, 30)
    first = np.zeros(16, np.float32)
    last = np.zeros(16, np.float32)
    first[[0, 5, 15]] = 3.0, 2.0, 1.0  # of blocks 4, 8 and 22
    last[[4, 14]] = 1.5, 2.2
    probe.take([], first)
    probe.take([], last)
    manager.spans.cut(table, probe.spans())
    assert [(span.start, span.stop) for span in table.spans] == [
        (4, 8),
        (12, 14),
        (18, 22),
        (26, 27),
    ]
    manager.check_invariants([table])
