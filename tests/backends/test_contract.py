"""The contract of every backend, against dense attention in float64. Arrays are passed and returned
as NumPy here.
"""

import dataclasses

import numpy as np
import pytest

from helpers.backends.makers import MAKERS, MIX, UNMADE, Arrays, Maker, opened
from helpers.kernels.paged_cases import DTYPES, num_blocks_for, random_rows, round_to
from kvboost_edge.backends.base import AttentionParams, BatchLayout, KVSpec, LayerKVSpec
from kvboost_edge.errors import ConfigError
from kvboost_edge.kvcache.block_table import CopyOp

PLAIN = AttentionParams(0.3)
DIMS = (16, 24, 32, 40, 64, 80, 96, 128, 256)


KINDS = {name: [dtype for dtype in DTYPES if (name, dtype) not in UNMADE] for name in MAKERS}


def with_each(name, values):
    """Parametrize with each backend and value; `make test` uses one storage dtype per value."""
    cases = []
    for number, value in enumerate(values):
        for backend, dtypes in KINDS.items():
            for dtype in dtypes:
                marks = () if dtype == dtypes[number % len(dtypes)] else pytest.mark.full
                cases.append(
                    pytest.param(
                        (backend, dtype), value, marks=marks, id=f"{backend}-{dtype}-{number}"
                    )
                )
    return pytest.mark.parametrize(("make", name), cases, indirect=["make"])


@pytest.fixture(
    params=[(name, dtype) for name, dtypes in KINDS.items() for dtype in dtypes],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def make(request):
    with opened(Maker(*request.param, made=[])) as maker:
        yield maker


@pytest.fixture(params=[name for name in MAKERS if (name, "float32") not in UNMADE])
def make_f32(request):
    with opened(Maker(request.param, "float32", made=[])) as maker:
        yield maker


@with_each("dim", DIMS)
def test_random_shapes_and_options_equal_the_reference(make, dim):
    """Each head dim meets each block size in one of the storage dtypes."""
    block_size = (16, 32, 64)[(DIMS.index(dim) + DTYPES.index(make.dtype)) % 3]
    rng = np.random.default_rng([dim, block_size])
    lengths = []
    for _ in range(rng.integers(2, 6)):
        total = int(rng.integers(1, 200))
        lengths.append(
            (1 if rng.random() < 0.5 else int(rng.integers(1, min(total, 40) + 1)), total)
        )
    lengths.append((2, int(rng.integers(500, 600))))
    kv_heads = int(rng.integers(1, 4))
    per_group = int(rng.choice([1, 2, 3, 4, 7, 8]))
    case = make.case(
        int(rng.integers(1 << 30)),
        tuple(lengths),
        kv_heads=kv_heads,
        per_group=per_group,
        dim=dim,
        block_size=block_size,
    )
    sinks = random_rows(rng, kv_heads * per_group) * np.float32(3.0)
    params = AttentionParams(
        dim**-0.5,
        window=int(rng.choice([0, 1, 5, 16, 63, 128, 700])),
        softcap=float(rng.choice([0.0, 0.0, 2.5, 30.0])),
        sinks=sinks if rng.random() < 0.5 else None,
    )
    arrays = make(
        kv_heads, dim, block_size=block_size, num_blocks=num_blocks_for(lengths, block_size)
    )
    arrays.write_whole(case)
    make.check(arrays, case, params)


@with_each(
    "params",
    [
        PLAIN,
        AttentionParams(0.3, window=1),
        AttentionParams(0.3, window=16),
        AttentionParams(0.3, window=17),
        AttentionParams(0.3, window=64),
        AttentionParams(0.3, softcap=1.5),
        AttentionParams(0.3, sinks=np.array([-9, 0, 1, 2, 3, 9], np.float32)),
        AttentionParams(
            0.3, window=33, softcap=4.0, sinks=np.array([5, 4, 3, 2, 1, 0], np.float32)
        ),
    ],
)
def test_each_option_in_a_ragged_batch_equals_the_reference(make, params):
    case = make.case(1)
    make.check(make.filled(case), case, params)


def test_written_keys_and_values_are_read_back_exactly(make):
    """With a window of 1 a token sees only itself: the output is its value, and unit queries read
    its key through lse.
    """
    heads = 3
    dim = 24
    case = make.case(2, ((40, 40), (3, 3)), kv_heads=heads, dim=dim)
    arrays = make.filled(case)
    layout = case.whole
    keys, values = (np.concatenate(rows) for rows in (case.keys, case.values))
    queries = np.tile(np.eye(dim, dtype=np.float32), (len(keys), heads, 1))
    out, lse = arrays.attend(0, queries, layout, AttentionParams(1.0, window=1))
    # Kernels that keep scores in base 2 round them twice.
    in_base_2 = make.in_half or make.name == "cpu"
    np.testing.assert_allclose(
        lse.reshape(keys.shape), round_to(keys, make.dtype), rtol=2e-7 if in_base_2 else 0
    )
    expected = np.repeat(round_to(values, make.dtype), dim, axis=1)
    np.testing.assert_array_equal(out, expected)


def test_a_later_write_overwrites_an_earlier_one(make):
    case = make.case(3)
    other = make.case(4)
    arrays = make.filled(case)
    slots = case.layout(case.spans)
    arrays.write(0, other.rows(other.keys, case.spans), other.rows(other.values, case.spans), slots)
    for sequence, start, stop in case.spans:
        case.keys[sequence][start:stop] = other.keys[sequence][start:stop]
        case.values[sequence][start:stop] = other.values[sequence][start:stop]
    make.check(arrays, case, PLAIN)


def test_tokens_outside_the_window_are_never_read(make):
    window = 20
    case = make.case(5, ((1, 100), (9, 200), (1, 33)))
    expected = case.expected(case.spans, AttentionParams(0.3, window=window), make.dtype)
    for sequence, start, _ in case.spans:
        case.keys[sequence][: max(0, start - window + 1)] = np.nan
        case.values[sequence][: max(0, start - window + 1)] = np.nan
    make.assert_close(
        make.filled(case).attend_new(case, AttentionParams(0.3, window=window)), expected
    )


def test_layers_are_independent(make):
    cases = [make.case(seed) for seed in (6, 7)]
    arrays = make(2, 24, num_blocks=num_blocks_for(MIX, 16), layers=2)
    arrays.write_whole(cases[0], layer=0)
    layout = cases[0].whole
    spans = [(sequence, 0, total) for sequence, (_, total) in enumerate(MIX)]
    arrays.write(
        1, cases[1].rows(cases[1].keys, spans), cases[1].rows(cases[1].values, spans), layout
    )
    for layer, case in enumerate(cases):
        queries = case.rows(case.queries, case.spans)
        got = arrays.attend(layer, queries, cases[0].layout(case.spans), PLAIN)
        make.assert_close(got, case.expected(case.spans, PLAIN, make.dtype))


def test_layers_of_different_shapes_equal_the_reference(make_f32):
    spec = KVSpec((LayerKVSpec(2, 24), LayerKVSpec(1, 64)), 16, "float32")
    arrays = Arrays(MAKERS[make_f32.name](spec, num_blocks_for(MIX, 16)))
    make_f32.made.append(arrays.backend)
    for layer, (heads, dim) in enumerate(((2, 24), (1, 64))):
        case = make_f32.case(8, kv_heads=heads, dim=dim)
        spans = [(sequence, 0, total) for sequence, (_, total) in enumerate(MIX)]
        params = AttentionParams(0.2, 30)
        arrays.write(layer, case.rows(case.keys, spans), case.rows(case.values, spans), case.whole)
        got = arrays.attend(
            layer, case.rows(case.queries, case.spans), case.layout(case.spans), params
        )
        make_f32.assert_close(got, case.expected(case.spans, params, "float32"))


def test_a_fork_shares_blocks_until_it_copies(make):
    """Two sequences share their blocks. One copies its half-full tail, and both write a next token
    of their own.
    """
    parent = make.case(9, ((1, 25),))
    arrays = make.filled(parent)
    tail = int(parent.tables[0, 1])
    unused = (set(range(5)) - set(parent.tables[0].tolist())).pop()
    child = dataclasses.replace(parent, tables=parent.tables.copy())
    child.tables[0, 1] = unused
    rng = np.random.default_rng(10)
    both = make.fit(
        dataclasses.replace(
            parent,
            lengths=((1, 26), (1, 26)),
            tables=np.concatenate([parent.tables, child.tables]),
            queries=[random_rows(rng, 26, 6, 24) for _ in range(2)],
            keys=[np.concatenate([parent.keys[0], random_rows(rng, 1, 2, 24)]) for _ in range(2)],
            values=[
                np.concatenate([parent.values[0], random_rows(rng, 1, 2, 24)]) for _ in range(2)
            ],
        )
    )
    arrays.backend.copy_blocks([CopyOp(tail, unused)])
    assert arrays.backend.checksum_blocks([tail]) == arrays.backend.checksum_blocks([unused])
    layout = both.layout(both.spans)
    arrays.write(0, both.rows(both.keys, both.spans), both.rows(both.values, both.spans), layout)
    make.check(arrays, both, PLAIN)
    make.check(arrays, parent, PLAIN)


def test_sequences_share_prefix_blocks(make):
    case = make.case(11, ((5, 53), (1, 49), (16, 64)))
    case.tables[1:, :3] = case.tables[0, :3]
    for sequence in (1, 2):
        case.keys[sequence][:48], case.values[sequence][:48] = (
            case.keys[0][:48],
            case.values[0][:48],
        )
    make.check(make.filled(case), case, PLAIN)


def test_block_copies_cover_all_layers(make):
    arrays = make(2, 24, num_blocks=4, layers=2)
    arrays.backend.poison_blocks(range(4))
    rng = np.random.default_rng(12)
    case = make.case(13, ((16, 16),))
    layout = dataclasses.replace(case, tables=np.array([[1]], np.int32)).whole
    for layer in range(2):
        arrays.write(layer, random_rows(rng, 16, 2, 24), random_rows(rng, 16, 2, 24), layout)
    before = arrays.backend.checksum_blocks(range(4))
    arrays.backend.copy_blocks([CopyOp(1, 3), CopyOp(3, 0)])
    after = arrays.backend.checksum_blocks(range(4))
    assert after == [before[1], before[1], before[2], before[1]]
    assert before[1] != before[2]
    arrays.backend.copy_blocks([])
    assert arrays.backend.checksum_blocks(range(4)) == after


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("half", ["keys", "values"])
def test_a_checksum_detects_one_changed_element(make, layer, half):
    arrays = make(2, 24, num_blocks=2, layers=2)
    case = dataclasses.replace(make.case(14, ((16, 16),)), tables=np.array([[1]], np.int32))
    rows = {"keys": case.keys[0].copy(), "values": case.values[0].copy()}
    for each in range(2):
        arrays.write(each, rows["keys"], rows["values"], case.whole)
    (before,) = arrays.backend.checksum_blocks([1])
    rows[half][15, 1, 23] += 1
    arrays.write(layer, rows["keys"], rows["values"], case.whole)
    (changed,) = arrays.backend.checksum_blocks([1])
    assert changed != before
    rows[half][15, 1, 23] = case.keys[0][15, 1, 23] if half == "keys" else case.values[0][15, 1, 23]
    arrays.write(layer, rows["keys"], rows["values"], case.whole)
    assert arrays.backend.checksum_blocks([1, 1]) == [before, before]


def test_poisoned_blocks_give_nan(make):
    case = make.case(15, ((1, 40), (1, 40)))
    arrays = make.filled(case)
    others = case.tables[1, :3].tolist()
    before = arrays.backend.checksum_blocks(others)
    arrays.backend.poison_blocks([int(case.tables[0, 1])])
    assert arrays.backend.checksum_blocks(others) == before
    out, lse = arrays.attend_new(case, PLAIN)
    assert np.isnan(out[0]).all()
    assert np.isnan(lse[0]).all()
    assert np.isfinite(out[1]).all()


def test_sequences_without_new_tokens_are_skipped(make):
    case = make.case(16, ((0, 30), (2, 20), (0, 1), (1, 600), (0, 7)))
    make.check(make.filled(case), case, PLAIN)


def test_queries_need_not_be_contiguous(make_f32):
    case = make_f32.case(17)
    queries = case.rows(case.queries, case.spans)
    params = AttentionParams(0.3)
    strided = np.repeat(queries, 2, axis=1)[:, ::2]
    arrays = make_f32.filled(case)
    layout = case.layout(case.spans)
    got = arrays.attend(0, strided, layout, params)
    for mine, plain in zip(got, arrays.attend(0, queries, layout, params), strict=True):
        np.testing.assert_array_equal(mine, plain)


def test_pool_bytes_equal_the_allocation(make):
    backend = make(2, 24, block_size=32, num_blocks=5, layers=3).backend
    assert backend.pool_bytes == 5 * 3 * 2 * 32 * 2 * 24 * (4 if make.dtype == "float32" else 2)
    assert backend.pool_bytes == 5 * backend.spec.bytes_per_block
    backend.close()
    assert backend.pool_bytes == 0


def valid_layout():
    """Build a layout of blocks of 16 in a pool of 8: the last 4 of 20 tokens, and the 33rd token of
    another sequence.
    """
    return BatchLayout(
        np.array([0, 4, 5], np.int32),
        np.array([20, 33], np.int32),
        np.array([[7, 2, -1], [7, 5, 4]], np.int32),
        np.array([32, 33, 34, 35, 64], np.int64),
    )


def test_unused_table_entries_are_ignored(make_f32):
    layout = valid_layout()
    layout.block_tables[0, 2] = 1 << 30
    make_f32(2, 16).backend.prepare(layout)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens_q": [0, 4]}, r"2 sequences needs cu_seqlens_q of shape \(3,\)"),
        ({"block_tables": [[7, 2, 3]]}, "block tables"),
        ({"block_tables": [7, 2]}, "block tables"),
        ({"cu_seqlens_q": [1, 4, 5]}, "start at 0"),
        ({"cu_seqlens_q": [0, 6, 5]}, "not decrease"),
        ({"seq_lens": [3, 33]}, "more query rows"),
        ({"slot_mapping": [32, 33, 34, 35]}, "one slot for each of 5 tokens"),
        ({"slot_mapping": [[32, 33, 34, 35, 64]]}, "one slot for each of 5 tokens"),
        ({"slot_mapping": [32, 33, 34, 35, 128]}, r"0\.\.127"),
        ({"slot_mapping": [-1, 33, 34, 35, 64]}, r"0\.\.127"),
        ({"block_tables": [[7, 2], [7, 5]]}, "are too short for seq_len 33"),
        ({"seq_lens": [20, 49]}, "are too short for seq_len 49"),
        ({"block_tables": [[7, -1, -1], [7, 5, 4]]}, r"block id -1 must be in the pool's 0\.\.7"),
        ({"block_tables": [[7, 2, -1], [7, 5, 8]]}, r"block id 8 must be in the pool's 0\.\.7"),
    ],
)
def test_invalid_layouts_are_refused(make_f32, change, message):
    valid = valid_layout()
    arrays = {name: np.array(value, getattr(valid, name).dtype) for name, value in change.items()}
    with pytest.raises(ConfigError, match=message):
        make_f32(2, 16).backend.prepare(dataclasses.replace(valid, **arrays))


@pytest.mark.parametrize("pair", [(0, 8), (8, 0), (-1, 0), (0, -1)])
def test_copies_outside_the_pool_are_refused(make_f32, pair):
    named = rf"(block id (8|-1)|copy {pair[0]} -> {pair[1]}) .* the pool's .*0\.\.7"
    with pytest.raises(ConfigError, match=named):
        make_f32(2, 16).backend.copy_blocks([CopyOp(*pair)])


def test_invalid_pools_are_refused(make_f32):
    with pytest.raises(ConfigError, match="num_blocks=0"):
        make_f32(2, 16, num_blocks=0)
    with pytest.raises(ConfigError, match="int8"):
        MAKERS[make_f32.name](KVSpec((LayerKVSpec(2, 16),), 16, "int8"), 4)
