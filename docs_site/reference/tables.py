"""Markdown tables and paragraphs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

__all__ = ["cell", "paragraph", "table"]


def cell(text: str) -> str:
    """Return a text as it is written into a cell: on one line, with pipes escaped."""
    return " ".join(text.split()).replace("|", "\\|")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table, a line for each row."""
    lines = [columns, ["---"] * len(columns), *([cell(one) for one in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n".replace("  ", " ") for line in lines)


def paragraph(text: str) -> str:
    """Return a text in lines of at most 100 columns."""
    return textwrap.fill(text.strip(), 100, break_long_words=False, break_on_hyphens=False) + "\n"
