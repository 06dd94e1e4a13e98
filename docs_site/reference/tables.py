"""Formatting of Markdown tables and paragraphs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

__all__ = ["cell", "paragraph", "table"]


def cell(text: str) -> str:
    """Return a text for a table cell: on one line, with pipes escaped."""
    return " ".join(text.split()).replace("|", "\\|")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with one line per row."""
    lines = [columns, ["---"] * len(columns), *([cell(one) for one in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n".replace("  ", " ") for line in lines)


def paragraph(text: str) -> str:
    """Return a text wrapped to lines of at most 100 columns."""
    return textwrap.fill(text.strip(), 100, break_long_words=False, break_on_hyphens=False) + "\n"
