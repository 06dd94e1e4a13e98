"""Segments of block tables: the positions that their entries hold. Plain NumPy, for kernels,
oracles, backends and the scheduler alike.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "Longs",
    "Part",
    "Parts",
    "deltas_of",
    "entry_deltas",
    "entry_of",
    "entry_positions",
    "has_delta",
    "is_last",
    "own_parts",
    "repeated_parts",
    "turned_positions",
    "valid_to",
]

Longs = npt.NDArray[np.int64]
Parts = npt.NDArray[np.int32] | None
"""int32 [num_parts, 5], rows of `Part`, those of a sequence in order of positions, sequences in
order, each with at least one; None: every sequence has one part, whose block 0 begins at position
0.
"""

_END = np.iinfo(np.int32).max


class Part(NamedTuple):
    """Consecutive entries of one sequence's block table that hold consecutive positions.

    first_index      the first of them
    first_position   position of its slot 0, at most `valid_from`; negative where position 0 is
                     inside a block
    valid_from       the first position served; all up to the next part's, the last part serves all
                     that follow
    delta            how far keys are from the positions they were computed at, new - old: a query
                     at position p attends them as one at p - delta; 0 in the last part, which is
                     written
    """

    sequence: Any
    first_index: Any
    first_position: Any
    valid_from: Any
    delta: Any


def valid_to(parts: npt.NDArray[np.int32]) -> Longs:
    """Where each part's positions end, int64 [num_parts]; 2^31 - 1 for the last of a sequence."""
    one = Part(*parts.T)
    ends = np.full(len(parts), _END, dtype=np.int64)
    goes_on = one.sequence[1:] == one.sequence[:-1]
    ends[:-1][goes_on] = one.valid_from[1:][goes_on]
    return ends


def is_last(parts: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Which parts are the last of their sequences, bool [num_parts]."""
    last: npt.NDArray[np.bool_] = valid_to(parts) == _END
    return last


def has_delta(parts: Parts) -> bool:
    """Whether keys of some part were computed at other positions; what has another shape is no
    parts and has none.
    """
    return parts is not None and bool(parts[..., Part._fields.index("delta") :].any())


def turned_positions(parts: npt.NDArray[np.int32], seq_lens: npt.NDArray[np.int32]) -> int:
    """One more than the largest position that a query of these sequences is turned to."""
    part = Part(*parts.astype(np.int64).T)
    return int((seq_lens[part.sequence] - part.delta).max())


def entry_positions(
    shape: tuple[int, ...], parts: Parts, block_size: int
) -> tuple[Longs, Longs, Longs]:
    """Of every entry of block tables int32 [num_seqs, width]: position of slot 0, first position
    served, position behind the last one served. Each int64 of the tables' shape.
    """
    num_seqs, width = shape
    first: Longs = np.broadcast_to(np.arange(width, dtype=np.int64) * block_size, (num_seqs, width))
    if parts is None:
        return first, first, first + block_size
    first = first.copy()
    served = first.copy()
    until = first.copy()
    ends = valid_to(parts)
    rows = [Part(*row) for row in parts.tolist()]
    for number, part in enumerate(rows):
        entries = slice(
            part.first_index, width if ends[number] == _END else rows[number + 1].first_index
        )
        begins = (
            part.first_position
            + np.arange(entries.stop - entries.start, dtype=np.int64) * block_size
        )
        first[part.sequence, entries] = begins
        served[part.sequence, entries] = np.maximum(begins, part.valid_from)
        until[part.sequence, entries] = np.minimum(begins + block_size, ends[number])
    return first, served, until


def entry_deltas(shape: tuple[int, ...], parts: npt.NDArray[np.int32]) -> Longs:
    """Of every entry of block tables int32 [num_seqs, width]: the delta of its part."""
    deltas = np.zeros(shape, dtype=np.int64)
    for part in (Part(*row) for row in parts.tolist()):
        deltas[part.sequence, part.first_index :] = part.delta
    return deltas


def entry_of(parts: Parts, sequence: int, positions: Longs, block_size: int) -> tuple[Longs, Longs]:
    """Of positions of one sequence: the entries of its table that hold them, and the offsets in
    their blocks.
    """
    if parts is None:
        indices, offsets = np.divmod(positions, block_size)
        return indices, offsets
    part = _parts_at(parts, sequence, positions)
    indices, offsets = np.divmod(positions - part.first_position, block_size)
    return part.first_index + indices, offsets


def deltas_of(parts: Parts, sequence: int, positions: Longs) -> Longs:
    """Of positions of one sequence: the delta of the part that serves each."""
    if parts is None:
        return np.zeros(len(positions), dtype=np.int64)
    found: Longs = _parts_at(parts, sequence, positions).delta
    return found


def _parts_at(parts: npt.NDArray[np.int32], sequence: int, positions: Longs) -> Part:
    """The part that serves each of some positions of a sequence, int64 [num_positions] each."""
    mine = parts[Part(*parts.T).sequence == sequence].astype(np.int64)
    return Part(*mine[np.searchsorted(Part(*mine.T).valid_from, positions, side="right") - 1].T)


def own_parts(num_seqs: int, parts: Parts) -> tuple[Longs, Longs]:
    """First index and first position of each sequence's last part, the one that its new tokens are
    written to.
    """
    if parts is None:
        zeros = np.zeros(num_seqs, dtype=np.int64)
        return zeros, zeros
    last = Part(*parts[is_last(parts)].astype(np.int64).T)
    return last.first_index, last.first_position


def repeated_parts(parts: Parts, source: Longs) -> Parts:
    """The parts of sequences `source`, any number of times each, as those of sequences 0, 1, ..."""
    if parts is None:
        return None
    chosen = [parts[parts[:, 0] == sequence] for sequence in source]
    found = np.concatenate(chosen)
    found[:, 0] = np.repeat(np.arange(len(source)), [len(rows) for rows in chosen])
    return found
