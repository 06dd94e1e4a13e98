"""Which positions the entries of block tables hold. Plain NumPy, for kernels' plans, oracles and backends alike."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Longs", "Part", "Parts", "entry_of", "entry_positions", "is_last", "own_parts", "valid_to"]

Longs = npt.NDArray[np.int64]
Parts = npt.NDArray[np.int32] | None
"""int32 [num_parts, 5], rows of `Part`, those of a sequence in order of positions, sequences in order, each with at
least one; None: every sequence has one part, whose block 0 begins at position 0."""

_END = np.iinfo(np.int32).max


class Part(NamedTuple):
    """Consecutive entries of one sequence's block table that hold consecutive positions.

    first_index      the first of them
    first_position   position of its slot 0, at most `valid_from`
    valid_from       the first position served; all up to the next part's, the last part serves all that follow
    delta            how far keys are from the positions they were computed at; only 0 is attended yet
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


def entry_positions(shape: tuple[int, ...], parts: Parts, block_size: int) -> tuple[Longs, Longs, Longs]:
    """Of every entry of block tables int32 [num_seqs, width]: position of slot 0, first position served, position
    behind the last one served. Each int64 of the tables' shape."""
    num_seqs, width = shape
    first: Longs = np.broadcast_to(np.arange(width, dtype=np.int64) * block_size, (num_seqs, width))
    if parts is None:
        return first, first, first + block_size
    first = first.copy()
    served, until = first.copy(), first.copy()
    ends = valid_to(parts)
    rows = [Part(*row) for row in parts.tolist()]
    for number, part in enumerate(rows):
        entries = slice(part.first_index, width if ends[number] == _END else rows[number + 1].first_index)
        begins = part.first_position + np.arange(entries.stop - entries.start, dtype=np.int64) * block_size
        first[part.sequence, entries] = begins
        served[part.sequence, entries] = np.maximum(begins, part.valid_from)
        until[part.sequence, entries] = np.minimum(begins + block_size, ends[number])
    return first, served, until


def entry_of(parts: Parts, sequence: int, positions: Longs, block_size: int) -> tuple[Longs, Longs]:
    """Of positions of one sequence: the entries of its table that hold them, and the offsets in their blocks."""
    if parts is None:
        indices, offsets = np.divmod(positions, block_size)
        return indices, offsets
    mine = parts[Part(*parts.T).sequence == sequence].astype(np.int64)
    part = Part(*mine[np.searchsorted(Part(*mine.T).valid_from, positions, side="right") - 1].T)
    indices, offsets = np.divmod(positions - part.first_position, block_size)
    return part.first_index + indices, offsets


def own_parts(num_seqs: int, parts: Parts) -> tuple[Longs, Longs]:
    """First index and first position of each sequence's last part, the one that its new tokens are written to."""
    if parts is None:
        zeros = np.zeros(num_seqs, dtype=np.int64)
        return zeros, zeros
    last = Part(*parts[is_last(parts)].astype(np.int64).T)
    return last.first_index, last.first_position
