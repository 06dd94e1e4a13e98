"""Plans cover the work exactly once, positions are correct, unsupported pools are refused."""

import numpy as np
import pytest

from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.attention.paged import (
    PARTITION,
    Item,
    KVPool,
    PagedBatch,
    aligned_empty,
    plan_work,
    storage_kind,
)
from kvboost_edge.kernels.vectors import KIND_BF16, KIND_F16, KIND_F32


def random_batch(rng):
    num_seqs = int(rng.integers(1, 7))
    totals = rng.integers(1, 5 * PARTITION, num_seqs)
    new = np.array([rng.choice([0, 1, rng.integers(1, total + 1)]) for total in totals])
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    return PagedBatch(starts, totals.astype(np.int32), np.zeros((num_seqs, 1), np.int32))


@pytest.mark.parametrize("seed", range(30))
def test_the_plan_covers_every_span_of_every_row_once(seed):
    rng = np.random.default_rng(seed)
    batch = random_batch(rng)
    per_kv = int(rng.choice([1, 3, 8, 100]))
    heads = int(rng.integers(1, 9))
    window = int(rng.choice([0, 1, 100, 512, 1000]))
    threads = int(rng.integers(1, 9))
    plan = plan_work(batch, per_kv, heads, window, threads)
    assert plan.items.dtype == np.int32
    assert plan.items.flags.c_contiguous
    done = {}
    splits = {}
    for item in (Item(*row) for row in plan.items.tolist()):
        assert 0 < item.num_rows <= plan.tile_rows
        assert item.first_partition < item.end_partition
        for row in range(item.first_row, item.first_row + item.num_rows):
            done.setdefault((item.sequence, row), []).extend(
                range(item.first_partition, item.end_partition)
            )
        if item.split >= 0:
            assert item.end_partition == item.first_partition + 1
            splits.setdefault(item.split, []).append(item)
    lengths = np.diff(batch.cu_seqlens_q)
    assert set(done) == {
        (sequence, row) for sequence, length in enumerate(lengths) for row in range(length)
    }
    for (sequence, row), partitions in done.items():
        position = int(batch.seq_lens[sequence] - lengths[sequence]) + row
        seen = range(max(0, position - window + 1) if window else 0, position + 1)
        assert sorted(set(partitions)) == sorted(partitions), "no partition may occur twice"
        assert {token // PARTITION for token in (seen[0], seen[-1])} <= set(partitions)
        assert set(range(seen[0] // PARTITION, seen[-1] // PARTITION + 1)) <= set(partitions)
    assert sorted(splits) == list(range(plan.num_splits))
    partials = []
    for members in splits.values():
        assert (
            len(
                {
                    member._replace(first_partition=0, end_partition=0, ordinal=0)
                    for member in members
                }
            )
            == 1
        )
        assert len(members) == members[0].num_partitions
        in_order = sorted(members, key=lambda member: member.ordinal)
        assert [member.ordinal for member in in_order] == list(range(len(members)))
        assert [member.first_partition for member in in_order] == sorted(
            m.first_partition for m in members
        )
        partials.extend(range(members[0].first_partial, members[0].first_partial + len(members)))
    assert sorted(partials) == list(range(plan.num_partials)), "partial results must not overlap"
    if threads == 1:
        assert plan.num_splits == 0


@pytest.mark.parametrize("window", [0, 1, 64, 100, 512, 513, 1000])
@pytest.mark.parametrize("new", [1, 3])
def test_decode_steps_share_plans(window, new):
    plans = {}
    for length in range(new, 4 * PARTITION):
        batch = PagedBatch(
            np.array([0, new], np.int32), np.array([length], np.int32), np.zeros((1, 1), np.int32)
        )
        plan = plan_work(batch, 4, 2, window, 2)
        plans[id(plan)] = plan
        items = [Item(*row) for row in plan.items.tolist()]
        seen = sorted(
            one for item in items for one in range(item.first_partition, item.end_partition)
        )
        first = max(0, length - new - window + 1) // PARTITION if window else 0
        assert seen == list(range(first, (length - 1) // PARTITION + 1))
    assert len(plans) <= 4 * PARTITION // 64 + 4, (
        "a new plan is needed only for each tile and for partitions that leave the window"
    )


def test_a_long_decode_is_split_over_the_threads():
    batch = PagedBatch(
        np.array([0, 1], np.int32), np.array([10 * PARTITION], np.int32), np.zeros((1, 1), np.int32)
    )
    assert len(plan_work(batch, 4, 1, 0, 2).items) == 10
    assert len(plan_work(batch, 4, 1, 0, 1).items) == 1


@pytest.mark.parametrize(
    ("dtype", "kind"), [(np.float32, KIND_F32), (np.float16, KIND_F16), (np.uint16, KIND_BF16)]
)
def test_storage_kinds_of_pools(dtype, kind):
    assert (
        storage_kind(KVPool(np.zeros((2, 1, 24, 16), dtype), np.zeros((2, 1, 16, 24), dtype)))
        == kind
    )


@pytest.mark.parametrize(
    ("keys", "values", "message"),
    [
        (np.zeros((2, 1, 24, 16)), np.zeros((2, 1, 16, 24)), "float64"),
        (
            np.zeros((2, 1, 24, 16), np.float32),
            np.zeros((2, 1, 16, 24), np.float16),
            "must both be one of",
        ),
        (
            np.zeros((4, 1, 24, 16), np.float32)[::2],
            np.zeros((2, 1, 16, 24), np.float32),
            "C-contiguous",
        ),
        (
            np.zeros((2, 1, 24, 16), np.float32),
            np.zeros((4, 1, 16, 24), np.float32)[::2],
            "C-contiguous",
        ),
        (
            np.zeros((2, 1, 24, 16), np.float32),
            np.zeros((2, 1, 24, 16), np.float32),
            "blocks, heads, block, dim",
        ),
        (
            np.zeros((2, 1, 24, 8), np.float32),
            np.zeros((2, 1, 8, 24), np.float32),
            "multiple of 16",
        ),
    ],
)
def test_unsupported_pools_are_refused(keys, values, message):
    with pytest.raises(ConfigError, match=message):
        storage_kind(KVPool(keys, values))


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5, 16)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
def test_arrays_start_at_a_cache_line(shape, dtype):
    arrays = [aligned_empty(shape, dtype) for _ in range(8)]
    for array in arrays:
        assert array.ctypes.data % 64 == 0
        assert (array.shape, array.dtype) == (shape, dtype)
        assert array.flags.c_contiguous
        assert array.flags.writeable
