"""Block tables of several segments: the index of an entry does not give its position, and plain
sequences keep their bits.
"""

import numpy as np
import pytest

from helpers.backends.makers import into
from helpers.distance import distance
from helpers.kernels.paged_cases import assert_close, make_case
from kvboost_edge.backends.base import AttentionParams, BatchLayout, KVSpec, LayerKVSpec
from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.backends.reference import ReferenceBackend
from kvboost_edge.backends.torch_backend import TorchBackend
from kvboost_edge.errors import ConfigError
from kvboost_edge.segments import Segment, entry_of, entry_positions

SIZE = 16
BLOCKS = 128
HEADS = 2
PER_HEAD = 3
DIM = 24
BITS = [(8, 8), (8, 4), (4, 4)]
KINDS = [ReferenceBackend, CPUBackend, TorchBackend]
EACH = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


class Seamed:
    """One sequence of a case in blocks of its own, cut into segments.

    - cuts: positions where segments begin
    - offsets: the slot in its first block where each of these segments begins

    An entry that serves no position separates two segments.
    """

    def __init__(self, case, sequence, cuts, offsets, first_block):
        self.case = case
        self.sequence = sequence
        self.cuts = [0, *cuts]
        self.ends = [*cuts, case.lengths[sequence][1]]
        self.segments = []
        table = []
        for cut, end, offset in zip(self.cuts, self.ends, [0, *offsets], strict=True):
            self.segments.append(Segment(0, len(table), cut - offset, cut, 0))
            count = -(-(end - cut + offset) // SIZE) + 1
            table += range(first_block + len(table), first_block + len(table) + count)
        self.table = np.array(table, np.int32)

    def layout(self, start, stop):
        """Build the layout of the tokens [start, stop) of one segment. Later segments do not exist
        yet.
        """
        segments = np.array(
            [segment for segment in self.segments if segment.valid_from < stop], np.int32
        )
        entries, offsets = entry_of(segments, 0, np.arange(start, stop), SIZE)
        slots = self.table[entries].astype(np.int64) * SIZE + offsets
        starts = np.array([0, stop - start], np.int32)
        ends = np.array([stop], np.int32)
        return BatchLayout(starts, ends, self.table[None], slots, segments)

    def write(self, backend):
        for start, end in zip(self.cuts, self.ends, strict=True):
            self.write_rows(backend, np.arange(start, end), self.layout(start, end))

    def write_rows(self, backend, tokens, layout):
        """Write keys and values of these tokens as the layout says."""
        arrays = (rows[self.sequence][tokens] for rows in (self.case.keys, self.case.values))
        batch = backend.prepare(layout)
        backend.write_kv(0, *(into(backend, rows) for rows in arrays), batch)
        return batch

    def attend(self, backend, new, params):
        total = self.ends[-1]
        layout = self.layout(total - new, total)
        queries = self.case.queries[self.sequence][total - new :]
        return attended(backend, layout, queries, params)


def attended(backend, layout, queries, params):
    out, lse = backend.attention(0, into(backend, queries), backend.prepare(layout), params)
    return np.asarray(out), np.asarray(lse)


def one_case(seed, *lengths):
    return make_case(
        np.random.default_rng(seed),
        lengths,
        kv_heads=HEADS,
        per_group=PER_HEAD,
        dim=DIM,
        block_size=SIZE,
    )


def pool(kind, bits=(16, 16), **options):
    backend = kind(
        KVSpec(
            (LayerKVSpec(HEADS, DIM),), SIZE, "float32" if bits == (16, 16) else "float16", bits
        ),
        BLOCKS,
        **options,
    )
    backend.poison_blocks(range(BLOCKS))
    return backend


MANNERS = [
    ((10,), (0,), AttentionParams(0.2)),
    ((10, 37), (0, 5), AttentionParams(0.2, softcap=3.0)),
    (
        (16, 48, 90),
        (0, 15, 1),
        AttentionParams(0.2, window=50, sinks=np.arange(6, dtype=np.float32)),
    ),
    ((3, 4, 5), (0, 0, 9), AttentionParams(0.2, window=7)),
    ((64,), (0,), AttentionParams(0.2, window=1)),
    ((530, 600), (7, 0), AttentionParams(0.2)),
    ((512,), (0,), AttentionParams(0.2, window=300, softcap=5.0)),
]


@EACH
@pytest.mark.parametrize(("cuts", "offsets", "params"), MANNERS, ids=str)
@pytest.mark.parametrize("new", [1, 9])
def test_attention_over_segments_equals_attention_over_their_tokens(
    kind, cuts, offsets, params, new
):
    case = one_case(len(cuts), (new, cuts[-1] + 21))
    seamed = Seamed(case, 0, cuts, offsets, 3)
    backend = pool(kind)
    seamed.write(backend)
    got = seamed.attend(backend, new, params)
    assert_close(got, case.expected(case.spans, params, "float32"))
    backend.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_segment_border_on_a_partition_border_changes_no_bit(threads):
    case = one_case(5, (70, 1300))
    seamed = Seamed(case, 0, (512,), (0,), 0)
    plain = pool(CPUBackend, num_threads=threads)
    backend = pool(CPUBackend, num_threads=threads)
    plain.write_kv(0, case.keys[0], case.values[0], plain.prepare(case.whole))
    seamed.write(backend)
    params = AttentionParams(0.2)
    wanted = attended(plain, case.layout(case.spans), case.rows(case.queries, case.spans), params)
    for one, other in zip(seamed.attend(backend, 70, params), wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    plain.close()
    backend.close()


@pytest.mark.parametrize("bits", [(16, 16), *BITS], ids=str)
def test_a_plain_sequence_is_unchanged_next_to_a_segmented_one(bits):
    """The plain sequence is one segment in the batch with the segmented one. Its output equals that
    of a layout without segments.
    """
    case = one_case(6, (1, 700), (1, 85))
    params = AttentionParams(0.2, window=600)
    backend = pool(CPUBackend, bits, num_threads=2)
    whole = case.layout([(0, 0, 700)])
    backend.write_kv(0, case.keys[0], case.values[0], backend.prepare(whole))
    if bits != (16, 16):
        backend.release_blocks(range(BLOCKS))
    seamed = Seamed(case, 1, (32,), (0,), 60)
    for start, end in ((0, 32), (32, 80)):
        seamed.write_rows(backend, np.arange(start, end), seamed.layout(start, end))

    def alone():
        layout = case.layout([(0, 688, 700)])
        batch = backend.prepare(layout)
        backend.write_kv(0, case.keys[0][688:], case.values[0][688:], batch)
        out, lse = backend.attention(0, case.queries[0][688:], batch, params)
        return np.array(out), np.array(lse)

    wanted = alone()
    if bits != (16, 16):
        backend.release_blocks(case.tables[0][43:44].tolist())
    one = case.layout([(0, 688, 700)])
    other = seamed.layout(80, 85)
    width = max(one.block_tables.shape[1], other.block_tables.shape[1])
    tables = np.full((2, width), -1, np.int32)
    tables[0, : one.block_tables.shape[1]] = one.block_tables[0]
    tables[1, : other.block_tables.shape[1]] = other.block_tables[0]
    assert other.segments is not None
    theirs = other.segments.copy()
    theirs[:, 0] = 1
    both = BatchLayout(
        np.array([0, 12, 17], np.int32),
        np.array([700, 85], np.int32),
        tables,
        np.concatenate([one.slot_mapping, other.slot_mapping]),
        np.concatenate([np.array([Segment(0, 0, 0, 0, 0)], np.int32), theirs]),
    )
    batch = backend.prepare(both)
    keys, values, queries = (
        np.concatenate([arrays[0][688:], arrays[1][80:]])
        for arrays in (case.keys, case.values, case.queries)
    )
    backend.write_kv(0, keys, values, batch)
    out, lse = backend.attention(0, queries, batch, params)
    np.testing.assert_array_equal(out[:12], wanted[0])
    np.testing.assert_array_equal(lse[:12], wanted[1])
    backend.close()


@pytest.mark.parametrize("bits", BITS, ids=str)
@pytest.mark.parametrize(
    ("cuts", "params"),
    [
        ((32,), AttentionParams(0.2)),
        ((26, 58), AttentionParams(0.2, window=40)),
        ((10, 600), AttentionParams(0.2, softcap=4.0, sinks=np.ones(6, np.float32))),
    ],
    ids=str,
)
@pytest.mark.parametrize("new", [1, 20])
@pytest.mark.some(3)
def test_quantized_segments_equal_the_reference(bits, cuts, params, new):
    """A segment may end inside a full block. The slots after its end are not attended."""
    case = one_case(7, (new, cuts[-1] + 37))
    results = []
    for kind, options in ((ReferenceBackend, {}), (CPUBackend, {"num_threads": 2})):
        backend = pool(kind, bits, **options)
        seamed = Seamed(case, 0, cuts, [0] * len(cuts), 2)
        for segment, (start, end) in enumerate(zip(seamed.cuts, seamed.ends, strict=True)):
            if segment + 1 == len(seamed.cuts):
                end -= new
            stop = (
                start + -(-(end - start) // SIZE) * SIZE if segment + 1 < len(seamed.cuts) else end
            )
            filled = np.minimum(
                np.arange(start, stop), end - 1
            )  # a block that ends early repeats its last token
            if segment + 1 < len(seamed.cuts):
                seamed.segments, kept = seamed.segments[: segment + 1], seamed.segments
                layout = seamed.layout(start, stop)
                seamed.segments = kept
            else:
                layout = seamed.layout(start, stop)
            seamed.write_rows(backend, filled, layout)
        total = seamed.ends[-1]
        batch = seamed.write_rows(
            backend, np.arange(total - new, total), seamed.layout(total - new, total)
        )
        out, lse = backend.attention(0, case.queries[0][total - new :], batch, params)
        results.append((np.array(out), np.array(lse)))
        backend.close()
    reference, compiled = results
    assert distance(compiled[0], reference[0]) <= 1e-5
    np.testing.assert_allclose(compiled[1], reference[1], rtol=0, atol=1e-5)
    exact = case.expected(case.spans, params, "float32")
    assert distance(compiled[0], exact[0]) <= (0.2 if 4 in bits else 0.02)


def test_entry_positions_of_plain_tables():
    first, served, until = entry_positions((2, 3), None, SIZE)
    assert first.tolist() == served.tolist() == [[0, 16, 32]] * 2
    assert until.tolist() == [[16, 32, 48]] * 2
    assert [x.tolist() for x in entry_of(None, 0, np.array([0, 15, 16, 40]), SIZE)] == [
        [0, 0, 1, 2],
        [0, 15, 0, 8],
    ]


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([(0, 0, 0, 0, 4)], "but must have delta 0"),
        ([(1, 0, 0, 0, 0)], "cover sequences 0\\.\\.0"),
        ([(0, 0, 0)], "rows with the columns"),
        ([(0, 1, 0, 3, 0)], "skip positions or exceed tables"),
        ([(0, 0, 0, 0, 0), (0, 2, 33, 33, 0)], "skip positions or exceed tables"),
        ([(0, 0, 0, 0, 0), (0, 9, 20, 20, 0)], "skip positions or exceed tables"),
        ([(0, 0, 0, 0, 0), (0, 2, 2, 20, 0)], "skip positions or exceed tables"),
        ([(0, 0, 0, 0, 0), (0, 2, 30, 30, 0)], "last segments"),
        ([(0, 0, 0, 0, 0), (0, 1, 16, 16, 3)], r"last segments have delta \[3\]"),
        (
            [(0, 0, 0, 0, 1), (0, 1, 16, 16, 0)],
            "position 0 has delta 1, but its keys cannot have been computed at position -1",
        ),
        ([(0, 0, 0, 0, 0), (0, 1, 12, 14, 15), (0, 2, 20, 20, 0)], "at position -1;"),
        ([(0, 0, -16, 0, 0), (0, 1, 0, 0, 0)], "skip positions or exceed tables"),
        ([(0, 0, -3, 0, -3), (0, 1, 16, 16, 0)], "skip positions or exceed tables"),
    ],
)
@EACH
def test_invalid_segments_are_refused(kind, segments, message):
    refuses(pool(kind), np.arange(3), segments, message)


def refuses(backend, slots, segments, message):
    """Check that the last 3 of 28 tokens, in a table of 4 blocks with these segments, are refused."""
    starts = np.array([0, 3], np.int32)
    ends = np.array([28], np.int32)
    table = np.arange(4, dtype=np.int32)[None]
    with pytest.raises(ConfigError, match=message):
        backend.prepare(BatchLayout(starts, ends, table, slots, np.array(segments, np.int32)))
    backend.close()


def test_a_quantized_segment_is_written_from_slot_0():
    segments = [(0, 0, 0, 0, 0), (0, 2, 20, 25, 0)]
    refuses(pool(ReferenceBackend, (8, 8)), 2 * SIZE + 5 + np.arange(3), segments, "slot 0")
