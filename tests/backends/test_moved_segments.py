"""Layouts of segments with a delta: the backends that support them, the refused ones, and blocks
that a pass both writes and reads.
"""

import numpy as np
import pytest
import torch

from helpers.backends.makers import on_cuda
from helpers.cuda.standin import needs_kernels, standing_in
from helpers.kernels.shifted_cases import Pieces, blocks_from, layout_of, plain
from kvboost_edge.backends.base import AttentionParams, KVSpec, LayerKVSpec
from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.backends.reference import ReferenceBackend
from kvboost_edge.backends.torch_backend import TorchBackend
from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.attention.paged import AttentionOptions, PagedBatch, QueryRotation
from kvboost_edge.kernels.attention.rope import RopeTable
from kvboost_edge.kernels.reference import attention as reference
from kvboost_edge.segments import (
    Segment,
    deltas_of,
    entry_of,
    entry_positions,
    has_delta,
    turned_positions,
)

SIZE = 16
BLOCKS = 32
HEADS = 2
DIM = 16
KINDS = [ReferenceBackend, CPUBackend, TorchBackend]
CODED = pytest.mark.parametrize("kind", KINDS[:2], ids=lambda kind: kind.name)


def pool(kind, bits=(16, 16)):
    dtype = "float32" if bits == (16, 16) else "float16"
    backend = kind(KVSpec((LayerKVSpec(HEADS, DIM),), SIZE, dtype, bits), BLOCKS)
    backend.poison_blocks(range(BLOCKS))
    return backend


def random_kv(count):
    rng = np.random.default_rng(count)
    return tuple(rng.standard_normal((count, HEADS, DIM), dtype=np.float32) for _ in range(2))


def write(backend, rows):
    batch = backend.prepare(layout_of(rows, SIZE))
    backend.write_kv(0, *random_kv(sum(row.stop - row.start for row in rows)), batch)
    return batch


def from_inside_a_block():
    """Build a row of tokens 5..26 of blocks 8 and 9 at position 0, followed by 4 tokens of its own
    in block 0.
    """
    new = Pieces(SIZE, blocks_from(0))
    new.run([8, 9], 5, 22)
    return new.own(4)


def test_positions_of_a_segment_that_starts_before_0():
    row = from_inside_a_block()
    segments = np.array(row.segments, np.int32)
    assert row.segments == [Segment(0, 0, -5, 0, -5), Segment(0, 2, 22, 22, 0)]
    assert [x.tolist() for x in entry_positions((1, 3), segments, SIZE)] == [
        [[-5, 11, 22]],
        [[0, 11, 22]],
        [[11, 22, 38]],
    ]
    positions = np.array([0, 10, 11, 21, 22, 25])
    assert [x.tolist() for x in entry_of(segments, 0, positions, SIZE)] == [
        [0, 0, 1, 1, 2, 2],
        [5, 15, 0, 10, 0, 3],
    ]
    assert deltas_of(segments, 0, positions).tolist() == [-5, -5, -5, -5, 0, 0]
    assert turned_positions(segments, np.array([26], np.int32)) == 31
    assert [has_delta(some) for some in (None, segments, segments[1:], segments[:, :3])] == [
        False,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_moved_segments_need_query_rotation(kind):
    backend = pool(kind)
    layout = layout_of([from_inside_a_block()], SIZE)
    reasons = {
        CPUBackend: r"segments with delta \[-5, 0\] contain keys computed at other positions",
        TorchBackend: (
            "backend 'torch' without RoPE frequencies does not support segments with a position delta"
        ),
    }
    if kind in reasons:
        batch = backend.prepare(layout)
        queries = torch.zeros((4, HEADS, DIM))
        with pytest.raises(ConfigError, match=reasons[kind]):
            backend.attention(
                0, queries if kind is TorchBackend else queries.numpy(), batch, AttentionParams(1.0)
            )
    else:
        with pytest.raises(
            ConfigError,
            match=rf"backend '{backend.name}' does not support segments with a position delta",
        ):
            backend.prepare(layout)
    backend.close()


def rows_over(first, count):
    """Build a row of the first `count` tokens of a row with one segment, followed by four of its
    own in block 20.
    """
    new = Pieces(SIZE, blocks_from(20))
    new.run(first.table, 0, count)
    return new.own(4)


@CODED
@pytest.mark.parametrize("bits", [(8, 8), (8, 4)], ids=str)
def test_a_row_attends_to_blocks_filled_in_the_same_pass(kind, bits):
    """The block is begun in the same pass or in an earlier one. The result equals that after a pass
    of its own.
    """
    queries = np.random.default_rng(0).standard_normal((4, HEADS, DIM), dtype=np.float32)
    keys, values = random_kv(36)
    results = []
    for passes in ([(0, 32), (32, 36)], [(0, 36)], [(0, 6), (6, 36)]):
        backend = pool(kind, bits)
        whole = plain(32, SIZE, blocks_from(4))
        after = rows_over(whole, 32)
        for start, stop in passes:
            rows = [whole._replace(start=start, stop=min(stop, 32))] if start < 32 else []
            rows += [after] if stop > 32 else []
            batch = backend.prepare(layout_of(rows, SIZE))
            backend.write_kv(0, keys[start:stop], values[start:stop], batch)
        padded = np.concatenate([np.zeros((stop - start - 4, HEADS, DIM), np.float32), queries])
        results.append(np.array(backend.attention(0, padded, batch, AttentionParams(0.25))[0][-4:]))
        backend.close()
    assert np.isfinite(results[0]).all()
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@CODED
def test_open_quantized_blocks_are_refused_in_earlier_segments(kind):
    """The block is begun in the same pass or in an earlier one. The refusal changes nothing."""
    backend = pool(kind, (8, 8))
    whole = plain(26, SIZE, blocks_from(4))
    with pytest.raises(
        ConfigError, match="block 5 is only partly written, but is not in the last segment"
    ):
        backend.prepare(layout_of([whole, rows_over(whole, 26)], SIZE))
    begun = whole._replace(stop=10)
    write(backend, [begun])
    with pytest.raises(
        ConfigError, match="block 4 is only partly written, but is not in the last segment"
    ):
        backend.prepare(layout_of([rows_over(begun, 10)], SIZE))
    with pytest.raises(
        ConfigError, match="block 4 is only partly written, but is not in the last segment"
    ):
        backend.prepare(layout_of([begun._replace(start=10, stop=13), rows_over(begun, 10)], SIZE))
    with pytest.raises(
        ConfigError, match="block 5 is only partly written, but is not in the last segment"
    ):
        backend.prepare(layout_of([whole._replace(start=10), rows_over(whole, 26)], SIZE))
    write(backend, [whole._replace(start=10), rows_over(whole, 16)])
    backend.close()


@pytest.mark.parametrize(
    "params",
    [
        AttentionParams(0.3),
        AttentionParams(0.3, window=20),
        AttentionParams(0.5, softcap=4.0),
        AttentionParams(0.3, sinks=np.array([0.5, -1.0, 2.0, 0.0], np.float32)),
    ],
    ids=["plain", "window", "softcap", "sinks"],
)
@pytest.mark.parametrize("half", [0, 3, DIM // 2])
def test_torch_rotates_keys_like_the_reference(half, params):
    assert_rotates_like_the_reference(TorchBackend, half, params)


@needs_kernels
def test_cuda_rotates_keys_like_the_reference():
    with standing_in():
        assert_rotates_like_the_reference(on_cuda, DIM // 2, AttentionParams(0.3, window=20))


def assert_rotates_like_the_reference(make, half, params):
    """The batch has two sequences of runs and one without. Some of their keys are stored where no
    segment serves them.
    """
    frequencies = 1000.0 ** (-np.arange(half) / max(half, 1))
    table = RopeTable(frequencies.astype(np.float32))
    table.cover(256)
    stored = plain(80, SIZE, blocks_from(0))
    moved = Pieces(SIZE, blocks_from(8))
    twice = Pieces(SIZE, blocks_from(14))
    rows = [moved.own(16)]
    moved.run(stored.table, 37, 30)
    rows.append(moved.own(7))
    twice.run(stored.table, 3, 20)
    twice.run(stored.table, 50, 30)
    rows += [twice.own(7), plain(7, SIZE, blocks_from(20))]
    slow = pool(ReferenceBackend)
    fast = pool(make)
    for backend, kind in ((slow, np.asarray), (fast, torch.from_numpy)):
        for number, row in enumerate([stored, *rows]):
            keys, values = random_kv(row.stop - row.start)
            layout = layout_of(
                [row._replace(segments=[segment._replace(delta=0) for segment in row.segments])],
                SIZE,
            )
            backend.write_kv(0, kind(keys + number), kind(values), backend.prepare(layout))
    layout = layout_of(rows, SIZE)
    queries = np.random.default_rng(1).standard_normal((37, 2 * HEADS, DIM), dtype=np.float32)
    batch = PagedBatch(layout.cu_seqlens_q, layout.seq_lens, layout.block_tables, layout.segments)
    turning = QueryRotation(queries, table.cos, table.sin)
    wanted = reference.paged_attention(
        queries, slow._pools[0], batch, AttentionOptions(*params), turning
    )
    got = fast.attention(0, torch.from_numpy(queries), fast.prepare(layout), params, frequencies)
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)
    still = reference.paged_attention(queries, slow._pools[0], batch, AttentionOptions(*params))
    assert half == 0 or np.abs(still[0] - wanted[0]).max() > 0.05
    slow.close()
    fast.close()
