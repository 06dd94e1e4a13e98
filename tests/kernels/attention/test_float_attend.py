"""The attention kernel against dense attention. A row's bits depend only on its own sequence."""

import numpy as np
import pytest

from helpers.kernels.paged_cases import (
    DTYPES,
    assert_close,
    make_case,
    num_blocks_for,
    poisoned_pool,
)
from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.attention.float_launch import AttentionWorkspace, paged_attention
from kvboost_edge.kernels.attention.paged import AttentionOptions, PagedBatch
from kvboost_edge.kernels.reference import attention as reference

Span = tuple[int, int, int]  # sequence, first position, position after the last
Result = tuple[np.ndarray, np.ndarray]

# Decode and prefill at small and large depths, around tiles of 64 and partitions of 512.
LENGTHS = (
    (1, 1),
    (63, 63),
    (1, 65),
    (70, 600),
    (1, 1100),
    (5, 513),
    (130, 130),
    (1, 512),
    (3, 1537),
)
OPTIONS = {
    "plain": AttentionOptions(0.2),
    "window 1": AttentionOptions(0.2, window=1),
    "window 64": AttentionOptions(0.2, window=64),
    "window 100": AttentionOptions(0.2, window=100),
    "window 700": AttentionOptions(0.2, window=700),
    "softcap": AttentionOptions(0.2, softcap=3.0),
    "sinks": AttentionOptions(0.2, sinks=np.array([-30, -1, 0, 1, 2, 30], np.float32)),
    "all": AttentionOptions(
        0.2, window=530, softcap=6.0, sinks=np.array([3, 2, 1, 0, -1, -2], np.float32)
    ),
    "bidirectional": AttentionOptions(0.2, ahead=1 << 30),
    "bidirectional, window": AttentionOptions(0.2, window=33, ahead=32),
    "bidirectional, wide window": AttentionOptions(0.2, window=520, ahead=519, softcap=3.0),
}


@pytest.fixture(scope="module")
def two_threads():
    space = AttentionWorkspace(2)
    yield space
    space.close()


def ragged(seed, lengths=LENGTHS, *, dim=32, block_size=16):
    return make_case(
        np.random.default_rng(seed),
        lengths,
        kv_heads=2,
        per_group=3,
        dim=dim,
        block_size=block_size,
    )


def empty_pool(case, dtype="float32"):
    _, heads, dim = case.keys[0].shape
    return poisoned_pool(
        num_blocks_for(case.lengths, case.block_size), heads, dim, case.block_size, dtype
    )


def write(case, pool, spans):
    slots = case.layout(spans).slot_mapping
    reference.write_kv(case.rows(case.keys, spans), case.rows(case.values, spans), pool, slots)


def filled_pool(case, dtype="float32"):
    pool = empty_pool(case, dtype)
    write(case, pool, [(sequence, 0, total) for sequence, (_, total) in enumerate(case.lengths)])
    return pool


def attend(case, pool, spans, options, space=None):
    layout = case.layout(spans)
    batch = PagedBatch(layout.cu_seqlens_q, layout.seq_lens, layout.block_tables)
    return paged_attention(case.rows(case.queries, spans), pool, batch, options, space)


def assert_same_bits(got, expected):
    for mine, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(mine, other)
        assert np.isfinite(mine).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.some(3)
def test_float_attention_equals_dense_attention(options, dtype, two_threads):
    case = ragged(1)
    got = attend(case, filled_pool(case, dtype), case.spans, options, two_threads)
    assert_close(got, case.expected(case.spans, options, dtype))


@pytest.mark.parametrize("dim", [8, 16, 20, 48, 72, 112, 160, 192, 256])
def test_every_head_dim_equals_dense_attention(dim):
    """Channels are summed in panels of 64, 32 and 16, and the rest is padded."""
    case = ragged(2, ((40, 90), (1, 70)), dim=dim)
    options = AttentionOptions(dim**-0.5)
    assert_close(
        attend(case, filled_pool(case), case.spans, options),
        case.expected(case.spans, options, "float32"),
    )


@pytest.mark.parametrize(
    ("kv_heads", "per_group"), [(1, 1), (4, 1), (1, 5), (2, 16), (1, 71), (8, 2)]
)
def test_every_grouping_of_heads_equals_dense_attention(kv_heads, per_group):
    lengths = ((30, 80), (1, 70))
    sizes = {"kv_heads": kv_heads, "per_group": per_group, "dim": 16, "block_size": 16}
    case = make_case(np.random.default_rng(3), lengths, **sizes)
    options = AttentionOptions(0.25, window=40)
    assert_close(
        attend(case, filled_pool(case), case.spans, options),
        case.expected(case.spans, options, "float32"),
    )


def test_the_reference_equals_dense_attention():
    case = ragged(4, ((5, 40), (1, 70)))
    layout = case.layout(case.spans)
    batch = PagedBatch(layout.cu_seqlens_q, layout.seq_lens, layout.block_tables)
    queries = case.rows(case.queries, case.spans)
    for options in OPTIONS.values():
        got = reference.paged_attention(queries, filled_pool(case), batch, options)
        assert_close(got, case.expected(case.spans, options, "float32"))


@pytest.mark.parametrize(
    ("options", "dtype", "dim"),
    [
        (OPTIONS["plain"], "float32", 32),
        (OPTIONS["plain"], "float16", 40),
        (OPTIONS["plain"], "bfloat16", 64),
        (OPTIONS["window 100"], "float32", 64),
        (OPTIONS["window 700"], "float16", 32),
        (OPTIONS["all"], "float32", 24),
        (OPTIONS["all"], "bfloat16", 32),
    ],
)
def test_a_row_alone_equals_the_row_in_any_batch(options, dtype, dim, two_threads):
    case = ragged(5, dim=dim)
    pool = filled_pool(case, dtype)
    together = attend(case, pool, case.spans, options)
    assert_same_bits(attend(case, pool, case.spans, options, two_threads), together)
    row = 0
    for sequence, start, stop in case.spans:
        expected = tuple(part[row : row + stop - start] for part in together)
        assert_same_bits(
            attend(case, pool, [(sequence, start, stop)], options, two_threads), expected
        )
        for position in {start, (start + stop) // 2, stop - 1}:
            alone = attend(case, pool, [(sequence, position, position + 1)], options, two_threads)
            assert_same_bits(
                alone, tuple(part[position - start : position - start + 1] for part in expected)
            )
        row += stop - start
    order = np.random.default_rng(6).permutation(len(case.spans))
    shuffled = attend(case, pool, [case.spans[i] for i in order], options, two_threads)
    rows = np.split(np.arange(row), np.cumsum([stop - start for _, start, stop in case.spans])[:-1])
    picked = np.concatenate([rows[i] for i in order])
    assert_same_bits(shuffled, (together[0][picked], together[1][picked]))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("name", "dtype", "dim"), [("plain", "float32", 32), ("all", "float16", 40)]
)
def test_chunks_equal_the_whole(name, dtype, dim, seed, two_threads):
    """The chunks are random, alternate with those of another sequence, and are written into memory
    full of NaN.
    """
    case = ragged(7, ((700, 700), (620, 620)), dim=dim)
    options = OPTIONS[name]
    whole = attend(case, filled_pool(case, dtype), case.spans, options, two_threads)
    rng = np.random.default_rng(seed)
    pool = empty_pool(case, dtype)
    results = ([], [])
    done = [0, 0]
    while done != [700, 620]:
        steps = [
            min(int(rng.choice([1, 7, 16, 50, 64, 200, 511])), end - at)
            for at, end in zip(done, (700, 620), strict=True)
        ]
        spans = [
            (sequence, done[sequence], done[sequence] + steps[sequence]) for sequence in range(2)
        ]
        write(case, pool, [span for span in spans if span[1] < span[2]])
        out, lse = attend(case, pool, spans, options, two_threads if rng.random() < 0.5 else None)
        for sequence, rows in enumerate((slice(0, steps[0]), slice(steps[0], None))):
            results[sequence].append((out[rows], lse[rows]))
            done[sequence] += steps[sequence]
    chunks = [*results[0], *results[1]]
    assert_same_bits(
        (np.concatenate([out for out, _ in chunks]), np.concatenate([lse for _, lse in chunks])),
        whole,
    )


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_block_size_and_placement_change_no_bit(block_size):
    lengths = ((1, 600), (40, 70))
    small = ragged(8, lengths)
    large = ragged(9, lengths, block_size=block_size)
    for name in ("queries", "keys", "values"):
        getattr(large, name)[:] = getattr(small, name)
    for options in OPTIONS.values():
        expected = attend(small, filled_pool(small), small.spans, options)
        assert_same_bits(attend(large, filled_pool(large), large.spans, options), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 16, 50, 600])
def test_blocks_before_the_window_are_not_read(window, dtype, two_threads):
    """NaN in those blocks, and in the tokens of the window's first block before the window, changes
    no bit.
    """
    case = ragged(10, ((1, 1300), (20, 700), (90, 1000)))
    options = AttentionOptions(0.2, window=window)
    expected = attend(case, filled_pool(case, dtype), case.spans, options)
    for sequence, start, _ in case.spans:
        case.keys[sequence][: max(0, start - window + 1)] = np.nan
        case.values[sequence][: max(0, start - window + 1)] = np.nan
    pool = filled_pool(case, dtype)
    assert_same_bits(attend(case, pool, case.spans, options), expected)
    assert_same_bits(attend(case, pool, case.spans, options, two_threads), expected)


@pytest.mark.parametrize(
    "name", ["bidirectional", "bidirectional, window", "bidirectional, wide window"]
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_bidirectional_sequence_is_the_same_in_any_batch(name, dtype, two_threads):
    case = ragged(14, ((1100, 1100), (3, 3), (64, 64), (65, 65), (600, 600)))
    pool = filled_pool(case, dtype)
    options = OPTIONS[name]
    together = attend(case, pool, case.spans, options, two_threads)
    row = 0
    for span in case.spans:
        expected = tuple(part[row : row + span[2]] for part in together)
        for space in (None, two_threads):
            assert_same_bits(attend(case, pool, [span], options, space), expected)
        row += span[2]


@pytest.mark.parametrize("ahead", [1, 40, 600])
def test_blocks_outside_a_bidirectional_window_are_not_read(ahead, two_threads):
    """Blocks that no row reaches are full of NaN, which changes no bit."""
    case = ragged(12, ((1300, 1300), (20, 20), (700, 700)))
    options = AttentionOptions(0.2, window=ahead + 1, ahead=ahead)
    expected = attend(case, filled_pool(case), case.spans, options)
    for sequence, total in ((0, 1300), (2, 700)):
        span = (sequence, total - 100, total)
        at = sum(stop for _, stop in case.lengths[:sequence])
        low = max(0, total - 100 - ahead)
        for rows in (case.keys, case.values):
            kept = rows[sequence][:low].copy()
            rows[sequence][:low] = np.nan
            got = attend(case, filled_pool(case), [span], options, two_threads)
            rows[sequence][:low] = kept
            assert_same_bits(got, tuple(part[at + total - 100 : at + total] for part in expected))


def test_bidirectional_attention_refuses_segments():
    case = ragged(13, ((5, 40),))
    layout = case.layout(case.spans)
    parts = np.zeros((1, 6), np.int32)
    batch = PagedBatch(layout.cu_seqlens_q, layout.seq_lens, layout.block_tables, parts)
    with pytest.raises(ConfigError, match="ahead=3"):
        paged_attention(
            case.rows(case.queries, case.spans),
            filled_pool(case),
            batch,
            AttentionOptions(0.2, ahead=3),
        )


def test_sinks_of_minus_infinity_have_no_effect():
    case = ragged(13, ((4, 90),))
    none = AttentionOptions(0.2, sinks=np.full(6, -np.inf, np.float32))
    assert_same_bits(
        attend(case, filled_pool(case), case.spans, none),
        attend(case, filled_pool(case), case.spans, OPTIONS["plain"]),
    )


@pytest.mark.parametrize("scale", [50.0, -50.0, 1e30])
def test_scores_of_any_size_stay_finite(scale):
    """Scores differ so much that a row equals the value of its best key. The keys grow, so the
    running maximum keeps changing.
    """
    case = ragged(14, ((1, 700),))
    case.keys[0] *= np.linspace(0.1, 1.0, 700, dtype=np.float32)[:, None, None]
    out, lse = attend(case, filled_pool(case), case.spans, AttentionOptions(scale))
    scores = (
        np.einsum(
            "hd,thd->ht", case.queries[0][-1].astype(np.float64), np.repeat(case.keys[0], 3, axis=1)
        )
        * scale
    )
    best = scores.argmax(axis=1)
    gap = np.diff(np.sort(scores, axis=1)[:, -2:]).ravel()
    assert (gap > 20).any()
    expected = np.stack([case.values[0][token, head // 3] for head, token in enumerate(best)])
    np.testing.assert_allclose(out[0][gap > 20], expected[gap > 20], atol=1e-6)
    np.testing.assert_allclose(lse[0], scores.max(axis=1), rtol=1e-3)


def test_far_lower_scores_underflow_to_zero_weight():
    case = ragged(15, ((1, 130),))
    case.queries[0][:] = 0
    case.queries[0][:, :, 0] = 1
    case.keys[0][:, :, 0] = -200
    case.keys[0][7, :, 0] = 0
    out, lse = attend(case, filled_pool(case), case.spans, AttentionOptions(1.0))
    np.testing.assert_array_equal(out[0], np.repeat(case.values[0][7], 3, axis=0))
    np.testing.assert_array_equal(lse, np.zeros((1, 6)))


def test_mismatched_queries_are_refused():
    case = ragged(19, ((1, 20),))
    pool = filled_pool(case)
    for heads, dim in ((6, 16), (5, 32)):
        case.queries[0] = np.zeros((20, heads, dim), np.float32)
        with pytest.raises(ConfigError, match="2 KV heads of size 32"):
            attend(case, pool, case.spans, OPTIONS["plain"])


def test_mismatched_sinks_are_refused():
    case = ragged(20, ((1, 20),))
    with pytest.raises(ConfigError, match=r"sinks .*6"):
        attend(
            case,
            filled_pool(case),
            case.spans,
            AttentionOptions(0.2, sinks=np.zeros(5, np.float32)),
        )
