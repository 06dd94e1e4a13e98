"""Sequences of a pass as recurrent layers see them.

B_STATES is int64:

- a row of SEQUENCE_NUMBERS for each sequence, indexed by the S_* constants;
- the sequence of each token;
- for each snapshot a pair (rows, address): the state after this many rows of the sequence is also
  stored in the slot at this address.

A layer's conv state is at `ConvInputs.state` bytes, its matrices at `ScanOp.state` bytes after a
slot's address.

The last rows of a sequence may be draft tokens. They read the state after all rows before them,
but no slot contains them. Their inputs are kept in rows of drafts. Accepted ones are then rows of
another pass (`Runner.accept_drafts`), which computes the same operations on the same numbers.
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

# First row of the sequence in the pass, and number of rows; addresses of the slots read (0: zeros)
# and written; address and number of its snapshots; rows that are not drafts; address of the row for
# its first draft token, or 0: drafts are not kept.
S_FIRST, S_ROWS, S_IN, S_OUT, S_SAVES, S_NUM_SAVES, S_CERTAIN, S_DRAFTS = range(8)
SEQUENCE_NUMBERS = 8  # a cache line


@kernel
def of_sequence(job: ProgramJob, sequence: int, number: int) -> Any:
    """Return one of a sequence's numbers."""
    return load_i64(job.buffers[B_STATES] + 8 * (sequence * SEQUENCE_NUMBERS + number))


@kernel
def sequence_of(job: ProgramJob, token: int) -> Any:
    """Return the sequence of a row of the pass."""
    return load_i64(
        job.buffers[B_STATES] + 8 * (job.buffers[B_SEQUENCES] * SEQUENCE_NUMBERS + token)
    )


@kernel
def saved_rows(job: ProgramJob, sequence: int, index: int) -> Any:
    """Return the rows of the sequence before snapshot `index`; -1 if there are fewer snapshots."""
    if index >= of_sequence(job, sequence, S_NUM_SAVES):
        return -1
    return load_i64(of_sequence(job, sequence, S_SAVES) + 16 * index)


@kernel
def saved_at(job: ProgramJob, sequence: int, index: int) -> Any:
    """Return the address of the slot of snapshot `index`."""
    return load_i64(of_sequence(job, sequence, S_SAVES) + 16 * index + 8)
