"""Storage dtypes, writes by slot, copies of blocks and merged partial results, against NumPy and
torch.
"""

import numpy as np
import pytest

from helpers.kernels.paged_cases import (
    DTYPES,
    NUMPY_DTYPES,
    attend_densely,
    poisoned_pool,
    random_rows,
    round_to,
    round_with_torch,
)
from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.attention import storage
from kvboost_edge.kernels.attention.paged import AttentionOptions
from kvboost_edge.kernels.attention.storage import (
    STORAGE_DTYPES,
    from_storage,
    merge_state,
    to_storage,
)
from kvboost_edge.kernels.reference import attention as reference

MERGES = [storage.merge_state, reference.merge_state]


def make_pool(dtype):
    return poisoned_pool(6, 2, 24, 32, dtype)


def as_bytes(pool):
    return [array.tobytes() for array in pool]


def test_every_storage_dtype_has_a_numpy_dtype():
    assert STORAGE_DTYPES == NUMPY_DTYPES


@pytest.mark.parametrize("dtype", DTYPES)
def test_conversion_rounds_as_torch_does(dtype):
    values = (
        np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32).view(np.float32)
    )
    values = np.concatenate(
        [values, np.array([0, -0.0, np.inf, -np.inf, np.nan, 1 + 2**-8, 1 + 3 * 2**-8], np.float32)]
    )
    stored = to_storage(values, NUMPY_DTYPES[dtype])
    assert stored.dtype == NUMPY_DTYPES[dtype]
    np.testing.assert_array_equal(from_storage(stored), round_with_torch(values, dtype))
    np.testing.assert_array_equal(from_storage(stored), round_to(values, dtype))
    np.testing.assert_array_equal(
        from_storage(to_storage(from_storage(stored), stored.dtype)), from_storage(stored)
    )


def test_bfloat16_bits_equal_torchs():
    import torch

    values = np.random.default_rng(1).standard_normal(10_000, dtype=np.float32)
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(to_storage(values, np.uint16), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("writer", [storage.write_kv, reference.write_kv])
def test_each_token_is_written_to_its_slot_only(writer, dtype):
    rng = np.random.default_rng(2)
    pool = make_pool(dtype)
    slots = rng.permutation(6 * 32)[:70].astype(np.int64)
    keys = random_rows(rng, 70, 2, 24)
    values = random_rows(rng, 70, 2, 24)
    expected = make_pool(dtype)
    for token, (block, offset) in enumerate(zip(slots // 32, slots % 32, strict=True)):
        expected.keys[block, :, :, offset] = to_storage(keys[token], expected.keys.dtype)
        expected.values[block, :, offset, :] = to_storage(values[token], expected.values.dtype)
    writer(keys, values, pool, slots)
    assert as_bytes(pool) == as_bytes(expected)


def test_written_rows_need_not_be_contiguous():
    rng = np.random.default_rng(3)
    wide = random_rows(rng, 5, 4, 48)
    slots = np.arange(10, dtype=np.int64)[::2]
    pools = [make_pool("float32") for _ in range(2)]
    storage.write_kv(wide[:, ::2, ::2], wide[:, 1::2, 1::2], pools[0], slots)
    storage.write_kv(wide[:, ::2, ::2].copy(), wide[:, 1::2, 1::2].copy(), pools[1], slots.copy())
    assert as_bytes(pools[0]) == as_bytes(pools[1])


@pytest.mark.parametrize("shape", [(4, 2, 24), (5, 1, 24), (5, 2, 16), (5, 48)])
def test_mismatched_rows_are_refused(shape):
    fit = np.zeros((5, 2, 24), np.float32)
    other = np.zeros(shape, np.float32)
    pool = make_pool("float32")
    slots = np.arange(5, dtype=np.int64)
    before = as_bytes(pool)
    for keys, values in ((fit, other), (other, fit)):
        with pytest.raises(ConfigError, match=r"\(5, 2, 24\)"):
            storage.write_kv(keys, values, pool, slots)
    assert as_bytes(pool) == before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("copier", [storage.copy_blocks, reference.copy_blocks])
def test_block_copies_are_complete_and_in_order(copier, dtype):
    pool = make_pool(dtype)
    for array in pool:
        array.view(np.uint8)[...] = np.random.default_rng(4).integers(
            0, 256, array.view(np.uint8).shape
        )
    before = [array.copy() for array in pool]
    copier(pool, [(0, 3), (3, 5), (1, 0), (2, 2)])
    for array, old in zip(pool, before, strict=True):
        assert array.tobytes() == old[[1, 1, 2, 0, 4, 0]].tobytes()
    copier(pool, [])


@pytest.mark.parametrize("merge", MERGES)
def test_merged_parts_are_attention_over_all_keys(merge):
    """Three disjoint sets of keys are merged from the left and from the right."""
    rng = np.random.default_rng(5)
    options = AttentionOptions(0.4)
    query = random_rows(rng, 1, 6, 16)
    keys = random_rows(rng, 60, 2, 16)
    values = random_rows(rng, 60, 2, 16)
    parts = [
        tuple(
            part.astype(np.float32)
            for part in attend_densely(query, keys[low:high], values[low:high], options)
        )
        for low, high in ((0, 1), (1, 40), (40, 60))
    ]
    out, lse = attend_densely(query, keys, values, options)
    for got in (
        merge(*merge(*parts[0], *parts[1]), *parts[2]),
        merge(*parts[0], *merge(*parts[1], *parts[2])),
    ):
        np.testing.assert_allclose(got[0], out, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(got[1], lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("merge", MERGES)
def test_merging_an_empty_part_changes_nothing(merge):
    v = random_rows(np.random.default_rng(6), 3, 2, 16)
    s = np.array([[1, -200], [300, 0], [-1, 5]], np.float32)
    empty = np.full_like(v, np.nan), np.full_like(s, -np.inf)
    for merged in (merge(v, s, *empty), merge(*empty, v, s)):
        np.testing.assert_array_equal(merged[0], v)
        np.testing.assert_array_equal(merged[1], s)
    nothing = merge(*empty, *empty)
    np.testing.assert_array_equal(nothing[0], np.zeros_like(v))
    np.testing.assert_array_equal(nothing[1], empty[1])


def test_merging_very_different_and_equal_weights():
    v_a = np.full((3, 2), 1.0, np.float32)
    v_b = np.full((3, 2), 3.0, np.float32)
    s_a = np.array([1000, -1000, 7], np.float32)
    s_b = np.array([-1000, 1000, 7], np.float32)
    v, s = merge_state(v_a, s_a, v_b, s_b)
    np.testing.assert_array_equal(v, [[1, 1], [3, 3], [2, 2]])
    np.testing.assert_allclose(s, [1000, 1000, 7 + np.log(2)], rtol=1e-6)
