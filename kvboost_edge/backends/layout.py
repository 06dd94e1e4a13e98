"""What every backend checks before it touches its pool: a pass's layout, and ids of blocks. Loads no Numba."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.base import BatchLayout
from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.attention.parts import Longs, Part, entry_positions, has_delta, is_last

__all__ = ["check_block", "check_layout", "refuse_deltas"]


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


def refuse_deltas(layout: BatchLayout, who: str) -> None:
    """ConfigError in the name of `who`, which attends no keys that were computed at other positions, where parts have
    a delta."""
    if layout.parts is not None and has_delta(layout.parts):
        raise ConfigError(
            f"{who} does not attend keys computed at other positions, parts with delta "
            f"{Part(*layout.parts.T).delta.tolist()}: the native runner on backend 'cpu' does, where all layers have "
            "keys of one shape and heads x head_dim is a multiple of 32"
        )


def _check_tables(layout: BatchLayout, block_size: int, num_blocks: int) -> None:
    tables, seq_lens = layout.block_tables, layout.seq_lens.astype(np.int64)
    width = tables.shape[1]
    if layout.parts is None:
        used = np.arange(width) < -(-seq_lens // block_size)[:, None]
        room = np.full(len(seq_lens), width * block_size)
    else:
        _check_parts(layout, layout.parts, block_size)
        _, served, until = entry_positions(tables.shape, layout.parts, block_size)
        used = (served < until) & (served < seq_lens[:, None])
        room = until.max(axis=1, initial=0)
    if (room < seq_lens).any():
        raise ConfigError(f"block tables of {width} blocks of {block_size} do not hold seq_len {int(seq_lens.max())}")
    ids = tables[used]
    if ids.size:
        check_block(int(ids.min()), num_blocks)
        check_block(int(ids.max()), num_blocks)


def _check_parts(layout: BatchLayout, parts: npt.NDArray[np.int32], block_size: int) -> None:
    """ConfigError unless each sequence's parts follow one another from position 0 on, the last one holding its new
    tokens at the positions they are computed at, and others none that were computed before position 0."""
    num_seqs, width = layout.block_tables.shape
    if (
        parts.ndim != 2
        or parts.shape[1] != len(Part._fields)
        or not np.array_equal(np.unique(parts[:, 0]), np.arange(num_seqs))
        or (np.diff(parts[:, 0]) < 0).any()
    ):
        raise ConfigError(f"parts {parts.tolist()} must be rows of {Part._fields}, in order, for {num_seqs} sequences")
    part, before = Part(*parts.T), Part(*np.roll(parts, 1, axis=0).T)
    _check_deltas(Part(*parts.astype(np.int64).T), is_last(parts))
    ends = before.first_position + (part.first_index - before.first_index) * block_size
    follows = (
        (part.valid_from > before.valid_from) & (part.first_index > before.first_index) & (part.valid_from <= ends)
    )
    offset = part.valid_from - part.first_position
    fits = (offset >= 0) & (offset < block_size) & (part.first_index < width)
    begins = (part.valid_from == 0) & (part.first_index >= 0)
    is_first = np.roll(is_last(parts), 1)
    if not (fits & np.where(is_first, begins, follows)).all():
        raise ConfigError(f"parts {parts.tolist()} leave positions out or lie outside tables of {width} blocks")
    first = layout.seq_lens - np.diff(layout.cu_seqlens_q)
    if (part.valid_from[is_last(parts)] > first).any():
        raise ConfigError(f"new tokens from positions {first.tolist()} on are not all in their sequences' last parts")


def _check_deltas(part: Part, last: npt.NDArray[np.bool_]) -> None:
    """part: int64 [num_parts] each; last: which of them are written."""
    if part.delta[last].any():
        raise ConfigError(
            f"last parts with delta {part.delta[last].tolist()}: new tokens are not written among keys computed at "
            "other positions, their parts must have delta 0"
        )
    computed: Longs = part.valid_from - part.delta
    if (computed < 0).any():
        at = int(computed.argmin())
        raise ConfigError(
            f"keys from position {part.valid_from[at]} on with delta {part.delta[at]} would have been computed from "
            f"position {computed[at]} on: a delta must be at most the first position that its part serves"
        )


def check_block(block_id: int, num_blocks: int) -> None:
    """ConfigError unless the pool has this block."""
    if not 0 <= block_id < num_blocks:
        raise ConfigError(f"block id {block_id} must lie in the pool's 0..{num_blocks - 1}")
