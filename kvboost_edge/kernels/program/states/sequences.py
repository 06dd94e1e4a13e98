"""The sequences of a pass as layers with a state see them.

B_STATES is int64: a row of SEQUENCE_NUMBERS for each sequence, by the S_* constants; then of each
token the number of its sequence; then of each of the saves a pair (rows, address): the state behind
so many of the sequence's rows goes to the slot at this address, too. A layer's state begins
`ConvInputs.state`, its matrices `ScanOp.state` bytes after a slot's address.

The last rows of a sequence may be drafts: tokens that are only guessed. They see the state behind
all rows before them, and no slot sees them: what they bring to a state is kept in rows of drafts,
until those that were right are rows of a pass over these rows (`Runner.accept_drafts`), the same
operations on the same numbers.
"""

from __future__ import annotations

from typing import Any

from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.program.table import B_SEQUENCES, B_STATES, ProgramJob
from kvboost_edge.kernels.vectors import load_i64

__all__ = [
    "SEQUENCE_NUMBERS",
    "S_CERTAIN",
    "S_DRAFTS",
    "S_FIRST",
    "S_IN",
    "S_NUM_SAVES",
    "S_OUT",
    "S_ROWS",
    "S_SAVES",
    "of_sequence",
    "saved_at",
    "saved_rows",
    "sequence_of",
]

# Its first row of the pass, and how many; addresses of the slots that are read (0: zeros) and
# written; address and number of its saves; how many of its rows are no drafts; address of the row
# of drafts that its first one has, or 0 where nothing is kept of them.
S_FIRST, S_ROWS, S_IN, S_OUT, S_SAVES, S_NUM_SAVES, S_CERTAIN, S_DRAFTS = range(8)
SEQUENCE_NUMBERS = 8  # a cache line


@kernel
def of_sequence(job: ProgramJob, sequence: int, number: int) -> Any:
    """One of a sequence's numbers."""
    return load_i64(job.buffers[B_STATES] + 8 * (sequence * SEQUENCE_NUMBERS + number))


@kernel
def sequence_of(job: ProgramJob, token: int) -> Any:
    """The sequence of a row of the pass."""
    return load_i64(
        job.buffers[B_STATES] + 8 * (job.buffers[B_SEQUENCES] * SEQUENCE_NUMBERS + token)
    )


@kernel
def saved_rows(job: ProgramJob, sequence: int, index: int) -> Any:
    """Behind how many of the sequence's rows a state is saved; -1 where there are fewer saves."""
    if index >= of_sequence(job, sequence, S_NUM_SAVES):
        return -1
    return load_i64(of_sequence(job, sequence, S_SAVES) + 16 * index)


@kernel
def saved_at(job: ProgramJob, sequence: int, index: int) -> Any:
    """Address of the slot that it goes to."""
    return load_i64(of_sequence(job, sequence, S_SAVES) + 16 * index + 8)
