"""The separately compiled kernels (kernels/entry.py) that a program needs, and their addresses."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.attention.storage import copy_entry
from kvboost_edge.kernels.entry import KernelEntry
from kvboost_edge.kernels.linear.amx_choice import trial_entries
from kvboost_edge.kernels.linear.dispatch import ladders
from kvboost_edge.kernels.linear.wide import requantize_entries
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.attention_calls import attend_entries, close_entry
from kvboost_edge.kernels.program.interpreter import apart_entries, program_entry
from kvboost_edge.kernels.team import team_entries

__all__ = ["entries_of", "kernel_table", "pass_entries", "table_entries"]


def entries_of(operations: Iterable[type[lt.Operation]]) -> list[int]:
    """Return the entries that run these operations, as indices in a job's `kernels` or K_PROGRAM.

    Raises:
        ConfigError: no entry runs one of the operations.
    """
    found = set()
    for operation in operations:
        knowing = [entry for entry, known in lt.OPERATIONS.items() if operation in known]
        if not knowing:
            raise ConfigError(
                f"no entry runs the program operation {operation.__name__}; add it to "
                "kernels/program/table.py"
            )
        found.update(knowing)
    return sorted(found)


def table_entries(
    kinds: Iterable[int],
    operations: Iterable[type[lt.Operation]],
    quantized: bool | None,
    *,
    sparse: bool = False,
) -> dict[int, KernelEntry]:
    """Map indices in a job's `kernels` to entries.

    Args:
        kinds: numbers of the weight formats.
        operations: operations of the program.
        quantized: True if the pool is quantized; None if the program has no attention.
        sparse: True if prompts may have sparse ranges.
    """
    found = {kind: ladders[kind] for kind in sorted(set(kinds))}
    found |= {
        index: apart_entries[index] for index in entries_of(operations) if index != lt.K_PROGRAM
    }
    if lt.K_WIDE in found:
        found |= {
            lt.K_REQUANTIZE + kind: requantize_entries[kind]
            for kind in sorted(set(kinds) & requantize_entries.keys())
        }
    if quantized is not None:
        found[lt.K_ATTEND] = attend_entries[quantized, sparse]
    if quantized:
        found[lt.K_CLOSE] = close_entry
    return found


def pass_entries(
    kinds: Iterable[int],
    operations: Iterable[type[lt.Operation]],
    *,
    quantized: bool,
    sparse: bool = False,
) -> list[KernelEntry]:
    """Return all entries that a pass needs, slowest to compile first.

    Args:
        kinds: numbers of the weight formats.
        operations: operations of the program.
        quantized: True if the pool is quantized.
        sparse: True if prompts may have sparse ranges.
    """
    of_table = table_entries(kinds, operations, quantized, sparse=sparse)
    longest = [
        of_table.pop(index)
        for index in (lt.K_EXPERTS, lt.K_ATTEND, lt.K_WIDE, lt.K_SCAN)
        if index in of_table
    ]
    return [program_entry, *longest, *trial_entries, *of_table.values(), copy_entry, *team_entries]


def kernel_table(
    kinds: Iterable[int],
    operations: Iterable[type[lt.Operation]],
    quantized: bool | None = None,
    *,
    sparse: bool = False,
) -> npt.NDArray[np.int64]:
    """Return a job's `kernels`, int64 [NUM_KERNELS], and compile entries that are not on disk."""
    table = np.zeros(lt.NUM_KERNELS, dtype=np.int64)
    for index, entry in table_entries(kinds, operations, quantized, sparse=sparse).items():
        table[index] = entry.address
    return table
