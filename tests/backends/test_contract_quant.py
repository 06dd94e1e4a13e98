"""The contract of a quantized pool, for the reference and the compiled backend: its error, its
bits, its open blocks.
"""

import dataclasses
import itertools
import re

import numpy as np
import pytest

from helpers.distance import distance
from helpers.kernels.paged_cases import make_case, random_rows
from helpers.kernels.quantized_kv_cases import (
    KERNELS,
    KINDS,
    MAKERS,
    before_new,
    expected,
    make_backend,
    random_passes,
    run,
    run_all,
    whole,
    write,
)
from kvboost_edge.backends.base import AttentionParams, KVSpec, LayerKVSpec
from kvboost_edge.errors import BackendUnavailable, CapacityError, ConfigError
from kvboost_edge.kvcache.block_table import CopyOp

PLAIN = AttentionParams(0.2)
# Relative L2 error and absolute error. Weights become bytes, each off by up to 1/510 of a tile's
# largest; scores lose much less.
OUT_ERROR = 8e-3
LSE_ERROR = 1e-3


def pytest_generate_tests(metafunc):
    """Run tests of `bits` with all pairs that a backend supports, and others with one pair."""
    if "bits" in metafunc.fixturenames:
        ids = [f"{name}-{bits[0]}-{bits[1]}" for name, bits in KINDS]
        metafunc.parametrize(("name", "bits"), KINDS, ids=ids, scope="function")
    elif "name" in metafunc.fixturenames:
        metafunc.parametrize("name", MAKERS)


@pytest.fixture
def usual(name):
    """Bits for tests that check something else."""
    return (8, 4) if name in KERNELS else (8, 8)


@pytest.fixture
def make(name, usual):
    made = []

    def call(case, bits=usual, num_open=17):
        made.append(make_backend(name, case, bits, num_open=num_open))
        return made[-1]

    yield call
    for backend in made:
        backend.close()


def small_case(seed, lengths, *, dim=24, size=16):
    rng = np.random.default_rng(seed)
    return make_case(rng, lengths, kv_heads=2, per_group=3, dim=dim, block_size=size)


def filled(make, case, bits):
    """Return a pool that holds the tokens before the case's new ones."""
    backend = make(case, bits)
    write(backend, case, before_new(case))
    return backend


def assert_same(name, got, wanted):
    """Assert equality; for torch, whose products sum in any order, up to rounding."""
    tolerance = 0.0 if name in KERNELS else 1e-5
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


def assert_near(got, wanted):
    assert distance(got[0], wanted[0]) <= OUT_ERROR
    np.testing.assert_allclose(got[1], wanted[1], rtol=0, atol=LSE_ERROR)


@pytest.mark.parametrize(
    ("dim", "size", "params"),
    [
        (16, 16, AttentionParams(0.3)),
        (24, 32, AttentionParams(0.2, window=50, sinks=np.arange(6, dtype=np.float32))),
        (64, 16, AttentionParams(0.125, softcap=3.0)),
        (80, 64, AttentionParams(0.1, window=17)),
        (128, 16, AttentionParams(0.09, window=600, softcap=20.0, sinks=np.zeros(6, np.float32))),
        (20, 16, AttentionParams(0.2, window=1)),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
@pytest.mark.some(3)
def test_quantized_attention_equals_the_reference(make, bits, dim, size, params):
    case = small_case(dim, ((1, 30), (5, 100), (3, 540), (20, 20)), dim=dim, size=size)
    backend = filled(make, case, bits)
    assert_near(run(backend, case, case.spans, params), expected(case, case.spans, params, bits))


@pytest.mark.some(2)
def test_chunking_changes_no_bit(make, name, bits):
    case = small_case(1, ((1, 49), (1, 70), (1, 16)))
    params = AttentionParams(0.3, window=40)
    at_once = run_all(make(case, bits), case, [whole(case)], params)
    one_by_one = [
        [(s, at, at + 1) for s, (_, total) in enumerate(case.lengths) if at < total]
        for at in range(70)
    ]
    for passes in (one_by_one, random_passes(np.random.default_rng(2), case, 20)):
        backend = make(case, bits)
        for mine, plain in zip(run_all(backend, case, passes, params), at_once, strict=True):
            assert_same(name, mine[0], plain[0])
            assert_same(name, mine[1], plain[1])


def test_full_blocks_have_the_same_bytes_for_any_chunking(make, bits):
    case = small_case(3, ((1, 48),))
    ids = case.tables[0, :3].tolist()
    sums = []
    for cuts in ((0, 48), (0, 5, 16, 31, 48), (0, 1, 33, 34, 48)):
        backend = make(case, bits)
        for start, stop in itertools.pairwise(cuts):
            write(backend, case, [(0, start, stop)])
        sums.append(backend.checksum_blocks(ids))
    assert sums[0] == sums[1] == sums[2]


def test_a_checksum_covers_full_and_open_blocks(make):
    case = small_case(4, ((1, 20),))
    sums = []
    for change in ((0, 0), (15, 0), (0, 19)):
        other = dataclasses.replace(
            case, keys=[case.keys[0].copy()], values=[case.values[0].copy()]
        )
        other.keys[0][change[0], 1, 23] += 10 * (change[0] > 0)
        other.values[0][change[1], 1, 23] += 10 * (change[1] > 0)
        backend = make(other)
        write(backend, other, [(0, 0, 20)])
        sums.append(backend.checksum_blocks(case.tables[0, :2].tolist()))
    assert sums[1][0] != sums[0][0]
    assert sums[1][1] == sums[0][1]
    assert sums[2][1] != sums[0][1]
    assert sums[2][0] == sums[0][0]


def test_a_forked_open_block_is_independent(make, name, usual):
    """Two sequences share a full block and an open one. The open one is copied, and both continue
    to write.
    """
    parent = small_case(5, ((1, 25),))
    tail = int(parent.tables[0, 1])
    unused = (set(range(5)) - set(parent.tables[0].tolist())).pop()
    rng = np.random.default_rng(6)
    tables = np.array([[parent.tables[0, 0], block, -1] for block in (tail, unused)], np.int32)
    grown = {
        field: [
            np.concatenate([getattr(parent, field)[0], random_rows(rng, 7, heads, 24)])
            for _ in range(2)
        ]
        for field, heads in (("queries", 6), ("keys", 2), ("values", 2))
    }
    both = dataclasses.replace(parent, lengths=((7, 32), (7, 32)), tables=tables, **grown)
    backend = make(parent)
    write(backend, parent, [(0, 0, 25)])
    backend.copy_blocks([CopyOp(tail, unused)])
    assert backend.checksum_blocks([tail]) == backend.checksum_blocks([unused])
    got = run(backend, both, both.spans, PLAIN)
    assert_near(got, expected(both, both.spans, PLAIN, usual))
    for sequence in range(2):
        alone = make(dataclasses.replace(parent, lengths=((7, 32),)))
        lone = dataclasses.replace(
            both,
            lengths=((7, 32),),
            **{field: [arrays[sequence]] for field, arrays in grown.items()},
        )
        write(alone, lone, [(0, 0, 25)])
        rows = slice(7 * sequence, 7 * sequence + 7)
        assert_same(name, run(alone, lone, lone.spans, PLAIN)[0], got[0][rows])


def test_a_copied_full_block_gives_equal_attention(make):
    case = small_case(7, ((1, 33),))
    backend = make(case)
    write(backend, case, [(0, 0, 32)])
    before = run(backend, case, case.spans, PLAIN)
    spare = (set(range(6)) - set(case.tables[0].tolist())).pop()
    backend.copy_blocks([CopyOp(int(case.tables[0, 1]), spare)])
    moved = dataclasses.replace(case, tables=case.tables.copy())
    moved.tables[0, 1] = spare
    after = run(backend, moved, case.spans, PLAIN)
    np.testing.assert_array_equal(after[0], before[0])


def test_tokens_outside_the_window_are_never_read(make, bits):
    params = AttentionParams(0.3, window=20)
    case = small_case(8, ((1, 100), (9, 200)))
    plain = run(filled(make, case, bits), case, case.spans, params)
    backend = filled(make, case, bits)
    for sequence, start, _ in case.spans:
        unseen = (start - 19) // 16
        backend.poison_blocks(case.tables[sequence, :unseen].tolist())
        case.tables[sequence, :unseen] = backend.num_blocks - 1
    np.testing.assert_array_equal(run(backend, case, case.spans, params)[0], plain[0])


def test_poisoned_blocks_give_nan(make, bits):
    case = small_case(9, ((1, 40), (1, 40)))
    for block in (1, 2):
        backend = filled(make, case, bits)
        others = case.tables[1, :3].tolist()
        before = backend.checksum_blocks(others)
        backend.poison_blocks([int(case.tables[0, block])])
        assert backend.checksum_blocks(others) == before
        out, lse = run(backend, case, case.spans, PLAIN)
        assert np.isnan(out[0]).all()
        assert np.isnan(lse[0]).all()
        assert np.isfinite(out[1]).all()


@pytest.mark.parametrize("half", ["keys", "values"])
def test_non_finite_values_give_nan(make, bits, half):
    for broken in (np.nan, np.inf, 1e6):
        case = small_case(10, ((1, 18),))
        getattr(case, half)[0][3, 1, 5] = broken
        backend = filled(make, case, bits)
        out, _ = run(backend, case, case.spans, PLAIN)
        assert (
            not np.isfinite(out[0, 3:]).any()
            if half == "keys"
            else not np.isfinite(out[0, 3:, 5]).any()
        )
        assert np.isfinite(out[0, :3]).all()


def test_too_many_open_blocks_are_refused(make):
    case = small_case(11, ((5, 5), (20, 20), (3, 3)))
    backend = make(case, num_open=2)
    write(backend, case, [(0, 0, 5), (1, 0, 20)])
    with pytest.raises(CapacityError, match=r"3 blocks .* num_open=2"):
        write(backend, case, [(2, 0, 3)])
    with pytest.raises(CapacityError, match="num_open=2"):
        backend.copy_blocks([CopyOp(int(case.tables[0, 0]), int(case.tables[2, 0]))])
    backend.release_blocks([int(case.tables[0, 0]), int(case.tables[1, 0])])
    write(backend, case, [(2, 0, 3)])
    with pytest.raises(ConfigError, match=r"offset 5, because a quantized block"):
        backend.prepare(case.layout([(0, 5, 6)]))


def test_a_filled_block_releases_its_buffer_in_the_same_pass(make, name):
    """One buffer suffices for a sequence that fills one block and begins the next in the same pass."""
    case = small_case(12, ((1, 70),))
    backend = make(case, num_open=1)
    wanted = run_all(make(case), case, [whole(case)], PLAIN)
    got = run_all(backend, case, [[(0, 0, 10)], [(0, 10, 20)], [(0, 20, 64)], [(0, 64, 70)]], PLAIN)
    assert_same(name, got[0][0], wanted[0][0])


def test_blocks_may_be_restarted_without_a_release(make):
    case = small_case(13, ((1, 24),))
    backend = make(case, num_open=1)
    write(backend, case, [(0, 0, 10)])
    got = run(backend, case, [(0, 0, 24)], PLAIN)
    np.testing.assert_array_equal(got[0], run(make(case), case, [(0, 0, 24)], PLAIN)[0])


def test_out_of_order_writes_are_refused(make):
    case = small_case(14, ((5, 40), (5, 40)))
    backend = make(case)
    with pytest.raises(ConfigError, match=r"offset 3, because a quantized block .*block_size=16"):
        backend.prepare(case.layout([(0, 35, 40)]))
    layout = case.layout([(0, 32, 36)])
    layout.slot_mapping[2] += 1
    with pytest.raises(ConfigError, match=r"token 2 of the batch has slot"):
        backend.prepare(layout)
    shared = dataclasses.replace(case, tables=np.stack([case.tables[0], case.tables[0]]))
    with pytest.raises(ConfigError, match="written by two sequences"):
        backend.prepare(shared.layout([(0, 0, 5), (1, 0, 5)]))


def test_layers_of_different_shapes_are_independent(name):
    cases = [
        small_case(15, ((3, 37),)),
        small_case(16, ((3, 37),)),
        small_case(17, ((3, 37),), dim=64),
    ]
    spec = KVSpec(
        (LayerKVSpec(2, 24), LayerKVSpec(2, 24), LayerKVSpec(2, 64)), 16, "float16", (8, 8)
    )
    backend = MAKERS[name](spec, 6, num_open=2)
    for case in cases:
        case.tables[:] = cases[0].tables
    for spans in ([(0, 0, 34)], [(0, 34, 37)]):
        batch = backend.prepare(cases[0].layout(spans))
        for layer, case in enumerate(cases):
            backend.write_kv(
                layer, case.rows(case.keys, spans), case.rows(case.values, spans), batch
            )
    for layer, case in enumerate(cases):
        got = backend.attention(layer, case.rows(case.queries, case.spans), batch, PLAIN)
        assert_near(got, expected(case, case.spans, PLAIN, (8, 8)))
    backend.close()


def test_bytes_of_the_pool_and_of_open_blocks(name):
    """With the heads of Qwen2-0.5B a block holds codes, a zero and a step per channel, and a scale
    per token (with 4 bits also a middle).
    """
    layer = LayerKVSpec(2, 64)
    keys = {8: 16 * 64 + 2 * 64 + 64, 4: 16 * 32 + 2 * 64 + 64}
    values = {
        8: 16 * 64 + 2 * 32,
        4: 16 * 32 + 2 * 32,
    }  # in either case a line of 64 bytes holds the scales
    for k_bits, v_bits in (bits for kind, bits in KINDS if kind == name):
        spec = KVSpec((layer,) * 3, 16, "float16", (k_bits, v_bits))
        assert spec.bytes_per_block == 3 * 2 * (keys[k_bits] + values[v_bits])
        assert spec.bytes_per_open_block == 3 * 2 * 2 * 64 * 16 * 2
        backend = MAKERS[name](spec, 5, num_open=4)
        assert backend.pool_bytes == 5 * spec.bytes_per_block + 4 * spec.bytes_per_open_block
        backend.close()
    assert KVSpec((layer,), 16, "float16").bytes_per_open_block == 0


def torch_backend(*arguments, **options):
    """Make a torch backend. The import is local, so this file does not need torch."""
    from kvboost_edge.backends.torch_backend import TorchBackend

    return TorchBackend(*arguments, **options)


TORCH = {"torch": torch_backend}


def coded(bits=(8, 8), dtype="float16", block_size=16):
    return KVSpec((LayerKVSpec(2, 16),), block_size, dtype, bits)


POOLS = [
    (KERNELS, coded((16, 8)), {}, r"KV bits \(16, 8\)"),
    (KERNELS, coded((8, 2)), {}, r"KV bits \(8, 2\)"),
    ((*KERNELS, "torch"), coded(dtype="float32"), {}, "'float32'.*'float16'"),
    ((*KERNELS, "torch"), coded(), {"num_open": 0}, "num_open=0"),
    (("torch",), coded(block_size=24), {}, "block_size=24"),
]


@pytest.mark.parametrize(
    ("kind", "spec", "more", "message"), [(kind, *row) for kinds, *row in POOLS for kind in kinds]
)
def test_invalid_pools_are_refused(kind, spec, more, message):
    with pytest.raises(ConfigError, match=message):
        (MAKERS | TORCH)[kind](spec, 4, **more)


@pytest.mark.parametrize("others", [(8, 4), (4, 8), (4, 4), (16, 8)], ids=str)
def test_torch_refuses_other_kv_widths_by_name(others):
    said = rf"does not support KV at {re.escape(str(others))} bits; use kv_cache_bits=16 or 8"
    with pytest.raises(BackendUnavailable, match=said):
        torch_backend(coded(others), 4)


def test_torch_codes_equal_the_references():
    """Scales are rounded to float16 from sums that differ in the last bit of a float32, so a few
    codes differ.
    """
    case = small_case(18, ((1, 160),), dim=40)
    ids = case.tables[0, :10].tolist()
    both = []
    for kind in ("reference", "torch-cpu"):
        backend = make_backend(kind, case, (8, 8))
        write(backend, case, [(0, 0, 160)])
        both.append(backend.read_blocks(ids).astype(np.int64))
        backend.close()
    assert np.mean(both[0] != both[1]) <= 1e-3


@pytest.mark.parametrize("kind", [*MAKERS, *TORCH])
def test_releasing_closed_blocks_has_no_effect(kind):
    backend = (MAKERS | TORCH)[kind](coded((16, 16), "float32"), 4)
    backend.release_blocks([0, 3])
    backend.close()
