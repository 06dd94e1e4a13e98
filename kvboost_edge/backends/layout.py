"""What every backend checks before it touches its pool: a pass's layout, and ids of blocks. Loads no Numba."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.base import BatchLayout, PassStates
from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.attention.parts import Longs, Part, entry_positions, has_delta, is_last

__all__ = ["check_block", "check_layout", "refuse_deltas"]


def check_layout(
    layout: BatchLayout, block_size: int, num_blocks: int, num_state_slots: int = 0, num_draft_rows: int = 0
) -> None:
    """ConfigError, naming what is wrong, unless the layout's shapes agree and every id and slot lies in the pool, and
    it names slots of states where there are some, with no more drafts than there are rows for."""
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
    if (layout.states is None) != (num_state_slots == 0):
        raise ConfigError(
            f"a pass {'without' if layout.states is None else 'with'} slots of states does not fit a backend that has "
            f"{num_state_slots} of them: num_state_slots"
        )
    if layout.states is not None:
        _check_states(layout.states, lengths, num_state_slots)
        _check_drafts(layout.states, lengths, num_draft_rows)


def _check_states(states: PassStates, lengths: npt.NDArray[np.int32], num_slots: int) -> None:
    """lengths: rows of each sequence in the pass."""
    read, written, saves, certain = states
    num_seqs, certain = len(lengths), lengths if certain is None else certain
    if read.shape != (num_seqs,) or written.shape != (num_seqs,) or saves.ndim != 2 or saves.shape[1] != 3:
        raise ConfigError(
            f"states of {num_seqs} sequences need state_in and state_out of shape ({num_seqs},) and saves of shape "
            f"(n, 3); got {read.shape}, {written.shape} and {saves.shape}"
        )
    whose, rows, slots = saves.T.astype(np.int64)
    if len(saves) and not (whose.min() >= 0 and whose.max() < num_seqs):
        raise ConfigError(f"saves {saves.tolist()} name sequences outside 0..{num_seqs - 1}")
    if certain.shape != (num_seqs,) or (certain > lengths).any() or (certain < np.minimum(lengths, 1)).any():
        raise ConfigError(
            f"certain {certain.tolist()} must be 1 to all of the {lengths.tolist()} rows of each sequence"
        )
    if (rows < 1).any() or (rows > certain[whose]).any():
        raise ConfigError(
            f"saves {saves.tolist()} must lie behind 1 to all of the {certain.tolist()} certain rows of their sequences"
        )
    if (np.diff(whose) < 0).any() or ((np.diff(whose) == 0) & (np.diff(rows) <= 0)).any():
        raise ConfigError(f"saves {saves.tolist()} must ascend by sequence, then rows")
    every = np.concatenate([written.astype(np.int64), slots])
    low, high = (min(every.min(), read.min() + 1), max(every.max(), read.max())) if num_seqs else (0, -1)
    if low < 0 or high >= num_slots:
        raise ConfigError(
            f"state_in {read.tolist()} (-1: zeros), state_out {written.tolist()} and the slots of saves "
            f"{slots.tolist()} must lie in 0..{num_slots - 1}"
        )
    if len(np.unique(every)) < len(every):
        raise ConfigError(f"slots {every.tolist()} of states are written, and one of them twice")
    foreign = (every[:, None] == read) & (np.arange(len(every))[:, None] != np.arange(num_seqs))
    if foreign.any():
        raise ConfigError(
            f"slots {every[foreign.any(axis=1)].tolist()} of states are written while others read them: state_in "
            f"{read.tolist()}, state_out {written.tolist()}, saves {saves.tolist()}"
        )


def _check_drafts(states: PassStates, lengths: npt.NDArray[np.int32], num_rows: int) -> None:
    drafted = 0 if states.certain is None else int((lengths - states.certain).sum())
    if drafted > num_rows:
        raise ConfigError(f"a pass has {drafted} drafts, and there is room for what {num_rows} bring to states")


def refuse_deltas(layout: BatchLayout, who: str) -> None:
    """ConfigError in the name of `who`, which attends no keys that were computed at other positions, where parts have
    a delta."""
    if layout.parts is not None and has_delta(layout.parts):
        raise ConfigError(
            f"{who} does not attend keys computed at other positions, parts with delta "
            f"{Part(*layout.parts.T).delta.tolist()}: the native runner on backend 'cpu' does, where all layers have "
            "keys of one shape and heads x head_dim is a multiple of 32; the torch runner on backend 'torch' too, for "
            "models with plain rope"
        )


def _check_tables(layout: BatchLayout, block_size: int, num_blocks: int) -> None:
    tables, seq_lens = layout.block_tables, layout.seq_lens.astype(np.int64)
    width = tables.shape[1]
    if layout.parts is None:
        used = np.arange(width) < -(-seq_lens // block_size)[:, None]
        room = np.full(len(seq_lens), width * block_size)
    else:
        checked = _checked(layout.parts, tables.shape, block_size)
        first = seq_lens - np.diff(layout.cu_seqlens_q)
        if (checked.written_from > first).any():
            raise ConfigError(
                f"new tokens from positions {first.tolist()} on are not all in their sequences' last parts"
            )
        used = checked.is_used & (checked.served < seq_lens[:, None])
        room = checked.room
    if (room < seq_lens).any():
        raise ConfigError(f"block tables of {width} blocks of {block_size} do not hold seq_len {int(seq_lens.max())}")
    ids = tables[used]
    if ids.size:
        check_block(int(ids.min()), num_blocks)
        check_block(int(ids.max()), num_blocks)


class _CheckedParts(NamedTuple):
    """What the layouts of a sequence's steps have in common; nobody writes into it.

    is_used, served   bool, int64 [num_seqs, width]: which entries serve positions, and from which on
    room              int64 [num_seqs]: the position behind the last one that there is room for
    written_from      int32 [num_seqs]: the first position of the part that is written
    """

    is_used: npt.NDArray[np.bool_]
    served: Longs
    room: Longs
    written_from: npt.NDArray[np.int32]


def _checked(parts: npt.NDArray[np.int32], shape: tuple[int, ...], block_size: int) -> _CheckedParts:
    if parts.ndim != 2 or parts.shape[1] != len(Part._fields) or not len(parts):
        raise ConfigError(f"parts {parts.tolist()} must be rows of {Part._fields}")
    return _check_again(parts.astype(np.int32).tobytes(), shape, block_size)


@lru_cache(maxsize=64)
def _check_again(data: bytes, shape: tuple[int, ...], block_size: int) -> _CheckedParts:
    """`_check_parts` for parts that were not met before the same: in a step of decoding they took 0.5 ms."""
    parts = np.frombuffer(data, dtype=np.int32).reshape(-1, len(Part._fields))
    _check_parts(parts, shape, block_size)
    _, served, until = entry_positions(shape, parts, block_size)
    return _CheckedParts(
        served < until, served, until.max(axis=1, initial=0), Part(*parts.T).valid_from[is_last(parts)]
    )


def _check_parts(parts: npt.NDArray[np.int32], shape: tuple[int, ...], block_size: int) -> None:
    """ConfigError unless each sequence's parts follow one another from position 0 on, the last one at the positions it
    is computed at, and others none that were computed before position 0."""
    num_seqs, width = shape
    steps = np.diff(parts[:, 0])
    if (parts[0, 0], parts[-1, 0]) != (0, num_seqs - 1) or (steps < 0).any() or (steps > 1).any():
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
