"""Which positions the entries of block tables hold. Plain NumPy, for kernels' plans, oracles and backends alike."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Longs", "Part", "Parts", "entry_of", "entry_positions", "own_parts", "valid_to"]

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

    sequence: int
    first_index: int
    first_position: int
    valid_from: int
    delta: int


def valid_to(parts: npt.NDArray[np.int32]) -> Longs:
    """Where each part's positions end, int64 [num_parts]; 2^31 - 1 for the last of a sequence."""
    ends = np.full(len(parts), _END, dtype=np.int64)
    goes_on = parts[1:, 0] == parts[:-1, 0]
    ends[:-1][goes_on] = parts[1:, 3][goes_on]
    return ends


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
    for number, row in enumerate(parts.tolist()):
        part = Part(*row)
        last = number + 1 == len(parts) or parts[number + 1, 0] != part.sequence
        entries = slice(part.first_index, width if last else int(parts[number + 1, 1]))
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
    mine = parts[parts[:, 0] == sequence].astype(np.int64)
    part = mine[np.searchsorted(mine[:, 3], positions, side="right") - 1]
    indices, offsets = np.divmod(positions - part[:, 2], block_size)
    return part[:, 1] + indices, offsets


def own_parts(num_seqs: int, parts: Parts) -> tuple[Longs, Longs]:
    """First index and first position of each sequence's last part, the one that its new tokens are written to."""
    if parts is None:
        zeros = np.zeros(num_seqs, dtype=np.int64)
        return zeros, zeros
    last = np.searchsorted(parts[:, 0], np.arange(num_seqs), side="right") - 1
    return parts[last, 1].astype(np.int64), parts[last, 2].astype(np.int64)
