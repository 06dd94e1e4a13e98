"""Table of tested model families in docs/models.md."""

from __future__ import annotations

import re

from docs_site.reference.tables import table
from kvboost_edge.models.families.registry import MODEL_TYPES

__all__ = ["families_table", "with_table"]

_COLUMNS = ("`model_type`", "family", "runners", "files", "compared with")
_HEAD = table(_COLUMNS, ()).splitlines()[0]
_TABLE = re.compile(re.escape(_HEAD) + r"\n(?:\|.*\n)*")


def families_table() -> str:
    """Return the table, with a row for each tested model_type in order."""
    rows = []
    for name, known in sorted(MODEL_TYPES.items()):
        one = known.architecture
        if one.tested:
            runners, files = ", ".join(one.runners), ", ".join(one.files)
            rows.append((f"`{name}`", one.note, runners, files, one.proof))
    return table(_COLUMNS, rows)


def with_table(page: str) -> str:
    """Replace the table of a page. Raises ValueError unless the page has exactly one."""
    if len(_TABLE.findall(page)) != 1:
        raise ValueError("the page must have one table of families")
    return _TABLE.sub(lambda found: families_table(), page)
