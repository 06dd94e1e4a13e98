"""Conversion of whole blocks to bytes and back, for storage outside the pool.

Each array of a pool is viewed as uint8 [num_blocks, n], so row b is the part of block b in this
array. The bytes of a block are its rows in all arrays, concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ConfigError

__all__ = ["as_rows", "check_block", "check_block_ids", "check_content", "gather", "scatter"]

Bytes = npt.NDArray[np.uint8]


def as_rows(array: npt.NDArray[np.generic]) -> Bytes:
    """View a contiguous array [num_blocks, ...] as uint8 [num_blocks, n]."""
    return array.reshape(len(array), -1).view(np.uint8)


def check_block(block_id: int, num_blocks: int) -> None:
    """Raise ConfigError unless the block id is in the pool."""
    if not 0 <= block_id < num_blocks:
        raise ConfigError(f"block id {block_id} must be in the pool's 0..{num_blocks - 1}")


def check_block_ids(block_ids: Sequence[int], num_blocks: int) -> None:
    """Raise ConfigError unless all block ids are in the pool."""
    for block_id in block_ids:
        check_block(block_id, num_blocks)


def check_content(
    ids: Sequence[int], data: Bytes, bytes_per_item: int, item: str = "block"
) -> None:
    """Raise ConfigError unless `data` has the size of these items and their ids are distinct."""
    expected = (len(ids), bytes_per_item)
    if data.dtype != np.uint8 or data.shape != expected:
        raise ConfigError(
            f"{len(ids)} {item}s need uint8 data of shape {expected}; got {data.dtype} {data.shape}"
        )
    if len(set(ids)) != len(ids):
        raise ConfigError(f"{item}s {list(ids)} contain duplicates; list each {item} only once")


def gather(arrays: Sequence[Bytes], block_ids: Sequence[int]) -> Bytes:
    """Concatenate the rows of blocks in all arrays to uint8 [len(block_ids), bytes per block]."""
    ids = np.array(block_ids, dtype=np.intp)
    ends = np.cumsum([rows.shape[1] for rows in arrays])
    data = np.empty((len(ids), int(ends[-1])), dtype=np.uint8)
    for rows, end in zip(arrays, ends.tolist(), strict=True):
        data[:, end - rows.shape[1] : end] = rows.take(ids, axis=0)
    return data


def scatter(arrays: Sequence[Bytes], block_ids: Sequence[int], data: Bytes) -> None:
    """Write bytes from `gather` to the rows of blocks."""
    ids = np.array(block_ids, dtype=np.intp)
    end = 0
    for rows in arrays:
        start = end
        end = end + rows.shape[1]
        rows[ids] = data[:, start:end]
