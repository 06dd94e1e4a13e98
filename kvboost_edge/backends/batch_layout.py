"""Checks of batch layouts, shared by all backends."""

from __future__ import annotations

from functools import lru_cache
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.base import BatchLayout, PassStates
from kvboost_edge.backends.block_bytes import check_block
from kvboost_edge.errors import ConfigError
from kvboost_edge.segments import Longs, Segment, entry_positions, has_delta, is_last

__all__ = ["check_layout", "refuse_deltas"]

# Tables with at most this many entries are checked as lists, which takes 4 us plus 0.03 us per
# entry. NumPy takes 9 us for any size.
_FEW_ENTRIES = 128


def check_layout(
    layout: BatchLayout,
    block_size: int,
    num_blocks: int,
    num_state_slots: int = 0,
    num_draft_rows: int = 0,
) -> None:
    """Raise ConfigError that names the fault if a layout is inconsistent.

    Shapes must agree, and all ids and slots must be in the pool. For a model with recurrent state,
    the layout must have state slots, and at most `num_draft_rows` draft tokens.
    """
    num_seqs = len(layout.seq_lens)
    cu_seqlens = layout.cu_seqlens_q
    tables = layout.block_tables
    slots = layout.slot_mapping
    if cu_seqlens.shape != (num_seqs + 1,) or tables.ndim != 2 or len(tables) != num_seqs:
        raise ConfigError(
            f"a layout of {num_seqs} sequences needs cu_seqlens_q of shape ({num_seqs + 1},) and "
            f"{num_seqs} block tables; got cu_seqlens_q of shape {cu_seqlens.shape} and block "
            f"tables of shape {tables.shape}"
        )
    # For a few sequences, NumPy's overhead would exceed the work.
    starts = cu_seqlens.tolist()
    seq_lens = layout.seq_lens.tolist()
    lengths = [end - first for first, end in pairwise(starts)]
    if starts[0] != 0 or not all(
        0 <= new <= known for new, known in zip(lengths, seq_lens, strict=True)
    ):
        raise ConfigError(
            f"cu_seqlens_q={starts} must start at 0, not decrease, and give no sequence more "
            f"query rows than its entry of seq_lens={seq_lens}"
        )
    if slots.shape != (starts[-1],):
        raise ConfigError(
            f"slot_mapping of shape {slots.shape} must have one slot for each of {starts[-1]} "
            "tokens"
        )
    written = slots.tolist()
    if written and not (min(written) >= 0 and max(written) < num_blocks * block_size):
        raise ConfigError(
            f"slots {min(written)}..{max(written)} must be in the pool's "
            f"0..{num_blocks * block_size - 1}"
        )
    if layout.sparse is not None and layout.sparse.shape != (num_seqs, 2):
        raise ConfigError(
            f"sparse ranges of shape {layout.sparse.shape} must have shape ({num_seqs}, 2): the "
            "first position and the end for each sequence"
        )
    _check_tables(layout, seq_lens, block_size, num_blocks)
    if (layout.states is None) != (num_state_slots == 0):
        raise ConfigError(
            f"the layout has {'no ' if layout.states is None else ''}recurrent state slots, but "
            f"the backend has num_state_slots={num_state_slots}"
        )
    if layout.states is not None:
        num_drafts = sum(lengths) - sum(_check_states(layout.states, lengths, num_state_slots))
        if num_drafts > num_draft_rows:
            raise ConfigError(
                f"the layout has {num_drafts} draft tokens, but the backend has "
                f"num_draft_rows={num_draft_rows}"
            )


def _check_states(states: PassStates, lengths: list[int], num_slots: int) -> list[int]:
    """Check the slots of recurrent state, and return the number of certain rows per sequence.

    Args:
        states: The slots.
        lengths: Number of rows of each sequence in the pass.
        num_slots: Number of slots in the pool.
    """
    num_seqs = len(lengths)
    shapes = states.state_in.shape, states.state_out.shape, states.saves.shape
    if shapes[:2] != ((num_seqs,), (num_seqs,)) or len(shapes[2]) != 2 or shapes[2][1] != 3:
        raise ConfigError(
            f"the states of {num_seqs} sequences need state_in and state_out of shape "
            f"({num_seqs},) and saves of shape (n, 3); got {shapes[0]}, {shapes[1]} and {shapes[2]}"
        )
    read = states.state_in.tolist()
    written = states.state_out.tolist()
    saves = states.saves.tolist()
    certain: list[int] = lengths if states.certain is None else states.certain.tolist()
    if any(not 0 <= whose < num_seqs for whose, _, _ in saves):
        raise ConfigError(f"saves={saves} contains sequences outside 0..{num_seqs - 1}")
    if len(certain) != num_seqs or any(
        not min(n, 1) <= of <= n for of, n in zip(certain, lengths, strict=True)
    ):
        raise ConfigError(
            f"certain={certain} must have numbers from 1 to the number of rows of each sequence, "
            f"{lengths}"
        )
    if any(not 1 <= rows <= certain[whose] for whose, rows, _ in saves):
        raise ConfigError(
            f"saves={saves} must have row counts from 1 to the number of certain rows of each "
            f"sequence, {certain}"
        )
    if any(this[:2] <= last[:2] for last, this in pairwise(saves)):
        raise ConfigError(f"saves={saves} must be sorted by sequence, then by rows")
    slots = [slot for _, _, slot in saves]
    every = [*written, *slots]
    if not all(0 <= slot < num_slots for slot in every) or not all(
        -1 <= slot < num_slots for slot in read
    ):
        raise ConfigError(
            f"state slots out of range 0..{num_slots - 1}: state_in {read} (-1 means zeros), "
            f"state_out {written}, save slots {slots}"
        )
    if len(set(every)) < len(every):
        raise ConfigError(
            f"recurrent state slots {every} contain duplicates; write each slot only once"
        )
    readers: dict[int, set[int]] = {}
    for sequence, slot in enumerate(read):
        readers.setdefault(slot, set()).add(sequence)
    foreign = [slot for index, slot in enumerate(every) if readers.get(slot, set()) - {index}]
    if foreign:
        raise ConfigError(
            f"recurrent state slots {foreign} are written while other sequences read them: "
            f"state_in {read}, state_out {written}, saves {saves}"
        )
    return certain


def refuse_deltas(layout: BatchLayout, who: str) -> None:
    """Raise ConfigError that names `who` if a segment has a position delta."""
    if layout.segments is not None and has_delta(layout.segments):
        raise ConfigError(
            f"{who} does not support segments with a position delta, "
            f"{Segment(*layout.segments.T).delta.tolist()}; use the native runner with "
            "backend='cpu', or for plain RoPE, the torch runner with backend='torch'"
        )


def _check_tables(
    layout: BatchLayout, seq_lens: list[int], block_size: int, num_blocks: int
) -> None:
    tables = layout.block_tables
    width = tables.shape[1]
    if layout.segments is None:
        room = [width * block_size] * len(seq_lens)
        if tables.size <= _FEW_ENTRIES:
            rows = zip(tables.tolist(), seq_lens, strict=True)
            ids = list(
                chain.from_iterable(row[: -(-seq_len // block_size)] for row, seq_len in rows)
            )
        else:
            ids = _bounds(tables[np.arange(width) < -(-layout.seq_lens[:, None] // block_size)])
    else:
        checked = _checked(layout.segments, tables.shape, block_size)
        first = layout.seq_lens - np.diff(layout.cu_seqlens_q)
        if (checked.written_from > first).any():
            raise ConfigError(
                f"new tokens start at positions {first.tolist()}, before the last segments of "
                "their sequences; write all new tokens to the last segment"
            )
        room = checked.room.tolist()
        ids = _bounds(tables[checked.is_used & (checked.served < layout.seq_lens[:, None])])
    if any(seq_len > most for seq_len, most in zip(seq_lens, room, strict=True)):
        raise ConfigError(
            f"block tables of {width} blocks of {block_size} tokens are too short for seq_len "
            f"{max(seq_lens)}"
        )
    if ids:
        check_block(min(ids), num_blocks)
        check_block(max(ids), num_blocks)


def _bounds(ids: npt.NDArray[np.int32]) -> list[int]:
    return [int(ids.min()), int(ids.max())] if ids.size else []


class _CheckedParts(NamedTuple):
    """Checked properties of a layout's segments. Read-only, because several steps share them.

    Attributes:
        is_used: bool [num_seqs, width], True for table entries that hold KV in use.
        served: int64 [num_seqs, width], the first position of each entry.
        room: int64 [num_seqs], the first position beyond the table.
        written_from: int32 [num_seqs], the first position of the last segment, which is written.
    """

    is_used: npt.NDArray[np.bool_]
    served: Longs
    room: Longs
    written_from: npt.NDArray[np.int32]


def _checked(
    segments: npt.NDArray[np.int32], shape: tuple[int, ...], block_size: int
) -> _CheckedParts:
    if segments.ndim != 2 or segments.shape[1] != len(Segment._fields) or not len(segments):
        raise ConfigError(
            f"segments {segments.tolist()} must be rows with the columns {Segment._fields}"
        )
    return _check_again(segments.astype(np.int32).tobytes(), shape, block_size)


@lru_cache(maxsize=64)
def _check_again(data: bytes, shape: tuple[int, ...], block_size: int) -> _CheckedParts:
    """Check segments and return their properties. Cached, because the check takes 0.5 ms."""
    segments = np.frombuffer(data, dtype=np.int32).reshape(-1, len(Segment._fields))
    _check_segments(segments, shape, block_size)
    _, served, until = entry_positions(shape, segments, block_size)
    return _CheckedParts(
        served < until,
        served,
        until.max(axis=1, initial=0),
        Segment(*segments.T).valid_from[is_last(segments)],
    )


def _check_segments(
    segments: npt.NDArray[np.int32], shape: tuple[int, ...], block_size: int
) -> None:
    """Raise ConfigError unless the segments of each sequence are consecutive from position 0 on.

    Position deltas are checked too, see `_check_deltas`.
    """
    num_seqs, width = shape
    steps = np.diff(segments[:, 0])
    if (
        (segments[0, 0], segments[-1, 0]) != (0, num_seqs - 1)
        or (steps < 0).any()
        or (steps > 1).any()
    ):
        raise ConfigError(
            f"segments {segments.tolist()} must be sorted by sequence and cover sequences "
            f"0..{num_seqs - 1}"
        )
    segment = Segment(*segments.T)
    before = Segment(*np.roll(segments, 1, axis=0).T)
    _check_deltas(Segment(*segments.astype(np.int64).T), is_last(segments))
    ends = before.first_position + (segment.first_index - before.first_index) * block_size
    follows = (
        (segment.valid_from > before.valid_from)
        & (segment.first_index > before.first_index)
        & (segment.valid_from <= ends)
    )
    offset = segment.valid_from - segment.first_position
    fits = (offset >= 0) & (offset < block_size) & (segment.first_index < width)
    begins = (segment.valid_from == 0) & (segment.first_index >= 0)
    is_first = np.roll(is_last(segments), 1)
    if not (fits & np.where(is_first, begins, follows)).all():
        raise ConfigError(
            f"segments {segments.tolist()} skip positions or exceed tables of {width} blocks"
        )


def _check_deltas(segment: Segment, last: npt.NDArray[np.bool_]) -> None:
    """Raise ConfigError if a segment has an invalid position delta.

    The last segment of a sequence must have delta 0. Other segments must not contain KV that was
    computed before position 0.

    Args:
        segment: Fields of all segments, int64 [num_segments] each.
        last: Marks the last segment of each sequence.
    """
    if segment.delta[last].any():
        raise ConfigError(
            f"last segments have delta {segment.delta[last].tolist()}, but must have delta 0, "
            "because new tokens are written to them"
        )
    computed: Longs = segment.valid_from - segment.delta
    if (computed < 0).any():
        at = int(computed.argmin())
        raise ConfigError(
            f"a segment from position {segment.valid_from[at]} has delta {segment.delta[at]}, "
            f"but its keys cannot have been computed at position {computed[at]}; a delta must be "
            "at most the first position of its segment"
        )
