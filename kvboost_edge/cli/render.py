"""Pictures of the pool for a terminal: the block map and the figures beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

__all__ = ["block_map", "pool_panel"]

# State of a block -> (glyph, style, meaning); the glyphs differ, so that the picture works without colour too.
STATES = (
    ("·", "bright_black", "free"),
    ("░", "blue", "cached, idle"),
    ("▒", "green", "in use by one request"),
    ("█", "magenta", "shared by several requests"),
)
MAX_CELLS = 512


def block_map(states: Sequence[int], *, width: int) -> Text:
    """One glyph per block, `width` to a line. A pool of more than MAX_CELLS blocks is drawn with several blocks to a
    glyph, which then shows the busiest of them."""
    per_cell = -(-len(states) // MAX_CELLS) or 1
    cells = [max(states[start : start + per_cell]) for start in range(0, len(states), per_cell)]
    picture = Text(no_wrap=True)
    for start in range(0, len(cells), width):
        for state in cells[start : start + width]:
            glyph, style, _ = STATES[state]
            picture.append(glyph, style)
        picture.append("\n")
    for index, (glyph, style, meaning) in enumerate(STATES):
        picture.append("   " if index else "")
        picture.append(glyph, style)
        picture.append(f" {meaning} {states.count(index)}")
    if per_cell > 1:
        picture.append(f"\na glyph is {per_cell} blocks and shows the busiest of them")
    return picture


def pool_panel(states: Sequence[int], stats: dict[str, Any], *, width: int, title: str = "Block pool") -> Panel:
    """The block map above all figures of `paged_stats()`."""
    parts: list[RenderableType] = [block_map(list(states), width=max(16, min(width, 120) - 6)), Text()]
    parts.append(_stats_table(stats))
    return Panel(Group(*parts), title=title, expand=False)


def _stats_table(stats: dict[str, Any]) -> Table:
    """The figures in three columns of name and value."""
    table = Table.grid(padding=(0, 2))
    cells = [(name, _figure(name, value)) for name, value in stats.items()]
    rows = -(-len(cells) // 3)
    for row in range(rows):
        line: list[RenderableType] = []
        for name, value in cells[row::rows]:
            line += [Text(name, "dim"), Text(value)]
        table.add_row(*line)
    return table


def _figure(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return f"{value / 1e6:,.1f} MB"
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
