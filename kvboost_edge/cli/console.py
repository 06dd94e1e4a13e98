"""Consoles that print text literally, because brackets in paths or answers are not markup."""

from __future__ import annotations

from rich.console import Console
from rich.progress import TextColumn
from rich.status import Status
from rich.text import Text

__all__ = ["counted", "open_console", "spinner", "text_column"]


def open_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Open a console that adds no styles of its own. Pass styles to `print`, or use a `Text`."""
    return Console(stderr=stderr, quiet=quiet, markup=False, emoji=False, highlight=False)


def text_column(text: str, style: str = "none") -> TextColumn:
    """Create a text column for a progress bar. Braces in the format refer to fields of the task."""
    return TextColumn(text, style=style, markup=False)


def spinner(console: Console, text: str) -> Status:
    """Show a spinner with a text while the body runs."""
    return console.status(Text(text))


def counted(number: int, one: str, many: str) -> str:
    """Format a count with its noun, such as "1 file" or "2,000 files"."""
    return f"{number:,} {one if number == 1 else many}"
