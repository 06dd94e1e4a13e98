"""Passes over sequences with recurrent state: operations over random rows, with slots chosen by the
test.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from helpers.kernels.linear_driver import Program
from kvboost_edge.backends.base import BatchLayout, LayerStateSpec, PassStates
from kvboost_edge.backends.batch_layout import check_layout
from kvboost_edge.backends.state_pool import StatePool
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.runners.native.recurrent_layers import accepted_rows, pass_states


class Piece(NamedTuple):
    """Rows of one sequence in a pass, of which the last `drafts` are drafts. `saves` lists (rows,
    slot) of each snapshot.
    """

    rows: int
    read: int
    write: int
    saves: tuple[tuple[int, int], ...] = ()
    drafts: int = 0


def poisoned_pool(
    specs: Sequence[LayerStateSpec], num_slots: int, num_draft_rows: int = 0
) -> StatePool:
    pool = StatePool(specs, num_slots, num_draft_rows)
    pool.poison(range(num_slots))
    pool.poison_drafts()
    return pool


def layout_of(pieces: Sequence[Piece], num_slots: int, num_draft_rows: int = 0) -> BatchLayout:
    """Return a checked layout. Its blocks store nothing and are all the first one."""
    lengths = [piece.rows for piece in pieces]
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    width = max(1, -(-max(lengths) // 16))
    saves = [
        (index, rows, slot) for index, piece in enumerate(pieces) for rows, slot in piece.saves
    ]
    states = PassStates(
        np.array([piece.read for piece in pieces], np.int32),
        np.array([piece.write for piece in pieces], np.int32),
        np.array(saves, np.int32).reshape(-1, 3),
        np.array([piece.rows - piece.drafts for piece in pieces], np.int32),
    )
    layout = BatchLayout(
        starts,
        np.array(lengths, np.int32),
        np.zeros((len(pieces), width), np.int32),
        np.zeros(starts[-1], np.int64),
        states=states,
    )
    check_layout(layout, 16, 1, num_slots, num_draft_rows)
    return layout


def add_states(program: Program, pieces: Sequence[Piece], pool: StatePool) -> None:
    numbers: npt.NDArray[np.int64] = pass_states(
        layout_of(pieces, pool.num_slots, pool.num_draft_rows), pool
    )
    program.buffer(lt.B_STATES, numbers)
    program.buffers[lt.B_SEQUENCES] = len(pieces)


def accepting(
    pieces: Sequence[Piece],
    pool: StatePool,
    accepted: Sequence[int],
    saves: Sequence[tuple[int, int, int]],
    written: Sequence[int] | None = None,
) -> Program:
    """Return a program without operations over the draft rows left by a pass over these pieces. It
    writes the slots of that pass, or `written`.
    """
    layout = layout_of(pieces, pool.num_slots, pool.num_draft_rows)
    slots = np.array([piece.write for piece in pieces], np.int32)
    outs = slots if written is None else np.array(written, np.int32)
    states = PassStates(slots, outs, np.array(saves, np.int32).reshape(-1, 3))
    rows = accepted_rows(layout, pool, np.array(accepted, np.int32), states)
    program = Program(rows.num_rows)
    program.buffer(lt.B_STATES, rows.numbers)
    program.buffers[lt.B_SEQUENCES] = np.count_nonzero(accepted)
    program.buffers[lt.B_DRAFTS] = rows.drafts
    return program
