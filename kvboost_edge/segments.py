"""Segments of block tables: the positions that their entries hold. Plain NumPy, for kernels,
oracles, backends and the scheduler alike.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
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

Longs = npt.NDArray[np.int64]
Segments = npt.NDArray[np.int32] | None
"""int32 [num_segments, 5], rows of `Segment`, those of a sequence in order of positions, sequences
in order, each with at least one; None: every sequence has one segment, whose block 0 begins at
position 0.
"""

_END = np.iinfo(np.int32).max


class Segment(NamedTuple):
    """Consecutive entries of one sequence's block table that hold consecutive positions.

    Attributes:
        first_index: the first of them.
        first_position: position of its slot 0, at most `valid_from`; negative where position 0 is
            inside a block.
        valid_from: the first position served; all up to the next segment's, the last segment serves
            all that follow.
        delta: how far keys are from the positions they were computed at, new - old: a query at
            position p attends them as one at p - delta; 0 in the last segment, which is written.
    """

    sequence: Any
    first_index: Any
    first_position: Any
    valid_from: Any
    delta: Any


def valid_to(segments: npt.NDArray[np.int32]) -> Longs:
    """Where each segment's positions end, int64 [num_segments]; 2^31 - 1 for the last of a
    sequence.
    """
    one = Segment(*segments.T)
    ends = np.full(len(segments), _END, dtype=np.int64)
    goes_on = one.sequence[1:] == one.sequence[:-1]
    ends[:-1][goes_on] = one.valid_from[1:][goes_on]
    return ends


def is_last(segments: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Which segments are the last of their sequences, bool [num_segments]."""
    last: npt.NDArray[np.bool_] = valid_to(segments) == _END
    return last


def has_delta(segments: Segments) -> bool:
    """Whether keys of some segment were computed at other positions; what has another shape is no
    segments and has none.
    """
    return segments is not None and bool(segments[..., Segment._fields.index("delta") :].any())


def turned_positions(segments: npt.NDArray[np.int32], seq_lens: npt.NDArray[np.int32]) -> int:
    """One more than the largest position that a query of these sequences is turned to."""
    segment = Segment(*segments.astype(np.int64).T)
    return int((seq_lens[segment.sequence] - segment.delta).max())


def entry_positions(
    shape: tuple[int, ...], segments: Segments, block_size: int
) -> tuple[Longs, Longs, Longs]:
    """Of every entry of block tables int32 [num_seqs, width]: position of slot 0, first position
    served, position behind the last one served. Each int64 of the tables' shape.
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
    """Of every entry of block tables int32 [num_seqs, width]: the delta of its segment."""
    deltas = np.zeros(shape, dtype=np.int64)
    for segment in (Segment(*row) for row in segments.tolist()):
        deltas[segment.sequence, segment.first_index :] = segment.delta
    return deltas


def entry_of(
    segments: Segments, sequence: int, positions: Longs, block_size: int
) -> tuple[Longs, Longs]:
    """Of positions of one sequence: the entries of its table that hold them, and the offsets in
    their blocks.
    """
    if segments is None:
        indices, offsets = np.divmod(positions, block_size)
        return indices, offsets
    segment = _segments_at(segments, sequence, positions)
    indices, offsets = np.divmod(positions - segment.first_position, block_size)
    return segment.first_index + indices, offsets


def deltas_of(segments: Segments, sequence: int, positions: Longs) -> Longs:
    """Of positions of one sequence: the delta of the segment that serves each."""
    if segments is None:
        return np.zeros(len(positions), dtype=np.int64)
    found: Longs = _segments_at(segments, sequence, positions).delta
    return found


def _segments_at(segments: npt.NDArray[np.int32], sequence: int, positions: Longs) -> Segment:
    """The segment that serves each of some positions of a sequence, int64 [num_positions] each."""
    mine = segments[Segment(*segments.T).sequence == sequence].astype(np.int64)
    return Segment(
        *mine[np.searchsorted(Segment(*mine.T).valid_from, positions, side="right") - 1].T
    )


def own_segments(num_seqs: int, segments: Segments) -> tuple[Longs, Longs]:
    """First index and first position of each sequence's last segment, the one that its new tokens
    are written to.
    """
    if segments is None:
        zeros = np.zeros(num_seqs, dtype=np.int64)
        return zeros, zeros
    last = Segment(*segments[is_last(segments)].astype(np.int64).T)
    return last.first_index, last.first_position


def repeated_segments(segments: Segments, source: Longs) -> Segments:
    """The segments of sequences `source`, any number of times each, as those of sequences 0, 1,
    ...
    """
    if segments is None:
        return None
    chosen = [segments[segments[:, 0] == sequence] for sequence in source]
    found = np.concatenate(chosen)
    found[:, 0] = np.repeat(np.arange(len(source)), [len(rows) for rows in chosen])
    return found
