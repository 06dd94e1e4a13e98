"""What a planted fault is."""

from __future__ import annotations

import dataclasses

_OUTSIDE = "cuda_ext/"  # the one folder beside the package whose files have faults


@dataclasses.dataclass(frozen=True)
class Fault:
    """`old` becomes `new` (pairs), once each, in `file`; `tests` are pytest's arguments."""

    name: str
    file: str
    edits: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]


def fault(name: str, file: str, old: str, new: str, *tests: str) -> Fault:
    """Make a fault of one replacement in a file of the package, or of cuda_ext."""
    path = file if file.startswith(_OUTSIDE) else f"kvboost_edge/{file}"
    return Fault(name, path, ((old, new),), tests)


def faults(*rows: tuple[str, ...]) -> tuple[Fault, ...]:
    """Make a fault of each row: name, file, old, new, tests."""
    return tuple(fault(*row) for row in rows)
