"""The table of tested families in docs/models.md.

python -m kvboost_edge.models.families.table            print it
python -m kvboost_edge.models.families.table --write    write it into docs/models.md
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from kvboost_edge.models.families.registry import MODEL_TYPES

__all__ = ["families_table", "with_table"]

_PAGE = Path(__file__).parents[3] / "docs" / "models.md"
_HEAD = "| `model_type` | | runners | files | compared with |\n|---|---|---|---|---|\n"
_TABLE = re.compile(re.escape(_HEAD) + r"(?:\|.*\n)*")


def families_table() -> str:
    """Write a row for each tested model_type, in order."""
    rows = []
    for name, known in sorted(MODEL_TYPES.items()):
        one = known.architecture
        if one.tested:
            cells = (f"`{name}`", one.note, ", ".join(one.runners), ", ".join(one.files), one.proof)
            rows.append(f"| {' | '.join(cells)} |\n")
    return _HEAD + "".join(rows)


def with_table(page: str) -> str:
    """Replace the table of a page. ValueError unless it has one."""
    if len(_TABLE.findall(page)) != 1:
        raise ValueError("the page must have one table of families")
    return _TABLE.sub(lambda found: families_table(), page)


def main(arguments: list[str]) -> None:
    """Print the table, or write it."""
    if arguments not in ([], ["--write"]):
        raise SystemExit(__doc__)
    if arguments:
        page = _PAGE.read_text(encoding="utf-8")
        _PAGE.write_text(with_table(page), encoding="utf-8")
    else:
        sys.stdout.write(families_table())


if __name__ == "__main__":
    main(sys.argv[1:])
