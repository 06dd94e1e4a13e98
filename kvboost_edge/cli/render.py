"""Terminal output of block maps, pool statistics, cache use and prompt progress."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress import BarColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from kvboost_edge.cli.console import text_column
from kvboost_edge.engine.request.progress import Progress

__all__ = [
    "PromptBar",
    "block_map",
    "draft_words",
    "duration_words",
    "finish_words",
    "pool_panel",
    "reuse_words",
    "tokens_words",
]

# Glyph, style and meaning of each block state. The glyphs differ, so the map is readable without
# colour.
STATES = (
    ("·", "bright_black", "free"),
    ("░", "blue", "idle, cached"),
    ("▒", "green", "one request"),
    ("█", "magenta", "shared"),
    ("◆", "yellow", "at another position"),
)
MAX_CELLS = 512

_PATIENCE_SECONDS = 0.5
_LINE_SECONDS = 5.0


class PromptBar:
    """Progress bar for a prompt.

    On a terminal, it appears after half a second and disappears when it is closed. Nothing else may
    be printed to the terminal meanwhile. Elsewhere, it prints one line for a long prompt.
    """

    def __init__(self, console: Console) -> None:
        self.is_wanted = not console.quiet
        self._console = console
        self._begun = time.monotonic()
        self._bar: Bar | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def show(self, progress: Progress) -> None:
        """Update the bar."""
        patience = _PATIENCE_SECONDS if self._console.is_terminal else _LINE_SECONDS
        if not self.is_wanted or time.monotonic() - self._begun < patience:
            return
        if not self._console.is_terminal:
            self._console.print(f"reading the prompt, {progress_words(progress)}", style="dim")
            self.is_wanted = False
            return
        if self._bar is None:
            columns = (
                text_column("{task.description}", "dim"),
                BarColumn(),
                text_column("{task.fields[told]}", "dim"),
            )
            self._bar = Bar(*columns, console=self._console, transient=True)
            self._bar.add_task("", told="")
            self._bar.start()
        doing = (
            "reading the prompt"
            if progress.computed or progress.elapsed
            else "waiting in the queue"
        )
        task = self._bar.task_ids[0]
        told = progress_words(progress)
        self._bar.update(
            task, description=doing, completed=progress.computed, total=progress.total, told=told
        )

    def close(self) -> None:
        """Remove the bar."""
        self.is_wanted = False
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def progress_words(progress: Progress) -> str:
    """Format progress, such as "2,560 of 4,210 tokens, 495 per second, about 4 s left"."""
    speed = progress.tokens_per_second
    words = f"{progress.computed:,} of {progress.total:,} tokens"
    words += f", {speed:,.0f} per second" if speed else ""
    left = progress.seconds_left
    return words if left is None else f"{words}, about {duration_words(left)} left"


def duration_words(seconds: float) -> str:
    """Format a duration, such as "4 s" or "10 min"."""
    return f"{max(1, round(seconds))} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def block_map(states: Sequence[int], *, width: int) -> Group:
    """Draw one glyph per block, `width` glyphs per line, and a legend with counts.

    In a pool of more than MAX_CELLS blocks, a glyph represents several blocks and shows the state
    of the busiest one.
    """
    per_cell = -(-len(states) // MAX_CELLS) or 1
    cells = [max(states[start : start + per_cell]) for start in range(0, len(states), per_cell)]
    picture = Text(no_wrap=True)
    for start in range(0, len(cells), width):
        for state in cells[start : start + width]:
            picture.append(STATES[state][0], STATES[state][1])
        picture.append("\n")
    legend = Text()
    for state, (glyph, style, meaning) in enumerate(STATES):
        legend.append("   " if state else "")
        legend.append(glyph, style)
        legend.append(f" {meaning}: {states.count(state)}")
    if per_cell > 1:
        legend.append(f"\neach glyph represents {per_cell} blocks and shows the busiest one")
    return Group(picture, legend)


def pool_panel(
    states: Sequence[int], stats: dict[str, Any] | None, *, width: int, title: str = "Block pool"
) -> Panel:
    """Draw the block map and, if given, the statistics from `paged_stats()`."""
    picture = block_map(list(states), width=max(16, min(width, 120) - 6))
    if stats is None:
        return Panel(picture, title=title, expand=False)
    columns = 3 if width >= 110 else 2
    return Panel(Group(picture, Text(), _stats_table(stats, columns)), title=title, expand=False)


def reuse_words(
    prompt_tokens: int,
    cached_tokens: int,
    hit_tokens: Mapping[str, int],
    reused_span_tokens: int,
    recomputed: int,
    approximations: Sequence[str] = (),
) -> str:
    """Format the cache use of a prompt, such as "90 prompt tokens, 64 from the cache (48 from
    disk)".

    The brackets contain the tokens from offload tiers. Reasons why the answer is approximate
    follow.
    """
    outside = [
        f"{tokens} from {tier}" for tier, tokens in hit_tokens.items() if tier != "pool" and tokens
    ]
    more = f" ({', '.join(outside)})" if outside else ""
    words = f"{tokens_words(prompt_tokens, 'prompt token')}, {cached_tokens} from the cache{more}"
    why = [label.replace("_", " ") for label in approximations]
    if reused_span_tokens:
        why.append(
            f"{reused_span_tokens} tokens reused at other positions, {recomputed} recomputed"
        )
    return f"{words} · approximate: {', '.join(why)}" if why else words


def tokens_words(number: int, kind: str = "token") -> str:
    """Format a number of tokens, such as "1 token" or "2 tokens"."""
    return f"{number} {kind}{'' if number == 1 else 's'}"


def draft_words(drafted_tokens: int, accepted_tokens: int) -> list[str]:
    """Format the verified draft tokens as the parts of a line: one, or none without drafts."""
    if not drafted_tokens:
        return []
    return [f"{accepted_tokens} of {tokens_words(drafted_tokens, 'draft token')} accepted"]


def finish_words(reason: str) -> str:
    """Format a finish reason. "length" comes with the options that set the limits."""
    limits = "token limit (-n) or context length (--ctx-size) reached, or KV cache is full"
    return f"length: {limits}" if reason == "length" else reason


def _stats_table(stats: dict[str, Any], columns: int) -> Table:
    """Create a table of statistics with this many pairs of name and value per row."""
    table = Table.grid(padding=(0, 2))
    cells = [
        (name, _figure(name, value))
        for name, value in stats.items()
        if not isinstance(value, Mapping)
    ]
    cells += [(f"tier {name}", _tier_figure(tier)) for name, tier in stats.get("tiers", {}).items()]
    rows = -(-len(cells) // columns)
    for row in range(rows):
        line: list[RenderableType] = []
        for name, value in cells[row::rows]:
            line += [Text(name, "dim"), Text(value)]
        table.add_row(*line)
    return table


def _tier_figure(tier: Mapping[str, Any]) -> str:
    """Format the contents of a tier, or its failure."""
    if tier["state"] or tier["blocks"] is None:
        return tier["state"] or "ready"
    return f"{tier['blocks']:,} blocks, {tier['bytes'] / 1e6:,.1f} MB"


def _figure(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return f"{value / 1e6:,.1f} MB"
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
