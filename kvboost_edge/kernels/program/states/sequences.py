"""Sequences of a pass from the point of view of recurrent layers.

B_STATES is int64:

- a row of SEQUENCE_NUMBERS for each sequence, indexed by the S_* constants;
- the sequence index of each token;
- for each snapshot a pair (rows, address). The state after this many rows of the sequence is also
  stored in the slot at this address.

A layer's conv state is at byte `ConvInputs.state` of a slot, its matrices at byte `ScanOp.state`.

The last rows of a sequence may be draft tokens. They read the state after all rows before them, but
their own effect is not stored in a slot. Their inputs are stored in draft rows instead. If drafts
are accepted, they become rows of another pass (`Runner.accept_drafts`), which computes the same
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

# Numbers of a sequence: its first row in the pass; its number of rows; address of the slot that is
# read, or 0 for a zero state; address of the slot that is written; address of its snapshots; number
# of snapshots; number of rows that are not drafts; address of the row for its first draft token, or
# 0 if drafts are not stored.
S_FIRST, S_ROWS, S_IN, S_OUT, S_SAVES, S_NUM_SAVES, S_CERTAIN, S_DRAFTS = range(8)
SEQUENCE_NUMBERS = 8  # one cache line of int64


@kernel
def of_sequence(job: ProgramJob, sequence: int, number: int) -> Any:
    """Return one of a sequence's numbers, selected by an S_* constant."""
    return load_i64(job.buffers[B_STATES] + 8 * (sequence * SEQUENCE_NUMBERS + number))


@kernel
def sequence_of(job: ProgramJob, token: int) -> Any:
    """Return the index of the sequence that a row of the pass belongs to."""
    return load_i64(
        job.buffers[B_STATES] + 8 * (job.buffers[B_SEQUENCES] * SEQUENCE_NUMBERS + token)
    )


@kernel
def saved_rows(job: ProgramJob, sequence: int, index: int) -> Any:
    """Return how many rows of the sequence snapshot `index` covers; -1 if it does not exist."""
    if index >= of_sequence(job, sequence, S_NUM_SAVES):
        return -1
    return load_i64(of_sequence(job, sequence, S_SAVES) + 16 * index)


@kernel
def saved_at(job: ProgramJob, sequence: int, index: int) -> Any:
    """Return the address of the slot that snapshot `index` is stored in."""
    return load_i64(of_sequence(job, sequence, S_SAVES) + 16 * index + 8)
