"""Queries rotated to the positions at which keys were computed, against keys rotated to the
positions at which they are attended.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from helpers.kernels.paged_cases import DTYPES, attend_densely, poisoned_pool, random_rows
from helpers.kernels.shifted_cases import Pieces, Row, blocks_from, layout_of, plain, with_deltas
from helpers.pairwise import pairwise
from kvboost_edge.backends.base import KVSpec, LayerKVSpec
from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.attention.float_launch import AttentionWorkspace, paged_attention
from kvboost_edge.kernels.attention.paged import (
    AttentionOptions,
    Floats,
    Item,
    KVPool,
    PagedBatch,
    QueryRotation,
    plan_work,
)
from kvboost_edge.kernels.attention.rope import RopeTable
from kvboost_edge.kernels.quantized_kv.code_launch import paged_attention_coded
from kvboost_edge.kernels.quantized_kv.code_layout import BIT_PAIRS
from kvboost_edge.kernels.reference import attention as reference
from kvboost_edge.kernels.reference.quantized_kv import decode_block
from kvboost_edge.kernels.reference.quantized_kv import paged_attention_coded as reference_coded

SIZE = 16
BLOCKS = 192
STORED = 1280
KV_HEADS = 2
PER_GROUP = 3
POSITIONS = 4096
OPTIONS = {
    "plain": AttentionOptions(0.2),
    "window 50": AttentionOptions(0.2, window=50),
    "window 300": AttentionOptions(0.2, window=300, sinks=np.arange(6, dtype=np.float32)),
    "softcap": AttentionOptions(0.2, softcap=3.0),
}
# (channels of a head, rotated pairs, factor of the RoPE tables as in YaRN)
ROPES = {
    "whole": (24, 12, 1.0),
    "wide": (64, 32, 1.0),
    "segment": (40, 10, 1.0),
    "yarn": (32, 16, 1.25),
    "none": (16, 0, 1.0),
}


class Moved(NamedTuple):
    """A stored sequence, and a new one composed of runs of it and of computed `rows`.

    Attributes:
        queries, keys, values: of the whole new sequence, before rotation.
        stored_keys, stored_values: of the stored one, before rotation.
    """

    stored: Row
    rows: list[Row]
    cos: Floats
    sin: Floats
    queries: Floats
    keys: Floats
    values: Floats
    stored_keys: Floats
    stored_values: Floats

    @property
    def row(self):
        return self.rows[-1]

    def rotated(self, heads, positions):
        half = self.cos.shape[1]
        cos, sin = (table[positions][:, None].astype(np.float64) for table in (self.cos, self.sin))
        first = heads[:, :, :half]
        second = heads[:, :, half : 2 * half]
        pairs = first * cos - second * sin, second * cos + first * sin
        return np.concatenate([*pairs, heads[:, :, 2 * half :]], axis=2).astype(np.float32)

    def new(self, row):
        """Return the queries of a row's tokens, and their rotation."""
        queries = self.queries[row.start : row.stop]
        return self.rotated(queries, np.arange(row.start, row.stop)), QueryRotation(
            queries, self.cos, self.sin
        )

    def write(self, backend):
        everything = np.arange(STORED)
        batch = backend.prepare(layout_of([self.stored], SIZE))
        backend.write_kv(0, self.rotated(self.stored_keys, everything), self.stored_values, batch)
        for row in self.rows:
            span = slice(row.start, row.stop)
            batch = backend.prepare(layout_of([row], SIZE))
            backend.write_kv(
                0,
                self.rotated(self.keys[span], np.arange(row.start, row.stop)),
                self.values[span],
                batch,
            )

    def batch(self, row):
        layout = layout_of([row], SIZE)
        return PagedBatch(
            layout.cu_seqlens_q, layout.seq_lens, layout.block_tables, layout.segments
        )


def make(rope, last, seed=0):
    """Make a sequence with runs that begin and end inside blocks, runs of whole blocks, the same
    blocks at two places, and runs moved forward and backward.
    """
    dim, half, factor = ROPES[rope]
    rng = np.random.default_rng(seed)
    take = blocks_from(0)
    stored = plain(STORED, SIZE, take)
    new = Pieces(SIZE, take)
    # Frequencies have few bits, so that angles are exact and rotations differ only by rounding.
    exact = (np.round(1024 * 10000.0 ** (-np.arange(half) / max(half, 1))) / 1024).astype(
        np.float32
    )
    tables = RopeTable(exact, factor)
    tables.cover(POSITIONS)
    keys, values = (random_rows(rng, STORED, KV_HEADS, dim) for _ in range(2))
    pieces = []
    rows = []
    for start, count in ((5, 42), (-1, 48), (5, 42), (100, 3), (96, 64), (560, 700), (-1, last)):
        if start < 0:
            rows.append(new.own(count))
            pieces.append(
                (random_rows(rng, count, KV_HEADS, dim), random_rows(rng, count, KV_HEADS, dim))
            )
        else:
            new.run(stored.table, start, count)
            pieces.append((keys[start : start + count], values[start : start + count]))
    all_keys, all_values = (np.concatenate(one) for one in zip(*pieces, strict=True))
    queries = 2 * random_rows(rng, new.length, KV_HEADS * PER_GROUP, dim)
    return Moved(stored, rows, tables.cos, tables.sin, queries, all_keys, all_values, keys, values)


@pytest.fixture(scope="module")
def two_threads():
    space = AttentionWorkspace(2)
    yield space
    space.close()


def shapes_of(dim):
    """Return the shapes of a pool's keys and values."""
    return (BLOCKS, KV_HEADS, dim, SIZE), (BLOCKS, KV_HEADS, SIZE, dim)


def float_pool(moved, dtype):
    """Return a pool whose unwritten parts are NaN."""
    pool = poisoned_pool(BLOCKS, KV_HEADS, moved.keys.shape[2], SIZE, dtype)
    stored = moved.rotated(moved.stored_keys, np.arange(STORED))
    reference.write_kv(stored, moved.stored_values, pool, moved.stored.slots(SIZE))
    for row in moved.rows:
        span = slice(row.start, row.stop)
        keys = moved.rotated(moved.keys[span], np.arange(row.start, row.stop))
        reference.write_kv(keys, moved.values[span], pool, row.slots(SIZE))
    return pool


def assert_near(got, wanted, tolerance):
    for mine, other in zip(got, wanted, strict=True):
        assert np.isfinite(mine).all()
        assert np.linalg.norm(mine - other) <= tolerance * np.linalg.norm(other)


def assert_far(got, wanted):
    assert np.linalg.norm(got[0] - wanted[0]) >= 0.1 * np.linalg.norm(wanted[0])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("rope", ROPES)
def test_the_reference_equals_attention_over_recomputed_keys(rope, options):
    moved = make(rope, 9)
    assert sorted({segment.delta for segment in moved.row.segments}) == [-361, -5, 0, 32, 39, 85]
    assert moved.row.segments[0].first_position == -5
    queries, turning = moved.new(moved.row)
    got = reference.paged_attention(
        queries, float_pool(moved, "float32"), moved.batch(moved.row), options, turning
    )
    keys = moved.rotated(moved.keys, np.arange(moved.row.stop))
    assert_near(got, attend_densely(queries, keys, moved.values, options), 2e-5)


@pytest.mark.parametrize(
    ("rope", "dtype", "name", "last"), pairwise(ROPES, DTYPES, OPTIONS, (1, 30))
)
def test_rotated_queries_equal_rotated_keys(rope, dtype, name, last, two_threads):
    options = OPTIONS[name]
    moved = make(rope, 30)
    pool = float_pool(moved, dtype)
    row = moved.row.last(last)
    queries, turning = moved.new(row)
    wanted = reference.paged_attention(queries, pool, moved.batch(row), options, turning)
    for space in (None, two_threads):
        got = paged_attention(queries, pool, moved.batch(row), options, space, turning=turning)
        assert_near(got, wanted, 2e-5)
    if rope != "none" and options.window != 50:
        wrong = moved.batch(with_deltas(row, lambda delta: delta - 1))
        assert_far(paged_attention(queries, pool, wrong, options, turning=turning), wanted)


@pytest.mark.parametrize(
    ("bits", "rope", "last"),
    pairwise(
        BIT_PAIRS,
        {"whole": "plain", "wide": "softcap", "segment": "window 300", "yarn": "plain"}.items(),
        (1, 13),
    ),
)
def test_rotated_queries_over_quantized_keys(bits, rope, last):
    """Results are within 1e-5 of the specification with the same rounding steps, and within integer
    precision of the decoded values. The unit that finishes last merges the rows' own block, which
    must not be multiplied with rotated queries.
    """
    options = OPTIONS[rope[1]]
    moved = make(rope[0], 13)
    dim = moved.keys.shape[2]
    backend = CPUBackend(
        KVSpec((LayerKVSpec(KV_HEADS, dim),), SIZE, "float16", bits), BLOCKS, num_threads=2
    )
    backend.poison_blocks(range(BLOCKS))
    moved.write(backend)
    row = moved.row.last(last)
    backend.release_blocks(moved.row.table[-1:])
    prepared = backend.prepare(layout_of([moved.row], SIZE))
    span = slice(moved.row.start, moved.row.stop)
    backend.write_kv(
        0,
        moved.rotated(moved.keys[span], np.arange(span.start, span.stop)),
        moved.values[span],
        prepared,
    )
    assert prepared.quantized is not None
    codes, layout, own = backend._coded.layer(0, prepared.quantized)
    queries, turning = moved.new(row)
    batch = moved.batch(row)
    wanted = reference_coded(queries, codes, layout, batch, own, options, turning)
    forwards = plan_work(batch, PER_GROUP, KV_HEADS, options.window, 1)
    backwards = forwards._replace(items=np.ascontiguousarray(forwards.items[::-1]))
    assert Item(*backwards.items[-1]).delta != 0
    for plan in (forwards, backwards):
        got = paged_attention_coded(
            queries, codes, layout, batch, own, options, None, plan, turning
        )
        assert_near(got, wanted, 1e-5)
    pool = KVPool(*(np.zeros(shape, np.float32) for shape in shapes_of(dim)))
    for block in set(row.table[:-1]):
        for head in range(KV_HEADS):
            keys, values = decode_block(codes[block, head], layout)
            pool.keys[block, head] = keys.T
            pool.values[block, head] = values
    buffer = own.tables[0, 0]
    pool.keys[row.table[-1]] = own.pool.keys[buffer]
    pool.values[row.table[-1]] = own.pool.values[buffer]
    exact = reference.paged_attention(queries, pool, batch, options, turning)
    assert_near(got, exact, 1e-2)
    wrong = moved.batch(with_deltas(row, lambda delta: delta - 1))
    assert_far(
        paged_attention_coded(queries, codes, layout, wrong, own, options, turning=turning), exact
    )
    backend.close()


def test_a_delta_without_a_rotation_is_refused():
    moved = make("whole", 2)
    pool = float_pool(moved, "float32")
    batch = moved.batch(moved.row)
    queries, turning = moved.new(moved.row)
    with pytest.raises(ConfigError, match="pass the queries before RoPE"):
        paged_attention(queries, pool, batch, OPTIONS["plain"])
    with pytest.raises(ConfigError, match=r"must have shape \(2, 6, 24\)"):
        paged_attention(
            queries,
            pool,
            batch,
            OPTIONS["plain"],
            turning=turning._replace(queries=turning.queries[:1]),
        )
    short = turning._replace(cos=turning.cos[:500])
    with pytest.raises(ConfigError, match="positions, got 500"):
        paged_attention(queries, pool, batch, OPTIONS["plain"], turning=short)
