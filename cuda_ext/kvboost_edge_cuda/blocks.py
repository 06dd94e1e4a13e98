"""Writing KV to a paged pool, and copying blocks."""

from __future__ import annotations

import torch

from kvboost_edge_cuda.checks import IndexChecks
from kvboost_edge_cuda.library import operators
from kvboost_edge_cuda.tensors import aligned, current_stream

__all__ = ["copy_blocks", "write_kv"]


def write_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    check_values: bool = True,
) -> None:
    """Store the keys and values of tokens at their slots, in place.

    Args:
        keys: [num_tokens, num_kv_heads, head_dim], float16 or bfloat16.
        values: like `keys`.
        k_cache: [num_blocks, block_size, num_kv_heads, head_dim], same dtype.
        v_cache: like `k_cache`.
        slot_mapping: int64 [num_tokens], block id * block_size + offset. Tokens with a negative
            slot are skipped.
        check_values: whether to check that all slots are in the pool, which synchronizes with the
            device.

    Raises:
        ValueError: a slot is outside the pool.
        RuntimeError: the shapes, dtypes or devices of the tensors do not match.
    """
    checks = IndexChecks(check_values=check_values)
    checks.index("slot_mapping", slot_mapping, (keys.shape[0],), torch.int64)
    if check_values and slot_mapping.numel():
        last = k_cache.shape[0] * k_cache.shape[1] - 1
        checks.within("slot_mapping", slot_mapping, torch.iinfo(torch.int64).min, last)
        checks.raise_first()
    operators().write_kv(
        aligned(keys), aligned(values), k_cache, v_cache, slot_mapping, current_stream(keys)
    )


def copy_blocks(pools: list[torch.Tensor], pairs: list[tuple[int, int]]) -> None:
    """Copy whole blocks in every pool.

    Pairs are processed in order, so a block may be the source of a later pair.

    Args:
        pools: contiguous tensors [num_blocks, ...] on one device. The size of a block is a multiple
            of 16 bytes.
        pairs: (source, destination) block ids, which apply to every pool.

    Raises:
        ValueError: a pool or a block id is invalid.
    """
    if not pools or not pairs:
        return
    for pool in pools:
        nbytes = _block_bytes(pool)
        if (
            not pool.is_contiguous()
            or nbytes % 16
            or pool.data_ptr() % 16
            or pool.device != pools[0].device
        ):
            raise ValueError(
                f"pool {tuple(pool.shape)} must be contiguous, aligned to 16 bytes, on the device "
                "of the others, and have blocks of a multiple of 16 bytes"
            )
    num_blocks = min(len(pool) for pool in pools)
    for pair in pairs:
        if not all(0 <= block < num_blocks for block in pair):
            raise ValueError(
                f"copy {pair[0]} -> {pair[1]}: block ids must be in 0..{num_blocks - 1}"
            )
    sizes = [_block_bytes(pool) for pool in pools]
    device = pools[0].device
    rows = [[pool.data_ptr() for pool in pools], sizes]
    addresses, block_bytes = torch.tensor(rows, dtype=torch.int64).to(device)
    which = torch.tensor(pairs, dtype=torch.int64).to(device)
    operators().copy_blocks(addresses, block_bytes, max(sizes), which, current_stream(pools[0]))


def _block_bytes(pool: torch.Tensor) -> int:
    return int(pool[0].numel() * pool.element_size())
