"""Sparse prefill: which key blocks are kept, and attention over them, against NumPy."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.kernels.paged_cases import make_case
from helpers.kernels.quantized_kv_cases import decoded
from kvboost_edge.backends.base import AttentionParams, KVSpec, LayerKVSpec
from kvboost_edge.backends.batch_layout import check_layout
from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.attention.block_selection import FULL_MASS, keep_largest
from kvboost_edge.kernels.reference.block_selection import block_masses, kept_blocks, largest_kept

PARAMS = AttentionParams(0.125)
TOTAL = 944  # 59 key blocks, of which 20 are always kept


@given(
    st.lists(st.integers(0, 5) | st.integers(0, FULL_MASS - 1), min_size=1, max_size=40), st.data()
)
def test_the_kernel_keeps_the_fewest_of_the_largest(numbers, data):
    masses = np.array(numbers, np.int32)
    needed = data.draw(st.integers(-3, int(masses.sum())))
    bins = np.empty(2048, np.int64)
    smallest, equal = keep_largest(masses.ctypes.data, masses.size, needed, bins.ctypes.data)
    same = np.flatnonzero(masses == smallest)[:equal]
    np.testing.assert_array_equal(
        np.union1d(np.flatnonzero(masses > smallest), same),
        np.flatnonzero(largest_kept(masses, needed)),
    )


def a_case(dim=64, size=16, per_group=3):
    """Return two sequences whose queries are large enough to prefer few key blocks.

    All scores are far below 0, the score of zeros: padding that is attended to changes the output.
    """
    rng = np.random.default_rng(dim)
    case = make_case(
        rng, ((1, TOTAL), (1, 90)), kv_heads=2, per_group=per_group, dim=dim, block_size=size
    )
    case = dataclasses.replace(case, queries=[20 * rows for rows in case.queries])
    for rows, factor in ((case.queries, 32), (case.keys, -32)):
        for sequence in rows:
            sequence[..., 0] = factor
    return case


def attend(case, passes, ranges, *, bits=(16, 16), dtype="float32", threads=1, params=PARAMS):
    """Return the attention output of all tokens by sequence. Some of them have sparse ranges."""
    _, heads, dim = case.keys[0].shape
    spec = KVSpec((LayerKVSpec(heads, dim),), case.block_size, dtype, bits)
    num_blocks = int(case.tables.max()) + 1
    backend = CPUBackend(spec, num_blocks, num_threads=threads, num_open=70)
    backend.poison_blocks(range(num_blocks))
    found = [[] for _ in case.lengths]
    try:
        for spans in passes:
            rows = np.array([ranges[sequence] for sequence, _, _ in spans], np.int32)
            batch = backend.prepare(dataclasses.replace(case.layout(spans), sparse=rows))
            backend.write_kv(0, case.rows(case.keys, spans), case.rows(case.values, spans), batch)
            out, _ = backend.attention(0, case.rows(case.queries, spans), batch, params)
            bounds = batch.paged.cu_seqlens_q
            for (sequence, _, _), first, end in zip(spans, bounds, bounds[1:], strict=False):
                found[sequence].append(out[first:end])
    finally:
        backend.close()
    return [np.concatenate(parts) for parts in found if parts]


def expected(case, first, end, bits, dtype):
    """Compute the first sequence's rows of the range in float64, and the share of kept key blocks."""
    exact = [x[0].astype(dtype).astype(np.float64) for x in (case.keys, case.values)]
    coded = (
        exact if bits == (16, 16) else decoded(case.keys[0], case.values[0], case.block_size, bits)
    )
    queries = case.queries[0].astype(np.float64) * PARAMS.softmax_scale
    heads = case.keys[0].shape[1]
    rows, shares = [], []
    for group in range(first, end, 16):
        start = group // 64 * 64
        one = queries[group : group + 16].reshape(16, heads, -1, queries.shape[2])
        out = np.empty_like(one)
        for head in range(heads):
            kept = kept_blocks(block_masses(one[:, head], coded[0][:start, head]))
            shares.append(kept.mean())
            for row in range(16):
                own = (group + row) // case.block_size * case.block_size
                seen = np.concatenate([np.repeat(kept, 16), np.full(group + row + 1 - start, True)])
                keys, values = (
                    np.concatenate([c[:own, head], e[own : group + row + 1, head]])[seen]
                    for c, e in zip(coded, exact, strict=True)
                )
                scores = one[row, head] @ keys.T
                weights = np.exp(scores - scores.max(axis=1, keepdims=True))
                out[row, head] = weights @ values / weights.sum(axis=1, keepdims=True)
        rows.append(out.reshape(16, -1, queries.shape[2]))
    return np.concatenate(rows), np.mean(shares)


@pytest.mark.parametrize(
    ("bits", "dtype", "dim", "size", "per_group"),
    [
        ((16, 16), "float32", 64, 16, 7),
        ((16, 16), "float16", 24, 32, 1),
        ((8, 8), "float16", 64, 16, 7),
        ((4, 4), "float16", 24, 64, 2),
    ],
    ids=str,
)
def test_rows_of_a_range_attend_to_the_kept_blocks(bits, dtype, dim, size, per_group):
    case = a_case(dim, size, per_group)
    first, end = 800, 928
    passes = [[(0, 0, first), (1, 0, 90)], [(0, first, TOTAL)]]
    got = attend(case, passes, ((first, end), (0, 0)), bits=bits, dtype=dtype)[0][first:end]
    wanted, share = expected(case, first, end, bits, dtype)
    assert 0.35 < share < 0.9
    tolerance = 1e-4 if bits == (16, 16) else 0.02  # codes of softmax weights have 8 bits
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bits", [(16, 16), (8, 8)], ids=str)
def test_chunks_batches_and_threads_change_no_bit_of_sparse_rows(bits):
    case = a_case()
    ranges = ((656, 912), (0, 0))
    dtype = "float16"
    whole = attend(case, [[(0, 0, TOTAL), (1, 0, 90)]], ranges, bits=bits, dtype=dtype)
    passes = [
        [(1, 0, 50), (0, 0, 650)],
        [(0, 650, 656 + 48), (1, 50, 90)],
        [(0, 704, 720)],
        [(0, 720, 920)],
        [(0, 920, TOTAL)],
    ]
    parts = attend(case, passes, ranges, bits=bits, dtype=dtype, threads=3)
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(one, other)
    exact = attend(case, passes[:1], ((0, 0), (0, 0)), bits=bits, dtype=dtype)
    np.testing.assert_array_equal(exact[0], whole[0][:650])
    dense = attend(case, [[(0, 0, TOTAL)]], ((0, 0), (0, 0)), bits=bits, dtype=dtype)[0]
    differs = (dense != whole[0]).any(axis=(1, 2))
    assert differs[656:912].all()
    assert not differs[:656].any()
    assert not differs[912:].any()


def test_layers_with_a_window_ignore_sparse_ranges():
    case = a_case()
    params = PARAMS._replace(window=300)
    spans = [[(0, 0, TOTAL)]]
    plain, sparse = (
        attend(case, spans, (one, (0, 0)), params=params) for one in ((0, 0), (656, 912))
    )
    np.testing.assert_array_equal(plain[0], sparse[0])


@pytest.mark.parametrize("ranges", [(650, 912), (656, 900)])
def test_a_range_that_cuts_a_query_block_is_refused(ranges):
    with pytest.raises(ConfigError, match="in query blocks of 16"):
        attend(a_case(), [[(0, 0, TOTAL)]], (ranges, (0, 0)))


def test_each_sequence_of_a_layout_needs_a_range():
    case = a_case()
    layout = dataclasses.replace(case.whole, sparse=np.zeros((1, 2), np.int32))
    with pytest.raises(ConfigError, match=r"must have shape \(2, 2\)"):
        check_layout(layout, case.block_size, int(case.tables.max()) + 1)
