"""The type of a planted fault, and functions that make one."""

from __future__ import annotations

import dataclasses

_OUTSIDE = "cuda_ext/"  # the only folder outside the package that has faults


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault, and the tests that must notice it.

    Attributes:
        name: unique clause that describes the faulty behaviour.
        file: path of the file from the root of the repository.
        edits: pairs of a text that occurs once in the file and its replacement.
        tests: arguments of pytest.
    """

    name: str
    file: str
    edits: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]


def fault(name: str, file: str, old: str, new: str, *tests: str) -> Fault:
    """Return a fault with one replacement in a file of the package or of cuda_ext."""
    path = file if file.startswith(_OUTSIDE) else f"kvboost_edge/{file}"
    return Fault(name, path, ((old, new),), tests)


def faults(*rows: tuple[str, ...]) -> tuple[Fault, ...]:
    """Return one fault for each row of name, file, old text, new text and tests."""
    return tuple(fault(*row) for row in rows)
