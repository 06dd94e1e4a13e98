"""A layer as a program: a table of operations that a team of threads runs in order, in one call.

Every operation is cut into units (some tokens, or a run of weight tiles) that threads take from a counter; a thread
that finds no unit left waits until all units of the operation are done, then goes on to the next. A thread that joins
late passes through what is done. Reductions over inputs are never cut, so results do not depend on the threads.
"""

from __future__ import annotations

import time

from numba.core import types

from kvboost_edge.kernels.entry import Entry
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.program.attend import attend_row, attention_row, is_attended
from kvboost_edge.kernels.program.matrices import run_unit, units_of
from kvboost_edge.kernels.program.table import COUNTERS_PER_OP, F_OP, JOB_TYPE, K_ATTEND, OP_ATTEND, ProgramJob
from kvboost_edge.kernels.vectors import address_of, fetch_add, load_acquire, relax

__all__ = ["program_entry", "run_program"]

_NEXT, _DONE = 0, 8
_WHOLE = 1 << 20
_SPINS = 4000  # about 60 us
_NAP_S = 50e-6


@kernel
def _take_units(job: ProgramJob, spins: int) -> bool:
    """Run operations [first, last); False if another thread held up an operation for `spins` looks at its counter."""
    counters = address_of(job.counters)
    for index in range(job.first, job.last):
        op, params = job.ops[index], job.params[index]
        at = counters + 8 * COUNTERS_PER_OP * (index - job.first)
        left = spins
        if op[F_OP] == OP_ATTEND:
            row = attention_row(job, op)
            attend_row(job.kernels[K_ATTEND], (row,))
            while not is_attended(row):
                relax()
                left -= 1
                if left == 0:
                    return False
            continue
        units = units_of(job, op)
        while units > 0:
            unit = fetch_add(at + 8 * _NEXT, 1)
            if unit >= units:
                break
            run_unit(job, op, params, unit)
            fetch_add(at + 8 * _DONE, 1)
        while load_acquire(at + 8 * _DONE) < units:
            relax()
            left -= 1
            if left == 0:
                return False
    # Whoever gets here has seen every unit done, so one thread is enough to end the call for all.
    fetch_add(counters + 8 * COUNTERS_PER_OP * (job.last - job.first), _WHOLE)
    return True


program_entry = Entry(_take_units, JOB_TYPE, types.int64)


def run_program(job: ProgramJob) -> None:
    """Run operations [first, last). Every thread of a team calls this on the same job; a thread that waits long for
    another, whose core was taken away, gives up its own for a moment."""
    while not _take_units(job, _SPINS):
        time.sleep(_NAP_S)
