"""Tests of the CUDA kernels that move the pool's bytes: write_kv by slot, copy_blocks in order."""

import itertools

import numpy as np
import pytest

from helpers.cuda.on_cpu import CopyBlocksParams, Schedule, WriteKVParams, library

SCHEDULES = [Schedule(order, 0) for order in (0, 1, 2)]


@pytest.fixture(scope="module")
def kernels():
    return library()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=["forward", "backward", "shuffled"])
@pytest.mark.parametrize(
    ("heads", "dim", "block_size", "is_strided"),
    [(1, 8, 16, False), (3, 64, 16, True), (8, 256, 48, False)],
)
def test_keys_and_values_are_written_only_to_their_slots(
    kernels, heads, dim, block_size, is_strided, schedule
):
    rng = np.random.default_rng(1)
    num_blocks = 5
    num_tokens = 40
    shape = (
        (num_blocks, heads, block_size, dim) if is_strided else (num_blocks, block_size, heads, dim)
    )
    memory = rng.integers(0, 65536, (2, *shape), dtype=np.uint16)
    pools = [pool.transpose(0, 2, 1, 3) if is_strided else pool for pool in memory]
    # K and V of one projection, in alternating rows
    tokens = rng.integers(0, 65536, (num_tokens, 2, heads, dim), dtype=np.uint16)
    slots = rng.permutation(num_blocks * block_size)[:num_tokens].astype(np.int64)
    slots[::7] = -1
    expected = [pool.copy() for pool in pools]
    for i, slot in enumerate(slots):
        for which in (0, 1) if slot >= 0 else ():
            expected[which][slot // block_size, slot % block_size] = tokens[i, which]

    params = WriteKVParams(
        slot_mapping=slots.ctypes.data,
        num_tokens=num_tokens,
        num_kv_heads=heads,
        head_dim=dim,
        block_size=block_size,
    )
    for which, (source, target) in enumerate((("keys", "k"), ("values", "v"))):
        setattr(params, source, tokens[:, which].ctypes.data)
        setattr(params, f"{source}_row_stride", 2 * heads * dim)
        setattr(params, f"{source}_head_stride", dim)
        setattr(params, f"{target}_cache", memory[which].ctypes.data)
        for axis, stride in zip(("block", "row", "head"), pools[which].strides, strict=False):
            setattr(params, f"{target}_{axis}_stride", stride // 2)
    kernels.write_kv(params, schedule)
    for pool, wanted in zip(pools, expected, strict=True):
        np.testing.assert_array_equal(pool, wanted)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=["forward", "backward", "shuffled"])
def test_blocks_are_copied_in_order_in_every_pool(kernels, schedule):
    rng = np.random.default_rng(2)
    sizes = (16, 2048, 5040)  # less than a CTA's share, exactly one, and several with a tail
    pools = [rng.integers(0, 256, (6, size), dtype=np.uint8) for size in sizes]
    pairs = np.array(
        [(0, 1), (1, 2), (3, 0), (2, 5), (5, 5)], dtype=np.int64
    )  # 0's content ends in 1, 2 and 5
    expected = [pool.copy() for pool in pools]
    for pool, (source, target) in itertools.product(expected, pairs):
        pool[target] = pool[source]

    addresses = np.array([pool.ctypes.data for pool in pools], dtype=np.uint64)
    block_bytes = np.array(sizes, dtype=np.int64)
    params = CopyBlocksParams(
        pools=addresses.ctypes.data,
        block_bytes=block_bytes.ctypes.data,
        pairs=pairs.ctypes.data,
        num_pools=len(pools),
        num_pairs=len(pairs),
    )
    kernels.copy_blocks(params, max(sizes), schedule)
    for pool, wanted in zip(pools, expected, strict=True):
        np.testing.assert_array_equal(pool, wanted)
