"""Execution of a layer program: a thread team runs a table of operations in order, in one call.

Every operation is divided into units (some tokens, or a run of weight tiles) that threads take from
a counter. A thread that finds no more units waits until all units of the operation are done, then
goes on to the next operation. A thread that joins late skips finished operations. Reductions are
never divided among threads, so results do not depend on the number of threads.

Operations that few models need are separate entries, called by address once per unit. A program
compiles only those that it contains.
"""

from __future__ import annotations

import time

from kvboost_edge.kernels.entry import KernelEntry
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.attention_calls import attend_row, attention_row, is_attended
from kvboost_edge.kernels.program.expert_routing import dispatch, route
from kvboost_edge.kernels.program.experts import add_shared, experts_down, experts_gated, spread
from kvboost_edge.kernels.program.matrices import APART, run_unit, units_of
from kvboost_edge.kernels.program.states.conv import conv_gated, store_tails
from kvboost_edge.kernels.program.states.scan import gate, scan, steps
from kvboost_edge.kernels.program.table import COUNTERS_PER_OP, JOB_TYPE, ProgramJob, op_at
from kvboost_edge.kernels.program.tokens import tokens_of
from kvboost_edge.kernels.program.wide_matrices import run_wide
from kvboost_edge.kernels.signature import BOOL, INT64
from kvboost_edge.kernels.tuples import load_row
from kvboost_edge.kernels.vectors import address_of, fetch_add, load_acquire, relax

__all__ = ["apart_entries", "program_entry", "run_program"]

_NEXT = 0
_DONE = 8
_WHOLE = 1 << 20
_SPINS = 4000  # about 60 us
_NAP_S = 50e-6


@kernel
def _take_units(job: ProgramJob, spins: int) -> bool:
    """Run operations [first, last) of a job.

    Return False if a wait for other threads took more than `spins` reads of a counter.
    """
    counters = address_of(job.counters)
    for index in range(job.first, job.last):
        op = op_at(job, index)
        at = counters + 8 * COUNTERS_PER_OP * (index - job.first)
        left = spins
        if lt.is_op(lt.AttendOp, op):
            row = attention_row(job, load_row(lt.AttendOp, op).layer)
            attend_row(job.kernels[lt.K_ATTEND], (row,))
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
            run_unit(job, op, unit)
            fetch_add(at + 8 * _DONE, 1)
        while load_acquire(at + 8 * _DONE) < units:
            relax()
            left -= 1
            if left == 0:
                return False
    # A thread that gets here has seen that every unit is done, so one thread can end the call for
    # all.
    fetch_add(counters + 8 * COUNTERS_PER_OP * (job.last - job.first), _WHOLE)
    return True


@kernel
def _run_experts(job: ProgramJob, at: int, unit: int) -> None:
    """Run a unit of one of the operations on experts."""
    if lt.is_op(lt.DispatchOp, at):
        dispatch(job, load_row(lt.DispatchOp, at).experts)
    elif lt.is_op(lt.SpreadOp, at):
        spread(job, load_row(lt.SpreadOp, at), unit)
    elif lt.is_op(lt.ExpertsGatedOp, at):
        experts_gated(job, load_row(lt.ExpertsGatedOp, at), unit)
    elif lt.is_op(lt.ExpertsDownOp, at):
        experts_down(job, load_row(lt.ExpertsDownOp, at), unit)
    else:
        first, end = tokens_of(job, unit)
        for token in range(first, end):
            if lt.is_op(lt.RouteOp, at):
                route(job, load_row(lt.RouteOp, at), token)
            else:
                add_shared(job, load_row(lt.AddSharedOp, at), token)


@kernel
def _run_conv(job: ProgramJob, at: int, unit: int) -> None:
    """Run a unit of a `ConvOp`: the convolution of some tokens."""
    first, end = tokens_of(job, unit)
    for token in range(first, end):
        conv_gated(job, load_row(lt.ConvOp, at), token)


@kernel
def _run_tails(job: ProgramJob, at: int, unit: int) -> None:
    """Run a unit of a `KeepConvOp`, which stores conv states."""
    store_tails(job, load_row(lt.KeepConvOp, at).conv, unit)


@kernel
def _run_scan(job: ProgramJob, at: int, unit: int) -> None:
    """Run a unit of a `ScanOp`, `ScanInputsOp` or `GateOp`."""
    if lt.is_op(lt.ScanOp, at):
        scan(job, load_row(lt.ScanOp, at), unit)
        return
    first, end = tokens_of(job, unit)
    for token in range(first, end):
        if lt.is_op(lt.ScanInputsOp, at):
            steps(job, load_row(lt.ScanInputsOp, at), token)
        else:
            gate(job, load_row(lt.GateOp, at), token)


@kernel
def _run_wide(job: ProgramJob, at: int, unit: int) -> None:
    """Run a unit of an operation in wide arithmetic."""
    run_wide(job, at, unit)


apart_entries = {
    lt.K_EXPERTS: KernelEntry(_run_experts, *APART),
    lt.K_CONV: KernelEntry(_run_conv, *APART),
    lt.K_TAILS: KernelEntry(_run_tails, *APART),
    lt.K_SCAN: KernelEntry(_run_scan, *APART),
    lt.K_WIDE: KernelEntry(_run_wide, *APART),
}
"""Index in a job's `kernels` -> entry that runs the `OPERATIONS` of that index."""

program_entry = KernelEntry(_take_units, JOB_TYPE, INT64, returns=BOOL)


def run_program(job: ProgramJob) -> None:
    """Run operations [first, last) of a job; every thread of a team calls this on the same job."""
    # If another thread was descheduled by the OS, yield this thread's core for a moment.
    while not _take_units(job, _SPINS):
        time.sleep(_NAP_S)
