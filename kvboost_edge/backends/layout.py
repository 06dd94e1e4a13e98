"""What every backend checks before it touches its pool: a pass's layout, and ids of blocks. Imports no kernel."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.base import BatchLayout
from kvboost_edge.errors import ConfigError

__all__ = ["check_block", "check_layout"]


def check_layout(layout: BatchLayout, block_size: int, num_blocks: int) -> None:
    """ConfigError, naming what is wrong, unless the layout's shapes agree and every id and slot lies in the pool."""
    num_seqs = len(layout.seq_lens)
    cu_seqlens, tables, slots = layout.cu_seqlens_q, layout.block_tables, layout.slot_mapping
    if cu_seqlens.shape != (num_seqs + 1,) or tables.ndim != 2 or len(tables) != num_seqs:
        raise ConfigError(
            f"a layout of {num_seqs} sequences needs cu_seqlens_q of shape ({num_seqs + 1},) and as many block tables; "
            f"got {cu_seqlens.shape} and {tables.shape}"
        )
    lengths = np.diff(cu_seqlens)
    if cu_seqlens[0] != 0 or (lengths < 0).any() or (lengths > layout.seq_lens).any():
        raise ConfigError(
            f"cu_seqlens_q {cu_seqlens.tolist()} must start at 0, not fall, and give no sequence more query rows than "
            f"its seq_len in {layout.seq_lens.tolist()}"
        )
    if slots.shape != (int(cu_seqlens[-1]),):
        raise ConfigError(f"slot_mapping of shape {slots.shape} must have one slot for each of {cu_seqlens[-1]} tokens")
    if slots.size and not (slots.min() >= 0 and slots.max() < num_blocks * block_size):
        raise ConfigError(f"slots {slots.min()}..{slots.max()} must lie in the pool's 0..{num_blocks * block_size - 1}")
    _check_tables(layout, block_size, num_blocks)


def _check_tables(layout: BatchLayout, block_size: int, num_blocks: int) -> None:
    needed: npt.NDArray[np.int64] = -(-layout.seq_lens.astype(np.int64) // block_size)
    width = layout.block_tables.shape[1]
    if needed.size and needed.max() > width:
        raise ConfigError(
            f"block tables of {width} blocks of {block_size} do not hold seq_len {int(layout.seq_lens.max())}"
        )
    used = layout.block_tables[np.arange(width) < needed[:, None]]
    if used.size:
        check_block(int(used.min()), num_blocks)
        check_block(int(used.max()), num_blocks)


def check_block(block_id: int, num_blocks: int) -> None:
    """ConfigError unless the pool has this block."""
    if not 0 <= block_id < num_blocks:
        raise ConfigError(f"block id {block_id} must lie in the pool's 0..{num_blocks - 1}")
