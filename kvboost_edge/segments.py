"""Segments of block tables, which map table entries to positions, in plain NumPy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "QUERY_BLOCK",
    "Longs",
    "Segment",
    "Segments",
    "deltas_of",
    "entry_deltas",
    "entry_of",
    "entry_positions",
    "has_delta",
    "is_last",
    "own_segments",
    "repeated_segments",
    "turned_positions",
    "valid_to",
]

QUERY_BLOCK = 16
"""Number of tokens in a query block of a sparse prefill, which share a selection of key blocks.

A query block starts at a multiple of this number and is computed in one pass.
"""
Longs = npt.NDArray[np.int64]
Segments = npt.NDArray[np.int32] | None
"""Rows of `Segment`, int32 [num_segments, 5], or None if every sequence has one plain segment.

Rows are ordered by sequence, then by position. Every sequence has at least one segment. Block 0 of
a plain segment begins at position 0.
"""

_END = np.iinfo(np.int32).max


class Segment(NamedTuple):
    """Consecutive entries in a sequence's block table that store consecutive positions.

    Attributes:
        sequence: Index of the sequence.
        first_index: Index of the first table entry.
        first_position: Position of slot 0 in the first entry's block, at most `valid_from`. It is
            negative if position 0 is inside the block.
        valid_from: First position that is read from this segment. The segment ends where the next
            one begins, and the last segment is unlimited.
        delta: Shift of the keys from the positions where they were computed (new - old). A query at
            position p attends to them as if it were at p - delta. The last segment has delta 0,
            because new tokens are written to it.
    """

    sequence: Any
    first_index: Any
    first_position: Any
    valid_from: Any
    delta: Any


def valid_to(segments: npt.NDArray[np.int32]) -> Longs:
    """Return the end position of each segment, int64 [num_segments].

    The end is 2^31 - 1 for the last segment of a sequence.
    """
    one = Segment(*segments.T)
    ends = np.full(len(segments), _END, dtype=np.int64)
    goes_on = one.sequence[1:] == one.sequence[:-1]
    ends[:-1][goes_on] = one.valid_from[1:][goes_on]
    return ends


def is_last(segments: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Return whether each segment is the last of its sequence, bool [num_segments]."""
    last: npt.NDArray[np.bool_] = valid_to(segments) == _END
    return last


def has_delta(segments: Segments) -> bool:
    """Return whether any segment contains keys that were computed at other positions."""
    # An invalid array with fewer columns is treated as having no delta.
    return segments is not None and bool(segments[..., Segment._fields.index("delta") :].any())


def turned_positions(segments: npt.NDArray[np.int32], seq_lens: npt.NDArray[np.int32]) -> int:
    """Return the number of positions that RoPE tables must cover for the rotated queries."""
    segment = Segment(*segments.astype(np.int64).T)
    return int((seq_lens[segment.sequence] - segment.delta).max())


def entry_positions(
    shape: tuple[int, ...], segments: Segments, block_size: int
) -> tuple[Longs, Longs, Longs]:
    """Return the positions of each entry in block tables int32 [num_seqs, width].

    Returns:
        The position of slot 0, the first position read from the entry, and the position after the
            last one read, each int64 [num_seqs, width].
    """
    num_seqs, width = shape
    first: Longs = np.broadcast_to(np.arange(width, dtype=np.int64) * block_size, (num_seqs, width))
    if segments is None:
        return first, first, first + block_size
    first = first.copy()
    served = first.copy()
    until = first.copy()
    ends = valid_to(segments)
    rows = [Segment(*row) for row in segments.tolist()]
    for number, segment in enumerate(rows):
        entries = slice(
            segment.first_index, width if ends[number] == _END else rows[number + 1].first_index
        )
        begins = (
            segment.first_position
            + np.arange(entries.stop - entries.start, dtype=np.int64) * block_size
        )
        first[segment.sequence, entries] = begins
        served[segment.sequence, entries] = np.maximum(begins, segment.valid_from)
        until[segment.sequence, entries] = np.minimum(begins + block_size, ends[number])
    return first, served, until


def entry_deltas(shape: tuple[int, ...], segments: npt.NDArray[np.int32]) -> Longs:
    """Return the delta of each block table entry, int64 [num_seqs, width]."""
    deltas = np.zeros(shape, dtype=np.int64)
    for segment in (Segment(*row) for row in segments.tolist()):
        deltas[segment.sequence, segment.first_index :] = segment.delta
    return deltas


def entry_of(
    segments: Segments, sequence: int, positions: Longs, block_size: int
) -> tuple[Longs, Longs]:
    """Return the table index and the offset in the block for positions of a sequence."""
    if segments is None:
        indices, offsets = np.divmod(positions, block_size)
        return indices, offsets
    segment = _segments_at(segments, sequence, positions)
    indices, offsets = np.divmod(positions - segment.first_position, block_size)
    return segment.first_index + indices, offsets


def deltas_of(segments: Segments, sequence: int, positions: Longs) -> Longs:
    """Return the delta of the keys at each position of a sequence."""
    if segments is None:
        return np.zeros(len(positions), dtype=np.int64)
    found: Longs = _segments_at(segments, sequence, positions).delta
    return found


def _segments_at(segments: npt.NDArray[np.int32], sequence: int, positions: Longs) -> Segment:
    """Return the segments that contain positions of a sequence, int64 [num_positions] each."""
    mine = segments[Segment(*segments.T).sequence == sequence].astype(np.int64)
    return Segment(
        *mine[np.searchsorted(Segment(*mine.T).valid_from, positions, side="right") - 1].T
    )


def own_segments(num_seqs: int, segments: Segments) -> tuple[Longs, Longs]:
    """Return the first table index and the first position of each sequence's last segment."""
    if segments is None:
        zeros = np.zeros(num_seqs, dtype=np.int64)
        return zeros, zeros
    last = Segment(*segments[is_last(segments)].astype(np.int64).T)
    return last.first_index, last.first_position


def repeated_segments(segments: Segments, source: Longs) -> Segments:
    """Return the segments of the sequences `source`, renumbered 0, 1, ... in this order."""
    # A sequence may occur several times in `source`.
    if segments is None:
        return None
    chosen = [segments[segments[:, 0] == sequence] for sequence in source]
    found = np.concatenate(chosen)
    found[:, 0] = np.repeat(np.arange(len(source)), [len(rows) for rows in chosen])
    return found
