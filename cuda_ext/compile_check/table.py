"""The table in docs/cuda.md, which `make cuda-table` writes and `make cuda-check` verifies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compile_check.forms import Row

__all__ = ["BEGIN", "DOCS", "END", "as_lines", "replace_table", "stale_lines"]

DOCS = Path(__file__).parents[2] / "docs" / "cuda.md"
BEGIN = "<!-- made by `make cuda-table` -->"
END = "<!-- end -->"
_HEAD = (
    "| architecture | kernel | dtype | head dim | rows per CTA | registers | spilled bytes | "
    "shared bytes | HMMA | CTAs per multiprocessor | share of its warps "
    "|\n|---|---|---|---|---|---|---|---|---|---|---|"
)
_WARPS = 4


def as_lines(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the table without its header."""
    return [_line(row) for row in rows]


def _line(row: Row) -> str:
    form = row.form
    used = row.used
    filled = 100 * row.ctas * _WARPS // row.machine.warps_per_sm
    cells = (
        row.machine.name,
        form.kernel,
        form.dtype.lower() or "any",
        form.head_dim or "any",
        16 * form.warps_m or "",
        used.registers,
        used.spilled,
        row.shared,
        row.hmma or "",
        row.ctas,
        f"{filled} %",
    )
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def replace_table(rows: Sequence[Row]) -> None:
    """Replace the table in the document."""
    text = DOCS.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    table = "\n".join((BEGIN, _HEAD, *as_lines(rows), END))
    DOCS.write_text(before + table + after, encoding="utf-8")


def stale_lines(rows: Sequence[Row]) -> list[str]:
    """Return the table lines that are missing from the document."""
    held = set(DOCS.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].splitlines())
    return [line for line in as_lines(rows) if line not in held]
